"""A token's k and q times what is stored, on tensor cores: BF16 keys and E2M1 codes.

Owns the order in which columns meet, which is chosen so that what a lane of a warp loads is what it
multiplies: nothing passes through shared memory. For one warp, and BF16 tokens in a BF16 ring,
whose products are exact. Knows no cursor and no decay.

A row of K columns is four groups of K / 4, one for each of the four lanes that share a row of an
operand; a part is eight columns of every group, [.., 32]. k and q are [8, 32] in each part: row 2 t
is k and row 2 t + 1 is q in group t, and zero in the other groups. A product with them keeps the
groups' sums apart, [.., 4, 2], and so a block scale, which belongs to one group, is applied to sums
and not to codes. Legend: triton_tiles.py.
"""

import triton
import triton.language as tl

from replayssm.ops.quantize.layout import block_size
from replayssm.ops.quantize.tiles import decode_block_scale, factor_of
from replayssm.ops.quantize.words import (
    HALF_WAY,
    apart,
    bf16_dot,
    e2m1_operand,
    in_code_order,
    part_columns,
)
from replayssm.ops.triton_common import exact_dot


@triton.jit
def load_both(k_at, q_at, K: tl.constexpr):
    """k and q in parts [8, 32], BF16."""
    row, group = tl.arange(0, 8), tl.arange(0, 32) // 8
    base = tl.where(row % 2 == 0, k_at, q_at)
    mask = group[None, :] == (row // 2)[:, None]
    parts = ()
    for part in tl.static_range(K // 32):
        at = base[:, None] + part_columns(part, K)[None, :]
        parts = parts + (tl.load(at, mask=mask, other=0.0),)
    return parts


@triton.jit
def load_keys(keys, k_at, record, asked, newest, K: tl.constexpr):
    """Keys that are `asked` for in parts [BL, 32], BF16, and k, unless that is None, where
    `newest`; the rest is zero."""
    base, mask = keys + record * K, asked[:, None]
    if k_at is not None:
        base, mask = tl.where(newest, k_at, base), (asked | newest)[:, None]
    parts = ()
    for part in tl.static_range(K // 32):
        at = base[:, None] + part_columns(part, K)[None, :]
        parts = parts + (tl.load(at, mask=mask, other=0.0),)
    return parts


@triton.jit
def keys_times(parts, both, K: tl.constexpr, PRODUCTS: tl.constexpr):
    """Products [BL, 2] of keys with k and q."""
    BL: tl.constexpr = parts[0].shape[0]
    sums = tl.zeros([BL, 8], tl.float32)
    for part in tl.static_range(K // 32):
        a, b = _in_pairs(parts[part]), _in_pairs(both[part])
        sums = exact_dot(a, tl.trans(b), sums, PRODUCTS)
    return tl.sum(tl.reshape(sums, [BL, 4, 2]), 1)


@triton.jit
def _in_pairs(x):
    """A part [R, 32] as a lane holds an operand that was loaded in 16 or 32 bits, FP32: two columns
    from every lane in turn."""
    R: tl.constexpr = x.shape[0]
    x = tl.permute(tl.reshape(x.to(tl.float32), [R, 4, 4, 2]), [0, 2, 1, 3])
    return tl.reshape(x, [R, 32])


@triton.jit
def words_times(loaded, both, K: tl.constexpr, READ: tl.constexpr, PRODUCTS: tl.constexpr):
    """Products [R, 2] with k and q of a tile from `load_codes`."""
    R: tl.constexpr = loaded[0].shape[0]
    EACH: tl.constexpr = block_size(READ) // 8  # parts of a block
    BLOCKS: tl.constexpr = K // 32 // EACH  # of a group
    words = apart(loaded[0], K // 32)
    scales = apart(decode_block_scale(loaded[1], READ), BLOCKS)
    total = tl.zeros([R, 4, 2], tl.float32)
    for block in tl.static_range(BLOCKS):
        sums = tl.zeros([R, 8], tl.float32)
        for part in tl.static_range(block * EACH, block * EACH + EACH):
            x = in_code_order(both[part].to(tl.float32) * HALF_WAY)
            sums = bf16_dot(e2m1_operand(words[part]), x.to(tl.bfloat16), sums, PRODUCTS)
        total += tl.reshape(sums, [R, 4, 2]) * scales[block][:, :, None]
    return tl.sum(total, 1) * (factor_of(loaded, READ) * HALF_WAY)[:, None]
