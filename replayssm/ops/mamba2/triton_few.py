"""One token per row in one launch, for few rows, where time is latency and not bytes.

Owns the kernel of `decode` and of `step` for few rows: it answers the token and, in a step, commits
it and folds the ring that it fills. Knows no launch.

As `../gated_delta/triton_few.py`, which says why loads and branches are where they are: two trips
to memory, every row of the state in one warp, one exchange between warps. A tile is BP rows of one
head. Legend: triton_tiles.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.ops.mamba2.triton_tiles import as_recorded, decay
from replayssm.ops.quantize.layout import reads_words
from replayssm.ops.quantize.packing import decode_elements, encode_elements
from replayssm.ops.quantize.rounding import fact
from replayssm.ops.quantize.tiles import (
    factor_of,
    unscaled_of,
    values_of,
    words_times_one,
)
from replayssm.ops.triton_common import (
    Ticket,
    count_arrival,
    hear_head,
    move_if_last,
    no_offset,
)
from replayssm.ops.triton_pairs import (
    all_columns,
    all_parts,
    eighths_of_pairs,
    halves,
    in_columns,
    load_for_words,
    load_in_parts,
    load_part,
    load_rows_in_parts,
)
from replayssm.ops.triton_records import (
    first_of,
    last_first,
    later_sums,
    load_numbers,
    load_of_records,
    of_record,
    sum_of,
)
from replayssm.ops.triton_rows import (
    LANES,
    load_parts,
    load_to_multiply,
    lone_rows,
    no_token,
    plus_outer,
    tell_tile,
    times,
    write_and_move,
)


@triton.jit(do_not_specialize=["layer"])
def few_kernel(
    slots, tokens, A, read, ring,       # [B], of `cursors`; Tokens, [H], Stored, Ring
    out, cursors,                       # [B, H, P] float32, Cursors
    checkpoint, read_copy, layer,       # Stored; None: the caller commits and flushes
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    READ: tl.constexpr, RING: tl.constexpr, CHECKPOINT: tl.constexpr, READ_COPY: tl.constexpr,
    D_PER_CHANNEL: tl.constexpr,
    SHARED: tl.constexpr,               # a copy has a scale for more rows than a program has
    THREADS: tl.constexpr,              # of a program
    BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,              # of the state that are read at a time
    RECORD_COLUMNS: tl.constexpr,       # and of records
    FOLDED: tl.constexpr,               # columns of a state that are folded at a time
    PAIRED: tl.constexpr,               # B, C and the ring's B are BF16, and lie in pairs
):  # fmt: skip
    """Grid (tiles of P, H, B): outputs, records, flushes and cursors in one launch."""
    TILES: tl.constexpr = (P + BP - 1) // BP
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot_at = slots + row
    slot = tl.load(slot_at).to(tl.int64)
    if slot_at.to(tl.int64) < 0:  # it never is: see `no_offset`
        return
    nothing = no_offset(read.data, cursors.arrivals)
    token = _load_token(
        tokens, A, row, head, tile, nothing,
        H, P, G, N, READ, D_PER_CHANNEL, BP, BL, WIDTH, COLUMNS, RECORD_COLUMNS, PAIRED,
    )  # fmt: skip
    tl.debug_barrier()  # the compiler would ask for the token behind the branch
    if slot < 0:
        no_token(out, row, tile, head, H, P, BP)
        return
    pos = tl.load(cursors.pos + slot)
    count = pos.to(tl.int32)
    held = _load_held(
        read, ring, slot, head, tile,
        H, P, G, N, L, READ, BP, BL, WIDTH, COLUMNS, RECORD_COLUMNS, PAIRED,
    )  # fmt: skip
    at = (out, row, slot, head, tile, count)
    tl.debug_barrier()  # all is asked for
    if CHECKPOINT is None:
        _reply(
            at, token, held, tokens, ring,
            H, P, G, N, L, READ, RING, BP, BL, WIDTH, COLUMNS, RECORD_COLUMNS, PAIRED,
        )  # fmt: skip
    elif count != L - 1:  # and so every thread has the cursor before anyone counts
        before = count_arrival(cursors, slot, True, THREADS)
        _reply(
            at, token, held, tokens, ring,
            H, P, G, N, L, READ, RING, BP, BL, WIDTH, COLUMNS, RECORD_COLUMNS, PAIRED,
        )  # fmt: skip
        move_if_last(cursors, slot, before, TILES * H, pos + 1, None, THREADS)
    else:
        flushes = tl.load(cursors.flushes + slot)
        sequence, seed = tl.load(cursors.sequence + slot), tl.load(cursors.seed + slot)
        ticket = Ticket(row.to(tl.int32), slot, count + 1, flushes, sequence, seed)
        p = tile * BP + tl.arange(0, BP)
        in_rows = None if P % BP == 0 else p < P
        state_row = head * P + p
        folded = load_parts(checkpoint, slot, state_row, in_rows, P, N, FOLDED, CHECKPOINT)
        said = None
        if SHARED:
            said = hear_head(cursors, slot, head, TILES, THREADS)
        tl.debug_barrier()
        token = _load_token(
            tokens, A, row, head, tile, 0,
            H, P, G, N, READ, D_PER_CHANNEL, BP, BL, WIDTH, COLUMNS, RECORD_COLUMNS, PAIRED,
        )  # fmt: skip
        held = _load_held(
            read, ring, slot, head, tile,
            H, P, G, N, L, READ, BP, BL, WIDTH, COLUMNS, RECORD_COLUMNS, PAIRED,
        )  # fmt: skip
        if not SHARED:
            _reply(
                at, token, held, tokens, ring,
                H, P, G, N, L, READ, RING, BP, BL, WIDTH, COLUMNS, RECORD_COLUMNS, PAIRED,
            )  # fmt: skip
        parts = _fold(
            folded, held, token, ring, slot, head,
            H, G, N, L, RING, CHECKPOINT, FOLDED, PAIRED,
        )  # fmt: skip
        tile_folded = tell_tile(parts, cursors, slot, head, tile, held[3], P, BP, READ, SHARED)
        if SHARED:  # while the others of the head are at it
            _reply(
                at, token, held, tokens, ring,
                H, P, G, N, L, READ, RING, BP, BL, WIDTH, COLUMNS, RECORD_COLUMNS, PAIRED,
            )  # fmt: skip
        write_and_move(
            tile_folded, checkpoint, read_copy, cursors, layer, ticket, head, tile, said,
            P, N, BP, WIDTH, CHECKPOINT, READ_COPY, SHARED, TILES * H, THREADS,
        )  # fmt: skip


@triton.jit
def _load_token(
    tokens, A, row, head, tile, nothing,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, READ: tl.constexpr,
    D_PER_CHANNEL: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, RECORD_COLUMNS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """A token as it lies: B [WIDTH], C as the ring's B meet it, B and C as the state meets them,
    x [BP], D [BP] or a scalar, dt, A."""
    group = head // (H // G)
    B_at = tokens.B + row * tokens.B_row + group * N
    C_at = tokens.C + row * tokens.C_row + group * N
    same = tl.zeros([BL], tl.int32)  # all records meet the same row
    of_records = load_rows_in_parts(C_at, same, same == 0, RECORD_COLUMNS, N, PAIRED)
    of_state = ()
    if reads_words(READ, N):
        of_state = (
            load_for_words(B_at, N, WIDTH, PAIRED), load_for_words(C_at, N, WIDTH, PAIRED),
        )  # fmt: skip
    else:
        for start in tl.static_range(0, N, COLUMNS):
            B = load_part(B_at, start, COLUMNS, N, PAIRED)
            of_state = of_state + ((B, load_part(C_at, start, COLUMNS, N, PAIRED)),)
    p = tile * BP + tl.arange(0, BP)
    x = tl.load(tokens.x + row * tokens.x_row + head * P + p, mask=p < P, other=0)
    D = x  # stands for what is not there: a tuple holds no None
    if tokens.D is not None:
        if D_PER_CHANNEL:
            D = tl.load(tokens.D + head * P + p, mask=p < P, other=0)
        else:
            D = tl.load(tokens.D + head)
    rate = tl.load(A + head)
    dt = tl.load(tokens.dt + row * tokens.dt_row + head + nothing)
    return B_at, of_records, of_state, x, D, rate, dt


@triton.jit
def _load_held(
    read, ring, slot, head, tile,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    READ: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, RECORD_COLUMNS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """What a slot holds for an answer, as it lies: B of all L records in parts [BL, columns], their
    x [BP, BL] and dt, and the state, words of codes or parts."""
    p, record = tile * BP + tl.arange(0, BP), last_first(BL)
    ring_B = ring.B + slot * ring.B_slot + head // (H // G) * (L * N)
    old_B = load_rows_in_parts(ring_B, record, record < L, RECORD_COLUMNS, N, PAIRED)
    old_x = load_of_records(ring.x + slot * ring.x_slot + head * (L * P), tile, P, L, BP, BL)
    old_dt = load_numbers(ring.dt + slot * ring.dt_slot + head * L, L, BL)
    in_rows = None if P % BP == 0 else p < P
    state = load_to_multiply(read, slot, head * P + p, in_rows, P, N, WIDTH, COLUMNS, READ)
    return old_B, old_x, old_dt, state


@triton.jit
def _reply(
    at, token, held, tokens, ring,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    READ: tl.constexpr, RING: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, RECORD_COLUMNS: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """Outputs of a tile, and its share of the record, computed and stored."""
    out, row, slot, head, tile, count = at
    B_at, _, _, x, _, _, dt = token
    FORMAT: tl.constexpr = fact(RING, "format")
    p, n, lone = tile * BP + tl.arange(0, BP), tl.arange(0, WIDTH), lone_rows(tile, BP)
    out += (row * H + head) * P
    if count < L:
        y = _answer(
            token, held, count, tokens, N, READ, RING, BP, BL, COLUMNS, RECORD_COLUMNS, PAIRED
        )
        lane = tl.arange(0, LANES)[:, None]
        one_lane = (lane == 0) & (p < P)[None, :]
        to = out + lone[None, :] + lane
        tl.store(to, tl.broadcast_to(y[None, :], [LANES, BP]), mask=one_lane)
        ring_x = ring.x + slot * ring.x_slot + (head * L + count) * P + p
        tl.store(ring_x, encode_elements(as_recorded(x, RING), FORMAT), mask=p < P)
        if tile == 0:
            tl.store(ring.dt + slot * ring.dt_slot + head * L + count, dt)
            if head % (H // G) == 0:
                B = as_recorded(tl.load(B_at + n, mask=n < N, other=0), RING)
                ring_B = ring.B + slot * ring.B_slot + (head // (H // G) * L + count) * N + n
                tl.store(ring_B, encode_elements(B, FORMAT), mask=n < N)
    else:  # a ring without room is a caller's mistake; no number may come of it
        tl.store(out + p, tl.full([BP], float("nan"), tl.float32), mask=p < P)


@triton.jit
def _answer(
    token, held, count, tokens,
    N: tl.constexpr, READ: tl.constexpr, RING: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr,
    COLUMNS: tl.constexpr, RECORD_COLUMNS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Outputs of a tile, [BP] FP32."""
    _, of_records, of_state, x, D, rate, dt = token
    old_B, old_x, old_dt, state = held
    FORMAT: tl.constexpr = fact(RING, "format")
    record = last_first(BL)
    past = record < count
    EACH: tl.constexpr = RECORD_COLUMNS // 2 if PAIRED else RECORD_COLUMNS
    met = tl.zeros([BL, EACH], tl.float32)
    for part in tl.static_range(len(old_B)):
        B, C = _recorded(old_B[part], RING, PAIRED), _given(of_records[part], PAIRED)
        for i in tl.static_range(len(B)):
            met += B[i] * C[i]
    weights = tl.where(past, tl.sum(met, 1), 0.0)  # [BL]
    counted = first_of(old_dt, count)
    decays = times(counted, rate)
    since = all_columns(later_sums(decays)) + rate * dt
    xs = decode_elements(tl.where(past[None, :], old_x, 0), FORMAT, False)
    xs *= (all_columns(counted) * decay(since, 0.0))[None, :]
    from_past = tl.sum(tl.reshape(xs * weights[None, :], [BP, LANES, BL // LANES]), 2)

    now = decay(sum_of(decays) + rate * dt, 0.0)
    if reads_words(READ, N):
        B, C = _eighths(of_state[0], PAIRED), _eighths(of_state[1], PAIRED)
        B_C = _as_recorded(B[0], RING, PAIRED) * C[0]
        for i in tl.static_range(1, 8):
            B_C += _as_recorded(B[i], RING, PAIRED) * C[i]
        y = words_times_one(state, C, READ)
        factor = factor_of(state, READ)
    else:
        PARTS: tl.constexpr = len(state)
        SIZE: tl.constexpr = COLUMNS // 2 if PAIRED else COLUMNS
        y, B_C = tl.zeros([BP, SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
        for part in tl.static_range(PARTS):
            s = in_columns(unscaled_of(state[part], N // PARTS, COLUMNS, READ), PAIRED)
            B, C = _given(of_state[part][0], PAIRED), _given(of_state[part][1], PAIRED)
            for i in tl.static_range(len(s)):
                y += s[i] * C[i][None, :]
                B_C += _as_recorded(B[i], RING, PAIRED) * C[i]
        factor = factor_of(state[0], READ)
    y *= (factor * now)[:, None]  # [BP, columns that are left]
    LEFT: tl.constexpr = y.shape[1]
    if LEFT % LANES == 0:
        y = tl.sum(tl.sum(tl.reshape(y, [BP, LANES, LEFT // LANES]), 2) + from_past, 1)
    else:
        y = tl.sum(y, 1) + tl.sum(from_past, 1)
    y += as_recorded(x, RING) * (dt * tl.sum(B_C, 0))
    if tokens.D is not None:
        y += D.to(tl.float32) * x.to(tl.float32)
    return y


@triton.jit
def _as_recorded(x, RING: tl.constexpr, PAIRED: tl.constexpr):
    return x if PAIRED else as_recorded(x, RING)


@triton.jit
def _given(x, PAIRED: tl.constexpr):
    return halves(x) if PAIRED else (x.to(tl.float32),)


@triton.jit
def _recorded(codes, RING: tl.constexpr, PAIRED: tl.constexpr):
    return halves(codes) if PAIRED else (decode_elements(codes, fact(RING, "format"), False),)


@triton.jit
def _eighths(x, PAIRED: tl.constexpr):
    return eighths_of_pairs(x) if PAIRED else x


@triton.jit
def _fold(
    loaded, held, token, ring, slot, head,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    RING: tl.constexpr, CHECKPOINT: tl.constexpr, COLUMNS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """A full ring folded into rows of a state, FP32 in parts, on CUDA cores."""
    PARTS: tl.constexpr = len(loaded)
    FORMAT: tl.constexpr = fact(RING, "format")
    B_at, _, _, x_new, _, rate, dt_new = token
    _, old_x, old_dt, _ = held
    dt = first_of(old_dt, L - 1)
    decays = times(dt, rate)
    since = all_columns(later_sums(decays)) + rate * dt_new
    xs = decode_elements(old_x, FORMAT, False) * (all_columns(dt) * decay(since, 0.0))[None, :]
    parts, B_new = (), ()
    given = load_in_parts(B_at, COLUMNS, N, PAIRED)
    for part in tl.static_range(PARTS):
        parts = parts + in_columns(values_of(loaded[part], N // PARTS, COLUMNS, CHECKPOINT), PAIRED)
        new = _given(given[part], PAIRED)
        for i in tl.static_range(len(new)):
            B_new = B_new + (_as_recorded(new[i], RING, PAIRED),)
    parts = times(parts, decay(sum_of(decays) + rate * dt_new, 0.0))
    ring_B = ring.B + slot * ring.B_slot + head // (H // G) * (L * N)
    for j in tl.range(L - 1):
        codes, B = load_in_parts(ring_B + j * N, COLUMNS, N, PAIRED), ()
        for part in tl.static_range(PARTS):
            B = B + _recorded(codes[part], RING, PAIRED)
        parts = plus_outer(parts, of_record(xs, j), B)
    parts = plus_outer(parts, as_recorded(x_new, RING) * dt_new, B_new)
    return all_parts(parts, PARTS)
