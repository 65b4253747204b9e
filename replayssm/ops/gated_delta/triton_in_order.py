"""A full ring folded into rows of a state, record by record, on CUDA cores.

For few rows: that takes less time than to prepare products of matrices, and needs no tile of 16.
Owns the order of the records. Knows no launch, no cursor, and not when a ring is full. A state is
held in parts [BV, columns], of which eight lanes share a row. Legend: triton_tiles.py.
"""

import triton
import triton.language as tl

from replayssm.ops.gated_delta.triton_tiles import as_held, decay, widen
from replayssm.ops.quantize.tiles import values_of
from replayssm.ops.triton_pairs import all_columns, all_parts, in_columns, load_in_parts
from replayssm.ops.triton_records import first_of, later_sums, of_record, sum_of
from replayssm.ops.triton_rows import plus_outer, times


@triton.jit
def fold_in_order(
    loaded, v_past, u_past, g_past, first_two, keys, first, ring, newest, u, k_at, source,
    K: tl.constexpr, L: tl.constexpr, CHECKPOINT: tl.constexpr,
    COLUMNS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Parts of the folded state, FP32, from parts of the stored one as `load_codes` has them.

    Of a ring's L - 1 older records: v or, where u is not solved for, u [BV, BL], log decays,
    keys at `keys`, and `first`, the number of the oldest; `first_two`, where u is solved for, are
    asked for already. The newest is a token's that was loaded from `source`, its key at `k_at`, its
    g, beta and v in `newest`; its u, where it is not solved for. Where it is, two records at a
    time: the state meets both keys before either is folded, and what the second misses of the first
    is the product of their keys.
    """
    PARTS: tl.constexpr = len(loaded)
    g, beta, v = newest
    parts = ()
    for part in tl.static_range(PARTS):
        parts = parts + in_columns(values_of(loaded[part], K // PARTS, COLUMNS, CHECKPOINT), PAIRED)
    k = _widen_all(load_in_parts(k_at, COLUMNS, K, PAIRED), source, ring.k)
    if ring.v is None:
        g_past = first_of(g_past, L - 1)
        us = u_past * decay(all_columns(later_sums(g_past)) + g, 0.0)[None, :]
        parts = times(parts, decay(sum_of(g_past) + g, 0.0))
        for j in tl.range(L - 1):
            old = load_in_parts(keys + j * K, COLUMNS, K, PAIRED)
            parts = plus_outer(parts, of_record(us, j), _widen_all(old, ring.k, ring.k))
        parts = plus_outer(parts, u, k)
    else:
        v = as_held(v, source, ring.v)
        ahead, ahead_after = first_two
        for i in tl.range((L - 1) // 2):
            old, after = ahead, ahead_after
            ahead = ask(keys, first, ring, 2 * i + 2, K, L, COLUMNS, PAIRED)
            ahead_after = ask(keys, first, ring, 2 * i + 3, K, L, COLUMNS, PAIRED)
            parts = _fold_two(
                parts, _old(old, ring, of_record(v_past, 2 * i)),
                _old(after, ring, of_record(v_past, 2 * i + 1)),
            )  # fmt: skip
        if L % 2 == 0:
            old = ask(keys, first, ring, L - 2, K, L, COLUMNS, PAIRED)
            old = _old(old, ring, of_record(v_past, L - 2))
            parts = _fold_two(parts, old, (k, decay(g, 0.0), beta, v))
        else:
            factor = decay(g, 0.0)
            u = beta * (v - _parts_times(parts, k) * factor)
            parts = plus_outer(times(parts, factor), u, k)
    return all_parts(parts, PARTS)


@triton.jit
def ask(
    keys, first, ring, j,
    K: tl.constexpr, L: tl.constexpr, COLUMNS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Key, log decay and write strength of record j, or of the last, as they lie."""
    j = tl.minimum(j, L - 1)
    parts = load_in_parts(keys + j * K, COLUMNS, K, PAIRED)
    return parts, tl.load(ring.g + first + j), tl.load(ring.beta + first + j)


@triton.jit
def _old(asked, ring, v):
    """Key, decay, write strength and v of a record that was asked for."""
    raw, g, beta = asked
    return _widen_all(raw, ring.k, ring.k), decay(g, 0.0), beta, v


@triton.jit
def _widen_all(raw, source, ring_k):
    """A key, FP32, as parts of the state meet it."""
    k = ()
    for part in tl.static_range(len(raw)):
        k = k + widen(raw[part], source, ring_k)
    return k


@triton.jit
def _fold_two(parts, old, after):
    k, factor, beta, v = old
    k_after, factor_after, beta_after, v_after = after
    u = beta * (v - _parts_times(parts, k) * factor)
    predicted = _parts_times(parts, k_after) * factor + u * _product(k, k_after, u.shape[0])
    u_after = beta_after * (v_after - predicted * factor_after)
    parts = plus_outer(times(parts, factor * factor_after), u * factor_after, k)
    return plus_outer(parts, u_after, k_after)


@triton.jit
def _parts_times(parts, k):
    """Products [BV] of rows with a key."""
    total = parts[0] * k[0][None, :]
    for part in tl.static_range(1, len(parts)):
        total = tl.fma(parts[part], tl.broadcast_to(k[part][None, :], total.shape), total)
    return tl.sum(total, 1)


@triton.jit
def _product(a, b, BV: tl.constexpr):
    """Product of two keys, once for every row, where it is needed: [BV]."""
    total = tl.zeros([BV, a[0].shape[0]], tl.float32)
    for part in tl.static_range(len(a)):
        x = tl.broadcast_to(a[part][None, :], total.shape)
        total = tl.fma(x, tl.broadcast_to(b[part][None, :], total.shape), total)
    return tl.sum(total, 1)
