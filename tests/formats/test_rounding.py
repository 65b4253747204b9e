"""Rounding to a format: exhaustive against two libraries and an exact oracle, specials, bits."""

import math

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from format_oracle import hard_values, magnitudes, neighbours
from format_oracle import stochastic as exact_stochastic
from gfloat import formats as gf

from replayssm.formats.number import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    FP16,
    FP32,
    INT8,
    NUMBER_FORMATS,
    NumberFormat,
)
from replayssm.formats.rounding import (
    NEAREST_EVEN,
    TOWARD_ZERO,
    Rounding,
    round_to_format,
    stochastic,
)

SMALL = [FP16, BF16, E4M3, E5M2, E2M1, INT8]
ML_DTYPES = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
GFLOAT = {
    "fp16": gf.format_info_binary16,
    "bf16": gf.format_info_bfloat16,
    "e4m3": gf.format_info_ocp_e4m3,
    "e5m2": gf.format_info_ocp_e5m2,
    "e2m1": gf.format_info_ocp_e2m1,
}
MODES = [NEAREST_EVEN, stochastic(13), stochastic(16), stochastic(24), TOWARD_ZERO]
INF, NAN = math.inf, math.nan


def by_name(fmt):
    return fmt.name if isinstance(fmt, NumberFormat) else None


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equal, signs of zero included, all NaN alike."""
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    nan = a.isnan() & b.isnan()
    return bool((nan | (a.view(torch.int32) == b.view(torch.int32))).all())


def rounded(x, fmt, rounding=NEAREST_EVEN, bits=None, **kwargs) -> torch.Tensor:
    x = torch.as_tensor(x, dtype=torch.float32)
    if rounding.mode == "stochastic" and bits is None:
        generator = torch.Generator().manual_seed(0)
        bits = torch.randint(0, 2**rounding.bits, x.shape, generator=generator)
    return round_to_format(x, fmt, rounding, bits, **kwargs)[0]


# ---- nearest even -----------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", SMALL, ids=by_name)
def test_every_code_survives_every_mode(fmt):
    grid = torch.tensor(magnitudes(fmt)[:-1])
    grid = torch.cat([grid, -grid])
    for mode in MODES:
        values, saturated = round_to_format(
            grid, fmt, mode, torch.full(grid.shape, 2**mode.bits - 1) if mode.bits else None
        )
        assert same(values, grid)
        assert saturated.sum() == 0


@pytest.mark.parametrize("fmt", SMALL[:-1], ids=by_name)
def test_nearest_agrees_with_ml_dtypes_on_every_midpoint_and_its_neighbours(fmt):
    x = hard_values(fmt)
    expected = x.numpy().astype(ML_DTYPES[fmt.name]).astype(np.float32)
    assert same(rounded(x, fmt), torch.from_numpy(expected))


@pytest.mark.parametrize("fmt", SMALL[:-1], ids=by_name)
def test_nearest_agrees_with_gfloat(fmt):
    x = hard_values(fmt)
    if len(x) > 20_000:
        x = x[:: len(x) // 20_000]
    expected = gfloat.round_ndarray(GFLOAT[fmt.name], x.double().numpy(), sat=True)
    assert same(rounded(x, fmt), torch.from_numpy(expected).float())


def test_nearest_int8_is_round_half_even():
    x = hard_values(INT8)
    assert same(rounded(x, INT8), torch.from_numpy(np.rint(x.numpy())))


@pytest.mark.parametrize("fmt", SMALL, ids=by_name)
def test_toward_zero_takes_the_neighbour_below(fmt):
    x = hard_values(fmt)
    x = x[:: max(1, len(x) // 5000)]
    expected = [math.copysign(neighbours(abs(v), fmt)[1], v) for v in x.tolist()]
    assert same(rounded(x, fmt, TOWARD_ZERO), torch.tensor(expected))


def test_e2m1_ties_go_to_the_even_code():
    x = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0]
    assert rounded(x, E2M1).tolist() == [0, 1, 1, 2, 2, 4, 4, 0, -4]


def test_rounding_directly_differs_from_rounding_through_bf16():
    x = torch.tensor([2.0**-10 * (1 + 2.0**-23)])
    assert rounded(x, E4M3).item() == 2.0**-9
    assert rounded(rounded(x, BF16), E4M3).item() == 0.0


# ---- overflow, Inf, NaN, zero -----------------------------------------------------------------


@pytest.mark.parametrize("fmt", SMALL, ids=by_name)
def test_overflow_starts_at_the_midpoint_to_the_number_after_the_last(fmt):
    """The tie goes to the even code: E4M3's 464 stays in range, as in OCP, the others' is out."""
    half = fmt.max_value + fmt.top_spacing / 2
    below = np.nextafter(np.float32(half), np.float32(0))
    above = np.nextafter(np.float32(half), np.float32(np.inf))
    x = torch.tensor([below, half, above, 10 * half]).clamp(max=FP32.max_value)
    x = torch.stack([x, -x])
    tie = fmt is not E4M3
    values, saturated = round_to_format(x, fmt)
    assert values.tolist() == [[fmt.max_value] * 4, [-fmt.max_value] * 4]
    assert saturated.tolist() == [2 + tie, 2 + tie]
    if fmt.has_nan:
        beyond = INF if fmt.has_infinity else NAN
        values, saturated = round_to_format(x, fmt, saturate=False)
        row = [fmt.max_value, beyond if tie else fmt.max_value, beyond, beyond]
        assert same(values, torch.tensor([row, [-v for v in row]]))
        assert saturated.tolist() == [2 + tie, 2 + tie]


@pytest.mark.parametrize("fmt", [FP16, BF16, E4M3, E5M2], ids=by_name)
def test_overflow_agrees_with_libraries_once_saturation_is_stated(fmt):
    half = fmt.max_value + fmt.top_spacing / 2
    x = np.array([half, np.nextafter(np.float32(half), np.float32(np.inf))], dtype=np.float32)
    x = np.concatenate([x, -x])
    for saturate in (True, False):
        expected = gfloat.round_ndarray(GFLOAT[fmt.name], x.astype(np.float64), sat=saturate)
        ours = rounded(torch.from_numpy(x), fmt, saturate=saturate)
        assert same(ours, torch.from_numpy(expected).float())
    with np.errstate(over="ignore"):
        theirs = x.astype(ML_DTYPES[fmt.name]).astype(np.float32)
    assert same(rounded(torch.from_numpy(x), fmt, saturate=False), torch.from_numpy(theirs))


@pytest.mark.parametrize("mode", MODES, ids=lambda m: f"{m.mode}{m.bits or ''}")
@pytest.mark.parametrize("fmt", [FP16, BF16, E4M3, E5M2], ids=by_name)
def test_non_finite_never_becomes_finite(fmt, mode):
    """The NaN patterns include the all-ones one that a public stochastic routine turns into 0."""
    patterns = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0x7F800000], dtype=torch.int32)
    x = patterns.view(torch.float32).repeat(64)
    x = torch.cat([x, -x, torch.tensor([1.0, FP32.max_value])])
    for saturate in (True, False):
        values, saturated = round_to_format(
            x,
            fmt,
            mode,
            torch.randint(0, 2**mode.bits, x.shape) if mode.bits else None,
            saturate,
        )
        assert values[:-2][x[:-2].isnan()].isnan().all()
        inf = x.isinf()
        expected = x[inf] if fmt.has_infinity else torch.full_like(x[inf], NAN)
        assert same(values[inf], expected)
        assert values[-2] == 1.0
        assert saturated[:-1].sum() == 0, "Inf and NaN are not saturated elements"
        assert values.to(fmt.torch_dtype).to(torch.float32).isnan().equal(values.isnan())


@pytest.mark.parametrize("fmt", [INT8, E2M1], ids=by_name)
def test_formats_without_nan_refuse_non_finite_input_and_unsaturated_overflow(fmt):
    for bad in (INF, -INF, NAN):
        with pytest.raises(ValueError, match="Inf or NaN"):
            round_to_format(torch.tensor([1.0, bad]), fmt)
    with pytest.raises(ValueError, match="must saturate"):
        round_to_format(torch.tensor([1.0]), fmt, saturate=False)


@pytest.mark.parametrize("fmt", SMALL, ids=by_name)
def test_fp32_subnormals_and_signed_zeros(fmt):
    tiny = torch.tensor([1, 2, 3, 0x7FFFFF], dtype=torch.int32).view(torch.float32)
    x = torch.cat([torch.zeros(1), tiny])
    x = torch.cat([x, -x])
    if fmt is BF16:
        expected = torch.from_numpy(x.numpy().astype(ml_dtypes.bfloat16).astype(np.float32))
    else:
        expected = torch.copysign(torch.zeros_like(x), x)
    assert same(rounded(x, fmt), expected)
    up = rounded(x, fmt, stochastic(16), torch.full(x.shape, 2**16 - 1))
    if fmt is not BF16:
        assert same(up, expected), "probabilities below 2^-16 truncate to 0"


def test_counts_are_per_leading_index():
    x = torch.zeros(3, 2, 5)
    x[0] = 1e6
    x[2, 1, 3] = -1e6
    assert round_to_format(x, FP16)[1].tolist() == [10, 0, 1]
    assert round_to_format(torch.tensor([1e6, 1.0]), FP16)[1].tolist() == [1, 0]


# ---- stochastic -------------------------------------------------------------------------------


def stochastic_values(fmt: NumberFormat) -> torch.Tensor:
    """Magnitudes across the range, each with easy and awkward fractions of its gap."""
    grid = magnitudes(fmt)[:-1]
    picks = sorted({0, 1, 2, len(grid) // 3, len(grid) // 2, len(grid) - 2} & set(range(len(grid))))
    values = []
    for i in picks:
        gap = grid[i + 1] - grid[i]
        values += [grid[i] + f * gap for f in (0, 2**-20, 2**-13, 0.1, 1 / 3, 0.5, 0.7, 1 - 2**-12)]
    x = torch.tensor(values, dtype=torch.float64).to(torch.float32)
    return torch.cat([x, -x])


@pytest.mark.parametrize("n", [4, 13, 16])
@pytest.mark.parametrize("fmt", SMALL, ids=by_name)
def test_expectation_over_all_bit_values(fmt, n):
    """Enumerated, not sampled: the mean over all patterns is the value, truncated to n bits."""
    x = stochastic_values(fmt)
    r = torch.arange(2**n).expand(len(x), -1)
    values = rounded(x[:, None].expand(-1, 2**n), fmt, stochastic(n), r).double()
    for row, value in zip(values, x.tolist(), strict=True):
        _, below, above, f = neighbours(abs(value), fmt)
        ups = (row.abs() == above).sum().item()
        assert ups == math.floor(f * 2**n)
        assert ((row.abs() == above) | (row.abs() == below)).all()
        exact = (f * 2**n).denominator == 1
        error = (row.abs().mean().item() - abs(value)) / (above - below)
        assert error == pytest.approx(0, abs=1e-12) if exact else -(2.0**-n) < error < 0


@pytest.mark.parametrize("n", [1, 7, 16, 17, 20, 24, 31, 32])
@pytest.mark.parametrize("fmt", SMALL, ids=by_name)
def test_threshold_bits_against_the_exact_rule(fmt, n):
    """The last pattern that rounds toward zero and the first that rounds away, for many n."""
    for value in stochastic_values(fmt).tolist():
        f = neighbours(abs(value), fmt)[3]
        first = 2**n - math.floor(f * 2**n)
        for r in {0, max(0, first - 1), min(first, 2**n - 1), 2**n - 1}:
            ours = rounded([value], fmt, stochastic(n), torch.tensor([r])).item()
            assert ours == exact_stochastic(value, fmt, n, r)


@pytest.mark.parametrize("fmt", SMALL[:-1], ids=by_name)
def test_stochastic_agrees_with_gfloat(fmt):
    x = hard_values(fmt)
    x = x[:: max(1, len(x) // 4000)]
    r = torch.randint(0, 2**16, x.shape, generator=torch.Generator().manual_seed(1))
    expected = gfloat.round_ndarray(
        GFLOAT[fmt.name],
        x.double().numpy(),
        gfloat.RoundMode.StochasticFastest,
        True,
        r.numpy(),
        16,
    )
    assert same(rounded(x, fmt, stochastic(16), r), torch.from_numpy(expected).float())


def test_stochastic_keeps_fp16_subnormals():
    """A public routine flushes both values to 0; the second example is unbiased below 2^-14 too."""
    n = 13
    r = torch.arange(2**n)
    for value, mean in ((2.0**-15, 2.0**-15), (2.0**-24, 2.0**-24), (1.25 * 2.0**-24,) * 2):
        got = rounded(torch.full((2**n,), value), FP16, stochastic(n), r)
        assert got.double().mean().item() == mean


def test_stochastic_overflow_is_declared():
    """65519, 65520, 65535 exceed FP16's maximum in 3840, 4096, 7936 of 8192 patterns."""
    x = torch.tensor([65519.0, 65520.0, 65535.0])[:, None].expand(-1, 8192)
    r = torch.arange(8192).expand(3, -1)
    values, saturated = round_to_format(x, FP16, stochastic(13), r)
    assert (values == 65504).all()
    assert saturated.tolist() == [3840, 4096, 7936]
    values, saturated = round_to_format(x, FP16, stochastic(13), r, saturate=False)
    assert values.isinf().sum(1).tolist() == [3840, 4096, 7936]


# ---- interface --------------------------------------------------------------------------------


def test_fp32_is_the_identity_and_shares_no_memory():
    x = torch.tensor([1.0, NAN, INF, 1e-45])
    y = rounded(x, FP32)
    assert same(x, y) and y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("fmt", SMALL, ids=by_name)
def test_input_is_not_modified_and_strides_do_not_matter(fmt):
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(2)) * 3
    x[0, 0, 0] = 2 * fmt.max_value if fmt is not BF16 else FP32.max_value
    before = x.clone()
    for mode in MODES:
        r = torch.randint(0, 2**mode.bits, x.shape) if mode.bits else None
        values, counts = round_to_format(x, fmt, mode, r)
        assert same(x, before)
        t = r if r is None else r.transpose(1, 2)
        turned, turned_counts = round_to_format(x.transpose(1, 2), fmt, mode, t)
        assert same(turned.transpose(1, 2).contiguous(), values)
        assert turned_counts.equal(counts)
        one_by_one = [
            round_to_format(x[i : i + 1], fmt, mode, None if r is None else r[i : i + 1])
            for i in range(4)
        ]
        assert same(torch.cat([v for v, _ in one_by_one]), values)


def test_wrong_requests_are_named():
    x = torch.ones(2)
    with pytest.raises(ValueError, match="float64"):
        round_to_format(x.double(), FP16)
    with pytest.raises(ValueError, match="scale format"):
        round_to_format(x, E8M0)
    with pytest.raises(ValueError, match="given none"):
        round_to_format(x, FP16, stochastic())
    with pytest.raises(ValueError, match="given some"):
        round_to_format(x, FP16, NEAREST_EVEN, torch.zeros(2, dtype=torch.int32))
    for bad in (
        dict(mode="up"),
        dict(mode="stochastic"),
        dict(mode="stochastic", bits=0),
        dict(mode="stochastic", bits=33),
        dict(mode="nearest_even", bits=3),
        dict(mode="toward_zero", philox_rounds=7),
        dict(mode="stochastic", bits=16, philox_rounds=6),
    ):
        with pytest.raises(ValueError):
            Rounding(**bad)


def test_names_are_keys():
    assert all(NUMBER_FORMATS[name].name == name for name in NUMBER_FORMATS)
