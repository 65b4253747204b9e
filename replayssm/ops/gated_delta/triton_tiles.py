"""Device functions that the Gated DeltaNet kernels share: reads, decays, products, the solve.

Owns how records become tiles, the triangular solve, and how a state is folded. Knows no
format (state tiles come from and go to `ops/quantize`), no launch and no cache.

Legend, for every kernel of this folder: S pool slots, B rows, T tokens, HK key heads, HV value
heads, K head_k_dim, V head_v_dim, L ring slots; value head h uses key head h // (HV / HK). A state
tile is BV value rows of one head. BK, BL, BT: K, L, T rounded up to powers of two; BL and BT to at
least 16, the smallest side of a `tl.dot`. Tiles are value-first, [BV, BK], [BV, BL], [BV, BT];
vectors over ring slots and tokens are [BL] and [BT].
"""

import triton
import triton.language as tl

from replayssm.formats.number import BF16, FP16
from replayssm.formats.rounding import NEAREST_EVEN
from replayssm.ops.quantize.rounding import round_to_format
from replayssm.ops.triton_common import exact_dot
from replayssm.ops.triton_pairs import eighths_of_pairs, halves

_BF16, _FP16 = tl.constexpr(BF16), tl.constexpr(FP16)
_NEAREST_EVEN = tl.constexpr(NEAREST_EVEN)


@triton.jit
def load_rows(base, rows, stride, in_rows, columns, in_columns):
    """FP32 tile [rows, columns]; what is outside is zero.

    Zeros are selected by the load, so a NaN left in an unused ring slot reaches no product.
    """
    at = base + rows[:, None] * stride + columns[None, :]
    return tl.load(at, mask=in_rows[:, None] & in_columns[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_columns(base, rows, stride, in_rows, columns, in_columns):
    """The transpose of `load_rows`: [columns, rows]."""
    at = base + columns[:, None] + rows[None, :] * stride
    return tl.load(at, mask=in_columns[:, None] & in_rows[None, :], other=0.0).to(tl.float32)


@triton.jit
def as_held(x, source, ring):
    """FP32 values of what `ring` will hold of x, loaded from `source`: a token's value is the same
    whether it is used now or read back later."""
    HELD: tl.constexpr = ring.dtype.element_ty
    x = x.to(tl.float32)
    if source.dtype.element_ty != HELD:
        if HELD == tl.bfloat16:
            x = round_to_format(x, None, _BF16, _NEAREST_EVEN, True)[0]
        elif HELD == tl.float16:
            x = round_to_format(x, None, _FP16, _NEAREST_EVEN, True)[0]
    return x


@triton.jit
def widen(x, source, ring):
    """FP32 values of what `triton_pairs.load_part` returned, those that `ring` will hold of it: a
    tuple of one, or of even and odd columns."""
    if x.dtype == tl.int32:
        return halves(x)
    else:
        return (as_held(x, source, ring),)


@triton.jit
def eighths(x, source, ring):
    """The eight vectors of `load_eighths`, FP32, of what `load_for_words` returned: those that
    `ring` will hold of it."""
    if len(x) == 2:
        return eighths_of_pairs(x)
    else:
        held = ()
        for i in tl.static_range(8):
            held = held + (as_held(x[i], source, ring),)
        return held


@triton.jit
def load_vector(base, column, ring, K: tl.constexpr):
    """FP32 values of one token's vector at `base` as `ring` will hold them; 0 past K."""
    return as_held(tl.load(base + column, mask=column < K, other=0.0), base, ring)


@triton.jit
def last(x, SIZE: tl.constexpr):
    """The last entry of a scan, exactly; another reduction of what was scanned rounds otherwise."""
    return tl.sum(tl.where(tl.arange(0, SIZE) == SIZE - 1, x, 0.0), 0)


@triton.jit
def decay(later, earlier):
    """exp(later - earlier) of cumulative log decays, in (0, 1]; see `ring.decay_between`."""
    return tl.exp(tl.minimum(later - earlier, 0.0))


@triton.jit
def substitute(right, system, TOKENS: tl.constexpr, BT: tl.constexpr):
    """u [BV, BT] of (I + A) u = r by forward substitution; system [BT, BT] = Aᵀ, strictly upper.

    Column i of the solution is final once the earlier ones are taken out of it. Backward stable: an
    exact-nilpotent product (I - A)(I + A²)(I + A⁴)… has fewer steps, but its terms grow like
    binomials where keys repeat (A of ones: 3e3 at 16 tokens, 2e8 at 32) and cancel.
    """
    token = tl.arange(0, BT)
    for i in tl.range(TOKENS - 1):
        u_i = tl.sum(tl.where(token[None, :] == i, right, 0.0), 1)  # [BV]
        a_i = tl.sum(tl.where(token[:, None] == i, system, 0.0), 0)  # [BT]
        right -= u_i[:, None] * a_i[None, :]
    return right


@triton.jit
def fold_records(s, u, k, log_decay, PRECISION: tl.constexpr, BL: tl.constexpr):
    """exp(G) S + Σ_j exp(G - G_j) u_j k_jᵀ, [BV, BK].

    u [BV, BL] and k [BL, BK] are zero in unused slots; the last entry of the cumulative log decays
    G_j [BL] is G.
    """
    total = last(log_decay, BL)
    weighted = u * decay(total, log_decay)[None, :]
    decayed = s * decay(total, 0.0)
    if BL > 32:
        # A tensor core cuts what it adds to, in each of so many steps; the small terms, which come
        # first, need not cut the state.
        return decayed + exact_dot(weighted, k, tl.zeros_like(decayed), PRECISION)
    return exact_dot(weighted, k, decayed, PRECISION)


@triton.jit
def fold_decayed(s, u, k, factors, PRECISION: tl.constexpr):
    """S Diag(factors) + Σ_j u_j k_jᵀ, [BV, BK], where keys and factors have all decays in them.

    u [BV, BL] and k [BL, BK] are FP32 and zero in unused slots; factors [BK]. FP32 operands take
    twice as many steps of a sum as BF16 keys, so none of them cuts the state.
    """
    product = exact_dot(u, k, tl.zeros_like(s), PRECISION)
    return s * factors[None, :] + product
