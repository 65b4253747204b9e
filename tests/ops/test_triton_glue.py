"""Norms, convolutions and gates in one kernel each, against torch; interpreted without a GPU."""

import pytest
import torch
import torch.nn.functional as F

from replayssm.ops.glue.triton_gates import gated, squared_relu, step_size
from replayssm.ops.glue.triton_glue import convolution, convolution_step, rms_norm, unit_vectors
from replayssm.ops.glue.triton_layers import delta_inputs, rotated_heads, scan_inputs

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
    with pytest.raises(ValueError, match="x .* not 2 or 3 of which the last is 1"):
        gated(x, normal(12, 4).T)
    with pytest.raises(ValueError, match=r"gate is torch.float32 \[4, 12\], x torch.bfloat16"):
        gated(x, x.bfloat16())


def convolved(x, state, weight, bias):
    """Outputs [B, T, C] of x [B, T, C] after `state` [B, C, W], their SiLU, and the new state."""
    whole = torch.cat([state, x.transpose(1, 2)], -1)
    out = F.conv1d(whole.float()[..., 1:], weight.float()[:, None], groups=weight.shape[0])
    out = (out if bias is None else out + bias.float()[:, None]).to(x.dtype)
    return F.silu(out.float()).to(x.dtype).transpose(1, 2), whole[..., -state.shape[-1] :]


TOKENS = pytest.mark.parametrize("tokens", [1, 2, 7])


@DTYPES
@TOKENS
def test_before_a_delta_rule(dtype, tokens):
    key_heads, width, value_heads, value_width, taps = 2, 12, 3, 16, 4
    channels = 2 * key_heads * width + value_heads * value_width
    rows = normal(2, tokens, channels + 3 + 2 * value_heads, dtype=dtype)
    x, _, b, a = rows.split([channels, 3, value_heads, value_heads], dim=-1)
    state, weight = (
        normal(2, channels, taps, dtype=dtype, seed=1),
        normal(channels, taps, dtype=dtype, seed=2),
    )
    a_log, dt_bias = normal(value_heads, dtype=dtype, seed=3), normal(value_heads, seed=4)
    wanted, wanted_state = convolved(x, state, weight, None)
    sizes = [key_heads * width, key_heads * width, value_heads * value_width]
    q, k, v = (
        part.unflatten(-1, (heads, -1))
        for part, heads in zip(
            wanted.split(sizes, -1), (key_heads, key_heads, value_heads), strict=True
        )
    )
    q, k = (
        t.float() / (t.float().square().sum(-1, keepdim=True) + 1e-6).sqrt() * scale
        for t, scale in ((q, 0.3), (k, 1.0))
    )
    got = delta_inputs(
        x,
        state,
        weight,
        None,
        (a, b),
        (a_log, dt_bias),
        key_heads=key_heads,
        value_width=value_width,
        eps=1e-6,
        scale=0.3,
    )
    close(got[0], q.to(dtype), dtype)
    close(got[1], k.to(dtype), dtype)
    close(got[2], v, dtype)
    g = -a_log.float().exp() * F.softplus(a.float() + dt_bias)
    assert torch.allclose(got[3], g, rtol=1e-5, atol=1e-7)
    close(got[4].to(dtype), b.float().sigmoid().to(dtype), dtype)
    assert torch.equal(state, wanted_state)


@DTYPES
@TOKENS
def test_before_a_scan(dtype, tokens):
    channels, heads, taps = 300, 5, 4
    rows = normal(2, tokens, 7 + channels + heads, dtype=dtype)
    _, x, raw = rows.split([7, channels, heads], dim=-1)
    state, weight = (
        normal(2, channels, taps, dtype=dtype, seed=1),
        normal(channels, taps, dtype=dtype, seed=2),
    )
    bias = normal(channels, dtype=dtype, seed=3)
    dt_bias, a_log, d = (normal(heads, dtype=dtype, seed=seed) for seed in (4, 5, 6))
    wanted, wanted_state = convolved(x, state, weight, bias)
    out, dt, rate, skip = scan_inputs(
        x, state, weight, bias, raw, (dt_bias, a_log, d), low=0.5, high=1.5
    )
    close(out, wanted, dtype)
    step = F.softplus(raw.float() + dt_bias.float()).clamp(0.5, 1.5)
    assert torch.allclose(dt, step, rtol=1e-5, atol=0)
    assert torch.allclose(rate, -a_log.float().exp(), rtol=1e-6, atol=0)
    assert torch.equal(skip, d.float()) and torch.equal(state, wanted_state)


@DTYPES
@pytest.mark.parametrize("rows", [1, 2])
def test_rotated_heads(dtype, rows):
    """The angles of one row are those of all."""
    batch, tokens, width, turning = 2, 3, 12, 8
    q = normal(batch, tokens, 3, 2 * width, dtype=dtype)[..., :width]
    k = normal(batch, tokens, 2, width, dtype=dtype, seed=1)
    weights = normal(width, dtype=dtype, seed=2), normal(width, dtype=dtype, seed=3)
    angle = normal(rows, tokens, turning // 2, seed=4).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def rotated(x, weight):
        x = (over_rms(x, width, 1e-6) * (1 + weight.float())).to(dtype)
        turned, rest = x[..., :turning], x[..., turning:]
        first, second = turned.chunk(2, -1)
        across = torch.cat([-second, first], -1)
        return torch.cat([turned * cos[:, :, None] + across * sin[:, :, None], rest], -1)

    got = rotated_heads(q, k, weights, (cos, sin), 1e-6)
    for out, x, weight in zip(got, (q, k), weights, strict=True):
        assert out.is_contiguous()
        close(out, rotated(x, weight), dtype)


@DTYPES
def test_gate_of_heads(dtype):
    wide, x = normal(3, 4, 40, dtype=dtype), normal(3, 4, 20, dtype=dtype, seed=1)
    gate = wide[..., 20:]
    got = gated(gate, x, sigmoid=True)
    assert got.is_contiguous()
    close(got, gate.float().sigmoid().to(dtype) * x, dtype)


@DTYPES
def test_squared_relu(dtype):
    x = normal(3, 700, dtype=dtype)
    close(squared_relu(x), F.relu(x).square(), dtype)


@pytest.mark.parametrize("gated_", ["before", "after"])
def test_norm_of_heads_that_is_rounded(gated_):
    """FP32 heads under one weight, a strided gate: the result is narrow, and so may be what is
    normalised.
    """
    x, weight = normal(2, 1, 24), normal(8, dtype=torch.bfloat16, seed=2)
    gate = normal(2, 1, 30, dtype=torch.bfloat16, seed=1)[..., 3:27]
    narrow = gated_ == "after"
    options = {"gated": gated_, "group": 8, "rounds": True, "narrow": narrow}
    got = rms_norm(x, weight, 1e-5, gate=gate, dtype=torch.bfloat16, **options)
    if narrow:
        wanted = over_rms(x.bfloat16(), 8, 1e-5).bfloat16() * weight.repeat(3)
        wanted = wanted.float() * F.silu(gate.float())
    else:
        wanted = over_rms(x * F.silu(gate.float()), 8, 1e-5) * weight.float().repeat(3)
    close(got, wanted.bfloat16(), torch.bfloat16)
