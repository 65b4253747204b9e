"""Device functions for tiles of a state against `formats`, bit for bit: scales, packing, products.

Runs in Triton's interpreter without a GPU, compiled with one (`pytest -m gpu`).
"""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from interpreter import DEVICE, KERNEL_MARKS
from same_bits import assert_same_bits

from replayssm.formats.block import BLOCK_FORMATS, MXFP4, MXFP8
from replayssm.formats.number import BF16, E4M3, E5M2, FP16
from replayssm.formats.storage import STORAGES, Storage
from replayssm.ops.quantize.layout import (
    load_matrix,
    reads_words,
    store_matrix,
    stored,
    tile_width,
)
from replayssm.ops.quantize.scaling import magnitude_bits
from replayssm.ops.quantize.store import store_scales, store_tile
from replayssm.ops.quantize.tiles import (
    load_codes,
    load_eighths,
    load_tile,
    load_unscaled,
    row_factor,
    times_vector,
)

pytestmark = KERNEL_MARKS

MX_RULES = {
    f"{fmt.name}-{rule}": Storage(format=replace(fmt, name=f"{fmt.name}-{rule}", scale_rule=rule))
    for fmt in (MXFP4, MXFP8)
    for rule in ("ceil", "even", "rceil")
}
DIALECTS = {
    name: Storage(format=fmt) for name, fmt in BLOCK_FORMATS.items() if name not in STORAGES
}
MAE = replace(BLOCK_FORMATS["nvfp4-46"], name="nvfp4-46-mae", four_over_six_error="mae")
ALL = STORAGES | MX_RULES | DIALECTS | {"nvfp4-46-mae": Storage(format=MAE)}
LAYER, STREAM = 11, 1


@triton.jit
def tile_kernel(
    x, dest, read_back, product_a, product_b, vectors, counts, seed, flush, sequence, key1,
    ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_HEADS: tl.constexpr,
    HEADS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, STORAGE: tl.constexpr,
):  # fmt: skip
    """Store TILE_HEADS matrices of one slot, read them back and multiply them."""
    slot = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, TILE_HEADS * TILE_ROWS)
    head = tl.program_id(0) * TILE_HEADS + i // TILE_ROWS
    row = head * ROWS + i % TILE_ROWS
    in_rows = (i % TILE_ROWS < ROWS) & (head < HEADS)
    base = slot * HEADS * ROWS
    value = load_matrix(x + base * COLS, row, in_rows, COLS, WIDTH)
    key = (tl.load(seed + slot), key1, tl.load(flush + slot), tl.load(sequence + slot))
    over, not_finite = store_tile(
        value, key, dest, slot, row, in_rows, ROWS, TILE_ROWS, COLS, WIDTH, STORAGE
    )
    tl.atomic_add(counts + slot * 2, over)
    tl.atomic_add(counts + slot * 2 + 1, not_finite)
    tl.debug_barrier()
    back = load_tile(dest, slot, row, in_rows, ROWS, COLS, WIDTH, STORAGE)
    store_matrix(read_back + base * COLS, row, in_rows, back, COLS, WIDTH)
    if reads_words(STORAGE, COLS):
        a = load_eighths(vectors, COLS, WIDTH // 8)
        b = load_eighths(vectors + COLS, COLS, WIDTH // 8)
        loaded = load_codes(dest, slot, row, in_rows, ROWS, COLS, WIDTH, STORAGE)
        dot_a = times_vector(loaded, a, COLS, WIDTH, STORAGE)
        dot_b = times_vector(loaded, b, COLS, WIDTH, STORAGE)
    else:
        column = tl.arange(0, WIDTH)
        a = tl.load(vectors + column, mask=column < COLS, other=0.0)
        b = tl.load(vectors + COLS + column, mask=column < COLS, other=0.0)
        unscaled = load_unscaled(dest, slot, row, in_rows, COLS, WIDTH, STORAGE)
        factor = row_factor(dest, slot, row, in_rows, ROWS, STORAGE)
        dot_a = tl.sum(unscaled * a[None, :], 1) * factor
        dot_b = tl.sum(unscaled * b[None, :], 1) * factor
    tl.store(product_a + base + row, dot_a, mask=in_rows)
    tl.store(product_b + base + row, dot_b, mask=in_rows)


class Written:
    """A tensor [S, heads, rows, cols] stored by the reference and by the device functions."""

    def __init__(self, x: torch.Tensor, storage: Storage, tile_heads: int = 2, slot_gap: int = 0):
        slots, heads, rows, cols = x.shape
        draw = {
            "seed": torch.arange(slots) + 2**31,
            "flush_index": torch.arange(slots) * 3,
            "sequence": torch.arange(slots) * 5 + 2,
        }
        bits = storage.draw_bits(x.shape, layer=LAYER, stream=STREAM, **draw)
        finite = torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
        self.want = storage.write(finite if not x.isfinite().all() else x, bits)
        self.got = self.want.map(lambda t: _poisoned(t, slot_gap))
        self.read_back = torch.full(x.shape, torch.nan, device=DEVICE)
        self.vectors = torch.randn(2, cols, device=DEVICE)
        self.products = torch.full((2, *x.shape[:-1]), torch.nan, device=DEVICE)
        self.counts = torch.zeros(slots, 2, dtype=torch.int32, device=DEVICE)
        tile_kernel[(-(-heads // tile_heads), slots)](
            x.to(DEVICE), stored(self.got), self.read_back, *self.products, self.vectors,
            self.counts, *(draw[n].to(DEVICE) for n in ("seed", "flush_index", "sequence")),
            LAYER + (STREAM << 24), ROWS=rows, TILE_ROWS=triton.next_power_of_2(rows),
            TILE_HEADS=tile_heads, HEADS=heads, COLS=cols, WIDTH=tile_width(cols, storage),
            STORAGE=storage, enable_fp_fusion=False,
        )  # fmt: skip


def _poisoned(t: torch.Tensor, gap: int) -> torch.Tensor:
    """Empty memory like `t`, every byte 0xDB, slots `gap` elements further apart than dense."""
    slots, size = t.shape[0], t[0].numel()
    memory = torch.full((slots * (size + gap) * t.element_size(),), 0xDB, dtype=torch.uint8)
    rows = memory.to(DEVICE).view(t.dtype).view(slots, size + gap)[:, :size]
    return rows[:, 0] if t.dim() == 1 else rows.unflatten(1, t.shape[1:])


def wide_range(slots: int, heads: int, rows: int, cols: int) -> torch.Tensor:
    """Rows of very different size, a zero row, a zero matrix, signed zeros and subnormals."""
    x = torch.randn(slots, heads, rows, cols) * torch.randn(slots, heads, rows, 1).mul(4).exp()
    x[0, 0, 2] = 0
    x[-1, -1] = 0
    x[0, 0, 3, :8] = torch.tensor([1e-42, -0.0, 0.0, 1e-38, -1e-40, 6e-8, -1e-5, 3.0])
    x[0, 1] *= 1e30
    x[-1, 0] *= 1e-38
    return x


@pytest.mark.parametrize("cols", [64, 24], ids=lambda c: f"cols{c}")
@pytest.mark.parametrize("name", ALL)
def test_tiles_match_the_reference_to_the_last_bit(name, cols):
    storage = ALL[name]
    x = wide_range(2, 3, 5, cols)
    written = Written(x, storage)
    for part, tensor in written.want.tensors().items():
        assert_same_bits(written.got.tensors()[part], tensor, f"{name} {part}")
    assert torch.equal(written.counts[:, 0].cpu().long(), written.want.saturated)
    assert not written.counts[:, 1].any()
    values = storage.read(written.want)
    assert_same_bits(written.read_back, values, f"{name} values")

    values, vectors = values.double(), written.vectors.cpu().double()
    exact = torch.einsum("shrc,vc->vshr", values, vectors)
    scale = torch.einsum("shrc,vc->vshr", values.abs(), vectors.abs())
    # Below 2^-120 products of single elements are subnormal.
    error = (written.products.cpu().double() - exact).abs() / (scale + 2.0**-120)
    assert error.max() < 1e-6


@triton.jit
def parts_kernel(
    x, dest, counts, seed, flush, sequence, key1,
    HEADS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, STORAGE: tl.constexpr,
):  # fmt: skip
    """Store a matrix of 32 rows in two parts, under scales that are chosen for all of it first."""
    slot, head = tl.program_id(1).to(tl.int64), tl.program_id(0)
    row = head * 32 + tl.arange(0, 32)
    base = x + slot * HEADS * 32 * COLS
    key = (tl.load(seed + slot), key1, tl.load(flush + slot), tl.load(sequence + slot))
    magnitude = magnitude_bits(load_matrix(base, row, None, COLS, WIDTH))
    amax = tl.max(tl.reshape(magnitude, [32, WIDTH // 16, 16]), 2)
    whole = tl.max(amax)
    store_scales(amax, whole, dest, slot, row, None, 32, COLS, WIDTH, STORAGE)
    for part in tl.static_range(2):
        some = head * 32 + part * 16 + tl.arange(0, 16)
        value = load_matrix(base, some, None, COLS, WIDTH)
        magnitude = magnitude_bits(value)
        amax = tl.max(tl.reshape(magnitude, [16, WIDTH // 16, 16]), 2)
        scales = store_scales(amax, whole, dest, slot, some, None, 32, COLS, WIDTH, STORAGE)
        over, not_finite = store_tile(
            value, key, dest, slot, some, None, 32, 16, COLS, WIDTH, STORAGE, whole, scales
        )
        tl.atomic_add(counts + slot * 2, over)
        tl.atomic_add(counts + slot * 2 + 1, not_finite)


@pytest.mark.parametrize("cols", [64, 24], ids=lambda c: f"cols{c}")
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-sr", "nvfp4-modelopt", "nvfp4-torchao"])
def test_scales_chosen_ahead_store_the_same_tiles(name, cols):
    storage = ALL[name]
    x = wide_range(2, 3, 32, cols)
    slots = torch.arange(2)
    draw = {"seed": slots + 2**31, "flush_index": slots * 3, "sequence": slots * 5 + 2}
    want = storage.write(x, storage.draw_bits(x.shape, layer=LAYER, stream=STREAM, **draw))
    got = want.map(lambda t: _poisoned(t, 0))
    counts = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    parts_kernel[(3, 2)](
        x.to(DEVICE), stored(got), counts, *(t.to(DEVICE) for t in draw.values()),
        LAYER + (STREAM << 24), HEADS=3, COLS=cols, WIDTH=tile_width(cols, storage),
        STORAGE=storage, enable_fp_fusion=False,
    )  # fmt: skip
    for part, tensor in want.tensors().items():
        assert_same_bits(got.tensors()[part], tensor, f"{name} {part}")
    assert counts[:, 0].tolist() == want.saturated.tolist() and not counts[:, 1].any()


@pytest.mark.parametrize("name", ["fp32", "fp16-sr", "int8", "nvfp4"])
def test_slots_may_be_strided(name):
    x = wide_range(3, 2, 4, 32)
    written = Written(x, STORAGES[name], tile_heads=1, slot_gap=16)
    for part, tensor in written.want.tensors().items():
        assert_same_bits(written.got.tensors()[part], tensor, f"{name} {part}")


def test_strided_heads_are_refused():
    quantized = STORAGES["fp32"].write(torch.zeros(2, 3, 4, 16))
    with pytest.raises(ValueError, match=r"data \[2, 3, 16, 4\] has strides"):
        stored(replace(quantized, data=quantized.data.transpose(-1, -2)))


@pytest.mark.parametrize("cols", [16, 32])
@pytest.mark.parametrize("row", range(4))
def test_a_scale_of_a_small_matrix_sees_all_of_its_rows(row, cols):
    """Of two matrices in a tile that has fewer blocks than a warp has lanes."""
    x = torch.randn(2, 2, 4, cols)
    x[:, 0, row, 3] = 100.0
    written = Written(x, STORAGES["nvfp4"])
    for part, tensor in written.want.tensors().items():
        assert_same_bits(written.got.tensors()[part], tensor, part)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize(
    "name", ["fp16", "bf16", "fp8", "fp8-e5m2", "int8", "nvfp4", "mxfp4", "mxfp8"]
)
def test_non_finite_state_is_counted_and_never_reads_as_a_number(name, bad):
    x = torch.randn(2, 2, 4, 32)
    x[1, 0, 2, 5] = bad
    written = Written(x, STORAGES[name])
    assert written.counts[:, 1].tolist() == [0, 1]
    assert not written.read_back[1, 0, 2, 5].isfinite()
    assert written.read_back[0].isfinite().all() and written.read_back[1, 1].isfinite().all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16, BF16], ids=lambda f: f.name)
def test_every_code_decodes_to_its_value(fmt):
    storage = Storage(format=fmt)
    count = 2 ** min(fmt.bits, 12)
    codes = torch.arange(count) * 2 ** (fmt.bits - min(fmt.bits, 12))
    codes = codes.to(torch.int16).view(torch.uint16) if fmt.bits == 16 else codes.to(torch.uint8)
    values = codes.view(fmt.torch_dtype).to(torch.float32).view(1, 1, -1, 16)
    # Codes are written by the device functions themselves, from their values.
    written = Written(torch.where(values.isfinite(), values, 0.0), storage, tile_heads=1)
    assert_same_bits(written.read_back, torch.where(values.isfinite(), values, 0.0), fmt.name)
