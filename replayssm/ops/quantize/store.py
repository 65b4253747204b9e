"""A tile rounded and stored: for every storage, in the order amax, scale, round, pack, count.

Owns that order. Knows no recurrence and no reading. The legend is that of `tiles`.
"""

import triton
import triton.language as tl

from replayssm.ops.quantize.layout import (
    block_size,
    element_of,
    is_packed,
    scales_of,
    store_matrix,
)
from replayssm.ops.quantize.packing import (
    encode_elements,
    pack_pairs,
    round_to_e2m1_pairs,
)
from replayssm.ops.quantize.philox import (
    random_bits,
)
from replayssm.ops.quantize.rounding import (
    fact,
    is_stochastic_half,
    largest_that_fits,
    random_bit_count,
    round_to_format,
    saturate_magnitude,
    stochastic_half,
    stochastic_half_overflows,
)
from replayssm.ops.quantize.scaling import (
    block_scale,
    magnitude_bits,
    mx_scale_code,
    power_of_two,
    row_scale,
    tensor_scale,
    to_codes,
)


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
    matrix_amax=None,
    scales=None,
):
    """Round FP32 x [R, WIDTH] and store it. x is 0 outside.

    Args:
        key: of the random bits, see `philox.random_bits`; read by stochastic rounding only.
        TILE_ROWS: rows of x per matrix.
        matrix_amax: pattern (int32 scalar) of the largest magnitude of the one matrix that x is
            part of. None: a tensor scale needs whole matrices, TILE_ROWS >= ROWS.
        scales: what `store_scales` returned for x's rows: their scales are stored. With it,
            `matrix_amax` is required.

    Returns:
        How many elements overflowed, and how many were not finite (int32 scalars).
    """
    R: tl.constexpr = row.shape[0]
    FORMAT: tl.constexpr = fact(STORAGE, "format")
    ELEMENT: tl.constexpr = element_of(STORAGE)
    ROUNDING: tl.constexpr = fact(STORAGE, "rounding")
    SCALES: tl.constexpr = scales_of(STORAGE)
    if SCALES == "nvfp4" and matrix_amax is None:
        tl.static_assert(TILE_ROWS >= ROWS, "a tensor scale needs whole matrices")
    SIZE: tl.constexpr = block_size(STORAGE)
    BLOCKS: tl.constexpr = WIDTH // SIZE
    magnitude = magnitude_bits(x)
    if scales is None:
        if SCALES == "none":
            amax = magnitude
        elif SCALES == "row":
            amax = tl.max(magnitude, 1)
        else:
            amax = tl.max(tl.reshape(magnitude, [R, BLOCKS, SIZE]), 2)
            # Every lane of a block has this. Gathered in place, each element is in one thread: the
            # scales, forty instructions each, are then chosen once.
            amax = tl.gather(amax, tl.broadcast_to(tl.arange(0, BLOCKS)[None, :], amax.shape), 1)
    else:
        tl.static_assert(SCALES == "nvfp4" and matrix_amax is not None)
    peak = tl.max(amax) if matrix_amax is None else matrix_amax
    over = peak * 0
    not_finite = over
    if peak >= 0x7F800000:
        not_finite = tl.sum((magnitude >= 0x7F800000).to(tl.int32))
    # Counting takes a pass over the tile: only where a maximum says that there is something.
    NEAREST_E2M1: tl.constexpr = is_packed(STORAGE) and fact(ROUNDING, "mode") == "nearest_even"
    LIMIT: tl.constexpr = largest_that_fits(ELEMENT, ROUNDING)
    may_overflow = peak > 0
    if SCALES == "none":
        may_overflow = peak > LIMIT
    if SCALES == "row":
        scale = row_scale(amax, ELEMENT)
        tl.store(stored.scale + slot * stored.scale_slot + row, scale, mask=in_rows)
        x = tl.div_rn(x, scale[:, None])
    elif SCALES != "none":
        if SCALES == "mx":
            code = mx_scale_code(amax, FORMAT)
            s = power_of_two(254 - code)
            whole = s
            highest = magnitude_bits(amax.to(tl.float32, bitcast=True) * s)
            may_overflow = tl.max(highest) > LIMIT
            code = code.to(tl.uint8)
        elif scales is not None:
            s, may_overflow = scales
            whole = _scale_of_one(matrix_amax, FORMAT)
        else:
            if matrix_amax is None and R == TILE_ROWS:
                matrix_amax = peak
            if matrix_amax is None:
                # Blocks first: lanes that have no block of their own lie between those that do, and
                # Triton 3.6 takes lanes that follow each other for those of one matrix.
                largest = tl.max(tl.reshape(tl.max(amax, 1), [R // TILE_ROWS, TILE_ROWS]), 1)
                per_matrix = tensor_scale(largest, FORMAT)
            else:
                per_matrix = _scale_of_one(matrix_amax, FORMAT)
            whole = _of_rows(per_matrix, R)
            _store_tensor_scale(whole, stored, slot, row, in_rows, ROWS)
            s = block_scale(tl.reshape(x, [R, BLOCKS, SIZE]), amax, whole[:, None], FORMAT)
            may_overflow = _takes_care(amax, s, whole, FORMAT, LIMIT)
            code = encode_elements(s, fact(FORMAT, "scale_format"))
        if scales is None:
            base = stored.scale + slot * stored.scale_slot
            store_matrix(base, row, in_rows, code, (COLS + SIZE - 1) // SIZE, BLOCKS)
        if not NEAREST_E2M1:
            x = _in_units(x, s, whole, STORAGE)

    data = stored.data + slot * stored.data_slot
    SATURATE: tl.constexpr = fact(STORAGE, "saturate")
    if NEAREST_E2M1:
        # Signs join last. Each branch takes its own quotients: none wait in registers for it.
        signs = x.to(tl.int32, bitcast=True)
        if may_overflow:
            units, overflows = saturate_magnitude(
                _in_units(tl.abs(x), s, whole, STORAGE), ELEMENT, LIMIT
            )
            over = tl.sum(overflows.to(tl.int32))
            if SCALES == "nvfp4":
                units, signs = _without_vanished(units, s), _without_vanished(signs, s)
            packed = round_to_e2m1_pairs(units, signs)
        else:
            packed = round_to_e2m1_pairs(_in_units(tl.abs(x), s, whole, STORAGE), signs)
    else:
        STOCHASTIC_HALF: tl.constexpr = is_stochastic_half(ELEMENT, ROUNDING, SATURATE)
        random = None
        if random_bit_count(ROUNDING) > 0:
            BITS: tl.constexpr = random_bit_count(ROUNDING)
            ROUNDS: tl.constexpr = fact(ROUNDING, "philox_rounds")
            random = random_bits(key, row, ROWS, COLS, WIDTH, BITS, ROUNDS)
        if STOCHASTIC_HALF:
            if may_overflow:
                over = tl.sum(stochastic_half_overflows(x, random).to(tl.int32))
            codes = stochastic_half(x, random)
        else:
            if may_overflow:
                _, overflows = round_to_format(x, random, ELEMENT, ROUNDING, SATURATE)
                over = tl.sum(overflows.to(tl.int32))
            x, _ = round_to_format(x, random, ELEMENT, ROUNDING, SATURATE)
            codes = encode_elements(x, ELEMENT)
    if is_packed(STORAGE):
        if not NEAREST_E2M1:
            packed = pack_pairs(codes)
            if SCALES == "nvfp4":
                packed = _without_vanished(packed, s)
        store_matrix(data, row, in_rows, packed, (COLS + 1) // 2, WIDTH // 2)
    else:
        store_matrix(data, row, in_rows, codes, COLS, WIDTH)
    return over, not_finite


@triton.jit
def _in_units(x, s, whole, STORAGE: tl.constexpr):
    """x [R, columns] in units of the code grid: block scales s [R, BLOCKS], inverted ones where
    they are powers of two, tensor scales `whole`."""
    blocks = tl.reshape(x, [x.shape[0], s.shape[1], x.shape[1] // s.shape[1]])
    if scales_of(STORAGE) == "mx":
        blocks = blocks * s[:, :, None]
    else:
        blocks = to_codes(blocks, s, whole[:, None], fact(STORAGE, "format"))
    return tl.reshape(blocks, x.shape)


@triton.jit
def _without_vanished(x, s):
    """x [R, columns], but 0 in blocks whose scales s [R, BLOCKS] are 0: their codes are +0."""
    blocks = tl.reshape(x, [x.shape[0], s.shape[1], x.shape[1] // s.shape[1]])
    return tl.reshape(tl.where((s == 0.0)[:, :, None], 0, blocks), x.shape)


@triton.jit
def store_scales(
    amax,
    matrix_amax,
    stored,
    slot,
    row,
    in_rows,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    STORAGE: tl.constexpr,
):
    """Choose and store the tensor scale and the block scales of rows of one matrix.

    For formats with a tensor scale whose block scales follow from magnitudes alone: where a matrix
    is more than a tile, its scales are chosen once, in any layout, not in that of its elements.

    Args:
        amax: patterns [R, WIDTH / block size] of the largest magnitudes of blocks; 0 outside.
        matrix_amax: pattern of the largest magnitude of the matrix.

    Returns:
        Block scales [R, WIDTH / block size] FP32, and whether any code may overflow under them: the
        `scales` of `store_tile`.
    """
    FORMAT: tl.constexpr = fact(STORAGE, "format")
    tl.static_assert(scales_of(STORAGE) == "nvfp4" and not fact(FORMAT, "four_over_six"))
    SIZE: tl.constexpr = block_size(STORAGE)
    per_row = _of_rows(_scale_of_one(matrix_amax, FORMAT), row.shape[0])
    _store_tensor_scale(per_row, stored, slot, row, in_rows, ROWS)
    s = block_scale(None, amax, per_row[:, None], FORMAT)
    code = encode_elements(s, fact(FORMAT, "scale_format"))
    base = stored.scale + slot * stored.scale_slot
    store_matrix(base, row, in_rows, code, (COLS + SIZE - 1) // SIZE, WIDTH // SIZE)
    LIMIT: tl.constexpr = largest_that_fits(element_of(STORAGE), fact(STORAGE, "rounding"))
    return s, _takes_care(amax, s, per_row, FORMAT, LIMIT)


@triton.jit
def _scale_of_one(matrix_amax, FORMAT: tl.constexpr):
    """Tensor scale [1] of a matrix from its largest magnitude, a scalar."""
    return tensor_scale(tl.full([1], 0, tl.int32) + matrix_amax, FORMAT)


@triton.jit
def _of_rows(per_matrix, R: tl.constexpr):
    """[R] from the values of equally many rows each."""
    COUNT: tl.constexpr = per_matrix.shape[0]
    return tl.reshape(tl.broadcast_to(per_matrix[:, None], [COUNT, R // COUNT]), [R])


@triton.jit
def _store_tensor_scale(per_row, stored, slot, row, in_rows, ROWS: tl.constexpr):
    """The tensor scales of the matrices that begin in these rows."""
    first = row % ROWS == 0 if in_rows is None else in_rows & (row % ROWS == 0)
    base = stored.tensor_scale + slot * stored.tensor_scale_slot
    tl.store(base + row // ROWS, per_row, mask=first)


@triton.jit
def _takes_care(amax, s, per_row, FORMAT: tl.constexpr, LIMIT: tl.constexpr):
    """Whether any code may overflow, or a block scale is 0."""
    highest = amax.to(tl.float32, bitcast=True)[:, :, None]
    highest = magnitude_bits(to_codes(highest, s, per_row[:, None], FORMAT))
    return tl.max(tl.where((s == 0.0)[:, :, None], 0x7F800000, highest)) > LIMIT
