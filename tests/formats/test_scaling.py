"""Row scales and MX block scales: the rules, their edges, their operation order."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from replayssm.formats import scaling
from replayssm.formats.block import MXFP4, MXFP8
from replayssm.formats.codec import dequantize, quantize
from replayssm.formats.number import E4M3, E5M2, INT8
from replayssm.formats.rounding import stochastic

ROW_FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2, INT8], ids=lambda f: f.name)


def heavy_tailed(*shape, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.exp2(torch.randint(-20, 21, (*shape[:-1], 1), generator=generator))


# ---- row scales -------------------------------------------------------------------------------


@ROW_FORMATS
def test_row_scale_is_one_ieee_division_used_in_both_directions(fmt):
    x = heavy_tailed(3, 4, 32, 16)
    q = quantize(x, fmt, scale="row")
    amax = x.abs().amax(-1, keepdim=True).numpy()
    np.testing.assert_array_equal(q.scale.numpy(), amax / np.float32(fmt.max_value))
    codes = q.data.to(torch.float32).numpy()
    np.testing.assert_array_equal(dequantize(q).numpy(), codes * q.scale.numpy())
    exact = x.double() / q.scale.double()
    step = torch.from_numpy(np.spacing(np.abs(codes))) * 2.0 ** (23 - fmt.mantissa_bits)
    step = torch.ones(()) if fmt is INT8 else step.clamp(min=fmt.smallest_subnormal)
    assert ((torch.from_numpy(codes).double() - exact).abs() <= step * 0.5000001).all()
    assert q.saturated.sum() == 0


@ROW_FORMATS
def test_row_maximum_an_ulp_above_the_top_saturates_quietly(fmt):
    """amax / fl(amax / max_value) can exceed max_value; nearest and stochastic bring it back."""
    amax = torch.linspace(1, 2, 4001)
    above = amax / (amax / torch.tensor(fmt.max_value)) > fmt.max_value
    assert above.any()
    x = amax[above].view(1, 1, -1, 1).repeat(1, 1, 1, 4)
    r = torch.full(x.shape, 2**16 - 1)
    for mode in (dict(), dict(rounding=stochastic(16), random_bits=r)):
        q = quantize(x, fmt, scale="row", **mode)
        assert (q.data.to(torch.float32) == fmt.max_value).all()
        assert q.saturated.tolist() == [0]


@ROW_FORMATS
def test_zero_row_has_scale_one_and_zero_codes(fmt):
    x = torch.zeros(1, 1, 2, 8)
    x[0, 0, 1] = 3.0
    x[0, 0, 0, 1] = -0.0
    q = quantize(x, fmt, scale="row")
    assert q.scale[0, 0, 0, 0] == 1
    assert (q.data[0, 0, 0].to(torch.float32) == 0).all()
    assert dequantize(q).equal(x)


@ROW_FORMATS
@pytest.mark.parametrize("amax", [1e-36, 1e-38, 1e-40, 1e-42, 3e-44, 1.4e-45])
def test_tiny_rows_survive(fmt, amax):
    """A subnormal scale k * 2^-149 costs the maximum up to 1 part in 2k, and nothing worse."""
    x = torch.tensor([amax, -amax / 2, amax / 3, 0]).view(1, 1, 1, 4)
    q = quantize(x, fmt, scale="row")
    assert (q.scale > 0).all()
    y = dequantize(q)
    k = q.scale.item() / 2.0**-149
    tolerance = 0.04 if k > 100 else 0.5 / k + 0.04
    assert y[..., 0].item() == pytest.approx(x[..., 0].item(), rel=tolerance)
    assert y.isfinite().all() and y[..., 3] == 0


# ---- MX ---------------------------------------------------------------------------------------


def mx(fmt, rule, value, count=32):
    """(scale byte, values) of one block of equal values under a rule."""
    q = quantize(torch.full((1, 1, 1, count), value), replace(fmt, scale_rule=rule))
    return q.scale.item(), dequantize(q).unique().tolist()


def test_mx_constants():
    """Known answers: FLOOR clips 7 to 6 and 500 to 448, RCEIL doubles the scale instead."""
    assert mx(MXFP4, "floor", 7.0) == (0x7F, [6.0])
    assert mx(MXFP4, "rceil", 7.0) == (0x80, [8.0])
    assert mx(MXFP8, "floor", 500.0) == (0x7F, [448.0])
    assert mx(MXFP8, "rceil", 500.0) == (0x80, [512.0])
    assert mx(MXFP4, "even", 7.0) == (0x80, [8.0])
    assert mx(MXFP4, "even", 6.99) == (0x7F, [6.0])
    assert mx(MXFP4, "ceil", 4.0) == (0x7F, [4.0])
    assert mx(MXFP4, "ceil", 4.5) == (0x80, [4.0])
    assert mx(MXFP4, "ceil", np.nextafter(np.float32(4), np.float32(5)).item())[0] == 0x80
    assert mx(MXFP4, "rceil", np.nextafter(np.float32(6), np.float32(7)).item())[0] == 0x80
    assert mx(MXFP4, "rceil", 6.0) == (0x7F, [6.0])


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=lambda f: f.name)
def test_mx_zero_and_tiny_blocks(fmt, rule):
    """torchao 0.18 reads half of, or zero for, blocks below 2^-118; the value must come back."""
    assert mx(fmt, rule, 0.0) == (0, [0.0])
    for exponent in (-100, -117, -118, -119, -122, -126):
        assert mx(fmt, rule, 2.0**exponent)[1] == [2.0**exponent]
    largest = 1.5 * 2.0**127
    assert mx(fmt, rule, largest)[1] == [largest]


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=lambda f: f.name)
def test_mx_agrees_with_torchao_away_from_its_known_faults(fmt, rule):
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = heavy_tailed(2, 4, 16, 64)
    dtype = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp8": torch.float8_e4m3fn}[fmt.name]
    mode = mx_tensor.ScaleCalculationMode(rule)
    theirs = mx_tensor.MXTensor.to_mx(x.view(-1, 64), dtype, 32, mode)
    q = quantize(x, replace(fmt, scale_rule=rule))
    assert q.scale.flatten().equal(theirs.scale.view(torch.uint8).flatten())
    assert dequantize(q).view(-1, 64).equal(theirs.dequantize(torch.float32))


def test_mx_counts_what_floor_clips():
    x = torch.ones(2, 1, 1, 32)
    x[1, 0, 0, :3] = torch.tensor([1.9, 1.7, -1.8])
    assert quantize(x, MXFP4).saturated.tolist() == [0, 2]
    assert quantize(x, replace(MXFP4, scale_rule="rceil")).saturated.tolist() == [0, 0]


def test_powers_of_two_are_exact():
    k = torch.arange(-127, 128, dtype=torch.int32)
    assert scaling.power_of_two(k).tolist() == [2.0**i for i in range(-127, 128)]
    assert scaling.e8m0_exponent(scaling.e8m0_code(k)).equal(k)
