"""One token per row in one launch, for few rows, where time is latency and not bytes.

Owns the kernel of `decode` and of `step` for few rows: it answers the token and, in a step, commits
it and folds the ring that it fills. Knows no launch.

Two trips to memory: for the token and the slot, then for all that lies at the slot. All slots of
the ring are read while the cursor is on its way, and those past it left out afterwards. Compilers
like to compute between loads, and then to wait for some before they ask for others: a barrier keeps
loads in front of it, and a branch that depends on the cursor keeps arithmetic behind it.

Warps that meet wait for the slowest. So every row of the state belongs to one warp, of which eight
lanes share it, and what a program knows of its records goes through shared memory once; vectors
come from memory in the layout that needs them, which the compiler sees to where they have no more
elements than the program has threads. Legend: triton_tiles.py.
"""

import triton
import triton.language as tl

from replayssm.ops.gated_delta.triton_in_order import ask, fold_in_order
from replayssm.ops.gated_delta.triton_tiles import as_held, decay, eighths, load_vector, widen
from replayssm.ops.quantize.layout import reads_words
from replayssm.ops.quantize.tiles import factor_of, unscaled_of, words_times_two
from replayssm.ops.triton_common import (
    Ticket,
    count_arrival,
    hear_head,
    move_if_last,
    no_offset,
)
from replayssm.ops.triton_pairs import (
    all_columns,
    in_columns,
    load_for_words,
    load_part,
    load_part_of_rows,
    load_rows_in_parts,
)
from replayssm.ops.triton_records import (
    first_of,
    last_first,
    later_sums,
    load_numbers,
    load_of_records,
    sum_of,
)
from replayssm.ops.triton_rows import (
    LANES,
    load_parts,
    load_to_multiply,
    lone_rows,
    no_token,
    tell_tile,
    write_and_move,
)


@triton.jit(do_not_specialize=["layer"])
def few_kernel(
    slots,  # [B], of `cursors`: what is loaded first
    tokens,  # Tokens
    read,  # Stored
    ring,  # Ring
    out,  # [B, HV, V] FP32
    cursors,  # Cursors
    checkpoint,  # Stored; None: the caller commits and flushes
    read_copy,  # Stored, or None
    layer,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    READ: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    READ_COPY: tl.constexpr,
    SHARED: tl.constexpr,  # a copy has a scale for more rows than a program has
    THREADS: tl.constexpr,  # of a program
    BV: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
    COLUMNS: tl.constexpr,  # of the state that are read at a time
    KEY_COLUMNS: tl.constexpr,  # and of keys
    FOLDED: tl.constexpr,  # columns of a state that are folded at a time: BK, or a part of K
    PAIRED: tl.constexpr,  # k, q and the ring's keys are BF16, and two of them can be read at once
):
    """Grid (tiles of V, HV, B).

    A program that finds that its token fills the ring folds it, with all that the ring holds for
    its tile. A row's last program to finish moves its cursor, when all others have read it.
    """
    COMMITS: tl.constexpr = CHECKPOINT is not None
    TILES: tl.constexpr = (V + BV - 1) // BV  # the grid's size costs a trip to memory
    # A flush answers while it waits for its head's others, if its u does not come of the answer.
    LATE: tl.constexpr = SHARED and ring.v is not None
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot_at = slots + row
    slot = tl.load(slot_at).to(tl.int64)
    if slot_at.to(tl.int64) < 0:  # it never is: see `no_offset`
        return
    nothing = no_offset(read.data, cursors.arrivals)
    token = _load_token(
        tokens, row, head, tile, nothing,
        HK, HV, K, V, READ, BV, BK, BL, COLUMNS, KEY_COLUMNS, PAIRED,
    )  # fmt: skip
    tl.debug_barrier()  # the compiler would ask for the token behind the branch
    if slot < 0:
        no_token(out, row, tile, head, HV, V, BV)
        return
    pos = tl.load(cursors.pos + slot)
    count = pos.to(tl.int32)
    held = _load_held(
        read, ring, slot, head, tile,
        HK, HV, K, V, L, READ, BV, BK, BL, COLUMNS, KEY_COLUMNS, PAIRED,
    )  # fmt: skip
    at = (out, row, slot, head, tile, count)
    tl.debug_barrier()  # all is asked for
    if not COMMITS:
        _reply(
            at, token, held, tokens, ring,
            HK, HV, K, V, L, READ, BV, BK, BL, COLUMNS, KEY_COLUMNS, PAIRED,
        )  # fmt: skip
    elif count != L - 1:  # and so every thread has the cursor before anyone counts
        before = count_arrival(cursors, slot, True, THREADS)
        _reply(
            at, token, held, tokens, ring,
            HK, HV, K, V, L, READ, BV, BK, BL, COLUMNS, KEY_COLUMNS, PAIRED,
        )  # fmt: skip
        move_if_last(cursors, slot, before, TILES * HV, pos + 1, None, THREADS)
    else:
        flushes = tl.load(cursors.flushes + slot)
        sequence, seed = tl.load(cursors.sequence + slot), tl.load(cursors.seed + slot)
        ticket = Ticket(row.to(tl.int32), slot, count + 1, flushes, sequence, seed)
        value = tile * BV + tl.arange(0, BV)
        in_rows = None if V % BV == 0 else value < V
        state_row = head * V + value
        folded = load_parts(checkpoint, slot, state_row, in_rows, V, K, FOLDED, CHECKPOINT)
        first = (slot * HV + head) * L
        keys = ring.k + (slot * HK + head // (HV // HK)) * L * K
        v_past, first_two = None, None
        if ring.v is not None:
            v_past = load_of_records(ring.v + first * V, tile, V, L, BV, BL).to(tl.float32)
            first_two = (
                ask(keys, first, ring, 0, K, L, FOLDED, PAIRED),
                ask(keys, first, ring, 1, K, L, FOLDED, PAIRED),
            )
        said = None
        if SHARED:
            said = hear_head(cursors, slot, head, TILES, THREADS)
        tl.debug_barrier()
        # Once more, from the cache: what both ways use would be unpacked before they part, and so
        # every program would wait for it before it counts.
        token = _load_token(
            tokens, row, head, tile, 0,
            HK, HV, K, V, READ, BV, BK, BL, COLUMNS, KEY_COLUMNS, PAIRED,
        )  # fmt: skip
        held = _load_held(
            read, ring, slot, head, tile,
            HK, HV, K, V, L, READ, BV, BK, BL, COLUMNS, KEY_COLUMNS, PAIRED,
        )  # fmt: skip
        k_at, _, _, v, g, beta = token
        u = None
        if not LATE:
            u = _reply(
                at, token, held, tokens, ring,
                HK, HV, K, V, L, READ, BV, BK, BL, COLUMNS, KEY_COLUMNS, PAIRED,
            )  # fmt: skip
        parts = fold_in_order(
            folded, v_past, held[1], held[2], first_two, keys, first, ring, (g, beta, v), u,
            k_at, tokens.k, K, L, CHECKPOINT, FOLDED, PAIRED,
        )  # fmt: skip
        tile_folded = tell_tile(parts, cursors, slot, head, tile, held[3], V, BV, READ, SHARED)
        if LATE:
            _reply(
                at, token, held, tokens, ring,
                HK, HV, K, V, L, READ, BV, BK, BL, COLUMNS, KEY_COLUMNS, PAIRED,
            )  # fmt: skip
        write_and_move(
            tile_folded, checkpoint, read_copy, cursors, layer, ticket, head, tile, said,
            V, K, BV, BK, CHECKPOINT, READ_COPY, SHARED, TILES * HV, THREADS,
        )  # fmt: skip


@triton.jit
def _load_token(
    tokens, row, head, tile, nothing,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, READ: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
    COLUMNS: tl.constexpr, KEY_COLUMNS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """A token as it lies: where k is, k and q as the ring's keys meet them and as the state does,
    v, g, beta."""
    key_head = head // (HV // HK)
    q_at = tokens.q + row * tokens.q_row + key_head * K
    k_at = tokens.k + row * tokens.k_row + key_head * K
    same = tl.zeros([BL], tl.int32)  # all records meet the same row
    of_keys = ()
    for start in tl.static_range(0, K, KEY_COLUMNS):
        k = load_part_of_rows(k_at, same, same == 0, start, KEY_COLUMNS, K, PAIRED)
        q = load_part_of_rows(q_at, same, same == 0, start, KEY_COLUMNS, K, PAIRED)
        of_keys = of_keys + ((k, q),)
    of_state = ()
    if reads_words(READ, K):
        of_state = (load_for_words(k_at, K, BK, PAIRED), load_for_words(q_at, K, BK, PAIRED))
    else:
        for start in tl.static_range(0, K, COLUMNS):
            k = load_part(k_at, start, COLUMNS, K, PAIRED)
            q = load_part(q_at, start, COLUMNS, K, PAIRED)
            of_state = of_state + ((k, q),)
    value = tile * BV + tl.arange(0, BV)
    v = tl.load(tokens.v + row * tokens.v_row + head * V + value, mask=value < V, other=0.0)
    g = tl.load(tokens.g + row * tokens.g_row + head)
    beta = tl.load(tokens.beta + row * tokens.beta_row + head + nothing)
    return k_at, of_keys, of_state, v, g, beta


@triton.jit
def _load_held(
    read, ring, slot, head, tile,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    READ: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
    COLUMNS: tl.constexpr, KEY_COLUMNS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """What a slot holds for an answer, as it lies: keys of all L records in parts [BL, columns],
    their u [BV, BL] and g, and the state, words of codes or parts."""
    value, record = tile * BV + tl.arange(0, BV), last_first(BL)
    first = (slot * HV + head) * L  # this head's oldest record
    keys = ring.k + (slot * HK + head // (HV // HK)) * L * K
    old_keys = load_rows_in_parts(keys, record, record < L, KEY_COLUMNS, K, PAIRED)
    u_past = load_of_records(ring.u + first * V, tile, V, L, BV, BL)
    g_past = load_numbers(ring.g + first, L, BL)
    in_rows = None if V % BV == 0 else value < V
    state = load_to_multiply(read, slot, head * V + value, in_rows, V, K, BK, COLUMNS, READ)
    return old_keys, u_past, g_past, state


@triton.jit
def _reply(
    at, token, held, tokens, ring,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    READ: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
    COLUMNS: tl.constexpr, KEY_COLUMNS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Outputs of V rows, and their share of the record, computed and stored. Returns u [BV]."""
    out, row, slot, head, tile, count = at
    k_at, _, _, v, g, beta = token
    value, column, lone = tile * BV + tl.arange(0, BV), tl.arange(0, BK), lone_rows(tile, BV)
    in_v = value < V
    out += (row * HV + head) * V
    u = tl.full([BV], float("nan"), tl.float32)
    if count < L:
        u, answer = _answer(
            token, held, count, tokens, ring, K, READ, BV, BK, BL, COLUMNS, KEY_COLUMNS, PAIRED
        )
        here = (slot * HV + head) * L + count
        lane = tl.arange(0, LANES)[:, None]
        to = tl.where(lane == 0, (out + lone)[None, :], (ring.u + here * V + lone)[None, :])
        both = tl.where(lane == 0, answer[None, :], u[None, :])
        tl.store(to, both, mask=(lane < 2) & in_v[None, :])
        if ring.v is not None:
            v_held = as_held(v, tokens.v, ring.v).to(ring.v.dtype.element_ty)
            tl.store(ring.v + here * V + value, v_held, mask=in_v)
        if tile == 0:
            tl.store(ring.g + here, g)
            if ring.beta is not None:
                tl.store(ring.beta + here, beta)
            if head % (HV // HK) == 0:
                k = load_vector(k_at, column, ring.k, K).to(ring.k.dtype.element_ty)
                key = (slot * HK + head // (HV // HK)) * L + count
                tl.store(ring.k + key * K + column, k, mask=column < K)
    else:  # a ring without room is a caller's mistake; no number may come of it
        tl.store(out + value, u, mask=in_v)
    return u


@triton.jit
def _answer(
    token, held, count, tokens, ring,
    K: tl.constexpr, READ: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
    COLUMNS: tl.constexpr, KEY_COLUMNS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """u and the outputs of V rows, [BV] FP32 each.

    Where a result for k stands beside one for q, they are two columns of one tensor.
    """
    _, of_keys, of_state, v, g, beta = token
    old_keys, u_past, g_past, state = held
    record = last_first(BL)
    EACH: tl.constexpr = KEY_COLUMNS // 2 if PAIRED else KEY_COLUMNS
    with_k, with_q = tl.zeros([BL, EACH], tl.float32), tl.zeros([BL, EACH], tl.float32)
    for part in tl.static_range(len(old_keys)):
        old = widen(old_keys[part], ring.k, ring.k)
        k = widen(of_keys[part][0], tokens.k, ring.k)
        q = widen(of_keys[part][1], tokens.q, tokens.q)
        for i in tl.static_range(len(old)):
            with_k += old[i] * k[i]
            with_q += old[i] * q[i]
    weights = tl.sum(tl.join(with_k, with_q), 1)  # [BL, 2]
    weights = tl.where((record < count)[:, None], weights, 0.0)
    counted = first_of(g_past, count)
    since = all_columns(later_sums(counted)) + g  # log decays since each record
    u_past = tl.where((record < count)[None, :], u_past * decay(since, 0.0)[None, :], 0.0)
    past = u_past[:, :, None] * weights[None, :, :]  # [BV, BL, 2]
    past = tl.sum(tl.reshape(past, [BV, LANES, BL // LANES, 2]), 2)

    now = decay(sum_of(counted) + g, 0.0)
    if reads_words(READ, K):
        k, q = eighths(of_state[0], tokens.k, ring.k), eighths(of_state[1], tokens.q, tokens.q)
        k_q = k[0] * q[0]
        for i in tl.static_range(1, 8):
            k_q += k[i] * q[i]
        both = words_times_two(state, k, q, READ)
        factor = factor_of(state, READ)
    else:
        PARTS: tl.constexpr = len(state)
        SIZE: tl.constexpr = COLUMNS // 2 if PAIRED else COLUMNS
        with_k, with_q = tl.zeros([BV, SIZE], tl.float32), tl.zeros([BV, SIZE], tl.float32)
        k_q = tl.zeros([SIZE], tl.float32)
        for part in tl.static_range(PARTS):
            s = in_columns(unscaled_of(state[part], K // PARTS, COLUMNS, READ), PAIRED)
            k = widen(of_state[part][0], tokens.k, ring.k)
            q = widen(of_state[part][1], tokens.q, tokens.q)
            for i in tl.static_range(len(s)):
                with_k += s[i] * k[i][None, :]
                with_q += s[i] * q[i][None, :]
                k_q += k[i] * q[i]
        both = tl.join(with_k, with_q)
        factor = factor_of(state[0], READ)
    both *= (factor * now)[:, None, None]  # [BV, columns that are left, 2]
    LEFT: tl.constexpr = both.shape[1]
    if LEFT % LANES == 0:
        both = tl.sum(tl.reshape(both, [BV, LANES, LEFT // LANES, 2]), 2)
        both = tl.sum(both + past, 1)
    else:
        both = tl.sum(both, 1) + tl.sum(past, 1)
    predicted, answer = tl.split(both)
    v = v.to(tl.float32) if ring.v is None else as_held(v, tokens.v, ring.v)
    u = beta * (v - predicted)
    return u, answer + u * tl.sum(k_q, 0)
