"""Rows of E2M1 words, and of BF16 records, times one vector on tensor cores.

Owns the order in which columns meet, chosen so that what a lane of a warp loads is what it
multiplies: nothing passes through shared memory. Products are exact where the vector is BF16. Knows
no recurrence and no cursor. Another compiler's layouts cost time, never a bit.

A row of COLS columns is four groups of COLS / 4, one for each of the four lanes that share a row of
an operand; a part is eight columns of every group, [.., 32]. The vector is [BLOCKS, 32] in each
part: a line for each block of the row, with zeros where columns are another block's. A product with
it keeps the sums of blocks apart, and so a block scale is applied to a sum and not to every code.
"""

import triton
import triton.language as tl

from replayssm.formats.storage import Storage
from replayssm.ops.quantize.layout import block_size, is_packed, reads_words
from replayssm.ops.quantize.tiles import decode_block_scale, factor_of

# Codes are used as BF16 patterns of 2^-126 times their value, and the vector times 2^63, so that
# sums stay in the normal range for entries from 2^-62 to 2^62.
HALF_WAY = tl.constexpr(2.0**63)


@triton.constexpr_function
def blocks_of(storage: Storage, cols: int) -> int | None:
    """Blocks of a row of `cols` E2M1 codes; None: such rows, or other codes, cannot be multiplied
    in parts."""
    if not is_packed(storage) or not reads_words(storage, cols) or cols % block_size(storage):
        return None
    blocks = cols // block_size(storage)
    return blocks if blocks >= 8 and blocks.bit_count() == 1 else None


@triton.jit
def part_columns(PART: tl.constexpr, COLS: tl.constexpr):
    """Columns [32] of a part."""
    place = tl.arange(0, 32)
    return place // 8 * (COLS // 4) + PART * 8 + place % 8


@triton.jit
def load_vector_parts(base, COLS: tl.constexpr, BLOCKS: tl.constexpr):
    """COLS elements at `base` in parts [BLOCKS, 32], as they lie."""
    EACH: tl.constexpr = COLS // BLOCKS // 8  # parts of a block
    line = tl.arange(0, BLOCKS)[:, None]
    group = tl.arange(0, 32)[None, :] // 8
    parts = ()
    for part in tl.static_range(COLS // 32):
        mine = (line // (BLOCKS // 4) == group) & (line % (BLOCKS // 4) == part // EACH)
        at = base + part_columns(part, COLS)[None, :] + 0 * line
        parts = parts + (tl.load(at, mask=mine, other=0.0),)
    return parts


@triton.jit
def load_row_parts(base, count, COLS: tl.constexpr, ROWS: tl.constexpr):
    """The first `count` of rows of COLS elements, else zero, in parts [ROWS, 32], as they lie."""
    row = tl.arange(0, ROWS)[:, None]
    parts = ()
    for part in tl.static_range(COLS // 32):
        column = part_columns(part, COLS)[None, :]
        mask = (row < count) & (column >= 0)
        parts = parts + (tl.load(base + row * COLS + column, mask=mask, other=0),)
    return parts


@triton.jit
def rows_times_parts(rows, vector, PRODUCTS: tl.constexpr):
    """Products [ROWS] of BF16 rows, patterns from `load_row_parts`, with `load_vector_parts`."""
    ROWS: tl.constexpr = rows[0].shape[0]
    BLOCKS: tl.constexpr = vector[0].shape[0]
    sums = tl.zeros([ROWS, BLOCKS], tl.float32)
    for part in tl.static_range(len(rows)):
        # A lane has pairs of columns of its group, 2 by 4 of them.
        a = tl.reshape(rows[part].to(tl.bfloat16, bitcast=True), [ROWS, 4, 4, 2])
        a = tl.reshape(tl.permute(a, [0, 2, 1, 3]), [ROWS, 32])
        b = tl.reshape(vector[part].to(tl.bfloat16), [BLOCKS, 4, 4, 2])
        b = tl.reshape(tl.permute(b, [2, 1, 3, 0]), [32, BLOCKS])
        sums = bf16_dot(a, b, sums, PRODUCTS)
    return tl.sum(sums, 1)


@triton.jit
def words_times_parts(
    loaded, vector, COLS: tl.constexpr, STORAGE: tl.constexpr, PRODUCTS: tl.constexpr
):
    """Products [R] of a tile from `load_codes` with `load_vector_parts`: sums, and the factor of
    each row that they lack."""
    R: tl.constexpr = loaded[0].shape[0]
    BLOCKS: tl.constexpr = COLS // block_size(STORAGE)
    words = apart(loaded[0], COLS // 32)
    sums = tl.zeros([R, BLOCKS], tl.float32)
    for part in tl.static_range(COLS // 32):
        b = in_code_order((vector[part].to(tl.float32) * HALF_WAY).to(tl.bfloat16))
        sums = bf16_dot(e2m1_operand(words[part]), b, sums, PRODUCTS)
    total = tl.sum(sums * decode_block_scale(loaded[1], STORAGE), 1)
    return total, factor_of(loaded, STORAGE) * HALF_WAY


@triton.jit
def in_code_order(x):
    """An operand [32, C] that meets one of `e2m1_operand`, of a part of C vectors [C, 32]: low and
    high half of a word, which pair of nibbles, which of the two pairs of an operand's register."""
    C: tl.constexpr = x.shape[0]
    x = tl.permute(tl.reshape(x, [C, 4, 2, 2, 2]), [3, 1, 4, 2, 0])
    return tl.reshape(x, [32, C])


@triton.jit
def bf16_dot(a, b, accumulator, PRODUCTS: tl.constexpr):
    """accumulator + a @ b of BF16 tiles; "ieee" is for interpreters."""
    if PRODUCTS == "bf16":
        return tl.dot(a, b, accumulator)
    else:
        return tl.dot(wide(a), wide(b), accumulator, input_precision=PRODUCTS)


@triton.jit
def wide(x):
    """FP32 of BF16: the interpreter's own conversion loses subnormal numbers."""
    return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.constexpr_function
def _halvings(count: int) -> int:
    return count.bit_length() - 1


@triton.jit
def apart(x, COUNT: tl.constexpr):
    """COUNT tensors [R, 4] of x [R, 4 * COUNT]: what comes first, second ... in each group."""
    R: tl.constexpr = x.shape[0]
    apart = (tl.reshape(x, [R, 4, COUNT]),)
    for _ in tl.static_range(_halvings(COUNT)):
        even, odd = (), ()
        for i in tl.static_range(len(apart)):
            first, second = _evens_and_odds(apart[i])
            even, odd = even + (first,), odd + (second,)
        apart = even + odd
    parts = ()
    for i in tl.static_range(COUNT):
        parts = parts + (tl.reshape(apart[i], [R, 4]),)
    return parts


@triton.jit
def _evens_and_odds(x):
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]))


@triton.jit
def e2m1_operand(words):
    """Values times 2^-126 of E2M1 words [R, 4], an operand [R, 32] of a product, BF16.

    Two codes at a time, nibbles n and n + 4, are moved to where the two BF16 numbers of a register
    have their signs and, six bits lower, exponents and significands.
    """
    R: tl.constexpr = words.shape[0]
    x = tl.join(
        tl.join(_pair(words, 0), _pair(words, 1)), tl.join(_pair(words, 2), _pair(words, 3))
    )
    return tl.reshape(tl.permute(x, [0, 4, 1, 3, 2]), [R, 32])


@triton.jit
def _pair(words, NIBBLE: tl.constexpr):
    UP: tl.constexpr = 12 - 4 * NIBBLE
    magnitudes = words << (UP - 6) if UP >= 6 else words >> (6 - UP)
    pair = ((words << UP) & -0x7FFF8000) | (magnitudes & 0x01C001C0)
    low, high = pair.to(tl.int16), (pair >> 16).to(tl.int16)
    return tl.join(low, high).to(tl.bfloat16, bitcast=True)
