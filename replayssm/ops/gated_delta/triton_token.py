"""One token of one state tile: its outputs, its record, and nothing else.

Owns what the kernels for many rows do with a token (for few: triton_few.py). The state tile meets k
and q in one pass, on CUDA cores: two products per element keep up with memory and round no operand.
Knows no launch, and of cursors only the record's number.

Legend: triton_tiles.py.
"""

import triton
import triton.language as tl

from replayssm.ops.gated_delta.triton_products import (
    keys_times,
    load_both,
    load_keys,
    words_times,
)
from replayssm.ops.gated_delta.triton_tiles import (
    as_held,
    decay,
    eighths,
    last,
    load_rows,
    load_vector,
)
from replayssm.ops.quantize.layout import reads_words
from replayssm.ops.quantize.operand import has_groups
from replayssm.ops.quantize.tiles import (
    factor_of,
    load_eighths,
    times_vector,
    unscaled_of,
)
from replayssm.ops.triton_rows import load_to_multiply


@triton.jit
def _load_for_keys(
    k_at, q_at, K: tl.constexpr, PRODUCTS: tl.constexpr, BL: tl.constexpr, COLUMNS: tl.constexpr
):
    """k and q as the ring's keys meet them."""
    if PRODUCTS is None:
        pairs = ()
        for start in tl.static_range(0, K, COLUMNS):
            column = start + tl.broadcast_to(tl.arange(0, COLUMNS)[None, :], [BL, COLUMNS])
            pairs = pairs + (_load_pair(k_at, q_at, column, K),)
        return pairs
    else:
        return load_both(k_at, q_at, K)


@triton.jit
def _load_for_state(
    k_at, q_at, of_keys,
    K: tl.constexpr, READ: tl.constexpr, PRODUCTS: tl.constexpr,
    BK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """k and q as the state meets them."""
    if not reads_words(READ, K):
        pairs = ()
        for start in tl.static_range(0, K, COLUMNS):
            pairs = pairs + (_load_pair(k_at, q_at, start + tl.arange(0, COLUMNS), K),)
        return pairs
    elif PRODUCTS is not None and has_groups(READ, K):
        return of_keys
    else:
        return load_eighths(k_at, K, BK // 8), load_eighths(q_at, K, BK // 8)


@triton.jit
def _load_pair(k_at, q_at, column, K: tl.constexpr):
    in_k = column < K
    return tl.load(k_at + column, mask=in_k, other=0.0), tl.load(
        q_at + column, mask=in_k, other=0.0
    )


@triton.jit
def one_token(
    out,  # [B, HV, V] FP32
    tokens,  # Tokens
    ring,  # Ring
    read,  # Stored
    row,
    slot,
    count,  # committed records, [] int32
    tile,
    head,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    READ: tl.constexpr,
    PRODUCTS: tl.constexpr,  # precision of products on tensor cores; None: on CUDA cores
    READS_BACK: tl.constexpr,  # whether the caller then reads the record, all of it
    BV: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
    COLUMNS: tl.constexpr,  # of the state that are read at a time
    KEY_COLUMNS: tl.constexpr,  # and of keys
):
    """Outputs of V rows `tile` of a head, and their share of the record: with READS_BACK all that
    the tile needs of it, so that the program can read it back.

    The state, whose place depends on the slot alone, is asked for first; then what depends on the
    cursor; nothing is computed, and so no warp waits for another, before all of it is on its way.
    Compilers like to compute between loads, and then to wait for some before they ask for others:
    a barrier keeps loads in front of it, and a branch that depends on the cursor keeps arithmetic
    behind it.
    Where a result for k stands beside one for q, they are two columns of one tensor: layouts change
    and warps meet once for both. Vectors come from memory in the layout that needs them.
    """
    value, record = tile * BV + tl.arange(0, BV), tl.arange(0, BL)
    in_v = value < V
    in_rows = None if V % BV == 0 else in_v
    state_row = head * V + value
    state = load_to_multiply(read, slot, state_row, in_rows, V, K, BK, COLUMNS, READ)
    key_head = head // (HV // HK)
    k_at = tokens.k + row * tokens.k_row + key_head * K
    q_at = tokens.q + row * tokens.q_row + key_head * K
    g = tl.load(tokens.g + row * tokens.g_row + head)
    beta = tl.load(tokens.beta + row * tokens.beta_row + head)
    v = tl.load(tokens.v + row * tokens.v_row + head * V + value, mask=in_v, other=0.0)

    past = record < count
    fits = count < L  # a ring without room is a caller's mistake; no number may come of it
    keys = ring.k + (slot * HK + key_head) * L * K
    first = (slot * HV + head) * L  # this head's oldest record
    newest = record == count
    if PRODUCTS is None:
        old_keys = _load_old(keys, record, past, K, KEY_COLUMNS)
    else:
        old_keys = load_keys(keys, k_at, record, past, newest, K)
    of_keys = _load_for_keys(k_at, q_at, K, PRODUCTS, BL, KEY_COLUMNS)
    u_past = load_rows(ring.u + first * V, record, V, past, value, in_v)  # [BL, BV]
    g_past = tl.load(ring.g + first + record, mask=past, other=0.0)  # [BL]
    if not READS_BACK:
        tl.debug_barrier()
    BEHIND: tl.constexpr = READ.code_bits == 32
    has_room = fits if BEHIND else True  # narrower states would spill where all has to come first
    if has_room:
        _answer(
            out, tokens, ring, row, slot, count, tile, head,
            of_keys, state, old_keys, u_past, g_past, v, g, beta,
            HK, HV, K, V, L, READ, PRODUCTS, READS_BACK, BV, BK, BL, COLUMNS, KEY_COLUMNS,
        )  # fmt: skip
    else:
        tl.store(
            out + (row * HV + head) * V + value, tl.full([BV], float("nan"), tl.float32), mask=in_v
        )


@triton.jit
def _answer(
    out, tokens, ring, row, slot, count, tile, head,
    of_keys, state, old_keys, u_past, g_past, v, g, beta,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    READ: tl.constexpr, PRODUCTS: tl.constexpr, READS_BACK: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
    COLUMNS: tl.constexpr, KEY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """What `one_token` computes and stores, when all of it has been asked for."""
    value, record = tile * BV + tl.arange(0, BV), tl.arange(0, BL)
    in_v, newest, fits = value < V, record == count, count < L
    if PRODUCTS is None:
        from_keys = _keys_times(old_keys, of_keys, newest, tokens.k, ring.k, BL, KEY_COLUMNS)
    else:
        from_keys = keys_times(old_keys, of_keys, K, PRODUCTS)
    # Where it is needed: it is in the cache.
    k_at = tokens.k + row * tokens.k_row + head // (HV // HK) * K
    q_at = tokens.q + row * tokens.q_row + head // (HV // HK) * K
    of_state = _load_for_state(k_at, q_at, of_keys, K, READ, PRODUCTS, BK, COLUMNS)
    if reads_words(READ, K) and PRODUCTS is not None and has_groups(READ, K):
        both = words_times(state, of_state, K, READ, PRODUCTS)
    elif reads_words(READ, K):
        k_parts = eighths(of_state[0], tokens.k, ring.k)
        with_k = times_vector(state, k_parts, K, BK, READ)
        with_q = times_vector(state, of_state[1], K, BK, READ)
        both = tl.join(with_k, with_q)  # [BV, 2]
    else:
        both = _parts_times(state, of_state, tokens.k, ring.k, K, BV, COLUMNS, READ)

    log_decay = tl.cumsum(g_past, 0)
    now = last(log_decay, BL) + g
    weight = tl.where(newest, 1.0, decay(now, log_decay))
    w_k, w_q = tl.split(from_keys * weight[:, None])  # [BL]; u_past is zero at the newest
    both *= decay(now, 0.0)
    both += tl.sum(tl.join(u_past * w_k[:, None], u_past * w_q[:, None]), 0)  # [BV, 2]
    predicted, answer = tl.split(both)
    v = v.to(tl.float32) if ring.v is None else as_held(v, tokens.v, ring.v)
    u = beta * (v - predicted)  # [BV]
    k_q = tl.sum(tl.where(newest, w_q, 0.0), 0)
    answer = tl.where(fits, answer + u * k_q, float("nan"))
    tl.store(out + (row * HV + head) * V + value, answer, mask=in_v)

    here = (slot * HV + head) * L + count
    if fits:
        tl.store(ring.u + here * V + value, u, mask=in_v)
        if ring.v is not None:
            tl.store(ring.v + here * V + value, v.to(ring.v.dtype.element_ty), mask=in_v)
        first_tile, first_head = tile == 0, head % (HV // HK) == 0
        if READS_BACK:  # every program stores it, the same bits
            first_tile |= count == L - 1
            first_head |= count == L - 1
        if first_tile:
            tl.store(ring.g + here, g)
            if ring.beta is not None:
                tl.store(ring.beta + here, beta)
            if first_head:
                column = tl.arange(0, BK)
                k = load_vector(k_at, column, ring.k, K)
                at = ring.k + ((slot * HK + head // (HV // HK)) * L + count) * K + column
                tl.store(at, k.to(ring.k.dtype.element_ty), mask=column < K)


@triton.jit
def _load_old(keys, record, asked, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Keys as they lie, in parts [BL, COLUMNS]."""
    parts = ()
    for start in tl.static_range(0, K, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = asked[:, None] & (column < K)[None, :]
        at = keys + record[:, None] * K + column[None, :]
        parts = parts + (tl.load(at, mask=mask, other=0.0),)
    return parts


@triton.jit
def _keys_times(
    parts, pairs, newest, source, ring_k,
    BL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Products [BL, 2] of the keys with k and q; at `newest`, of k itself."""
    with_k, with_q = tl.zeros([BL, COLUMNS], tl.float32), tl.zeros([BL, COLUMNS], tl.float32)
    for part in tl.static_range(len(parts)):
        k, q = as_held(pairs[part][0], source, ring_k), pairs[part][1].to(tl.float32)
        old = tl.where(newest[:, None], k, parts[part].to(tl.float32))
        with_k += old * k
        with_q += old * q
    return tl.sum(tl.join(with_k, with_q), 1)


@triton.jit
def _parts_times(
    parts, pairs, source, ring_k,
    K: tl.constexpr, BV: tl.constexpr, COLUMNS: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Products of the state with k and q, [BV, 2], one pass over the state."""
    PARTS: tl.constexpr = len(parts)
    with_k, with_q = tl.zeros([BV, COLUMNS], tl.float32), tl.zeros([BV, COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        s = unscaled_of(parts[part], K // PARTS, COLUMNS, READ)
        with_k += s * as_held(pairs[part][0], source, ring_k)[None, :]
        with_q += s * pairs[part][1].to(tl.float32)[None, :]
    return tl.sum(tl.join(with_k, with_q), 1) * factor_of(parts[0], READ)[:, None]
