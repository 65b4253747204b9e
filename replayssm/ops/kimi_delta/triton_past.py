"""What a token gets of past records: sums of gates, decayed keys, weights.

Owns how gates and keys lie among lanes, which is chosen so that what a lane loads is what it
multiplies, and no lane adds along records. Knows no state and no launch, and of cursors only the
record's number.

A ring's past is taken as events, BL of them: event 0 is the token itself, event i > 0 the record
before slot i. So L slots, of which a token finds one free, are L events. Columns are cut in PARTS
of 32, in which a lane has eight columns that follow each other in memory: sums of gates are
products, of which a lane gets two columns of every eight, and gates are loaded so that four of
these pairs are the eight. Up to PARTS warps have parts of their own.

Legend: triton_tiles.py.
"""

import triton
import triton.language as tl

from replayssm.ops.gated_delta.triton_tiles import as_held
from replayssm.ops.triton_common import exact_dot

_LOG2_E = tl.constexpr(1.4426950408889634)
# e to it is 0; a product in several terms takes no infinity.
_GONE = tl.constexpr(-1000.0)


@triton.constexpr_function
def parts_of(cols: int) -> int:
    """Parts of rows of `cols` keys or gates, a power of two."""
    return max(1, triton.next_power_of_2(cols) // 32)


@triton.jit
def load_token(
    tokens, row, head, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr
):
    """k and q of a token as they lie, where they meet keys, [PARTS, 1, 8, 32] with eight equal
    rows; and k and gates [BK] in the order of memory, for `store_token`."""
    key_head = head // (HV // HK)
    k_at = tokens.k + row * tokens.k_row + key_head * K
    q_at = tokens.q + row * tokens.q_row + key_head * K
    wide = _key_columns(K) + 0 * tl.arange(0, 8)[None, None, :, None, None]
    k_row = tl.load(k_at + wide, mask=wide < K, other=0.0)
    q_row = tl.load(q_at + wide, mask=wide < K, other=0.0)
    column = tl.arange(0, BK)
    in_k = column < K
    k = tl.load(k_at + column, mask=in_k, other=0.0)
    g = tl.load(tokens.g + row * tokens.g_row + head * K + column, mask=in_k, other=0.0)
    return _in_order(k_row, K), _in_order(q_row, K), k, g


@triton.jit
def store_token(
    token, tokens, ring, slot, head, count,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Key and gates of the record at slot `count` < L."""
    column = tl.arange(0, BK)
    in_k = column < K
    tl.store(ring.g + ((slot * HV + head) * L + count) * K + column, token[3], mask=in_k)
    if head % (HV // HK) == 0:
        k = as_held(token[2], tokens.k, ring.k).to(ring.k.dtype.element_ty)
        key_head = slot * HK + head // (HV // HK)
        tl.store(ring.k + (key_head * L + count) * K + column, k, mask=in_k)


@triton.jit
def load_past(
    tokens, ring, row, slot, head, stored,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Gates [PARTS, BL, 32] of the first `stored` < BL records and, in the last row, of the token;
    keys [PARTS, BL / 8, 8, 32] of these records, as they lie, events 1 to `stored`."""
    PARTS: tl.constexpr = parts_of(K)
    part = tl.arange(0, PARTS)[None, :, None, None, None]
    eighth = tl.arange(0, 8)[None, None, :, None, None]
    column = part * 32 + eighth * 4 + tl.arange(0, 4)[None, None, None, None, :]
    high = tl.arange(0, BL // 4)[:, None, None, None, None]
    record = high * 4 + tl.arange(0, 4)[None, None, None, :, None]
    newest = record == BL - 1
    gate = tokens.g + row * tokens.g_row + head * K
    at = tl.where(newest, gate, ring.g + ((slot * HV + head) * L + record) * K)
    gates = tl.load(at + column, mask=(newest | (record < stored)) & (column < K), other=0.0)
    gates = tl.reshape(tl.permute(gates, (1, 0, 3, 4, 2)), (PARTS, BL, 32))

    high = tl.arange(0, BL // 8)[:, None, None, None, None]
    event = high * 8 + tl.arange(0, 8)[None, None, :, None, None]
    column = _key_columns(K)
    asked = (event > 0) & (event <= stored) & (column < K)
    at = ring.k + (slot * HK + head // (HV // HK)) * L * K + (event - 1) * K + column
    return gates, _in_order(tl.load(at, mask=asked, other=0.0), K)


@triton.jit
def _key_columns(K: tl.constexpr):
    part = tl.arange(0, parts_of(K))[None, :, None, None, None]
    group = tl.arange(0, 4)[None, None, None, :, None]
    return part * 32 + group * 8 + tl.arange(0, 8)[None, None, None, None, :]


@triton.jit
def _in_order(x, K: tl.constexpr):
    """[PARTS, A, 8, 32] of [A, PARTS, 8, 4, 8], columns in the order of sums of gates."""
    A: tl.constexpr = x.shape[0]
    x = tl.permute(tl.reshape(x, (A, parts_of(K), 8, 4, 2, 4)), (1, 0, 2, 5, 3, 4))
    return tl.reshape(x, (parts_of(K), A, 8, 32))


@triton.jit
def only_past(past, count):
    """`load_past` of more than `count` records without those that do not exist."""
    BL: tl.constexpr = past[0].shape[1]
    record = tl.arange(0, BL)
    gates = tl.where(((record < count) | (record == BL - 1))[None, :, None], past[0], 0.0)
    return gates, tl.where((_events(BL) <= count)[None, :, :, None], past[1], 0.0)


@triton.jit
def _events(BL: tl.constexpr):
    return tl.arange(0, BL // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def weigh(past, token, tokens, ring, K: tl.constexpr, PRECISION: tl.constexpr):
    """What of each event reaches k and q, [BL] each: x · key ⊙ e^(sum of gates since); and the
    decay since the state, [32 PARTS] in the order of memory. PRECISION: of 0/1 times FP32.

    Event 0 has k for its key, and no decay. The sums are products with a matrix of zeros and ones,
    which are exact, and so are their signs.
    """
    PARTS: tl.constexpr = past[0].shape[0]
    BL: tl.constexpr = past[0].shape[1]
    gates = tl.maximum(past[0], _GONE)
    k = as_held(token[0], tokens.k, ring.k)
    q = token[1].to(tl.float32)
    i = tl.arange(0, BL)
    since = tl.broadcast_to((i[None, None, :] >= i[None, :, None]).to(tl.float32), (PARTS, BL, BL))
    sums = exact_dot(since, gates, tl.zeros_like(gates), PRECISION)
    keys = past[1].to(tl.float32) * tl.exp2(tl.reshape(sums, (PARTS, BL // 8, 8, 32)) * _LOG2_E)
    keys = tl.where((_events(BL) == 0)[None, :, :, None], k, keys)
    both = tl.sum(tl.sum(tl.join(keys * k, keys * q), 3), 0)
    w_k, w_q = tl.split(tl.reshape(both, (BL, 2)))

    total = tl.permute(tl.reshape(tl.sum(gates, 1), (PARTS, 4, 8)), (0, 2, 1))
    return w_k, w_q, tl.exp2(tl.reshape(total, (32 * PARTS,)) * _LOG2_E)
