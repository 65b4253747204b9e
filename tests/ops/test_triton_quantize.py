"""Device functions against `formats`, bit for bit: rounding, random bits, scales, packing, tiles.

Runs in Triton's interpreter without a GPU, compiled with one (`pytest -m gpu`).
"""

from dataclasses import replace

import numpy
import pytest
import torch
import triton
import triton.language as tl

from replayssm.formats.block import BLOCK_FORMATS, MXFP4, MXFP8
from replayssm.formats.number import BF16, E2M1, E4M3, E5M2, FP16, FP32, INT8
from replayssm.formats.philox import random_bits as reference_bits
from replayssm.formats.rounding import NEAREST_EVEN, TOWARD_ZERO, round_to_format, stochastic
from replayssm.formats.storage import STORAGES, Storage
from replayssm.ops.quantize import rounding as device_rounding
from replayssm.ops.quantize.layout import (
    load_matrix,
    reads_words,
    store_matrix,
    stored,
    tile_width,
)
from replayssm.ops.quantize.philox import philox4x32, random_bits
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

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes with NumPy, which warns where a GPU does not: x / 0, Inf - Inf.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)

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


def pattern(t: torch.Tensor) -> torch.Tensor:
    """Integer pattern of a tensor of any dtype, on the CPU."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.cpu().view(sizes[t.element_size()])


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    got, want = pattern(got), pattern(want)
    differs = (got != want).flatten().nonzero().flatten()
    assert not len(differs), (
        f"{what}: {len(differs)} of {got.numel()} differ, first at {int(differs[0])}: "
        f"{got.flatten()[differs[0]]:#x}, expected {want.flatten()[differs[0]]:#x}"
    )


# ---- rounding --------------------------------------------------------------------------------


@triton.jit
def round_kernel(
    x, random, values, over,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, SATURATE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * N + tl.arange(0, N)
    bits = tl.load(random + i).to(tl.uint32)
    y, overflowed = device_rounding.round_to_format(
        tl.load(x + i), bits, FORMAT, ROUNDING, SATURATE
    )
    tl.store(values + i, y)
    tl.store(over + i, overflowed.to(tl.int32))


def interesting_values(fmt) -> torch.Tensor:
    """Grid points, midpoints, their FP32 neighbours, tiny and huge values, specials; both signs."""
    exponents = torch.arange(fmt.min_exponent - 2, min(fmt.max_exponent, fmt.min_exponent + 12) + 1)
    exponents = torch.cat([exponents, torch.tensor([fmt.max_exponent, fmt.max_exponent + 1])])
    steps = torch.arange(0, 2 ** (min(fmt.mantissa_bits, 4) + 2), dtype=torch.float64)
    fine = 1 + steps / len(steps)
    grid = (fine[None] * 2.0 ** exponents[:, None].double()).flatten()
    spacing = torch.tensor([fmt.smallest_subnormal, fmt.top_spacing], dtype=torch.float64)
    low = torch.arange(0, 16, dtype=torch.float64) * spacing[0] / 4
    high = fmt.max_value + torch.arange(-8, 9, dtype=torch.float64) * spacing[1] / 4
    values = torch.cat([grid, low, high]).to(torch.float32).clamp(max=FP32.max_value)
    tiny = torch.tensor([0.0, 2**-149, 2**-140, 2**-126, 2**-127, 1e-30, 1e30, FP32.max_value])
    values = torch.cat([values, tiny])
    up = torch.nextafter(values, torch.tensor(torch.inf)).clamp(max=FP32.max_value)
    down = torch.nextafter(values, torch.tensor(0.0))
    values = torch.cat([values, up, down])
    if fmt.has_nan:
        values = torch.cat([values, torch.tensor([torch.inf, torch.nan])])
    return torch.cat([values, -values])


@pytest.mark.parametrize("saturate", [True, False], ids=["saturate", "overflow"])
@pytest.mark.parametrize(
    "rounding",
    [NEAREST_EVEN, TOWARD_ZERO, *(stochastic(bits=n) for n in (1, 8, 16, 24, 32))],
    ids=lambda r: f"{r.mode}{r.bits or ''}",
)
@pytest.mark.parametrize("fmt", [FP16, BF16, E4M3, E5M2, INT8, E2M1], ids=lambda f: f.name)
def test_rounding_gives_the_reference_bits(fmt, rounding, saturate):
    if not saturate and not fmt.has_nan:
        pytest.skip(f"{fmt.name} always saturates")
    x = interesting_values(fmt)
    n = rounding.bits or 1
    # Each value meets no bits, all bits, and two draws.
    draws = torch.randint(0, 2**n, (2, len(x)))
    random = torch.cat([torch.zeros_like(draws[:1]), draws, torch.full_like(draws[:1], 2**n - 1)])
    x = x.repeat(len(random))
    random = random.flatten()
    bits = random if rounding.mode == "stochastic" else None
    want, _ = round_to_format(x, fmt, rounding, bits, saturate)
    over = torch.stack([round_to_format(v, fmt, rounding, b, saturate)[1] for v, b in [
        (x[:, None], None if bits is None else bits[:, None])
    ]]).flatten()  # fmt: skip
    block = 4096
    padded = -len(x) % block
    x_in = torch.nn.functional.pad(x, (0, padded)).to(DEVICE)
    random_in = torch.nn.functional.pad(random, (0, padded)).to(DEVICE)
    got = torch.full_like(x_in, torch.nan)
    got_over = torch.zeros(len(x_in), dtype=torch.int32, device=DEVICE)
    round_kernel[(len(x_in) // block,)](
        x_in, random_in, got, got_over, FORMAT=fmt, ROUNDING=rounding, SATURATE=saturate, N=block
    )
    assert_same_bits(got[: len(x)], want, fmt.name)
    assert torch.equal(got_over[: len(x)].cpu().long(), over)


@triton.jit
def half_kernel(x, random, codes, over, ROUNDING: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    value, bits = tl.load(x + i), tl.load(random + i).to(tl.uint32)
    if device_rounding.is_stochastic_half(FP16_FORMAT, ROUNDING, True):
        tl.store(codes + i, device_rounding.stochastic_half(value, bits))
    overflows = device_rounding.stochastic_half_overflows(value, bits)
    tl.store(over + i, overflows.to(tl.int32))


FP16_FORMAT = tl.constexpr(FP16)


def test_the_short_way_to_stochastic_halves_gives_the_same():
    rounding = stochastic(bits=16)
    near_limit = 65536 - torch.arange(0, 96 * 256) / 256
    x = torch.cat([interesting_values(FP16), near_limit, -near_limit, torch.randn(9999) * 1e-5])
    x = x.repeat(4)
    random = torch.randint(0, 2**16, x.shape)
    random[: len(x) // 4], random[-len(x) // 4 :] = 0, 2**16 - 1
    want, _ = round_to_format(x, FP16, rounding, random, True)
    over = round_to_format(x[:, None], FP16, rounding, random[:, None], True)[1]
    padded = -len(x) % 4096
    x_in, random_in = (torch.nn.functional.pad(t, (0, padded)).to(DEVICE) for t in (x, random))
    got = torch.zeros(len(x_in), dtype=torch.float16, device=DEVICE)
    got_over = torch.zeros(len(x_in), dtype=torch.int32, device=DEVICE)
    half_kernel[(len(x_in) // 4096,)](x_in, random_in, got, got_over, ROUNDING=rounding, N=4096)
    assert torch.equal(got_over[: len(x)].cpu().long(), over)
    if not triton.knobs.runtime.interpret:
        number = ~x.isnan()
        assert_same_bits(got[: len(x)].cpu()[number], want.half()[number])
        assert got[: len(x)].cpu()[~number].isnan().all()


# ---- random bits -----------------------------------------------------------------------------


@triton.jit
def philox_kernel(counter, key, words, ROUNDS: tl.constexpr):
    c = tl.arange(0, 1)
    c0, c1 = tl.load(counter + c).to(tl.uint32), tl.load(counter + 1 + c).to(tl.uint32)
    c2, c3 = tl.load(counter + 2 + c).to(tl.uint32), tl.load(counter + 3 + c).to(tl.uint32)
    k0, k1 = tl.load(key + c).to(tl.uint32), tl.load(key + 1 + c).to(tl.uint32)
    w0, w1, w2, w3 = philox4x32(c0, c1, c2, c3, k0, k1, ROUNDS)
    tl.store(words + c, w0.to(tl.int64))
    tl.store(words + 1 + c, w1.to(tl.int64))
    tl.store(words + 2 + c, w2.to(tl.int64))
    tl.store(words + 3 + c, w3.to(tl.int64))


# Known answers of the generator's authors (Random123, kat_vectors), ten rounds.
ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_philox_known_answers(counter, key, words):
    got = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    philox_kernel[(1,)](
        torch.tensor(counter, device=DEVICE), torch.tensor(key, device=DEVICE), got, ROUNDS=10
    )
    assert tuple(got.tolist()) == words


@triton.jit
def bits_kernel(
    out, seed, flush, sequence, key1,
    R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    row = tl.arange(0, R)
    key = (tl.load(seed + b), key1, tl.load(flush + b), tl.load(sequence + b))
    bits = random_bits(key, row, ROWS, COLS, WIDTH, BITS, ROUNDS)
    store_matrix(out + b * R * COLS, row, None, bits.to(tl.int64), COLS, WIDTH)


@pytest.mark.parametrize("cols", [16, 20], ids=["groups in rows", "groups cross rows"])
@pytest.mark.parametrize("bits, rounds", [(16, 10), (13, 7), (1, 5), (17, 10), (32, 5)])
def test_random_bits_follow_the_reference_addressing(cols, bits, rounds):
    seed = torch.tensor([0, 2**32 - 1])
    flush, sequence = torch.tensor([3, 2**31]), torch.tensor([2**32 - 5, 1])
    rows, heads = 4, 2
    want = reference_bits(
        (2, heads, rows, cols), seed=seed, layer=LAYER, stream=STREAM, flush_index=flush,
        sequence=sequence, bits=bits, rounds=rounds,
    )  # fmt: skip
    got = torch.full((2, heads, rows, cols), -1, dtype=torch.int64, device=DEVICE)
    bits_kernel[(2,)](
        got, *(t.to(DEVICE) for t in (seed, flush, sequence)), LAYER + (STREAM << 24),
        R=heads * rows, ROWS=rows, COLS=cols, WIDTH=32, BITS=bits, ROUNDS=rounds,
    )  # fmt: skip
    assert torch.equal(got.cpu(), want.long())


# ---- tiles -----------------------------------------------------------------------------------


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
        assert_same_bits(written.got.tensors()[part].contiguous(), tensor, f"{name} {part}")
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
        assert_same_bits(got.tensors()[part].contiguous(), tensor, f"{name} {part}")
    assert counts[:, 0].tolist() == want.saturated.tolist() and not counts[:, 1].any()


@pytest.mark.parametrize("name", ["fp32", "fp16-sr", "int8", "nvfp4"])
def test_slots_may_be_strided(name):
    x = wide_range(3, 2, 4, 32)
    written = Written(x, STORAGES[name], tile_heads=1, slot_gap=16)
    for part, tensor in written.want.tensors().items():
        assert_same_bits(written.got.tensors()[part].contiguous(), tensor, f"{name} {part}")


def test_strided_heads_are_refused():
    quantized = STORAGES["fp32"].write(torch.zeros(2, 3, 4, 16))
    with pytest.raises(ValueError, match=r"data \[2, 3, 16, 4\] has strides"):
        stored(replace(quantized, data=quantized.data.transpose(-1, -2)))


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


# `scaling.minus_quotient` on a GPU, step by step in NumPy: float64 holds what each fused
# multiply-add sums, so that the conversion to float32 is its one rounding. Powers of two change
# exponents only: the significands of divisors and of one binade of dividends are all there is.


def _fused(a, b, c):
    product = a.astype(numpy.float64) * b  # at most 48 bits
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)
    assert not lost.any()
    return total.astype(numpy.float32)


@pytest.mark.parametrize("significand", range(8, 16))
def test_quotients_from_a_reciprocal_are_rounded_once(significand):
    d = numpy.float32(significand)
    inverse = -(numpy.float32(1) / d)
    for first in range(0x3F800000, 0x40000000, 2**21):
        x = numpy.arange(first, first + 2**21, dtype=numpy.uint32).view(numpy.float32)
        quotient = x * inverse
        excess = _fused(quotient, d, x)
        assert (_fused(excess, inverse, quotient) == -(x / d)).all()


@pytest.mark.parametrize("significand", range(8, 16))
def test_reciprocals_are_rounded_once_from_any_near_guess(significand):
    d = numpy.float32(significand)
    exact = numpy.float32(1) / d
    ulps = numpy.arange(-8, 9, dtype=numpy.int32)
    guess = (numpy.array([exact]).view(numpy.int32) + ulps).view(numpy.float32)
    error = _fused(-guess, d, numpy.float32(1))
    # Two terms of 24 bits each: more than float64 holds, but far from halfway between float32s.
    refined = guess.astype(numpy.float64) + error.astype(numpy.float64) * guess
    assert (refined.astype(numpy.float32) == exact).all()
