"""Tiles of a stored state: load, multiply, store, for every storage.

Owns the order amax, scale, round, pack, and which scale is applied when. Knows no recurrence: a
tile is R rows of a slot's [heads * ROWS, COLS] matrix, so it may span heads.

Arguments that all functions share:

    stored     `layout.Stored`, of pool tensors [S, heads, ROWS, ...]
    slot       int64 scalar
    row        [R] int32 rows of the slot: row r of head h is h * ROWS + r
    in_rows    [R] which of them exist, or None for all
    ROWS, COLS of one matrix; WIDTH: columns of the tile, `layout.tile_width(COLS, STORAGE)`
    STORAGE    `formats.storage.Storage`, a constexpr
"""

import triton
import triton.language as tl

from replayssm.ops.quantize.layout import (
    block_size,
    element_of,
    is_packed,
    load_matrix,
    load_vector,
    reads_words,
    scales_of,
    store_matrix,
)
from replayssm.ops.quantize.packing import (
    decode_elements,
    e2m1_scaled,
    encode_elements,
    pack_pairs,
    unpack_pairs,
)
from replayssm.ops.quantize.philox import random_bits
from replayssm.ops.quantize.rounding import fact, random_bit_count, round_to_format
from replayssm.ops.quantize.scaling import (
    block_scale,
    from_codes,
    is_encode,
    magnitude_bits,
    mx_scale_code,
    power_of_two,
    row_scale,
    tensor_scale,
    to_codes,
)


@triton.jit
def load_tile(
    stored,
    slot,
    row,
    in_rows,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    STORAGE: tl.constexpr,
):
    """FP32 [R, WIDTH], the values to the last bit; 0 outside."""
    x = _load_elements(stored, slot, row, in_rows, COLS, WIDTH, STORAGE)
    SCALES: tl.constexpr = scales_of(STORAGE)
    if SCALES == "none":
        return x
    elif SCALES == "row":
        return x * _load_row_scale(stored, slot, row, in_rows)[:, None]
    else:
        R: tl.constexpr = row.shape[0]
        SIZE: tl.constexpr = block_size(STORAGE)
        blocks = tl.reshape(x, [R, WIDTH // SIZE, SIZE])
        s = _load_block_scale(stored, slot, row, in_rows, COLS, WIDTH, STORAGE)
        if SCALES == "mx":
            blocks = blocks * s[:, :, None]
        else:
            per_matrix = _load_tensor_scale(stored, slot, row, in_rows, ROWS)[:, None]
            blocks = from_codes(blocks, s, per_matrix, fact(STORAGE, "format"))
        return tl.reshape(blocks, [R, WIDTH])


@triton.jit
def load_unscaled(
    stored,
    slot,
    row,
    in_rows,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    STORAGE: tl.constexpr,
):
    """FP32 [R, WIDTH] that becomes the values when rows are multiplied by `row_factor`.

    For products over columns: a scale that a whole row shares is applied to the R results.
    """
    x = _load_elements(stored, slot, row, in_rows, COLS, WIDTH, STORAGE)
    SCALES: tl.constexpr = scales_of(STORAGE)
    if SCALES == "none" or SCALES == "row":
        return x
    else:
        R: tl.constexpr = row.shape[0]
        SIZE: tl.constexpr = block_size(STORAGE)
        s = _load_block_scale(stored, slot, row, in_rows, COLS, WIDTH, STORAGE)
        blocks = tl.reshape(x, [R, WIDTH // SIZE, SIZE]) * s[:, :, None]
        return tl.reshape(blocks, [R, WIDTH])


@triton.jit
def row_factor(stored, slot, row, in_rows, ROWS: tl.constexpr, STORAGE: tl.constexpr):
    """[R] FP32: what `load_unscaled` left out of each row."""
    SCALES: tl.constexpr = scales_of(STORAGE)
    if SCALES == "row":
        return _load_row_scale(stored, slot, row, in_rows)
    elif SCALES == "nvfp4":
        scale = _load_tensor_scale(stored, slot, row, in_rows, ROWS)
        return tl.div_rn(1.0, scale) if is_encode(fact(STORAGE, "format")) else scale
    else:
        return tl.full([row.shape[0]], 1.0, tl.float32)


@triton.jit
def matvec(
    stored,
    slot,
    row,
    in_rows,
    a,
    b,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    STORAGE: tl.constexpr,
):
    """Products of the tile with FP32 vectors a and b [WIDTH], read once: ([R], [R]).

    b may be None (the second result repeats the first). a and b are 0 past COLS.
    E2M1 codes are used as FP32 patterns of 2^-126 times their value: eight products are summed
    before the block scale is applied. The power of two is made up for in two halves, before and
    after that sum, which so stays in the normal range for vector entries from 2^-62 to 2^62.
    """
    if reads_words(STORAGE, COLS):
        WORDS: tl.constexpr = WIDTH // 8
        data = (stored.data + slot * stored.data_slot).to(tl.pointer_type(tl.int32))
        words = load_matrix(data, row, in_rows, COLS // 8, WORDS)
        a_parts = _eighths(a * 2.0**63, WORDS)
        sum_a = e2m1_scaled(words, 0) * a_parts[0][None, :]
        sum_b = sum_a
        if b is not None:
            b_parts = _eighths(b * 2.0**63, WORDS)
            sum_b = e2m1_scaled(words, 0) * b_parts[0][None, :]
        for i in tl.static_range(1, 8):
            codes = e2m1_scaled(words, i)
            sum_a = tl.fma(codes, a_parts[i][None, :], sum_a)
            if b is not None:
                sum_b = tl.fma(codes, b_parts[i][None, :], sum_b)
        # The scale of each word's block.
        scales = stored.scale + slot * stored.scale_slot
        block = tl.arange(0, WORDS) * 8 // block_size(STORAGE)
        PITCH: tl.constexpr = (COLS + block_size(STORAGE) - 1) // block_size(STORAGE)
        at = row[:, None] * PITCH + block[None, :]
        exists = (block < PITCH)[None, :] & ((row >= 0) if in_rows is None else in_rows)[:, None]
        s = _decode_block_scale(tl.load(scales + at, mask=exists, other=0), STORAGE)
        result_a = tl.sum(sum_a * 2.0**63 * s, 1)
        result_b = tl.sum(sum_b * 2.0**63 * s, 1)
    else:
        x = load_unscaled(stored, slot, row, in_rows, COLS, WIDTH, STORAGE)
        result_a = tl.sum(x * a[None, :], 1)
        result_b = result_a
        if b is not None:
            result_b = tl.sum(x * b[None, :], 1)
    factor = row_factor(stored, slot, row, in_rows, ROWS, STORAGE)
    return result_a * factor, result_b * factor


@triton.jit
def _load_elements(
    stored,
    slot,
    row,
    in_rows,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    STORAGE: tl.constexpr,
):
    """FP32 values of the codes [R, WIDTH], scales left out."""
    data = stored.data + slot * stored.data_slot
    if is_packed(STORAGE):
        codes = unpack_pairs(load_matrix(data, row, in_rows, (COLS + 1) // 2, WIDTH // 2))
    else:
        codes = load_matrix(data, row, in_rows, COLS, WIDTH)
    return decode_elements(codes, element_of(STORAGE), scales_of(STORAGE) != "none")


@triton.jit
def _load_row_scale(stored, slot, row, in_rows):
    return load_vector(stored.scale + slot * stored.scale_slot, row, in_rows, 1.0)


@triton.jit
def _load_tensor_scale(stored, slot, row, in_rows, ROWS: tl.constexpr):
    base = stored.tensor_scale + slot * stored.tensor_scale_slot
    return load_vector(base, row // ROWS, in_rows, 1.0)


@triton.jit
def _load_block_scale(
    stored,
    slot,
    row,
    in_rows,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    STORAGE: tl.constexpr,
):
    """FP32 [R, blocks]."""
    SIZE: tl.constexpr = block_size(STORAGE)
    base = stored.scale + slot * stored.scale_slot
    codes = load_matrix(base, row, in_rows, (COLS + SIZE - 1) // SIZE, WIDTH // SIZE)
    return _decode_block_scale(codes, STORAGE)


@triton.jit
def _decode_block_scale(code, STORAGE: tl.constexpr):
    if scales_of(STORAGE) == "mx":
        return power_of_two(code.to(tl.int32))
    else:
        return decode_elements(code, fact(fact(STORAGE, "format"), "scale_format"), True)


@triton.jit
def _eighths(v, WORDS: tl.constexpr):
    """Entries i, 8 + i, 16 + i, ... of v [8 * WORDS] for i = 0 .. 7, eight vectors [WORDS]."""
    even, odd = tl.split(tl.reshape(v, [WORDS, 2, 2, 2]))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    v00, v04 = tl.split(v0)
    v01, v05 = tl.split(v1)
    v02, v06 = tl.split(v2)
    v03, v07 = tl.split(v3)
    return v00, v01, v02, v03, v04, v05, v06, v07


@triton.jit
def store_tile(
    x,
    key,
    stored,
    slot,
    row,
    in_rows,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    STORAGE: tl.constexpr,
):
    """Round FP32 x [R, WIDTH] and store it. x is 0 outside.

    Args:
        key: of the random bits, see `philox.random_bits`; read by stochastic rounding only.
        TILE_ROWS: rows of x per matrix. A tensor scale needs whole matrices: TILE_ROWS >= ROWS.

    Returns:
        How many elements overflowed, and how many were not finite (int32 scalars).
    """
    R: tl.constexpr = row.shape[0]
    FORMAT: tl.constexpr = fact(STORAGE, "format")
    ELEMENT: tl.constexpr = element_of(STORAGE)
    ROUNDING: tl.constexpr = fact(STORAGE, "rounding")
    SCALES: tl.constexpr = scales_of(STORAGE)
    magnitude = magnitude_bits(x)
    not_finite = tl.sum((magnitude >= 0x7F800000).to(tl.int32))
    random = None
    if random_bit_count(ROUNDING) > 0:
        random = random_bits(
            key, row, ROWS, COLS, WIDTH, random_bit_count(ROUNDING), fact(ROUNDING, "philox_rounds")
        )

    if SCALES == "row":
        scale = row_scale(tl.max(magnitude, 1), ELEMENT)
        tl.store(stored.scale + slot * stored.scale_slot + row, scale, mask=in_rows)
        x = tl.div_rn(x, scale[:, None])
    elif SCALES != "none":
        SIZE: tl.constexpr = block_size(STORAGE)
        BLOCKS: tl.constexpr = WIDTH // SIZE
        blocks = tl.reshape(x, [R, BLOCKS, SIZE])
        amax = tl.max(tl.reshape(magnitude, [R, BLOCKS, SIZE]), 2)
        if SCALES == "mx":
            code = mx_scale_code(amax, FORMAT)
            blocks = blocks * power_of_two(254 - code)[:, :, None]
            code = code.to(tl.uint8)
        else:
            tl.static_assert(TILE_ROWS >= ROWS, "a tensor scale needs whole matrices")
            matrix_amax = tl.max(tl.reshape(amax, [R // TILE_ROWS, TILE_ROWS * BLOCKS]), 1)
            per_matrix = tensor_scale(matrix_amax, FORMAT)
            per_row = tl.broadcast_to(per_matrix[:, None], [R // TILE_ROWS, TILE_ROWS])
            per_row = tl.reshape(per_row, [R])
            first = row % ROWS == 0 if in_rows is None else in_rows & (row % ROWS == 0)
            base = stored.tensor_scale + slot * stored.tensor_scale_slot
            tl.store(base + row // ROWS, per_row, mask=first)
            s = block_scale(blocks, amax, per_row[:, None], FORMAT)
            blocks = to_codes(blocks, s, per_row[:, None], FORMAT)
            code = encode_elements(s, fact(FORMAT, "scale_format"))
        base = stored.scale + slot * stored.scale_slot
        store_matrix(base, row, in_rows, code, (COLS + SIZE - 1) // SIZE, BLOCKS)
        x = tl.reshape(blocks, [R, WIDTH])

    x, over = round_to_format(x, random, ELEMENT, ROUNDING, fact(STORAGE, "saturate"))
    codes = encode_elements(x, ELEMENT)
    data = stored.data + slot * stored.data_slot
    if is_packed(STORAGE):
        store_matrix(data, row, in_rows, pack_pairs(codes), (COLS + 1) // 2, WIDTH // 2)
    else:
        store_matrix(data, row, in_rows, codes, COLS, WIDTH)
    return tl.sum(over.to(tl.int32)), not_finite
