"""NVFP4: golden values, operation order, four-over-six, axes, refusals, dialects."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from replayssm.formats import scaling
from replayssm.formats.block import NVFP4, NVFP4_46, NVFP4_MODELOPT, NVFP4_TORCHAO
from replayssm.formats.codec import NonFiniteStateError, dequantize, quantize
from replayssm.formats.rounding import stochastic
from replayssm.formats.scaling import DecodeScale, EncodeScale

F32 = np.float32


def by_name(fmt):
    return fmt.name


AXES = ("contracted", "rows")


def scale_bytes(q) -> list[int]:
    return q.scale.view(torch.uint8).flatten().tolist()


def state(*shape, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def powers_of_two(shape, limit: int) -> torch.Tensor:
    """Random powers of two from 2^-limit to 2^limit."""
    generator = torch.Generator().manual_seed(limit)
    return torch.exp2(torch.randint(-limit, limit + 1, shape, generator=generator).float())


def numpy_nvfp4(x: np.ndarray, full=2688.0):
    """Bytes and values of one matrix [R, C] in the default arithmetic, one operation at a time."""
    e4m3, e2m1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
    amax = np.abs(x).max()
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        S = F32(1) if amax == 0 else min(F32(full) / amax, np.finfo(F32).max)
        blocks = x.reshape(x.shape[0], -1, 16)
        s = ((np.abs(blocks).max(-1, keepdims=True) * S) / F32(6)).astype(e4m3).astype(F32)
        y = np.where(s == 0, F32(0), (blocks * S) / s)
    q = np.clip(y, -6, 6).astype(e2m1)
    code = q.view(np.uint8).reshape(*x.shape)
    data = (code[:, 0::2] & 15) | (code[:, 1::2] << 4)
    values = (q.astype(F32) * s) / S
    return data, s.astype(e4m3).view(np.uint8)[..., 0], S, values.reshape(x.shape)


# ---- default arithmetic -----------------------------------------------------------------------


@pytest.mark.parametrize("case", ["normal", "heavy", "sparse", "tiny", "large", "zero"])
def test_every_byte_against_numpy(case):
    x = state(2, 3, 32, 64, seed=1)
    if case == "heavy":
        x = x * powers_of_two((2, 3, 32, 64), 24)
    if case == "sparse":
        x = x * (state(2, 3, 32, 64, seed=2) > 1.5)
        x[:, :, 3] = 0
    if case in ("tiny", "large", "zero"):
        x = x * {"tiny": 1e-39, "large": 5e37, "zero": 0.0}[case]
    q = quantize(x, NVFP4)
    values = dequantize(q)
    assert q.saturated.tolist() == [0, 0]
    assert isinstance(q.tensor_scale, EncodeScale) and q.tensor_scale.value.shape == (2, 3, 1, 1)
    for b, h in np.ndindex(2, 3):
        data, scales, S, expected = numpy_nvfp4(x[b, h].numpy())
        kept = np.repeat(scales != 0, 8, axis=-1)  # signs of vanished blocks are not kept
        np.testing.assert_array_equal(q.data[b, h].numpy(), np.where(kept, data, 0))
        np.testing.assert_array_equal(q.scale[b, h].view(torch.uint8).numpy(), scales)
        assert q.tensor_scale.value[b, h].item() == S
        np.testing.assert_array_equal(values[b, h].numpy(), expected)


def test_operation_order_decides_scales_at_ties():
    """Block maxima within two ulps of a tie of E4M3: (amax * S) / 6, in that order, to the byte."""
    generator = torch.Generator().manual_seed(8)
    head_amax = 1 + torch.rand(64, generator=generator)
    codes = np.arange(8, 0x7E, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    ties = torch.from_numpy((values[1:] + values[:-1]) / 2).float()
    block_amax = (ties * 6)[None, :] / (2688 / head_amax[:, None])
    pattern = block_amax.view(torch.int32)[..., None] + torch.arange(-2, 3, dtype=torch.int32)
    x = torch.zeros(1, 64, 1 + 5 * len(ties), 16)
    x[0, :, 0, 0] = head_amax
    x[0, :, 1:, 3] = pattern.view(torch.float32).flatten(1)
    q = quantize(x, NVFP4)
    for h in range(64):
        expected = numpy_nvfp4(x[0, h].numpy())[1]
        np.testing.assert_array_equal(q.scale[0, h].view(torch.uint8).numpy(), expected)


def test_operation_order_decides_codes_at_ties():
    """Elements within two ulps of a tie of E2M1: (x * S) / s, in that order, to the byte."""
    x = state(1, 64, 16, 64, seed=9)
    q = quantize(x, NVFP4)
    step = q.scale.float()[..., None] / q.tensor_scale.value[..., None]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat(2)
    pattern = (ties * step).view(torch.int32) + (torch.arange(14, dtype=torch.int32) % 5 - 2)
    blocks = x.unflatten(-1, (-1, 16))
    top = blocks.abs().amax(-1, keepdim=True)
    near = torch.cat([top, -top, pattern.view(torch.float32).clamp(max=top)], dim=-1).flatten(-2)
    q = quantize(near, NVFP4)
    for h in range(64):
        np.testing.assert_array_equal(q.data[0, h].numpy(), numpy_nvfp4(near[0, h].numpy())[0])


def two_blocks(first: float, head_amax: float, fmt=NVFP4):
    """(first scale byte, first value) of a head with a block of `first` and one of `head_amax`."""
    x = torch.full((1, 1, 1, 32), first)
    x[..., 16:] = head_amax
    q = quantize(x, fmt)
    assert dequantize(q)[..., 31] == pytest.approx(head_amax, rel=1e-6) or head_amax < 1e-35
    return scale_bytes(q)[0], dequantize(q)[0, 0, 0, 0].item()


@pytest.mark.parametrize(
    ("exponent", "byte", "value"),
    [(-14, 0x0E, 6.104e-5), (-15, 0x07, 3.052e-5), (-18, 0x01, 4.360e-6), (-19, 0, 0), (-20, 0, 0)],
)
def test_golden_small_blocks(exponent, byte, value):
    assert two_blocks(2.0**exponent, 1.0) == (byte, pytest.approx(value, rel=2e-4))


def test_golden_tiny_heads():
    """Below 7.9e-36 the scale is capped.

    TransformerEngine also caps the multiplier 1 / (s / S), which makes it read 4.96e-39 for 1e-38;
    the division by s used here reads the nearest code, 9.9e-39.
    """
    assert two_blocks(1e-38, 1e-38)[1] == pytest.approx(9.92e-39, rel=1e-3)
    assert two_blocks(1e-42, 1e-42)[1] == 0.0


def test_golden_block_beyond_a_calibrated_amax_clips():
    """With S from an amax of 1, a block of 2 takes the largest scale and its elements clip to 1."""
    blocks = torch.full((1, 1, 1, 16), 2.0)
    S = EncodeScale(torch.full((1, 1, 1, 1), 2688.0))
    s = scaling.nvfp4_block_scale(blocks, scaling.block_amax(blocks), S, NVFP4)
    assert s.item() == 448
    codes = scaling.to_codes(blocks, s, S)
    assert codes.unique().tolist() == [12.0]
    assert scaling.from_codes(codes.clamp(max=6), s, S).unique().tolist() == [1.0]


def test_dead_zone():
    """Blocks at most 2^-10 / 448 of the head's amax read as zero, larger ones do not."""
    edge = 2.0**-10 / 448
    assert two_blocks(edge * 0.999, 1.0) == (0, 0.0)
    assert two_blocks(edge * 1.001, 1.0)[0] == 1


def test_zero_blocks_and_zero_heads():
    x = torch.zeros(1, 2, 2, 32)
    x[0, 0, 0, 16:] = state(16)
    x[0, 0, 1, 0] = -0.0
    q = quantize(x, NVFP4)
    assert q.tensor_scale.value[0, 1].item() == 1.0
    assert scale_bytes(q)[0] == 0 and scale_bytes(q)[2:] == [0] * 6
    assert q.data[0, 0, 0, :8].sum() == 0 and q.data[0, 0, 1].sum() == 0
    assert (dequantize(q)[0, 1] == 0).all()


def test_vanished_block_stores_no_signs():
    x = torch.full((1, 1, 1, 32), -1e-9)
    x[..., 16:] = 1.0
    assert quantize(x, NVFP4).data[..., :8].sum() == 0


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("fmt", [NVFP4, NVFP4_46, NVFP4_TORCHAO, NVFP4_MODELOPT], ids=by_name)
def test_non_finite_state_is_refused_by_place(fmt, bad):
    x = state(3, 4, 2, 16)
    x[1, 2, 1, 5] = bad
    x[2, 0, 0, 0] = bad
    with pytest.raises(NonFiniteStateError, match=r"\[1, 2\].*nvfp4") as error:
        quantize(x, fmt)
    assert error.value.index == (1, 2)


# ---- error anchors ----------------------------------------------------------------------------


def relative_error(x, fmt) -> float:
    return ((dequantize(quantize(x, fmt)) - x).norm() / x.norm()).item()


def test_error_anchors_on_normal_state():
    """Measured elsewhere with independent code on 16 x 64 x 128: .0953, .0953, .0868."""
    x = state(1, 16, 64, 128)
    assert relative_error(x, NVFP4) == pytest.approx(0.0953, abs=5e-4)
    assert relative_error(x, replace(NVFP4, scale_axis="rows")) == pytest.approx(0.0953, abs=5e-4)
    assert relative_error(x, NVFP4_46) == pytest.approx(0.0868, abs=5e-4)


def test_axis_matters_where_scales_are_structured():
    """Columns of different size: a block across them wastes range, .0951 against about .08."""
    decades = torch.rand(128, generator=torch.Generator().manual_seed(3))
    columns = state(1, 16, 64, 128) * 10 ** (-3 * decades)
    along, across = (relative_error(columns, replace(NVFP4, scale_axis=a)) for a in AXES)
    assert across == pytest.approx(0.0951, abs=1e-3) and along < 0.92 * across
    rows = columns.transpose(-1, -2).contiguous()
    assert relative_error(rows, NVFP4) == pytest.approx(across, rel=1e-6)


# ---- layout -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [NVFP4, NVFP4_46, NVFP4_TORCHAO], ids=lambda f: f.name)
def test_rows_axis_is_the_transposed_state(fmt):
    x = state(2, 3, 48, 32)
    q = quantize(x, replace(fmt, scale_axis="rows"))
    turned = quantize(x.transpose(-1, -2).contiguous(), fmt)
    assert q.data.shape == (2, 3, 32, 24) and q.shape == (3, 48, 32)
    assert q.data.equal(turned.data)
    assert q.scale.view(torch.uint8).equal(turned.scale.view(torch.uint8))
    assert dequantize(q).equal(dequantize(turned).transpose(-1, -2))
    r = torch.randint(0, 2**16, x.shape, generator=torch.Generator().manual_seed(0))
    mode = dict(rounding=stochastic())
    drawn = quantize(x, replace(fmt, scale_axis="rows"), random_bits=r, **mode)
    turned = quantize(x.transpose(-1, -2), fmt, random_bits=r.transpose(-1, -2), **mode)
    assert drawn.data.equal(turned.data)


@pytest.mark.parametrize("columns", [1, 5, 16, 24, 80, 100])
def test_last_block_may_be_short(columns):
    x = state(1, 2, 3, columns)
    padded = torch.nn.functional.pad(x, (0, -columns % 16))
    q, whole = quantize(x, NVFP4), quantize(padded, NVFP4)
    assert q.data.shape[-1] == -(-columns // 2) and q.scale.shape[-1] == -(-columns // 16)
    assert q.scale.view(torch.uint8).equal(whole.scale.view(torch.uint8))
    assert dequantize(q).equal(dequantize(whole)[..., :columns])


# ---- four over six ----------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["mse", "mae"])
@pytest.mark.parametrize("scale_max", [256, 448])
def test_four_over_six_keeps_the_better_candidate(error, scale_max):
    fmt = replace(NVFP4_46, scale_max=scale_max, four_over_six_error=error)
    x = state(2, 4, 32, 64, seed=5)
    blocks = x.unflatten(-1, (-1, 16))
    S = 6 * scale_max / x.abs().amax((-1, -2), keepdim=True)[..., None].double()

    def candidate(top):
        s = (blocks.abs().amax(-1, keepdim=True).double() * S / top).float()
        s = torch.from_numpy(
            s.clamp(max=448).numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        ).double()
        codes = (blocks.double() * S / s).clamp(-6, 6).float().numpy()
        codes = torch.from_numpy(codes.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)).double()
        e = (blocks.double() * S - codes * s).abs()
        return s, (e if error == "mae" else e * e).sum(-1, keepdim=True)

    (six, six_error), (four, four_error) = candidate(6), candidate(4)
    clear = (six_error - four_error).abs() > 1e-5 * six_error
    chosen = quantize(x, fmt).scale.float()[..., None].double()
    best = torch.where(four_error < six_error, four, six)
    assert clear.float().mean() > 0.98
    assert chosen[clear].equal(best[clear])
    assert 0.2 < (best == four).float().mean() < 0.8


def test_four_over_six_tie_goes_to_six():
    """All elements equal: both candidates are exact, so six is kept."""
    x = torch.ones(1, 1, 1, 16)
    q = quantize(x, NVFP4_46)
    assert q.scale.float().item() == 256
    assert quantize(x * 0, NVFP4_46).scale.float().item() == 0


# ---- dialects ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "exponent", "byte", "value"),
    [
        (NVFP4_MODELOPT, -14, 0x0E, 6.104e-5),
        (NVFP4_MODELOPT, -15, 0x07, 3.052e-5),
        (NVFP4_MODELOPT, -18, 0x01, 4.360e-6),
        (NVFP4_MODELOPT, -19, 0x01, 2.180e-6),
        (NVFP4_MODELOPT, -20, 0x01, 1.090e-6),
        (NVFP4_TORCHAO, -14, 0x0E, 6.104e-5),
        (NVFP4_TORCHAO, -15, 0x08, 3.488e-5),
        (NVFP4_TORCHAO, -18, 0x08, 2.906e-6),
        (NVFP4_TORCHAO, -19, 0x08, 2.906e-6),
        (NVFP4_TORCHAO, -20, 0x08, 0.0),
    ],
)
def test_golden_dialects(fmt, exponent, byte, value):
    assert two_blocks(2.0**exponent, 1.0, fmt) == (byte, pytest.approx(value, rel=2e-4))


@pytest.mark.parametrize(
    ("fmt", "zero_byte"), [(NVFP4, 0x00), (NVFP4_MODELOPT, 0x38), (NVFP4_TORCHAO, 0x08)]
)
def test_golden_zero_block_and_tiny_heads_of_dialects(fmt, zero_byte):
    assert two_blocks(0.0, 1.0, fmt) == (zero_byte, 0.0)
    if fmt.tensor_scale_rule == "decode":
        assert isinstance(quantize(torch.ones(1, 1, 1, 16), fmt).tensor_scale, DecodeScale)
        assert two_blocks(1e-38, 1e-38, fmt)[1] == pytest.approx(1.000e-38, rel=2e-3)
        assert two_blocks(1e-42, 1e-42, fmt)[1] == 0.0
    zero = quantize(torch.zeros(1, 1, 1, 16), fmt)
    assert zero.tensor_scale.value.item() == 1.0 and dequantize(zero).abs().sum() == 0


def test_torchao_dialect_agrees_with_torchao():
    """Scales to the byte; codes but for rare ties, as the library multiplies with reciprocals."""
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = state(1, 1, 64, 256) * powers_of_two((64, 1), 12)
    q = quantize(x, NVFP4_TORCHAO)
    per_tensor = nvfp4.per_tensor_amax_to_scale(x.abs().max())
    assert per_tensor.item() == q.tensor_scale.value.item()
    scales, codes = nvfp4.nvfp4_quantize(x[0, 0], 16, per_tensor)
    assert scales.view(torch.uint8).flatten().tolist() == scale_bytes(q)
    assert (codes.view(torch.uint8) != q.data[0, 0]).float().mean() < 1e-3
