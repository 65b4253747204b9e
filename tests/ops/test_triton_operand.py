"""State tiles as operands in the order of memory, against products of the values they stand for.

Runs in Triton's interpreter without a GPU, compiled with one (`pytest -m gpu`).
"""

import pytest
import torch
import triton
import triton.language as tl
from interpreter import DEVICE, KERNEL_MARKS

from replayssm.formats.storage import STORAGES
from replayssm.ops.quantize.layout import stored
from replayssm.ops.quantize.operand import (
    load_operand,
    load_readers,
    operand,
    operand_factor,
    piece_of,
)

pytestmark = KERNEL_MARKS

ROWS, READERS, TILE = 20, 5, 16


@triton.jit
def products_kernel(
    out, read, readers, slot,
    COUNT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, STORAGE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, heads): products [heads, ROWS, COUNT] of a slot's rows with COUNT readers."""
    head, slot = tl.program_id(1), tl.load(slot)
    value, t = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, 8)
    in_rows, row = value < ROWS, head * ROWS + value
    loaded = load_operand(read, slot, row, in_rows, ROWS, COLS, WIDTH, STORAGE)
    total = tl.zeros([TILE, 8], tl.float32)
    for piece in tl.static_range((COLS + WIDTH - 1) // WIDTH):
        x = operand(loaded, piece, COLS, STORAGE)
        y = load_readers(readers, t, COLS, t < COUNT, piece, COLS, WIDTH, STORAGE)
        total += tl.sum(x[:, None, :] * y[None, :, :], 2)
    total *= operand_factor(read, slot, row, in_rows, ROWS, COLS, STORAGE)[:, None]
    mask = in_rows[:, None] & (t < COUNT)[None, :]
    tl.store(out + row[:, None] * COUNT + t[None, :], total, mask=mask)


@pytest.mark.parametrize("cols", [128, 96, 64])
@pytest.mark.parametrize("name", [name for name in STORAGES if "-sr" not in name])
def test_products_are_those_of_the_stored_values(name, cols):
    """Of 20 rows in tiles of 16, with five BF16 vectors, whatever the order of columns."""
    storage = STORAGES[name]
    state = torch.randn(2, 3, ROWS, cols) * torch.randn(2, 3, ROWS, 1).exp()
    slots = torch.arange(2)
    key = {"seed": slots, "layer": 0, "stream": 0, "flush_index": slots, "sequence": slots}
    quantized = storage.write(state, storage.draw_bits(state.shape, **key))
    readers = torch.randn(READERS, cols).bfloat16()
    want = storage.read(quantized)[1].double() @ readers.double().T  # [heads, ROWS, READERS]
    out = torch.full(want.shape, torch.nan, device=DEVICE)
    products_kernel[(triton.cdiv(ROWS, TILE), 3)](
        out, stored(quantized.map(lambda t: t.to(DEVICE))), readers.to(DEVICE),
        torch.tensor([1], device=DEVICE), COUNT=READERS, ROWS=ROWS, COLS=cols,
        WIDTH=piece_of(storage, cols), TILE=TILE, STORAGE=storage, num_warps=1,
    )  # fmt: skip
    # Sums may be small; their terms are not.
    terms = storage.read(quantized)[1].double().abs() @ readers.double().abs().T
    assert ((out.cpu().double() - want).abs() <= 1e-6 * terms).all()
