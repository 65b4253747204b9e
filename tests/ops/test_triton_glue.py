"""Norms, convolutions and gates in one kernel each, against torch; interpreted without a GPU."""

import pytest
import torch
import torch.nn.functional as F

from replayssm.ops.glue.triton_glue import (
    convolution,
    convolution_step,
    gated,
    rms_norm,
    step_size,
    unit_vectors,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(got, wanted, dtype):
    """Two roundings more or less in BF16 (the interpreter truncates), another order in FP32."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    assert torch.allclose(got.float(), wanted.float(), rtol=tolerance, atol=tolerance)


def over_rms(x, group, eps):
    parts = x.float().unflatten(-1, (-1, group))
    return (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2)


@DTYPES
@pytest.mark.parametrize("centred", [False, True])
def test_norm(dtype, centred):
    wide = normal(3, 2, 4, 20, dtype=dtype)
    x, weight = wide[..., :10], normal(10, dtype=dtype, seed=1)
    factor = weight.float() + centred
    close(
        rms_norm(x, weight, 1e-5, centred=centred),
        (over_rms(x, 10, 1e-5) * factor).to(dtype),
        dtype,
    )


@DTYPES
def test_gate_after_the_norm(dtype):
    x, gate, weight = (
        normal(*s, dtype=dtype, seed=i) for i, s in enumerate([(5, 24), (5, 24), (24,)])
    )
    wanted = weight * over_rms(x, 24, 1e-6).to(dtype)
    wanted = (wanted.float() * F.silu(gate.float())).to(dtype)
    close(rms_norm(x, weight, 1e-6, gate=gate, gated="after", rounds=True), wanted, dtype)


@DTYPES
def test_gate_before_a_norm_of_groups(dtype):
    """What is normalised may be FP32 with a narrow weight and gate: the result is FP32."""
    x = normal(2, 3, 24)
    gate, weight = normal(2, 3, 24, dtype=dtype, seed=1), normal(24, dtype=dtype, seed=2)
    wanted = weight * over_rms(x * F.silu(gate.float()), 8, 1e-5)
    got = rms_norm(x, weight, 1e-5, gate=gate, group=8, rounds=True)
    close(got, wanted, torch.float32)


@DTYPES
@pytest.mark.parametrize("silu", [False, True])
def test_convolution(dtype, silu):
    channels, taps = 300, 4
    state, weight = (
        normal(2, channels, taps, dtype=dtype),
        normal(channels, taps, dtype=dtype, seed=1),
    )
    bias = normal(channels, dtype=dtype, seed=2) if silu else None
    wanted_state = state.clone()
    for step in range(3):
        x = normal(2, 1, channels, dtype=dtype, seed=3 + step).transpose(1, 2)
        window = torch.cat([wanted_state, x], -1)[..., 1:]
        wanted_state = window
        wanted = F.conv1d(window.float(), weight.float()[:, None], groups=channels)
        wanted = (wanted if bias is None else wanted + bias.float()[:, None]).to(dtype)
        wanted = F.silu(wanted.float()).to(dtype) if silu else wanted
        close(convolution_step(x, state, weight, bias, silu=silu), wanted, dtype)
        assert torch.equal(state, window)


@DTYPES
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_convolution_over_tokens(dtype, tokens):
    x = normal(2, tokens, 40, dtype=dtype).transpose(1, 2)
    weight, bias = normal(40, 4, dtype=dtype, seed=1), normal(40, dtype=dtype, seed=2)
    wanted = F.conv1d(F.pad(x.float(), (3, 0)), weight.float()[:, None], bias.float(), groups=40)
    close(convolution(x, weight, bias, silu=False), wanted.to(dtype), dtype)
    wanted = F.silu(wanted.to(dtype).float()).to(dtype)
    close(convolution(x, weight, bias, silu=True), wanted, dtype)


@DTYPES
def test_unit_vectors(dtype):
    x = normal(2, 8, 3, 6, dtype=dtype).transpose(1, 2)[..., ::2]
    wanted = x.float() / (x.float().square().sum(-1, keepdim=True) + 1e-6).sqrt() * 0.25
    got = unit_vectors(x, 1e-6, scale=0.25)
    assert got.is_contiguous()
    close(got, wanted.to(dtype), dtype)


@DTYPES
def test_gate(dtype):
    gate, x = normal(3, 700, dtype=dtype), normal(3, 700, dtype=dtype, seed=1)
    close(gated(gate, x), F.silu(gate) * x, dtype)


@pytest.mark.parametrize("softplus", [False, True])
def test_step_sizes(softplus):
    raw = torch.linspace(-25, 30, 60, device=DEVICE).view(2, 3, 10).bfloat16()
    bias = torch.linspace(-1, 1, 10, device=DEVICE)[:, None].expand(10, 4)[:, 0]
    wanted = raw.float() + bias
    wanted = F.softplus(wanted.double()).float() if softplus else wanted
    got = step_size(raw, bias, softplus=softplus, low=1e-9, high=25.0)
    assert torch.allclose(got, wanted.clamp(1e-9, 25.0), rtol=1e-5, atol=0)


def test_what_is_refused():
    x = normal(4, 12)
    with pytest.raises(ValueError, match="group is 5, which does not divide 12"):
        rms_norm(x, x[0], 1e-5, group=5)
    with pytest.raises(ValueError, match="gated is 'later'"):
        rms_norm(x, x[0], 1e-5, gate=x, gated="later")
    with pytest.raises(ValueError, match="x .* not dense"):
        gated(x, normal(12, 4).T)
    with pytest.raises(ValueError, match=r"gate is torch.float32 \[4, 12\], x torch.bfloat16"):
        gated(x, x.bfloat16())
