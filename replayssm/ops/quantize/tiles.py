"""Tiles of a stored state: load and multiply, for every storage.

Owns which scale is applied when. Knows no recurrence, and nothing of writing (`store`): a tile is R
rows of a slot's [heads * ROWS, COLS] matrix, so it may span heads.

Arguments that all functions here and in `store` share:

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
    reads_quarters,
    reads_words,
    scales_of,
)
from replayssm.ops.quantize.packing import (
    decode_elements,
    e2m1_scaled,
    unpack_pairs,
)
from replayssm.ops.quantize.rounding import (
    fact,
)
from replayssm.ops.quantize.scaling import (
    from_codes,
    is_encode,
    power_of_two,
)


@triton.jit
def load_codes(
    stored,
    slot,
    row,
    in_rows,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    STORAGE: tl.constexpr,
):
    """Everything stored of the tile, as it lies: (codes, block scales, scales of rows or matrices).

    Codes are [R, WIDTH], packed ones bytes [R, WIDTH / 2] or, where `reads_words`, int32
    [R, WIDTH / 8]. What a storage lacks repeats the codes. For kernels that load before they know
    what else they need; `values_of`, `unscaled_of`, `factor_of` and `times_vector` take the tuple.
    """
    data = stored.data + slot * stored.data_slot
    SCALES: tl.constexpr = scales_of(STORAGE)
    if reads_words(STORAGE, COLS):
        codes = load_matrix(data.to(tl.pointer_type(tl.int32)), row, in_rows, COLS // 8, WIDTH // 8)
    elif is_packed(STORAGE):
        codes = load_matrix(data, row, in_rows, (COLS + 1) // 2, WIDTH // 2)
    else:
        codes = load_matrix(data, row, in_rows, COLS, WIDTH)
    block, whole = codes, codes
    if SCALES == "mx" or SCALES == "nvfp4":
        SIZE: tl.constexpr = block_size(STORAGE)
        base = stored.scale + slot * stored.scale_slot
        block = load_matrix(base, row, in_rows, (COLS + SIZE - 1) // SIZE, WIDTH // SIZE)
    if SCALES == "row":
        whole = load_vector(stored.scale + slot * stored.scale_slot, row, in_rows, 1.0)
    elif SCALES == "nvfp4":
        base = stored.tensor_scale + slot * stored.tensor_scale_slot
        whole = load_vector(base, row // ROWS, in_rows, 1.0)
    return codes, block, whole


@triton.jit
def load_factor(
    stored,
    slot,
    row,
    in_rows,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    STORAGE: tl.constexpr,
):
    """Codes and scales of a tile as `times_vector` takes them: `load_codes`, but in four parts of
    the columns where it `reads_quarters`, so that few lanes share a row and have to add."""
    if reads_quarters(STORAGE):
        Q: tl.constexpr = WIDTH // 4
        data = stored.data + slot * stored.data_slot
        codes = (
            load_matrix(data, row, in_rows, COLS, Q),
            load_matrix(data, row, in_rows, COLS, Q, Q),
            load_matrix(data, row, in_rows, COLS, Q, 2 * Q),
            load_matrix(data, row, in_rows, COLS, Q, 3 * Q),
        )
        whole = codes[0]
        if scales_of(STORAGE) == "row":
            whole = load_vector(stored.scale + slot * stored.scale_slot, row, in_rows, 1.0)
        return codes, codes[0], whole
    else:
        return load_codes(stored, slot, row, in_rows, ROWS, COLS, WIDTH, STORAGE)


@triton.jit
def _elements(loaded, COLS: tl.constexpr, WIDTH: tl.constexpr, STORAGE: tl.constexpr):
    """FP32 values of the codes [R, WIDTH], scales left out."""
    codes = loaded[0]
    if reads_words(STORAGE, COLS):
        R: tl.constexpr = codes.shape[0]
        shift = tl.arange(0, 8)[None, None, :] * 4
        codes = tl.reshape((codes[:, :, None] >> shift) & 15, [R, WIDTH])
    elif is_packed(STORAGE):
        codes = unpack_pairs(codes)
    return decode_elements(codes, element_of(STORAGE), scales_of(STORAGE) != "none")


@triton.jit
def values_of(loaded, COLS: tl.constexpr, WIDTH: tl.constexpr, STORAGE: tl.constexpr):
    """FP32 [R, WIDTH], the values to the last bit; 0 outside."""
    SCALES: tl.constexpr = scales_of(STORAGE)
    x = _elements(loaded, COLS, WIDTH, STORAGE)
    if SCALES == "none":
        return x
    elif SCALES == "row":
        return x * loaded[2][:, None]
    else:
        R: tl.constexpr = x.shape[0]
        SIZE: tl.constexpr = block_size(STORAGE)
        blocks = tl.reshape(x, [R, WIDTH // SIZE, SIZE])
        s = decode_block_scale(loaded[1], STORAGE)
        if SCALES == "mx":
            blocks = blocks * s[:, :, None]
        else:
            blocks = from_codes(blocks, s, loaded[2][:, None], fact(STORAGE, "format"))
        return tl.reshape(blocks, [R, WIDTH])


@triton.jit
def unscaled_of(loaded, COLS: tl.constexpr, WIDTH: tl.constexpr, STORAGE: tl.constexpr):
    """FP32 [R, WIDTH] that becomes the values when rows are multiplied by `factor_of`.

    For products over columns: a scale that a whole row shares is applied to the R results.
    """
    SCALES: tl.constexpr = scales_of(STORAGE)
    x = _elements(loaded, COLS, WIDTH, STORAGE)
    if SCALES == "none" or SCALES == "row":
        return x
    else:
        R: tl.constexpr = x.shape[0]
        SIZE: tl.constexpr = block_size(STORAGE)
        s = decode_block_scale(loaded[1], STORAGE)
        blocks = tl.reshape(x, [R, WIDTH // SIZE, SIZE]) * s[:, :, None]
        return tl.reshape(blocks, [R, WIDTH])


@triton.jit
def factor_of(loaded, STORAGE: tl.constexpr):
    """[R] FP32: what `unscaled_of` left out of each row."""
    SCALES: tl.constexpr = scales_of(STORAGE)
    if SCALES == "row":
        return loaded[2]
    elif SCALES == "nvfp4":
        return 1.0 / loaded[2] if is_encode(fact(STORAGE, "format")) else loaded[2]
    else:
        return tl.full([loaded[0].shape[0]], 1.0, tl.float32)


@triton.jit
def load_vector_for(base, COLS: tl.constexpr, WIDTH: tl.constexpr, STORAGE: tl.constexpr):
    """COLS elements of any float dtype at `base`, FP32, as `times_vector` takes them."""
    if reads_words(STORAGE, COLS):
        return load_eighths(base, COLS, WIDTH // 8)
    elif reads_quarters(STORAGE):
        Q: tl.constexpr = WIDTH // 4
        return (
            _load_part(base, 0, Q, COLS),
            _load_part(base, Q, Q, COLS),
            _load_part(base, 2 * Q, Q, COLS),
            _load_part(base, 3 * Q, Q, COLS),
        )
    else:
        return _load_part(base, 0, WIDTH, COLS)


@triton.jit
def _load_part(base, FIRST: tl.constexpr, COUNT: tl.constexpr, COLS: tl.constexpr):
    column = FIRST + tl.arange(0, COUNT)
    return tl.load(base + column, mask=column < COLS, other=0).to(tl.float32)


@triton.jit
def times_vector(loaded, vector, COLS: tl.constexpr, WIDTH: tl.constexpr, STORAGE: tl.constexpr):
    """Product [R] of the tile from `load_factor` with a vector from `load_vector_for`."""
    if reads_words(STORAGE, COLS):
        result = _words_times_vector(loaded[0], decode_block_scale(loaded[1], STORAGE), vector)
    elif reads_quarters(STORAGE):
        ELEMENT: tl.constexpr = element_of(STORAGE)
        FINITE: tl.constexpr = scales_of(STORAGE) != "none"
        total = decode_elements(loaded[0][0], ELEMENT, FINITE) * vector[0][None, :]
        for i in tl.static_range(1, 4):
            part = decode_elements(loaded[0][i], ELEMENT, FINITE)
            total = tl.fma(part, tl.broadcast_to(vector[i][None, :], part.shape), total)
        result = tl.sum(total, 1)
    else:
        x = unscaled_of(loaded, COLS, WIDTH, STORAGE)
        result = tl.sum(x * vector[None, :], 1)
    if scales_of(STORAGE) == "none" or scales_of(STORAGE) == "mx":
        return result
    elif scales_of(STORAGE) == "row":
        return result * loaded[2]
    else:
        return result * factor_of(loaded, STORAGE)


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
    """`values_of` the tile."""
    loaded = load_codes(stored, slot, row, in_rows, ROWS, COLS, WIDTH, STORAGE)
    return values_of(loaded, COLS, WIDTH, STORAGE)


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
        return 1.0 / scale if is_encode(fact(STORAGE, "format")) else scale
    else:
        return tl.full([row.shape[0]], 1.0, tl.float32)


@triton.jit
def _words_times_vector(words, scale, parts):
    """[R] products of E2M1 words [R, WORDS], eight codes each, with block scales [R, BLOCKS].

    `parts` are the eight vectors [WORDS] that the codes of each place in a word meet. Codes are
    used as FP32 patterns of 2^-126 times their value, and a block's products are summed before its
    scale is applied. The power of two is made up for in two halves, before and after the sum, which
    so stays in the normal range for vector entries from 2^-62 to 2^62.
    """
    R: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    BLOCKS: tl.constexpr = scale.shape[1]
    total = e2m1_scaled(words, 0) * (parts[0] * 2.0**63)[None, :]
    for i in tl.static_range(1, 8):
        total = tl.fma(e2m1_scaled(words, i), (parts[i] * 2.0**63)[None, :], total)
    total = tl.sum(tl.reshape(total, [R, BLOCKS, WORDS // BLOCKS]), 2)
    return tl.sum(total * 2.0**63 * scale, 1)


@triton.jit
def words_times_two(loaded, k, q, STORAGE: tl.constexpr):
    """Products [R, BLOCKS, 2] of the blocks of `load_codes`'s words with two vectors, each in the
    parts of `load_eighths`; rows are still to be multiplied by `factor_of`. As
    `_words_times_vector`, but the codes are scaled, once for both."""
    both = tl.join(_codes_times(loaded[0], k), _codes_times(loaded[0], q))
    return tl.sum(_in_blocks(both, loaded, STORAGE), 2) * _raised_scale(loaded, STORAGE)[:, :, None]


@triton.jit
def words_times_one(loaded, vector, STORAGE: tl.constexpr):
    """`words_times_two` of one vector, [R, BLOCKS]."""
    product = _codes_times(loaded[0], vector)
    return tl.sum(_in_blocks(product, loaded, STORAGE), 2) * _raised_scale(loaded, STORAGE)


@triton.jit
def _codes_times(words, parts):
    """2^-63 times the products [R, WORDS] of words with a vector."""
    total = e2m1_scaled(words, 0) * 2.0**63 * parts[0][None, :]
    for i in tl.static_range(1, 8):
        x = e2m1_scaled(words, i) * 2.0**63
        total = tl.fma(x, tl.broadcast_to(parts[i][None, :], x.shape), total)
    return total


@triton.jit
def _in_blocks(x, loaded, STORAGE: tl.constexpr):
    """x [R, WORDS, ...] as [R, BLOCKS, WORDS / BLOCKS, ...]."""
    R: tl.constexpr = x.shape[0]
    BLOCKS: tl.constexpr = loaded[1].shape[1]
    EACH: tl.constexpr = x.shape[1] // BLOCKS
    if len(x.shape) == 2:
        return tl.reshape(x, [R, BLOCKS, EACH])
    else:
        return tl.reshape(x, [R, BLOCKS, EACH, x.shape[2]])


@triton.jit
def _raised_scale(loaded, STORAGE: tl.constexpr):
    return decode_block_scale(loaded[1], STORAGE) * 2.0**63


@triton.jit
def load_eighths(base, COLS: tl.constexpr, WORDS: tl.constexpr):
    """Elements i, 8 + i, 16 + i, ... at `base` for i = 0 .. 7, eight FP32 vectors [WORDS]."""
    at = base + tl.arange(0, WORDS) * 8
    mask = tl.arange(0, WORDS) * 8 < COLS
    return (
        tl.load(at, mask=mask, other=0).to(tl.float32),
        tl.load(at + 1, mask=mask, other=0).to(tl.float32),
        tl.load(at + 2, mask=mask, other=0).to(tl.float32),
        tl.load(at + 3, mask=mask, other=0).to(tl.float32),
        tl.load(at + 4, mask=mask, other=0).to(tl.float32),
        tl.load(at + 5, mask=mask, other=0).to(tl.float32),
        tl.load(at + 6, mask=mask, other=0).to(tl.float32),
        tl.load(at + 7, mask=mask, other=0).to(tl.float32),
    )


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
    return decode_block_scale(codes, STORAGE)


@triton.jit
def decode_block_scale(code, STORAGE: tl.constexpr):
    if scales_of(STORAGE) == "mx":
        return power_of_two(code.to(tl.int32))
    else:
        # E4M3 without a sign.
        return (code.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 2.0**120
