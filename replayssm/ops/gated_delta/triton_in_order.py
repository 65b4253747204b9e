"""A full ring folded into rows of a state, record by record, on CUDA cores.

For few rows: that takes less time than to prepare products of matrices, and needs no tile of 16.
Owns the order of the records. Knows no launch, no cursor, and not when a ring is full. A state is
held in parts [BV, COLUMNS], of which eight lanes share a row. Legend: triton_tiles.py.
"""

import triton
import triton.language as tl

from replayssm.ops.gated_delta.triton_tiles import as_held, decay, widen
from replayssm.ops.quantize.tiles import values_of
from replayssm.ops.triton_pairs import all_columns, in_columns, load_part
from replayssm.ops.triton_rows import plus_outer, times


@triton.jit
def load_records(
    ring, slot, head, tile,
    HV: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """What a fold needs of all records but the newest and their keys: log decays, write strengths,
    and v, or, where u is not solved for, log decays and u."""
    value = tile * BV + tl.arange(0, BV)
    first, in_v = (slot * HV + head) * L, value < V
    gates, betas, values = (), (), ()
    for j in tl.static_range(L - 1):
        at = first + j
        gates = gates + (tl.load(ring.g + at),)
        if ring.v is None:
            values = values + (tl.load(ring.u + at * V + value, mask=in_v, other=0.0),)
        else:
            betas = betas + (tl.load(ring.beta + at),)
            v = tl.load(ring.v + at * V + value, mask=in_v, other=0.0)
            values = values + (v.to(tl.float32),)
    return gates, betas, values


@triton.jit
def fold_in_order(
    loaded, records, keys, ring, newest, k_at, source,
    K: tl.constexpr, L: tl.constexpr, CHECKPOINT: tl.constexpr,
    COLUMNS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Parts of the folded state, FP32, from parts of the stored one as `load_codes` has them.

    `records` are of `load_records`, their keys at `keys`; the newest is a token's that was loaded
    from `source`, its key at `k_at`, its g, beta, v and u in `newest`. Where u is solved for, two
    records at a time: the state meets both keys before either is folded, and what the second misses
    of the first is the product of their keys.
    """
    PARTS: tl.constexpr = len(loaded)
    gates, betas, values = records
    g, beta, v, u = newest
    gates, betas = gates + (g,), betas + (beta,)
    parts = ()
    for part in tl.static_range(PARTS):
        parts = parts + in_columns(values_of(loaded[part], K // PARTS, COLUMNS, CHECKPOINT), PAIRED)
    if ring.v is None:
        values = values + (u,)
        since = g * 0.0
        weights = ()
        for j in tl.static_range(L):
            weights = (decay(since, 0.0),) + weights
            since += gates[L - 1 - j]
        parts = times(parts, decay(since, 0.0))
        for j in tl.static_range(L):
            k = _load_key(keys, k_at, source, ring.k, j, K, L, COLUMNS, PARTS, PAIRED)
            parts = plus_outer(parts, values[j] * weights[j], k)
    else:
        values = values + (as_held(v, source, ring.v),)
        for j in tl.static_range(0, L, 2):
            k = _load_key(keys, k_at, source, ring.k, j, K, L, COLUMNS, PARTS, PAIRED)
            factor = decay(gates[j], 0.0)
            u = betas[j] * (values[j] - _parts_times(parts, k) * factor)
            if j + 1 < L:
                after = _load_key(keys, k_at, source, ring.k, j + 1, K, L, COLUMNS, PARTS, PAIRED)
                factor_after = decay(gates[j + 1], 0.0)
                predicted = _parts_times(parts, after) * factor + u * _product(k, after)
                u_after = betas[j + 1] * (values[j + 1] - predicted * factor_after)
                parts = times(parts, factor * factor_after)
                parts = plus_outer(plus_outer(parts, u * factor_after, k), u_after, after)
            else:
                parts = plus_outer(times(parts, factor), u, k)
    EACH: tl.constexpr = len(parts) // PARTS
    whole = ()
    for part in tl.static_range(PARTS):
        columns = ()
        for i in tl.static_range(EACH):
            columns = columns + (parts[part * EACH + i],)
        whole = whole + (all_columns(columns),)
    return whole


@triton.jit
def _load_key(
    keys, k_at, source, ring_k, j: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """The key of record j, FP32, as parts of the state meet it."""
    parts = ()
    for part in tl.static_range(PARTS):
        if j < L - 1:
            x = load_part(keys + j * K, part * COLUMNS, COLUMNS, K, PAIRED)
        else:
            x = load_part(k_at, part * COLUMNS, COLUMNS, K, PAIRED)
        parts = parts + widen(x, source, ring_k)
    return parts


@triton.jit
def _parts_times(parts, k):
    """Products [BV] of rows with a key."""
    total = parts[0] * k[0][None, :]
    for part in tl.static_range(1, len(parts)):
        total = tl.fma(parts[part], tl.broadcast_to(k[part][None, :], total.shape), total)
    return tl.sum(total, 1)


@triton.jit
def _product(a, b):
    total = a[0] * b[0]
    for part in tl.static_range(1, len(a)):
        total += a[part] * b[part]
    return tl.sum(total, 0)
