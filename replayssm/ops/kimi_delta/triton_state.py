"""A tile of the state times a token's decayed k and q, in one pass.

Owns how both lie among lanes, which is chosen so that few lanes share a row and have to add. Knows
no ring, no cursor and no launch.

Legend: triton_tiles.py.
"""

import triton
import triton.language as tl

from replayssm.ops.gated_delta.triton_tiles import as_held
from replayssm.ops.quantize.layout import block_size, element_of, reads_quarters, scales_of
from replayssm.ops.quantize.operand import has_groups
from replayssm.ops.quantize.packing import decode_elements
from replayssm.ops.quantize.rounding import fact
from replayssm.ops.quantize.scaling import is_encode
from replayssm.ops.quantize.tiles import decode_block_scale, factor_of, load_codes, unscaled_of
from replayssm.ops.quantize.words import (
    HALF_WAY,
    apart,
    bf16_dot,
    e2m1_operand,
    in_code_order,
    part_columns,
)
from replayssm.ops.triton_common import bf16_terms


@triton.jit
def load_state(
    read, slot, head, first,
    V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    COLUMNS: tl.constexpr,  # of plain elements: what eight lanes read
    WARPS: tl.constexpr,  # of a program
    READ: tl.constexpr,
):  # fmt: skip
    """Everything stored of rows `first` to `first` + BV of a head, as it lies.

    Plain elements: codes [BK / COLUMNS, BV, COLUMNS]; a ninth lane would cost every row a shuffle.
    E2M1 words: [BV, K / 8], rows among warps as in a product.
    """
    data = read.data + slot * read.data_slot
    row = first + tl.arange(0, BV)
    if reads_quarters(READ):
        column = tl.arange(0, BK // COLUMNS)[:, None, None] * COLUMNS
        column += tl.arange(0, COLUMNS)[None, None, :]
        at = data + (head * V + row)[None, :, None] * K + column
        if V % BV == 0 and K == BK:
            codes = tl.load(at)
        else:
            codes = tl.load(at, mask=(row < V)[None, :, None] & (column < K), other=0)
        factor = codes
        if scales_of(READ) == "row":
            scales = read.scale + slot * read.scale_slot + head * V
            factor = tl.load(scales + row, mask=row < V, other=1.0)
        return codes, codes, factor
    elif has_groups(READ, K):
        BLOCKS: tl.constexpr = K // block_size(READ)
        words = data.to(tl.pointer_type(tl.int32)) + (head * V + first) * (K // 8)
        words = _load_among_warps(words, V - first, BV, K // 8, WARPS)
        scales = read.scale + slot * read.scale_slot + (head * V + first) * BLOCKS
        scales = _load_among_warps(scales, V - first, BV, BLOCKS, WARPS)
        factor = 1.0
        if scales_of(READ) == "nvfp4":
            factor = tl.load(read.tensor_scale + slot * read.tensor_scale_slot + head)
        return words, scales, factor
    else:
        in_rows = None if V % BV == 0 else row < V
        return load_codes(read, slot, head * V + row, in_rows, V, K, BK, READ)


@triton.jit
def _load_among_warps(base, rows, BV: tl.constexpr, COLS: tl.constexpr, WARPS: tl.constexpr):
    """The first `rows` of rows of COLS elements, [BV, COLS]: sixteen in turn for every warp, of
    which a lane has one and the eighth after it, and a quarter of its columns."""
    W: tl.constexpr = min(WARPS, BV // 16)
    RUN: tl.constexpr = COLS // 4
    row = tl.arange(0, BV // 16 // W)[:, None, None, None, None] * (16 * W)
    row += tl.arange(0, 2)[None, :, None, None, None] * 8
    row += tl.arange(0, W)[None, None, :, None, None] * 16
    row += tl.arange(0, 8)[None, None, None, :, None]
    column = tl.arange(0, COLS)
    column = (column // RUN * RUN + column % RUN)[None, None, None, None, :]
    x = tl.load(base + row * COLS + column, mask=(row < rows) & (column >= 0), other=0)
    return tl.reshape(tl.permute(x, (0, 2, 1, 3, 4)), (BV, COLS))


@triton.jit
def load_readers(
    tokens, row, head,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """k and q as they lie: vectors [BK], or, for E2M1 words, of each part two tiles [8, 32], with
    group i of k in row 2 i of the one, that of q in row 2 i + 1 of the other, and zeros around."""
    k_at = tokens.k + row * tokens.k_row + head // (HV // HK) * K
    q_at = tokens.q + row * tokens.q_row + head // (HV // HK) * K
    if has_groups(READ, K):
        line, group = tl.arange(0, 8)[:, None], tl.arange(0, 32)[None, :] // 8
        parts = ()
        for part in tl.static_range(K // 32):
            column = part_columns(part, K)[None, :]
            k = tl.load(k_at + column, mask=line == 2 * group, other=0.0)
            q = tl.load(q_at + column, mask=line == 2 * group + 1, other=0.0)
            parts = parts + ((k, q),)
        return parts
    else:
        column = tl.arange(0, BK)
        k = tl.load(k_at + column, mask=column < K, other=0.0)
        return k, tl.load(q_at + column, mask=column < K, other=0.0)


@triton.jit
def decayed(
    readers, source, held, decay, K: tl.constexpr, COLUMNS: tl.constexpr, READ: tl.constexpr
):
    """`load_readers` times decay [BK], for `state_times`; k is from `source` and used as `held`
    holds it. FP32 [BK / COLUMNS, COLUMNS] each, or of each part [8, 32] for both, times 2^63."""
    if has_groups(READ, K):
        decay = tl.permute(tl.reshape(decay * HALF_WAY, (4, K // 32, 8)), (2, 0, 1))
        decays = apart(tl.reshape(decay, (8, K // 8)), K // 32)  # [8, 4] each
        parts = ()
        for part in tl.static_range(K // 32):
            both = as_held(readers[part][0], source, held) + readers[part][1].to(tl.float32)
            parts = parts + (both * tl.reshape(tl.trans(decays[part]), (32,))[None, :],)
        return parts
    else:
        PARTS: tl.constexpr = decay.shape[0] // COLUMNS
        k, q = as_held(readers[0], source, held) * decay, readers[1].to(tl.float32) * decay
        return tl.reshape(k, (PARTS, COLUMNS)), tl.reshape(q, (PARTS, COLUMNS))


@triton.jit
def state_times(
    loaded, readers,
    K: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr, READ: tl.constexpr,
    PRODUCTS: tl.constexpr,  # precision of products of BF16
):  # fmt: skip
    """Products [BV, 2] of a tile from `load_state` with k and q of `decayed`."""
    if has_groups(READ, K):
        return _words_times(loaded, readers, K, READ, PRODUCTS)
    elif reads_quarters(READ):
        s = decode_elements(loaded[0], element_of(READ), scales_of(READ) != "none")
        with_k, with_q = s * readers[0][:, None, :], s * readers[1][:, None, :]
        both = tl.sum(tl.sum(tl.join(with_k, with_q), 0), 1)
        return both * loaded[2][:, None] if scales_of(READ) == "row" else both
    else:
        s = unscaled_of(loaded, K, BK, READ)
        k, q = tl.reshape(readers[0], (BK,)), tl.reshape(readers[1], (BK,))
        both = tl.sum(tl.join(s * k[None, :], s * q[None, :]), 1)
        return both * factor_of(loaded, READ)[:, None]


@triton.jit
def _words_times(loaded, readers, K: tl.constexpr, READ: tl.constexpr, PRODUCTS: tl.constexpr):
    """`state_times` of E2M1 words, as `../gated_delta/triton_products.words_times` has them: a row
    is four groups of columns, a part eight columns of every group, and the sums of groups are kept
    apart, because a block scale belongs to one. Readers are sums of three BF16 terms: all products
    are exact."""
    BV: tl.constexpr = loaded[0].shape[0]
    EACH: tl.constexpr = block_size(READ) // 8  # parts of a block
    BLOCKS: tl.constexpr = K // 32 // EACH  # of a group
    words = apart(loaded[0], K // 32)
    scales = apart(decode_block_scale(loaded[1], READ), BLOCKS)
    total = tl.zeros([BV, 4, 2], tl.float32)
    for block in tl.static_range(BLOCKS):
        sums = tl.zeros([BV, 8], tl.float32)
        for part in tl.static_range(block * EACH, block * EACH + EACH):
            a = e2m1_operand(words[part])
            high, middle, low = bf16_terms(readers[part])
            sums = bf16_dot(a, _as_codes_lie(low), sums, PRODUCTS)
            sums = bf16_dot(a, _as_codes_lie(middle), sums, PRODUCTS)
            sums = bf16_dot(a, _as_codes_lie(high), sums, PRODUCTS)
        total += tl.reshape(sums, (BV, 4, 2)) * scales[block][:, :, None]
    factor = HALF_WAY * 1.0
    if scales_of(READ) == "nvfp4":
        factor = HALF_WAY / loaded[2] if is_encode(fact(READ, "format")) else HALF_WAY * loaded[2]
    return tl.sum(total, 1) * factor


@triton.jit
def _as_codes_lie(x):
    """`in_code_order`, in FP32."""
    return in_code_order(x.to(tl.float32)).to(tl.bfloat16)
