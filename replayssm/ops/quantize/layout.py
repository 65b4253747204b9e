"""Where the codes and scales of a pool of states lie, for kernels.

Owns the kernel argument of a stored state, what a kernel must know of a `Storage` at compile time,
and masked access to rows. `formats/quantized.py` has the layout. Knows no arithmetic.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.formats.block import BlockFormat
from replayssm.formats.number import E2M1, NumberFormat
from replayssm.formats.quantized import Quantized
from replayssm.formats.storage import Storage


class Stored(NamedTuple):
    """A pool of stored matrices as kernels take it: pointers, and elements from slot to slot."""

    data: Tensor
    scale: Tensor | None
    tensor_scale: Tensor | None
    data_slot: int
    scale_slot: int
    tensor_scale_slot: int


def stored(quantized: Quantized) -> Stored:
    """Kernel argument for [S, heads, ROWS, COLS] in any format; slots may be strided, heads not.

    Raises:
        ValueError: a tensor whose slots are not dense in themselves.
    """
    tensors = quantized.tensors()
    fields = [tensors.get(name) for name in Stored._fields[:3]]
    for name, tensor in zip(Stored._fields, fields, strict=False):
        if tensor is not None and not tensor[0].is_contiguous():
            raise ValueError(f"{name} {list(tensor.shape)} has strides {tensor.stride()} in a slot")
    codes = [None if tensor is None else as_codes(tensor) for tensor in fields]
    # What is not there has a stride that is compiled in, and takes no place among the arguments.
    return Stored(*codes, *(1 if tensor is None else tensor.stride(0) for tensor in fields))


def as_codes(tensor: Tensor) -> Tensor:
    """The same memory in a dtype that kernels load: 8-bit floats as uint8, BF16 as int16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16)
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def columns_of_scale(storage: Storage) -> int:
    """Columns of a row that share a block's scale; 1 where there are no blocks."""
    return storage.format.block_size if isinstance(storage.format, BlockFormat) else 1


def tile_width(cols: int, storage: Storage) -> int:
    """Columns of a tile for `cols`: a power of two, whole blocks, and enough for a product.

    Triton gives each of the four lanes that share a row of an operand one register of the codes it
    was loaded as: four FP32 columns, but 32 packed ones. In a narrower operand lanes repeat each
    other, and the product counts some columns twice and others never (seen on Triton 3.6).
    """
    least = 32 if is_packed(storage) else 16
    return max(least, columns_of_scale(storage), triton.next_power_of_2(cols))


def refuse_unsupported(storage: Storage) -> None:
    """ValueError for a storage that has no kernels."""
    if isinstance(storage.format, BlockFormat) and storage.format.scale_axis != "contracted":
        raise ValueError(
            f"storage {storage.label}: scale_axis {storage.format.scale_axis!r} has no kernel, "
            "only 'contracted'"
        )


@triton.constexpr_function
def element_of(storage: Storage) -> NumberFormat:
    """Format of the codes."""
    is_block = isinstance(storage.format, BlockFormat)
    return storage.format.element if is_block else storage.format


@triton.constexpr_function
def scales_of(storage: Storage) -> str:
    """Kind of scales: "none", "row", "mx" or "nvfp4"."""
    if not isinstance(storage.format, BlockFormat):
        return storage.scale
    return "nvfp4" if storage.format.tensor_scale else "mx"


@triton.constexpr_function
def is_packed(storage: Storage) -> bool:
    """Whether two codes share a byte."""
    return isinstance(storage.format, BlockFormat) and storage.format.element == E2M1


@triton.constexpr_function
def reads_words(storage: Storage, cols: int) -> bool:
    """Whether `times_vector` takes eight E2M1 codes of one block at a time."""
    return is_packed(storage) and cols % 8 == 0 and storage.format.block_size >= 8


@triton.constexpr_function
def reads_quarters(storage: Storage) -> bool:
    """Whether `times_vector` takes the columns of a tile in four parts: nothing ties them."""
    return scales_of(storage) in ("none", "row")


@triton.constexpr_function
def block_size(storage: Storage) -> int:
    """Columns that share a scale; 16 where none do."""
    return storage.format.block_size if isinstance(storage.format, BlockFormat) else 16


@triton.jit
def rows_from(stored, first, ROWS: tl.constexpr, COLS: tl.constexpr, STORAGE: tl.constexpr):
    """`stored` as it looks from row `first` (a scalar) of each slot, for tiles whose rows follow
    each other inside a matrix or begin with one.

    Rows that then are constants apart have addresses that are, which a load takes for nothing.
    """
    SCALES: tl.constexpr = scales_of(STORAGE)
    data = stored.data + first * ((COLS + 1) // 2 if is_packed(STORAGE) else COLS)
    scale, tensor_scale = data, data  # what a storage lacks is not read
    if SCALES == "row":
        scale = stored.scale + first
    elif SCALES != "none":
        SIZE: tl.constexpr = block_size(STORAGE)
        scale = stored.scale + first * ((COLS + SIZE - 1) // SIZE)
    if SCALES == "nvfp4":
        tensor_scale = stored.tensor_scale + first // ROWS
    return Stored(
        data, scale, tensor_scale, stored.data_slot, stored.scale_slot, stored.tensor_scale_slot
    )


@triton.jit
def load_matrix(
    base, row, in_rows, PITCH: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr = 0
):
    """[R, WIDTH] of rows that are PITCH elements long and apart, from column FIRST; 0 outside."""
    column = FIRST + tl.arange(0, WIDTH)[None, :]
    at = base + row[:, None] * PITCH + column
    if in_rows is not None:
        return tl.load(at, mask=in_rows[:, None] & (column < PITCH), other=0)
    elif PITCH < FIRST + WIDTH:
        return tl.load(at, mask=(row >= 0)[:, None] & (column < PITCH), other=0)
    else:
        return tl.load(at)


@triton.jit
def store_matrix(base, row, in_rows, value, PITCH: tl.constexpr, WIDTH: tl.constexpr):
    """The counterpart of `load_matrix`."""
    column = tl.arange(0, WIDTH)[None, :]
    at = base + row[:, None] * PITCH + column
    if in_rows is not None:
        tl.store(at, value, mask=in_rows[:, None] & (column < PITCH))
    elif PITCH < WIDTH:
        tl.store(at, value, mask=(row >= 0)[:, None] & (column < PITCH))
    else:
        tl.store(at, value)


@triton.jit
def load_vector(base, index, mask, OTHER: tl.constexpr):
    """Elements at `index`; OTHER where not `mask` (None: everywhere valid)."""
    if mask is None:
        return tl.load(base + index)
    else:
        return tl.load(base + index, mask=mask, other=OTHER)
