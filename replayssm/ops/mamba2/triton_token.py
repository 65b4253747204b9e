"""One token against a tile of the state: device functions of the decode and step kernels.

Owns what a token's output is, and the order of loads: all of a program's loads are issued before
the first result is used, because a value that is awaited, or a barrier, holds back what follows.
Knows no launch. Legend: triton_tiles.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.ops.mamba2.triton_tiles import (
    FP32_RECORDS,
    as_recorded,
    by_head,
    decay,
    fold,
    is_exact,
    last,
    load_checkpoint,
    load_records,
    load_x_records,
    of_runs,
    past_of,
    piece_count,
    piece_start,
    runs_of,
    tile_rows,
    values_of_pieces,
    with_last,
    write_state,
)
from replayssm.ops.quantize.layout import load_vector, rows_from, scales_of
from replayssm.ops.quantize.packing import encode_elements
from replayssm.ops.quantize.rounding import fact
from replayssm.ops.quantize.tiles import load_factor, load_vector_for, times_vector
from replayssm.ops.quantize.words import (
    blocks_of,
    load_row_parts,
    load_vector_parts,
    rows_times_parts,
    words_times_parts,
)
from replayssm.ops.triton_common import prefix_sums


@triton.jit
def load_token(
    tokens, A, row, part,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    READ: tl.constexpr,                 # storage that C meets, or None
    PARTS: tl.constexpr,                # whether in parts, see `decode_token`
    D_PER_CHANNEL: tl.constexpr, HEADS: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What tile `part` needs of a row's token, which needs no cursor, as it lies.

    Returns C [WIDTH], C as it meets the state, B [WIDTH], x [R], dt [HEADS], A [HEADS] and D [R].
    """
    group, _, head, _, _, in_heads, _ = tile_rows(part, H, P, G, HEADS, BP)
    n = tl.arange(0, WIDTH)
    C_at = tokens.C + row * tokens.C_row + group * N
    C = tl.load(C_at + n, mask=n < N, other=0)
    if READ is None:
        C_read = C
    elif PARTS:
        C_read = load_vector_parts(C_at, N, blocks_of(READ, N))
    else:
        C_read = load_vector_for(C_at, N, WIDTH, READ)
    B = tl.load(tokens.B + row * tokens.B_row + group * N + n, mask=n < N, other=0)
    dt = tl.load(tokens.dt + row * tokens.dt_row + head, mask=in_heads, other=0.0)
    rate = tl.load(A + head, mask=in_heads, other=0.0)
    xs, Ds = (), ()
    for i in tl.static_range(piece_count(P, BP)):
        _, _, _, head_of, p, _, in_tile = tile_rows(part, H, P, G, HEADS, BP, i)
        x = tl.load(tokens.x + row * tokens.x_row + head_of * P + p, mask=in_tile, other=0)
        D = x
        if tokens.D is not None:
            at = tokens.D + (head_of * P + p if D_PER_CHANNEL else head_of)
            D = tl.load(at, mask=in_tile, other=0)
        xs, Ds = xs + (x,), Ds + (D,)
    return C, C_read, B, xs, dt, rate, Ds


@triton.jit
def load_ring(
    ring, slot, part, count,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes of what tile `part` needs of the ring's first `count` slots: B [BL, WIDTH], dt
    [BL, HEADS], x [BL, R]."""
    group, _, head, _, _, in_heads, _ = tile_rows(part, H, P, G, HEADS, BP)
    n = tl.arange(0, WIDTH)
    ring_B = ring.B + slot * ring.B_slot + group * L * N + n
    ring_dt = ring.dt + slot * ring.dt_slot + head * L
    B = load_records(ring_B, N, n < N, count, BL)
    dt = load_records(ring_dt, 1, in_heads, count, BL)
    return B, dt, load_x_records(ring, slot, part, count, H, P, G, L, HEADS, BP, BL)


@triton.jit
def answer(
    out, tokens, token, records, row, part,
    read,                               # [R] product of the stored state with C
    factors,                            # [R] that it lacks, or None
    met,                                # [BL] products of the records' B with C, or None
    unused,                             # slot from which `records` are to be dropped, or None
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    RING: tl.constexpr, HEADS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Stores the outputs of tile `part` of a row."""
    C, _, B_new, xs_given, dt_new, rate, Ds = token
    C = C.to(tl.float32)
    if met is None:
        met = tl.sum(past_of(records[0], unused, RING) * C[None, :], 1)  # [BL]
    dt = past_of(records[1], unused, FP32_RECORDS)
    log_decay = prefix_sums(rate[None, :] * dt)  # [BL, HEADS]
    now = last(log_decay) + rate * dt_new  # [HEADS]
    weights = dt * decay(now[None, :], log_decay) * met[:, None]
    weight_new = dt_new * tl.sum(as_recorded(B_new, RING) * C, 0)
    for i in tl.static_range(piece_count(P, BP)):
        _, _, _, head_of, p, _, in_tile = tile_rows(part, H, P, G, HEADS, BP, i)
        # All but the product with the state first: one change of layout for the sum.
        kept = of_runs(decay(now, 0.0), head_of.shape[0])
        y = as_recorded(xs_given[i], RING) * of_runs(weight_new, head_of.shape[0])
        if tokens.D is not None:
            y += Ds[i].to(tl.float32) * xs_given[i].to(tl.float32)
        x = past_of(records[2][i], unused, RING)
        y += tl.reshape(_weighted_sum(by_head(x, HEADS), weights), head_of.shape)
        if factors is not None:
            kept *= factors[i]
        y = tl.fma(read[i], kept, y)
        tl.store(out + row * (H * P) + head_of * P + p, y, mask=in_tile)


@triton.constexpr_function
def _halvings(slots: int) -> int:
    """How often slots can be halved; those of one thread are, one fused multiply-add a slot."""
    return min(3, slots.bit_length() - 1)


@triton.jit
def _weighted_sum(x, weights):
    """Sums [HEADS, BP] of x [BL, HEADS, BP] with weights [BL, HEADS] over BL."""
    xs, ws = (x,), (weights,)
    for _ in tl.static_range(_halvings(x.shape[0])):
        half_xs, half_ws = (), ()
        for i in tl.static_range(len(xs)):
            half_xs, half_ws = half_xs + _halves(xs[i]), half_ws + _halves(ws[i])
        xs, ws = half_xs, half_ws
    total = xs[0] * ws[0][:, :, None]
    for i in tl.static_range(1, len(xs)):
        total = tl.fma(xs[i], tl.broadcast_to(ws[i][:, :, None], xs[i].shape), total)
    return tl.sum(total, 0)


@triton.jit
def _halves(x):
    """First and second half of the first axis of x [A, B] or [A, B, C]."""
    HALF: tl.constexpr = x.shape[0] // 2
    if len(x.shape) == 2:
        x = tl.permute(tl.reshape(x, [2, HALF, x.shape[1]]), [1, 2, 0])
    else:
        x = tl.permute(tl.reshape(x, [2, HALF, x.shape[1], x.shape[2]]), [1, 2, 3, 0])
    return tl.split(x)


@triton.jit
def append(
    token, ring, slot, part, parts, pos,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    RING: tl.constexpr, HEADS: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores tile `part`'s share of the token's record at slot `pos`, of `parts` tiles a row."""
    _, _, B_new, xs_given, dt_new, _, _ = token
    group, first_p, head, _, _, in_runs, _ = tile_rows(part, H, P, G, HEADS, BP)
    FORMAT: tl.constexpr = fact(RING, "format")
    for i in tl.static_range(piece_count(P, BP)):
        _, _, _, head_of, p, _, in_tile = tile_rows(part, H, P, G, HEADS, BP, i)
        ring_x = ring.x + slot * ring.x_slot + head_of * L * P + p
        x_codes = encode_elements(as_recorded(xs_given[i], RING), FORMAT)
        tl.store(ring_x + pos * P, x_codes, mask=in_tile)
    RUNS: tl.constexpr = runs_of(P, BP)
    starts = in_runs & (((first_p // BP + tl.arange(0, HEADS)) % RUNS) == 0)
    tl.store(ring.dt + slot * ring.dt_slot + head * L + pos, dt_new, mask=starts)
    if part % (parts // G) == 0:
        n = tl.arange(0, WIDTH)
        ring_B = ring.B + slot * ring.B_slot + group * L * N + n
        B_codes = encode_elements(as_recorded(B_new, RING), FORMAT)
        tl.store(ring_B + pos * N, B_codes, mask=n < N)


@triton.jit
def fold_token(
    states, token, records, layer, checkpoint, read_copy, cursors, ticket, part,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    RING: tl.constexpr, CHECKPOINT: tl.constexpr, READ_COPY: tl.constexpr,
    PRECISION: tl.constexpr, HEADS: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Folds L - 1 records and the token into `states`, the checkpoint's values, and writes them:
    what a flush does once the token's record is in the ring, to the bit."""
    _, _, B_new, xs_given, dt_new, rate, _ = token
    B = with_last(past_of(records[0], L - 1, RING, PRECISION), as_recorded(B_new, RING), L)
    dt = with_last(past_of(records[1], L - 1, FP32_RECORDS), dt_new, L)
    xs = ()
    for i in tl.static_range(len(xs_given)):
        x = past_of(records[2][i], L - 1, RING)
        xs = xs + (with_last(x, as_recorded(xs_given[i], RING), L),)
    log_decay = prefix_sums(rate[None, :] * dt)
    states = fold(states, xs, B, dt, log_decay, last(log_decay), PRECISION)
    write_state(
        states, checkpoint, read_copy, cursors, layer, ticket, part,
        H, P, G, N, CHECKPOINT, READ_COPY, HEADS, BP, WIDTH,
    )  # fmt: skip


@triton.jit
def load_state(
    stored, slot, part,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    STORAGE: tl.constexpr, HEADS: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`load_factor` of tile `part`, for `times_vector`."""
    pieces = ()
    for i in tl.static_range(piece_count(P, BP)):
        pieces = pieces + (
            _load_piece(stored, slot, part, i, H, P, G, N, STORAGE, HEADS, BP, WIDTH),
        )
    return pieces


@triton.jit
def _load_piece(
    stored, slot, part, PIECE: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    STORAGE: tl.constexpr, HEADS: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    _, first_p, head, head_of, p, _, in_tile = tile_rows(part, H, P, G, HEADS, BP, PIECE)
    in_rows = None if is_exact(H, P, G, HEADS, BP) else in_tile
    if HEADS == 1 or P % BP == 0:  # rows follow each other
        first = tl.min(head, 0) * P + first_p + piece_start(P, BP, PIECE)
        tile = rows_from(stored, first, P, N, STORAGE)
        row = tl.arange(0, head_of.shape[0])
        loaded = load_factor(tile, slot, row, in_rows, P, N, WIDTH, STORAGE)
        if HEADS > 1 and BP < P and scales_of(STORAGE) == "nvfp4":  # matrices begin elsewhere
            base = stored.tensor_scale + slot * stored.tensor_scale_slot
            return loaded[0], loaded[1], load_vector(base, head_of, in_rows, 1.0)
        return loaded
    else:
        return load_factor(stored, slot, head_of * P + p, in_rows, P, N, WIDTH, STORAGE)


@triton.jit
def times_C(loaded, C, N: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr):
    """`times_vector` of what `load_state` loaded with C: [R]."""
    products = ()
    for i in tl.static_range(len(loaded)):
        products = products + (times_vector(loaded[i], C, N, WIDTH, READ),)
    return products


@triton.jit
def flush_token(
    out, tokens, token,
    records,                            # of which the last is unused
    cursors, state, layer, ticket, part,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    STORAGE: tl.constexpr, RING: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Tile `part` of a row whose ring its token fills, where there is one copy: one read of the
    state gives the outputs and is folded. The record does not enter the ring."""
    loaded = load_checkpoint(state, ticket.slot, part, H, P, G, N, STORAGE, HEADS, BP, WIDTH)
    values, y = values_of_pieces(loaded, N, WIDTH, STORAGE), ()
    for i in tl.static_range(len(values)):
        y = y + (tl.sum(values[i] * token[0].to(tl.float32)[None, :], 1),)
    answer(
        out, tokens, token, records, ticket.row, part, y, None, None, L - 1,
        H, P, G, RING, HEADS, BP,
    )  # fmt: skip
    fold_token(
        values, token, records, layer, state, None, cursors, ticket, part,
        H, P, G, N, L, RING, STORAGE, None, PRECISION, HEADS, BP, WIDTH,
    )  # fmt: skip


@triton.jit
def decode_token(
    out, tokens, token, ring, read,
    row, slot, pos, part, parts,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    READ: tl.constexpr, RING: tl.constexpr, DOTS: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Outputs of tile `part` of a row; its share of the record enters the ring.

    DOTS: how tensor cores multiply C, which the token has in parts (`quantize/words.py`), with the
    records' B and with the state's E2M1 words; None: they do not. Where a state of more bits is
    what a program waits for, to ask for records first costs more than it saves (FP16: 202 instead
    of 163 us for 256 rows).
    """
    if pos < L:
        factors, met = None, None
        if DOTS is not None:
            # First, so that B's registers are free when codes come.
            group, _, _, _, _, _, _ = tile_rows(part, H, P, G, HEADS, BP)
            ring_B = ring.B + slot * ring.B_slot + group * L * N
            met = rows_times_parts(load_row_parts(ring_B, pos, N, BL), token[1], DOTS)
        loaded = load_state(read, slot, part, H, P, G, N, READ, HEADS, BP, WIDTH)
        records = load_ring(ring, slot, part, pos, H, P, G, N, L, HEADS, BP, BL, WIDTH)
        if DOTS is not None:
            y, factors = (), ()
            for i in tl.static_range(len(loaded)):
                product, factor = words_times_parts(loaded[i], token[1], N, READ, DOTS)
                y, factors = y + (product,), factors + (factor,)
        else:
            y = times_C(loaded, token[1], N, WIDTH, READ)
        answer(
            out, tokens, token, records, row, part, y, factors, met, None,
            H, P, G, RING, HEADS, BP,
        )  # fmt: skip
        append(token, ring, slot, part, parts, pos, H, P, G, N, L, RING, HEADS, BP, WIDTH)
    else:
        store_constant(out, row, part, float("nan"), H, P, G, HEADS, BP)


@triton.jit
def store_constant(
    out, row, part, value: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Outputs of tile `part` of a row: 0 for padding, NaN where the ring has no room, which is a
    caller's mistake."""
    for i in tl.static_range(piece_count(P, BP)):
        _, _, _, head_of, p, _, in_tile = tile_rows(part, H, P, G, HEADS, BP, i)
        tl.store(out + row * (H * P) + head_of * P + p, value, mask=in_tile)
