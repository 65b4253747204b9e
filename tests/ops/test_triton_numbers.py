"""Device functions for single numbers against `formats`, bit for bit: rounding, random bits.

Quotients, too, which a GPU takes from reciprocals.

Runs in Triton's interpreter without a GPU, compiled with one (`pytest -m gpu`).
"""

import numpy
import pytest
import torch
import triton
import triton.language as tl
from interpreter import DEVICE, KERNEL_MARKS
from same_bits import assert_same_bits

from replayssm.formats.number import BF16, E2M1, E4M3, E5M2, FP16, FP32, INT8
from replayssm.formats.philox import random_bits as reference_bits
from replayssm.formats.rounding import NEAREST_EVEN, TOWARD_ZERO, round_to_format, stochastic
from replayssm.ops.quantize import rounding as device_rounding
from replayssm.ops.quantize.layout import store_matrix
from replayssm.ops.quantize.philox import philox4x32, random_bits

pytestmark = KERNEL_MARKS
LAYER, STREAM = 11, 1


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


# ---- quotients -------------------------------------------------------------------------------


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
