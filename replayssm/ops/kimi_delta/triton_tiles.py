"""Device functions that the Kimi Delta Attention kernels share: sums of gates and pairs.

Owns what a decay per key channel changes; records, the triangular solve and written states are
those of `../gated_delta/triton_tiles.py`. Knows no format, no launch and no cache.

Exponents are sums of gates over the tokens between two events, never differences of longer sums: a
channel that forgot at e^-300 and then stopped forgetting keeps every digit, and none is positive.

Legend: `../gated_delta/triton_tiles.py`; a gate is a row of K log decays, so that tiles of gates
are [BL, BK] and [BT, BK], like tiles of keys.
"""

import triton
import triton.language as tl

from replayssm.ops.gated_delta.triton_tiles import as_held
from replayssm.ops.triton_common import exact_dot


@triton.jit
def sums_before(g, PRECISION: tl.constexpr):
    """Of each row of g [A, C], its sum with the rows before it. PRECISION as of FP32 times BF16."""
    i = tl.arange(0, g.shape[0])
    return _sums_of_rows(g, i[:, None] <= i[None, :], PRECISION)


@triton.jit
def sums_after(g, PRECISION: tl.constexpr):
    """Of each row of g [A, C], the sum of the rows after it. PRECISION as of FP32 times BF16."""
    i = tl.arange(0, g.shape[0])
    return _sums_of_rows(g, i[:, None] > i[None, :], PRECISION)


@triton.jit
def _sums_of_rows(g, included, PRECISION: tl.constexpr):
    """[A, C]: row i is the sum of the rows l of g with included[l, i].

    A matrix product with zeros and ones: its products are exact, and so are its signs. (`tl.cumsum`
    of such a tile fails to compile beside products on Triton 3.6.)
    """
    zero = tl.zeros([g.shape[1], g.shape[0]], tl.float32)
    return tl.trans(exact_dot(tl.trans(g), included.to(tl.float32), zero, PRECISION))


@triton.jit
def pair_weights(
    keys,
    key_stride,
    queries,
    query_stride,
    gates,
    gate_stride,
    ring_keys,
    end,
    column,
    in_k,
    k_k,
    k_q,
):
    """Adds to k_k and k_q [BT, BT], at [j, i], what token i gets of key j in these columns.

    That is Σ_c k_jc e^{g_(j+1)c + ... + g_ic} r_ic with r = k (j < i), r = q (j <= i). Tokens
    i < end are at `keys`, `queries` and `gates`, one row a stride; queries None: k_q stays as it
    is. Keys are used as `ring_keys` holds them.

    A pair has a decay in each channel, so this is no matrix product: column i of the results is
    made from all earlier keys, which decay by a token at a time, as a state would.
    """
    token = tl.arange(0, k_k.shape[0])
    past = tl.zeros(
        [k_k.shape[0], column.shape[0]], tl.float32
    )  # decayed keys of the tokens so far
    i = 0  # no `range`: the interpreter of Triton 3.6 takes none that ends at a loaded number
    while i < end:
        g = tl.load(gates + i * gate_stride + column, mask=in_k, other=0.0)
        k = as_held(tl.load(keys + i * key_stride + column, mask=in_k, other=0.0), keys, ring_keys)
        here = token == i
        past *= tl.exp(g)[None, :]
        to_k = tl.sum(past * k[None, :], 1)  # [BT]
        k_k += tl.where(here[None, :], to_k[:, None], 0.0)
        past = tl.where(here[:, None], k[None, :], past)
        if queries is not None:
            q = tl.load(queries + i * query_stride + column, mask=in_k, other=0.0).to(tl.float32)
            to_q = tl.sum(past * q[None, :], 1)
            k_q += tl.where(here[None, :], to_q[:, None], 0.0)
        i += 1
    return k_k, k_q
