"""State tiles as operands of products over columns, as they lie in memory.

Owns the order of columns in which one warp multiplies what its lanes have loaded: nothing passes
through shared memory, and nobody waits. What meets a state is put in the same order, which changes
no product. Knows no recurrence. Another compiler's layouts cost time, never a bit.

A row is cut in pieces. Plain elements: 64 bytes, of which four lanes load a quarter each. E2M1
words: eight columns of each of four groups, see `words`.
"""

import triton
import triton.language as tl

from replayssm.formats.block import BlockFormat
from replayssm.formats.storage import Storage
from replayssm.ops.quantize.layout import (
    block_size,
    element_of,
    reads_quarters,
    reads_words,
    scales_of,
    tile_width,
)
from replayssm.ops.quantize.packing import decode_elements
from replayssm.ops.quantize.tiles import (
    decode_block_scale,
    load_codes,
    load_unscaled,
    row_factor,
)
from replayssm.ops.quantize.words import HALF_WAY, apart, e2m1_operand, part_columns, wide


def piece_of(storage: Storage, cols: int) -> int:
    """Columns of a piece, or of a tile where rows of `cols` have no such pieces."""
    plain = not isinstance(storage.format, BlockFormat)
    piece = max(plain_piece(storage.code_bits) if plain else 32, tile_width(1, storage))
    return piece if cols % piece == 0 else tile_width(cols, storage)


def plain_piece(bits: int) -> int:
    """Columns of a piece of plain elements of so many bits."""
    return 512 // bits


@triton.constexpr_function
def has_groups(storage: Storage, cols: int) -> bool:
    """Whether rows are four groups of E2M1 words, and a block lies in one of them."""
    if not reads_words(storage, cols):
        return False
    whole = 4 * block_size(storage)
    return cols % whole == 0 and (cols // whole).bit_count() == 1


@triton.jit
def load_operand(
    stored,
    slot,
    row,
    in_rows,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    STORAGE: tl.constexpr,
):
    """What is stored of a tile's rows, for `operand`; WIDTH: `piece_of` them. See `tiles`."""
    R: tl.constexpr = row.shape[0]
    PIECES: tl.constexpr = (COLS + WIDTH - 1) // WIDTH
    pieces = ()
    if has_groups(STORAGE, COLS):
        loaded = load_codes(stored, slot, row, in_rows, ROWS, COLS, COLS, STORAGE)
        # Codes are used as 2^-126 times their value, their scale as 2^63 times its own: products
        # of both are exact in BF16.
        scales = decode_block_scale(loaded[1], STORAGE) * HALF_WAY
        pieces = (apart(loaded[0], COLS // 32), apart(scales, COLS // 4 // block_size(STORAGE)))
    elif reads_quarters(STORAGE):
        for piece in tl.static_range(PIECES):
            # With a dimension more: loads of one shape get one layout, that of the smallest
            # elements.
            column = piece * WIDTH + tl.arange(0, WIDTH)[None, None, :]
            at = stored.data + slot * stored.data_slot + row[None, :, None] * COLS + column
            if in_rows is None and COLS % WIDTH == 0:
                codes = tl.load(at)
            else:
                rows = (row if in_rows is None else in_rows.to(tl.int32) - 1) >= 0
                codes = tl.load(at, mask=rows[None, :, None] & (column < COLS), other=0)
            pieces = pieces + (tl.reshape(codes, [R, WIDTH]),)
    else:
        for piece in tl.static_range(PIECES):
            x = load_unscaled(
                stored, slot, row * PIECES + piece, in_rows, COLS // PIECES, WIDTH, STORAGE
            )
            pieces = pieces + (x,)
    return pieces


@triton.jit
def operand(loaded, PIECE: tl.constexpr, COLS: tl.constexpr, STORAGE: tl.constexpr):
    """Piece number PIECE of a tile from `load_operand`, FP32 [R, WIDTH], columns in the order of
    `load_readers`; times `operand_factor`, the values."""
    if has_groups(STORAGE, COLS):
        R: tl.constexpr = loaded[0][0].shape[0]
        x = tl.reshape(e2m1_operand(loaded[0][PIECE]), [R, 2, 4, 4])
        scale = loaded[1][PIECE * 8 // block_size(STORAGE)]
        return tl.reshape(wide(x) * scale[:, None, :, None], [R, 32])
    elif reads_quarters(STORAGE):
        ELEMENT: tl.constexpr = element_of(STORAGE)
        return in_order(decode_elements(loaded[PIECE], ELEMENT, scales_of(STORAGE) != "none"))
    else:
        return in_order(loaded[PIECE])


@triton.jit
def operand_factor(
    stored, slot, row, in_rows, ROWS: tl.constexpr, COLS: tl.constexpr, STORAGE: tl.constexpr
):
    """[R] FP32: what `operand` left out of each row."""
    factor = row_factor(stored, slot, row, in_rows, ROWS, STORAGE)
    return factor * HALF_WAY if has_groups(STORAGE, COLS) else factor


@triton.jit
def load_readers(
    base,
    row,
    pitch,
    in_rows,
    PIECE: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    STORAGE: tl.constexpr,
):
    """Piece number PIECE of vectors [R, COLS] at `base`, `pitch` apart, that meet a state of this
    storage (None: one of their own dtype): FP32 [R, WIDTH], 0 outside."""
    R: tl.constexpr = row.shape[0]
    if STORAGE is not None and has_groups(STORAGE, COLS):
        at = base + row[:, None] * pitch + part_columns(PIECE, COLS)[None, :]
        x = tl.load(at, mask=in_rows[:, None], other=0).to(tl.float32)
        x = tl.permute(tl.reshape(x, [R, 4, 2, 2, 2]), [0, 3, 1, 4, 2])
        return tl.reshape(x, [R, 32])
    else:
        # So written, the compiler sees runs of a quarter: lanes load no more, as of a state.
        QUARTER: tl.constexpr = WIDTH // 4
        column = tl.arange(0, WIDTH)
        column = (PIECE * WIDTH + column // QUARTER * QUARTER + column % QUARTER)[None, None, :]
        mask = in_rows[None, :, None] & (column < COLS)
        x = tl.load(base + row[None, :, None] * pitch + column, mask=mask, other=0)
        return in_order(tl.reshape(x, [R, WIDTH]).to(tl.float32))


@triton.jit
def in_order(x):
    """Columns of x [R, C] in the order in which four lanes multiply that loaded a quarter of each
    row: two from every lane in turn."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    x = tl.permute(tl.reshape(x, [R, 4, C // 8, 2]), [0, 2, 1, 3])
    return tl.reshape(x, [R, C])
