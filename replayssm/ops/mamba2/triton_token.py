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
    last,
    load_records,
    past_of,
    tile_rows,
    with_last,
    write_state,
)
from replayssm.ops.quantize.packing import encode_elements
from replayssm.ops.quantize.rounding import fact
from replayssm.ops.quantize.tiles import (
    load_codes,
    load_factor,
    load_vector_for,
    times_vector,
    values_of,
)
from replayssm.ops.triton_common import prefix_sums


@triton.jit
def load_token(
    tokens, A, row, part,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    READ: tl.constexpr,                 # storage that `times_vector` reads, or None
    D_PER_CHANNEL: tl.constexpr, HEADS: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What tile `part` needs of a row's token, which needs no cursor, as it lies.

    Returns C [WIDTH], C for `times_vector`, B [WIDTH], x [R], dt [HEADS], A [HEADS] and D [R].
    """
    group, _, head, head_of, p, in_heads, in_tile = tile_rows(part, H, P, G, HEADS, BP)
    n = tl.arange(0, WIDTH)
    C_at = tokens.C + row * tokens.C_row + group * N
    C = tl.load(C_at + n, mask=n < N, other=0)
    C_read = C if READ is None else load_vector_for(C_at, N, WIDTH, READ)
    B = tl.load(tokens.B + row * tokens.B_row + group * N + n, mask=n < N, other=0)
    x = tl.load(tokens.x + row * tokens.x_row + head_of * P + p, mask=in_tile, other=0)
    dt = tl.load(tokens.dt + row * tokens.dt_row + head, mask=in_heads, other=0.0)
    rate = tl.load(A + head, mask=in_heads, other=0.0)
    D = x
    if tokens.D is not None:
        at = tokens.D + (head_of * P + p if D_PER_CHANNEL else head_of)
        D = tl.load(at, mask=in_tile, other=0)
    return C, C_read, B, x, dt, rate, D


@triton.jit
def load_ring(
    ring, slot, part, count,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes of what tile `part` needs of the ring's first `count` slots: B [BL, WIDTH], dt
    [BL, HEADS], x [BL, R]."""
    group, _, head, head_of, p, in_heads, in_tile = tile_rows(part, H, P, G, HEADS, BP)
    n = tl.arange(0, WIDTH)
    ring_B = ring.B + slot * ring.B_slot + group * L * N + n
    ring_dt = ring.dt + slot * ring.dt_slot + head * L
    ring_x = ring.x + slot * ring.x_slot + head_of * L * P + p
    B = load_records(ring_B, N, n < N, count, BL)
    dt = load_records(ring_dt, 1, in_heads, count, BL)
    return B, dt, load_records(ring_x, P, in_tile, count, BL)


@triton.jit
def answer(
    out, tokens, token, records, row, part,
    y,                                  # [R] product of the stored state with C
    unused,                             # slot from which `records` are to be dropped, or None
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    RING: tl.constexpr, HEADS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Stores the outputs of tile `part` of a row."""
    C, _, B_new, x_given, dt_new, rate, D = token
    _, _, _, head_of, p, _, in_tile = tile_rows(part, H, P, G, HEADS, BP)
    C = C.to(tl.float32)
    B = past_of(records[0], unused, RING)
    dt = past_of(records[1], unused, FP32_RECORDS)
    x = past_of(records[2], unused, RING)
    log_decay = prefix_sums(rate[None, :] * dt)  # [BL, HEADS]
    now = last(log_decay) + rate * dt_new  # [HEADS]
    weights = dt * decay(now[None, :], log_decay) * tl.sum(B * C[None, :], 1)[:, None]
    weight_new = dt_new * tl.sum(as_recorded(B_new, RING) * C, 0)
    y = by_head(y, HEADS) * decay(now, 0.0)[:, None]
    y += tl.sum(by_head(x, HEADS) * weights[:, :, None], 0)
    y += by_head(as_recorded(x_given, RING), HEADS) * weight_new[:, None]
    y = tl.reshape(y, [HEADS * BP])
    if tokens.D is not None:
        y += D.to(tl.float32) * x_given.to(tl.float32)
    tl.store(out + row * (H * P) + head_of * P + p, y, mask=in_tile)


@triton.jit
def append(
    token, ring, slot, part, parts, pos,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    RING: tl.constexpr, HEADS: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores tile `part`'s share of the token's record at slot `pos`, of `parts` tiles a row."""
    _, _, B_new, x_given, dt_new, _, _ = token
    group, first_p, head, head_of, p, in_heads, in_tile = tile_rows(part, H, P, G, HEADS, BP)
    FORMAT: tl.constexpr = fact(RING, "format")
    ring_x = ring.x + slot * ring.x_slot + head_of * L * P + p
    x_codes = encode_elements(as_recorded(x_given, RING), FORMAT)
    tl.store(ring_x + pos * P, x_codes, mask=in_tile)
    if first_p == 0:
        tl.store(ring.dt + slot * ring.dt_slot + head * L + pos, dt_new, mask=in_heads)
        if part % (parts // G) == 0:
            n = tl.arange(0, WIDTH)
            ring_B = ring.B + slot * ring.B_slot + group * L * N + n
            B_codes = encode_elements(as_recorded(B_new, RING), FORMAT)
            tl.store(ring_B + pos * N, B_codes, mask=n < N)


@triton.jit
def fold_token(
    state, token, records, layer, checkpoint, read_copy, cursors, ticket, part,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    RING: tl.constexpr, CHECKPOINT: tl.constexpr, READ_COPY: tl.constexpr,
    PRECISION: tl.constexpr, HEADS: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Folds L - 1 records and the token into `state`, the checkpoint's values, and writes it: what
    a flush does once the token's record is in the ring, to the bit."""
    _, _, B_new, x_given, dt_new, rate, _ = token
    _, _, _, head_of, p, _, in_tile = tile_rows(part, H, P, G, HEADS, BP)
    B = with_last(past_of(records[0], L - 1, RING), as_recorded(B_new, RING), L)
    dt = with_last(past_of(records[1], L - 1, FP32_RECORDS), dt_new, L)
    x = with_last(past_of(records[2], L - 1, RING), as_recorded(x_given, RING), L)
    log_decay = prefix_sums(rate[None, :] * dt)
    state = fold(state, x, B, dt, log_decay, last(log_decay), PRECISION)
    EXACT: tl.constexpr = P % BP == 0 and (H // G) % HEADS == 0
    write_state(
        state, checkpoint, read_copy, cursors, layer, ticket, head_of * P + p,
        None if EXACT else in_tile, P, BP, N, WIDTH, CHECKPOINT, READ_COPY,
    )  # fmt: skip


@triton.jit
def load_state(
    stored, slot, part,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    STORAGE: tl.constexpr,
    FACTOR: tl.constexpr,               # for `times_vector`, or to be folded
    HEADS: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`load_factor` or `load_codes` of tile `part`."""
    EXACT: tl.constexpr = P % BP == 0 and (H // G) % HEADS == 0
    _, _, _, head_of, p, _, in_tile = tile_rows(part, H, P, G, HEADS, BP)
    in_rows = None if EXACT else in_tile
    if FACTOR:
        return load_factor(stored, slot, head_of * P + p, in_rows, P, N, WIDTH, STORAGE)
    else:
        return load_codes(stored, slot, head_of * P + p, in_rows, P, N, WIDTH, STORAGE)


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
    loaded = load_state(state, ticket.slot, part, H, P, G, N, STORAGE, False, HEADS, BP, WIDTH)
    values = values_of(loaded, N, WIDTH, STORAGE)
    y = tl.sum(values * token[0].to(tl.float32)[None, :], 1)
    answer(
        out, tokens, token, records, ticket.row, part, y, L - 1, H, P, G, RING, HEADS, BP
    )  # fmt: skip
    fold_token(
        values, token, records, layer, state, None, cursors, ticket, part,
        H, P, G, N, L, RING, STORAGE, None, PRECISION, HEADS, BP, WIDTH,
    )  # fmt: skip


@triton.jit
def decode_token(
    out, tokens, token, ring, read, row, slot, pos, part, parts,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    READ: tl.constexpr, RING: tl.constexpr, EAGER: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Outputs of tile `part` of a row; its share of the record enters the ring.

    EAGER: all is asked for before the cursor is known, so the whole ring; the barrier keeps the
    compiler from asking for a value only where it is used. That is the shortest way through one
    program, and takes registers that else hold other programs, which wait in its place.
    """
    if EAGER:
        loaded = load_state(read, slot, part, H, P, G, N, READ, True, HEADS, BP, WIDTH)
        records = load_ring(ring, slot, part, L, H, P, G, N, L, HEADS, BP, BL, WIDTH)
        tl.debug_barrier()
    if pos < L:
        if not EAGER:
            loaded = load_state(read, slot, part, H, P, G, N, READ, True, HEADS, BP, WIDTH)
            records = load_ring(ring, slot, part, pos, H, P, G, N, L, HEADS, BP, BL, WIDTH)
        y = times_vector(loaded, token[1], N, WIDTH, READ)
        answer(
            out, tokens, token, records, row, part, y, pos if EAGER else None,
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
    _, _, _, head_of, p, _, in_tile = tile_rows(part, H, P, G, HEADS, BP)
    tl.store(out + row * (H * P) + head_of * P + p, value, mask=in_tile)
