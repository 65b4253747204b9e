"""Norms and short convolutions of hybrid layers, each in one kernel instead of up to twelve.

A decode step of a model of a few billion parameters is two thousand launches if every addition is
one, and they take as long as its matrix products. Owns kernels and launchers; what they compute is
said at each, with the places where it is rounded. Knows no model and no recurrence; on tensors of
any device that Triton runs on.

Legend: N rows, D elements of a row, B sequences, T tokens, C channels, W taps, H heads, K width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.ops.glue.triton_gates import silu

BEFORE, AFTER = "before", "after"
_ELEMENTS = 1024  # of a program of an elementwise kernel


@triton.jit
def norm_kernel(
    out,                                # [N, D]
    x, gate, weight,                    # [N, D], [N, D] or None, [D]
    x_row, gate_row, D, eps,
    GROUP: tl.constexpr, CENTRED: tl.constexpr, EARLY: tl.constexpr, ROUNDS: tl.constexpr,
    NARROW: tl.constexpr, SHARED: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (N, D / GROUP / GROUPS)."""
    row, element = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    at = group * GROUP + element
    inside = (element < GROUP) & (at < D)
    value = tl.load(x + row * x_row + at, mask=inside, other=0)
    if NARROW:
        value = value.to(out.dtype.element_ty)
    value = value.to(tl.float32)
    if gate is not None:
        gates = silu(tl.load(gate + row * gate_row + at, mask=inside, other=0).to(tl.float32))
        if EARLY:
            value *= gates
    value *= tl.rsqrt(tl.sum(value * value, 1) / GROUP + eps)[:, None]
    factor_at = weight + element if SHARED else weight + at
    factor = tl.load(factor_at, mask=(element < GROUP) if SHARED else inside, other=0)
    factor = factor.to(tl.float32)
    if CENTRED:
        factor += 1
    if ROUNDS and NARROW:
        value = value.to(out.dtype.element_ty).to(tl.float32)
    elif ROUNDS:
        value = value.to(x.dtype.element_ty).to(tl.float32)
    value *= factor
    if gate is not None:
        if not EARLY:
            value = value.to(out.dtype.element_ty).to(tl.float32) * gates
    tl.store(out + row * D + at, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    gate: Tensor | None = None,
    gated: str = BEFORE,
    group: int | None = None,
    centred: bool = False,
    rounds: bool = False,
    dtype: torch.dtype | None = None,
    narrow: bool = False,
) -> Tensor:
    """x [.., D] over its root mean square, times `weight` [D or group], like x; sums in FP32.

    Args:
        gate: like x, of which the SiLU multiplies x `gated` "before" the norm, or "after" it.
        group: elements that share a mean; default: all D.
        centred: the factor is 1 + weight.
        rounds: the normalised value is rounded to x's dtype before it is multiplied, and the
            product to that of the result (x's and weight's, promoted) before a gate.
        dtype: of the result, if another than that. narrow: x is first rounded to it.

    Raises:
        ValueError: `group` does not divide D, or `gated` is neither "before" nor "after".
    """
    D = x.shape[-1]
    group = D if group is None else group
    if D % group:
        raise ValueError(f"group is {group}, which does not divide {D} elements")
    if gated not in (BEFORE, AFTER):
        raise ValueError(f"gated is {gated!r}, allowed are {BEFORE!r} and {AFTER!r}")
    rows = x.reshape(-1, D)
    if dtype is None:
        early = rounds and gated == BEFORE
        dtype = torch.promote_types(x.dtype, weight.dtype) if early else x.dtype
    gates = None if gate is None else gate.reshape(-1, D)
    out = torch.empty(rows.shape, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(group)
    # Small groups, as heads are, several to a program.
    groups = min(triton.next_power_of_2(D // group), max(1, _ELEMENTS // block))
    norm_kernel[(len(rows), triton.cdiv(D // group, groups))](
        out,
        _dense_rows(rows),
        None if gates is None else _dense_rows(gates),
        weight,
        rows.stride(0) if rows.stride(1) == 1 else D,
        0 if gates is None else (gates.stride(0) if gates.stride(1) == 1 else D),
        D,
        eps,
        GROUP=group,
        CENTRED=centred,
        EARLY=gated == BEFORE,
        ROUNDS=rounds,
        NARROW=narrow,
        SHARED=len(weight) == group,
        GROUPS=groups,
        BLOCK=block,
        num_warps=max(1, min(8, groups * block // 512)),
    )
    return out.view(x.shape)


def _dense_rows(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit
def convolved(
    new, state, weight, bias,           # [C] at `channel`, [C, W], [C, W], [C] or None
    channel, inside,
    W: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """The output of a causal convolution after one more input; `state` takes it in, in place."""
    tap = tl.arange(0, WIDTH)[None, :]
    here = inside[:, None] & (tap < W)
    at = state + channel[:, None] * W + tap
    old = tl.load(at + 1, mask=here & (tap < W - 1), other=0)
    window = tl.where(tap == W - 1, new[:, None], old)
    tl.debug_barrier()  # everybody has read what others overwrite
    tl.store(at, window, mask=here)
    taps = tl.load(weight + channel[:, None] * W + tap, mask=here, other=0).to(tl.float32)
    value = tl.sum(window.to(tl.float32) * taps, 1)
    if bias is not None:
        value += tl.load(bias + channel, mask=inside, other=0).to(tl.float32)
    value = value.to(new.dtype)
    if SILU:
        value = silu(value.to(tl.float32)).to(new.dtype)
    return value


@triton.jit
def convolution_kernel(
    out,                                # [B, C]
    x, state, weight, bias,             # [B, C], [B, C, W], [C, W], [C] or None
    C, x_row, x_channel,
    W: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (C / BLOCK, B)."""
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    new = tl.load(x + row * x_row + channel * x_channel, mask=inside, other=0)
    value = convolved(new, state + row * C * W, weight, bias, channel, inside, W, WIDTH, SILU)
    tl.store(out + row * C + channel, value, mask=inside)


def convolution_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool
) -> Tensor:
    """One token of a causal convolution by channel: outputs [B, C, 1] like `x` [B, C, 1].

    In place: `state` [B, C, W], dense, in x's dtype: the last W inputs, oldest first. weight
    [C, W], bias [C]. The sum is FP32, rounded to x's dtype before the SiLU and after.
    """
    batch, channels, taps = state.shape
    out = torch.empty(batch, channels, 1, dtype=x.dtype, device=x.device)
    block = 256
    convolution_kernel[(triton.cdiv(channels, block), batch)](
        out,
        x,
        state,
        weight,
        bias,
        channels,
        x.stride(0),
        x.stride(1),
        W=taps,
        SILU=silu,
        WIDTH=triton.next_power_of_2(taps),
        BLOCK=block,
        num_warps=4,
    )
    return out


@triton.jit
def long_convolution_kernel(
    out,                                # [B, T, C]
    x, weight, bias,                    # [B, C, T], [C, W], [C] or None
    C, T, x_row, x_channel, x_token,
    W: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (C / CHANNELS, T / TOKENS, B)."""
    row = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = channel < C
    here = inside[:, None] & (token < T)[None, :]
    at = x + row * x_row + channel[:, None] * x_channel + token[None, :] * x_token
    value = tl.zeros((CHANNELS, TOKENS), tl.float32)
    if bias is not None:
        value += tl.load(bias + channel, mask=inside, other=0).to(tl.float32)[:, None]
    for tap in tl.static_range(W):
        seen = here & (token >= W - 1 - tap)[None, :]
        past = tl.load(at - (W - 1 - tap) * x_token, mask=seen, other=0)
        taps = tl.load(weight + channel * W + tap, mask=inside, other=0).to(tl.float32)
        value += past.to(tl.float32) * taps[:, None]
    value = value.to(out.dtype.element_ty)
    if SILU:
        value = silu(value.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + (row * T + token[None, :]) * C + channel[:, None], value, mask=here)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    """A causal convolution by channel over tokens from nothing: [B, C, T] like `x` [B, C, T], the
    channels of a token beside each other in memory.

    weight [C, W], bias [C]. The sum is FP32, rounded to x's dtype before the SiLU and after.
    """
    batch, channels, tokens = x.shape
    out = torch.empty(batch, tokens, channels, dtype=x.dtype, device=x.device)
    block = min(64, triton.next_power_of_2(tokens))
    rows = max(1, _ELEMENTS // block)
    grid = (triton.cdiv(channels, rows), triton.cdiv(tokens, block), batch)
    long_convolution_kernel[grid](
        out,
        x,
        weight,
        bias,
        channels,
        tokens,
        *x.stride(),
        W=weight.shape[1],
        SILU=silu,
        CHANNELS=rows,
        TOKENS=block,
        num_warps=4,
    )
    return out.transpose(1, 2)


@triton.jit
def unit_kernel(
    out, x,                             # [B, T, H, K]
    T, H, x_row, x_token, x_head, x_element, eps, scale,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B * T * H,)."""
    vector, element = tl.program_id(0), tl.arange(0, BLOCK)
    head, token, row = vector % H, vector // H % T, (vector // H // T).to(tl.int64)
    at = x + row * x_row + token * x_token + head * x_head + element * x_element
    value = tl.load(at, mask=element < K, other=0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) + eps) * scale
    value = value.to(out.dtype.element_ty)
    tl.store(out + vector.to(tl.int64) * K + element, value, mask=element < K)


def unit_vectors(x: Tensor, eps: float, *, scale: float = 1.0) -> Tensor:
    """x [B, T, H, K] over sqrt(|x|^2 + eps) of its last axis, times `scale`; like x, but dense."""
    batch, tokens, heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    unit_kernel[(batch * tokens * heads,)](
        out,
        x,
        tokens,
        heads,
        *x.stride(),
        eps,
        scale,
        K=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )
    return out
