"""Gates, activations and step sizes of hybrid layers, each in one kernel.

Owns the functions of one number that they are made of, the kernels and their launchers; what they
compute is said at each, with the places where it is rounded. Knows no model and no recurrence; on
tensors of any device that Triton runs on.

Legend: N rows, D elements of a row, B sequences, T tokens, H heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 1024  # of a program


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x), with the relative accuracy of e^x where that is small; x from 20 on."""
    e = tl.exp(tl.minimum(x, 20.0))
    one = 1 + e
    return tl.where(x > 20.0, x, tl.where(one == 1, e, tl.log(one) * (e / (one - 1))))


@triton.jit
def gate_kernel(
    out, gate, x,                       # [N, H, D] each
    gate_row, gate_head, x_row, x_head, H, D, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (N, H, D / BLOCK)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = at < D
    dtype: tl.constexpr = out.dtype.element_ty
    value = tl.load(gate + row * gate_row + head * gate_head + at, mask=inside, other=0)
    value = value.to(tl.float32)
    value = silu(value) if SILU else 1 / (1 + tl.exp(-value))
    value = value.to(dtype).to(tl.float32)
    value *= tl.load(x + row * x_row + head * x_head + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + (row * H + head) * D + at, value.to(dtype), mask=inside)


def gated(gate: Tensor, x: Tensor, *, sigmoid: bool = False) -> Tensor:
    """SiLU (or sigmoid) of `gate`, rounded to its dtype, times `x`: two tensors [N, .., D] of one
    shape and dtype, at most 3 axes, whose last is dense; the result is.

    Raises:
        ValueError: they are not.
    """
    for name, tensor in (("gate", gate), ("x", x)):
        if tensor.stride(-1) != 1 or tensor.dim() not in (2, 3):
            raise ValueError(
                f"{name} {list(tensor.shape)} has strides {tensor.stride()}, not 2 or 3 of which "
                "the last is 1"
            )
    if gate.shape != x.shape or gate.dtype != x.dtype:
        raise ValueError(
            f"gate is {gate.dtype} {list(gate.shape)}, x {x.dtype} {list(x.shape)}: must be alike"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads, width = (1 if x.dim() == 2 else x.shape[1]), x.shape[-1]
    block = min(_ELEMENTS, triton.next_power_of_2(width))
    gate_kernel[(len(x), heads, triton.cdiv(width, block))](
        out,
        gate,
        x,
        *(gate.stride(0), gate.stride(-2), x.stride(0), x.stride(-2)),
        *(heads, width),
        SILU=not sigmoid,
        BLOCK=block,
        num_warps=max(1, block // 256),
    )
    return out


@triton.jit
def square_kernel(out, x, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.maximum(tl.load(x + at, mask=at < count, other=0).to(tl.float32), 0)
    tl.store(out + at, (value * value).to(out.dtype.element_ty), mask=at < count)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0) squared, of a dense tensor."""
    assert x.is_contiguous()
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), _ELEMENTS),)
    square_kernel[grid](out, x, x.numel(), BLOCK=_ELEMENTS, num_warps=4)
    return out


@triton.jit
def step_size_kernel(
    out,                                # [N, H] float32
    x, bias,                            # [N, H], [H] or None
    x_row, x_head, bias_head, H, low, high,
    SOFTPLUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (N,)."""
    row, head = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = head < H
    value = tl.load(x + row * x_row + head * x_head, mask=inside, other=0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + head * bias_head, mask=inside, other=0).to(tl.float32)
    if SOFTPLUS:
        value = softplus(value)
    value = tl.minimum(tl.maximum(value, low), high)
    tl.store(out + row * H + head, value, mask=inside)


def step_size(x: Tensor, bias: Tensor | None, *, softplus: bool, low: float, high: float) -> Tensor:
    """x [B, T, H] plus `bias` [H], its softplus if wanted, clamped to low .. high; FP32, dense."""
    batch, tokens, heads = x.shape
    rows = x.reshape(batch * tokens, heads)
    out = torch.empty(batch, tokens, heads, dtype=torch.float32, device=x.device)
    step_size_kernel[(batch * tokens,)](
        out,
        rows,
        bias,
        rows.stride(0),
        rows.stride(1),
        0 if bias is None else bias.stride(0),
        heads,
        low,
        high,
        SOFTPLUS=softplus,
        BLOCK=triton.next_power_of_2(heads),
        num_warps=1,
    )
    return out
