"""What surrounds the recurrence or the attention of a hybrid layer: one kernel before it.

Owns kernels that prepare what a layer's projections say for the recurrence (convolution, SiLU, unit
vectors, gates, step sizes) or for attention (norm and rotation of heads), and their launchers. What
they compute is said at each, with the places where it is rounded. Knows no model; on tensors of any
device that Triton runs on.

Legend: B sequences, T tokens, C channels, W taps, HK and HV heads of keys and values (HQ of
queries), K and V their widths, H heads of a step size, D width of a head of attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.ops.glue.triton_gates import silu, softplus
from replayssm.ops.glue.triton_glue import convolved

_CHANNELS = 256  # of a program that convolves


@triton.jit
def _convolved_at(
    token, x, state, weight, bias,      # .., [T, C], [C, W], [C, W], [C] or None
    x_token, channel, inside, W: tl.constexpr,
):  # fmt: skip
    """The output for a token of a causal convolution that goes on from `state`, and its SiLU."""
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(W):
        past = token + tap - (W - 1)
        if past >= 0:
            seen = tl.load(x + past * x_token + channel, mask=inside, other=0)
        else:
            seen = tl.load(state + channel * W + W + past, mask=inside, other=0)
        taps = tl.load(weight + channel * W + tap, mask=inside, other=0).to(tl.float32)
        value += seen.to(tl.float32) * taps
    if bias is not None:
        value += tl.load(bias + channel, mask=inside, other=0).to(tl.float32)
    return silu(value.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _take_in(
    state, x, T, x_token, channel, inside, W: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The last W inputs [C, W] after T more of `x` [T, C], in place."""
    tap = tl.arange(0, WIDTH)[None, :]
    here = inside[:, None] & (tap < W)
    at, past = state + channel[:, None] * W + tap, T - W + tap
    old = tl.load(at + T, mask=here & (past < 0), other=0)
    new = tl.load(x + past * x_token + channel[:, None], mask=here & (past >= 0), other=0)
    tl.debug_barrier()  # everybody has read what others overwrite
    tl.store(at, tl.where(past < 0, old, new), mask=here)


@triton.jit
def delta_kernel(
    q, k, v, g, beta,                   # [B, T, HK, K] x 2, [B, T, HV, V], [B, T, HV] x 2
    x, state, weight, bias,             # [B, T, C], [B, C, W], [C, W], [C] or None
    a, b, a_log, dt_bias,               # [B, T, HV], [B, T, HV], [HV], [HV]
    x_row, x_token, a_row, a_token, b_row, b_token, T, HK, HV, eps, scale,
    ONE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid (2 HK + HV + 1, B): a head of queries, keys or values, or the gates of a row."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if part == 2 * HK + HV:
        for token in range(T):
            _delta_gates(
                g + (row * T + token) * HV, beta + (row * T + token) * HV,
                a + row * a_row + token * a_token, b + row * b_row + token * b_token,
                a_log, dt_bias, HV, HEADS,
            )  # fmt: skip
    else:
        element = tl.arange(0, BLOCK)
        inside = element < tl.where(part >= 2 * HK, V, K)
        first = tl.where(part >= 2 * HK, 2 * HK * K + (part - 2 * HK) * V, part * K)
        channel = first + element
        state += row * (2 * HK * K + HV * V) * W
        x += row * x_row
        if ONE:
            new = tl.load(x + channel, mask=inside, other=0)
            value = convolved(new, state, weight, bias, channel, inside, W, WIDTH, True)
            _delta_head(q, k, v, value, row, part, inside, HK, HV, eps, scale, K, V, BLOCK)
        else:
            for token in range(T):
                value = _convolved_at(token, x, state, weight, bias, x_token, channel, inside, W)
                at = row * T + token
                _delta_head(q, k, v, value, at, part, inside, HK, HV, eps, scale, K, V, BLOCK)
            _take_in(state, x, T, x_token, channel, inside, W, WIDTH)


@triton.jit
def _delta_head(
    q, k, v, value, at, part, inside, HK, HV, eps, scale,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores head `part` of token `at`."""
    element = tl.arange(0, BLOCK)
    if part >= 2 * HK:
        to = v + (at * HV + part - 2 * HK) * V + element
        tl.store(to, value.to(v.dtype.element_ty), mask=inside)
    else:
        wide = value.to(tl.float32)
        wide *= tl.rsqrt(tl.sum(wide * wide, 0) + eps)
        if part < HK:
            to = q + (at * HK + part) * K + element
            tl.store(to, (wide * scale).to(q.dtype.element_ty), mask=inside)
        else:
            to = k + (at * HK + part - HK) * K + element
            tl.store(to, wide.to(k.dtype.element_ty), mask=inside)


@triton.jit
def _delta_gates(g, beta, a, b, a_log, dt_bias, HV, HEADS: tl.constexpr):
    head = tl.arange(0, HEADS)
    inside = head < HV
    strength = tl.load(b + head, mask=inside, other=0).to(tl.float32)
    strength = (1 / (1 + tl.exp(-strength))).to(b.dtype.element_ty).to(tl.float32)
    tl.store(beta + head, strength, mask=inside)
    step = tl.load(a + head, mask=inside, other=0).to(tl.float32)
    step = softplus(step + tl.load(dt_bias + head, mask=inside, other=0).to(tl.float32))
    rate = tl.exp(tl.load(a_log + head, mask=inside, other=0).to(tl.float32))
    tl.store(g + head, -rate * step, mask=inside)


def delta_inputs(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: tuple[Tensor, Tensor],
    parameters: tuple[Tensor, Tensor],
    *,
    key_heads: int,
    value_width: int,
    eps: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs of a gated delta rule from what a layer's projections say of a few tokens.

    In place: `state` [B, C, W], dense, in x's dtype: the last W inputs of the convolution.

    Args:
        x: [B, T, C], tokens of queries, keys and values side by side, as they enter the
            convolution.
        weight, bias: [C, W], [C]; its sum is FP32, rounded to x's dtype before the SiLU and after.
        gates: raw decays and strengths, [B, T, HV] each.
        parameters: logarithm of the rate, and what is added to a raw decay, [HV] each.
        value_width: V.
        eps, scale: queries and keys are divided by sqrt(|x|^2 + eps), queries times scale.

    Returns q, k [B, T, HK, K] and v [B, T, HV, V] in x's dtype, log decays
    -exp(rate) softplus(raw + bias) and strengths (a sigmoid, rounded to its dtype), [B, T, HV]
    FP32: (q, k, v, g, beta).
    """
    (raw, strength), (a_log, dt_bias) = gates, parameters
    batch, channels, taps = state.shape
    tokens, value_heads = raw.shape[1:]
    width = (channels - value_heads * value_width) // (2 * key_heads)
    assert x.stride(2) == raw.stride(2) == strength.stride(2) == 1
    q, k = (x.new_empty(batch, tokens, key_heads, width) for _ in range(2))
    v = x.new_empty(batch, tokens, value_heads, value_width)
    g, beta = (x.new_empty(batch, tokens, value_heads, dtype=torch.float32) for _ in range(2))
    delta_kernel[(2 * key_heads + value_heads + 1, batch)](
        *(q, k, v, g, beta, x, state, weight, bias, raw, strength, a_log, dt_bias),
        *(*x.stride()[:2], *raw.stride()[:2], *strength.stride()[:2]),
        *(tokens, key_heads, value_heads, eps, scale),
        ONE=tokens == 1,
        K=width,
        V=value_width,
        W=taps,
        WIDTH=triton.next_power_of_2(taps),
        BLOCK=triton.next_power_of_2(max(width, value_width)),
        HEADS=triton.next_power_of_2(value_heads),
        num_warps=1,
    )
    return q, k, v, g, beta


@triton.jit
def scan_kernel(
    out, dt, rate, skip,                # [B, T, C], [B, T, H] float32, [H] float32 x 2
    x, state, weight, bias,             # [B, T, C], [B, C, W], [C, W], [C] or None
    raw, dt_bias, a_log, d,             # [B, T, H], [H], [H], [H]
    x_row, x_token, raw_row, raw_token, T, C, H, low, high,
    ONE: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Grid (C / BLOCK + 1, B): some channels, or the step sizes of a row."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if part == tl.num_programs(0) - 1:
        for token in range(T):
            to, at = dt + (row * T + token) * H, raw + row * raw_row + token * raw_token
            _step_sizes(to, at, dt_bias, H, low, high, HEADS)
        if row == 0:
            head = tl.arange(0, HEADS)
            logarithm = tl.load(a_log + head, mask=head < H, other=0).to(tl.float32)
            tl.store(rate + head, -tl.exp(logarithm), mask=head < H)
            passed = tl.load(d + head, mask=head < H, other=0).to(tl.float32)
            tl.store(skip + head, passed, mask=head < H)
    else:
        channel = part * BLOCK + tl.arange(0, BLOCK)
        inside = channel < C
        state += row * C * W
        x += row * x_row
        if ONE:
            new = tl.load(x + channel, mask=inside, other=0)
            value = convolved(new, state, weight, bias, channel, inside, W, WIDTH, True)
            tl.store(out + row * C + channel, value, mask=inside)
        else:
            for token in range(T):
                value = _convolved_at(token, x, state, weight, bias, x_token, channel, inside, W)
                tl.store(out + (row * T + token) * C + channel, value, mask=inside)
            _take_in(state, x, T, x_token, channel, inside, W, WIDTH)


@triton.jit
def _step_sizes(dt, raw, dt_bias, H, low, high, HEADS: tl.constexpr):
    head = tl.arange(0, HEADS)
    inside = head < H
    step = tl.load(raw + head, mask=inside, other=0).to(tl.float32)
    step = softplus(step + tl.load(dt_bias + head, mask=inside, other=0).to(tl.float32))
    tl.store(dt + head, tl.minimum(tl.maximum(step, low), high), mask=inside)


def scan_inputs(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    raw: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor],
    *,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of a selective scan from what a layer's projection says of a few tokens.

    In place: `state` [B, C, W], dense, in x's dtype: the last W inputs of the convolution.

    Args:
        x: [B, T, C], what enters the convolution (of `weight` and `bias`, rounded as in
            `convolution_step`), whose SiLU is returned like it, dense.
        raw: raw step sizes [B, T, H].
        parameters: what is added to them, logarithms of rates, and skips, [H] each.
        low, high: step sizes are clamped to.

    Returns (x, step sizes [B, T, H], minus the rates [H], the skips [H]), the last three FP32.
    """
    dt_bias, a_log, d = parameters
    batch, channels, taps = state.shape
    tokens, heads = raw.shape[1:]
    assert x.stride(2) == raw.stride(2) == 1
    out = x.new_empty(batch, tokens, channels)
    dt = x.new_empty(batch, tokens, heads, dtype=torch.float32)
    rate, skip = (dt.new_empty(heads) for _ in range(2))
    scan_kernel[(triton.cdiv(channels, _CHANNELS) + 1, batch)](
        *(out, dt, rate, skip, x, state, weight, bias, raw, dt_bias, a_log, d),
        *(*x.stride()[:2], *raw.stride()[:2], tokens, channels, heads, low, high),
        ONE=tokens == 1,
        W=taps,
        WIDTH=triton.next_power_of_2(taps),
        BLOCK=_CHANNELS,
        HEADS=triton.next_power_of_2(heads),
        num_warps=4,
    )
    return out, dt, rate, skip


@triton.jit
def rotate_kernel(
    q_out, k_out,                       # [B, T, HQ, D], [B, T, HK, D]
    q, k, q_weight, k_weight,           # the same, strided; [D], [D]
    cos, sin,                           # [B or 1, T, R]
    q_row, q_token, q_head, k_row, k_token, k_head, angle_row, T, HQ, HK, eps,
    D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (HQ + HK, B * T)."""
    part, token = tl.program_id(0), tl.program_id(1)
    row, time = (token // T).to(tl.int64), token % T
    angle = row * angle_row + time * R
    if part < HQ:
        at = q + row * q_row + time * q_token + part * q_head
        to = q_out + (token.to(tl.int64) * HQ + part) * D
        _rotate(to, at, q_weight, cos + angle, sin + angle, eps, D, R, BLOCK)
    else:
        at = k + row * k_row + time * k_token + (part - HQ) * k_head
        to = k_out + (token.to(tl.int64) * HK + part - HQ) * D
        _rotate(to, at, k_weight, cos + angle, sin + angle, eps, D, R, BLOCK)


@triton.jit
def _rotate(
    to, at, weight, cos, sin, eps, D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    element = tl.arange(0, BLOCK)
    inside, turns = element < D, element < R
    half: tl.constexpr = R // 2
    other = tl.where(element < half, element + half, element - half)
    dtype: tl.constexpr = to.dtype.element_ty
    value = tl.load(at + element, mask=inside, other=0).to(tl.float32)
    norm = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    factor = 1 + tl.load(weight + element, mask=inside, other=0).to(tl.float32)
    value = (value * norm * factor).to(dtype).to(tl.float32)
    partner = tl.load(at + other, mask=turns, other=0).to(tl.float32)
    factor = 1 + tl.load(weight + other, mask=turns, other=0).to(tl.float32)
    partner = (partner * norm * factor).to(dtype).to(tl.float32)
    partner = tl.where(element < half, -partner, partner)
    along = tl.load(cos + element, mask=turns, other=1).to(tl.float32)
    across = tl.load(sin + element, mask=turns, other=0).to(tl.float32)
    along = (value * along).to(dtype).to(tl.float32)
    across = (partner * across).to(dtype).to(tl.float32)
    tl.store(to + element, tl.where(turns, along + across, value).to(dtype), mask=inside)


def rotated_heads(
    q: Tensor,
    k: Tensor,
    weights: tuple[Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Queries [B, T, HQ, D] and keys [B, T, HK, D], each head over its root mean square, times
    1 + weight [D], rounded, and its first R elements rotated: like them, but dense.

    angles: cosines and sines [B or 1, T, R], the second half of R as the first; of the two products
    of a rotation each is rounded to the dtype of the heads.
    """
    cos, sin = angles
    batch, tokens, query_heads, width = q.shape
    heads, turning = k.shape[2], cos.shape[-1]
    assert q.stride(3) == k.stride(3) == 1 and cos.is_contiguous() and sin.is_contiguous()
    out = q.new_empty(q.shape), k.new_empty(k.shape)
    rotate_kernel[(query_heads + heads, batch * tokens)](
        *(*out, q, k, *weights, cos, sin),
        *(*q.stride()[:3], *k.stride()[:3], cos.stride(0) if len(cos) > 1 else 0),
        *(tokens, query_heads, heads, eps),
        D=width,
        R=turning,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )
    return out
