"""State tiles as operands of products over columns, as they lie in memory.

Owns the order of columns in which one warp multiplies what its lanes have loaded: nothing passes
through shared memory, and nobody waits. What meets a state is put in the same order, which changes
no product. Knows no recurrence. Another compiler's layouts cost time, never a bit.

A row is cut in pieces. Plain elements: 64 bytes, of which four lanes load a quarter each.
"""

import triton
import triton.language as tl

from replayssm.formats.block import BlockFormat
from replayssm.formats.storage import Storage
from replayssm.ops.quantize.layout import element_of, reads_quarters, scales_of, tile_width
from replayssm.ops.quantize.packing import decode_elements
from replayssm.ops.quantize.tiles import load_unscaled


def piece_of(storage: Storage, cols: int) -> int:
    """Columns of a piece, or of a tile where rows of `cols` have no such pieces."""
    plain = not isinstance(storage.format, BlockFormat)
    piece = max(plain_piece(storage.code_bits) if plain else 32, tile_width(1, storage))
    return piece if cols % piece == 0 else tile_width(cols, storage)


def plain_piece(bits: int) -> int:
    """Columns of a piece of plain elements of so many bits."""
    return 512 // bits


@triton.jit
def load_operand(
    stored,
    slot,
    row,
    in_rows,
    PIECE: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    STORAGE: tl.constexpr,
):
    """Piece number PIECE, of WIDTH columns, of rows of COLS: FP32 [R, WIDTH] in the order that
    `in_order` makes; times `tiles.row_factor`, the values. Other arguments: see `tiles`."""
    R: tl.constexpr = row.shape[0]
    if reads_quarters(STORAGE):
        # With a dimension more: loads of one shape get one layout, that of the smallest elements.
        column = PIECE * WIDTH + tl.arange(0, WIDTH)[None, None, :]
        at = stored.data + slot * stored.data_slot + row[None, :, None] * COLS + column
        if in_rows is None and COLS % WIDTH == 0:
            codes = tl.load(at)
        else:
            rows = (row if in_rows is None else in_rows.to(tl.int32) - 1) >= 0
            codes = tl.load(at, mask=rows[None, :, None] & (column < COLS), other=0)
        codes = tl.reshape(codes, [R, WIDTH])
        x = decode_elements(codes, element_of(STORAGE), scales_of(STORAGE) != "none")
    else:
        PIECES: tl.constexpr = (COLS + WIDTH - 1) // WIDTH
        x = load_unscaled(
            stored, slot, row * PIECES + PIECE, in_rows, COLS // PIECES, WIDTH, STORAGE
        )
    return in_order(x)


@triton.jit
def load_readers(
    base, row, pitch, in_rows, PIECE: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr
):
    """Piece number PIECE of vectors [R, COLS] at `base`, `pitch` apart, that meet a state: FP32
    [R, WIDTH] as `load_operand` orders them; 0 outside."""
    # So written, the compiler sees runs of a quarter: lanes load no more, as of a state.
    QUARTER: tl.constexpr = WIDTH // 4
    column = tl.arange(0, WIDTH)
    column = (PIECE * WIDTH + column // QUARTER * QUARTER + column % QUARTER)[None, None, :]
    mask = in_rows[None, :, None] & (column < COLS)
    x = tl.load(base + row[None, :, None] * pitch + column, mask=mask, other=0)
    return in_order(tl.reshape(x, [row.shape[0], WIDTH]).to(tl.float32))


@triton.jit
def in_order(x):
    """Columns of x [R, C] in the order in which four lanes multiply that loaded a quarter of each
    row: two from every lane in turn."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    x = tl.permute(tl.reshape(x, [R, 4, C // 8, 2]), [0, 2, 1, 3])
    return tl.reshape(x, [R, C])
