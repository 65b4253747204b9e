"""Parts shared by the two training models: norms, the causal convolution, decay initialisation.

Knows nothing of a particular recurrence. Shape legend: B batch, T time, D channels, H heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis in FP32, as both architectures compute it."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps)


def causal_conv_silu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Depthwise causal convolution and SiLU. x [B, T, D], weight [D, 1, W], zero history. A sum
    of W shifted products: on a GPU this fuses, where a depthwise convolution call is slow in its
    backward pass."""
    width = weight.shape[-1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    y = sum(padded[:, j : j + x.shape[1]] * weight[:, 0, j].to(x.dtype) for j in range(width))
    return F.silu(y if bias is None else y + bias.to(x.dtype))


def conv_step(x: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One token of `causal_conv_silu`. x [B, D]; history [B, W, D] is shifted in place and ends
    in x."""
    history.copy_(torch.cat([history[:, 1:], x[:, None].to(history.dtype)], dim=1))
    y = torch.einsum("bwd,dw->bd", history, weight[:, 0].to(history.dtype))
    return F.silu(y if bias is None else y + bias)


def memory_lengths(heads: int, layer: int, layers: int, shortest: float, longest: float) -> Tensor:
    """[H] initial memory lengths in tokens, log-spaced; layers are offset against each other to
    fill the spectrum."""
    offset = (layer + 0.5) / layers
    position = (torch.arange(heads) + offset) / heads
    return shortest * (longest / shortest) ** position


def inverse_softplus(y: Tensor) -> Tensor:
    """x such that softplus(x) = y > 0."""
    return y + torch.log(-torch.expm1(-y))


def init_linear(module: nn.Linear, std: float | None = None) -> None:
    """Normal initialisation with standard deviation 1/sqrt(fan in) unless given."""
    nn.init.normal_(
        module.weight, std=std if std is not None else 1.0 / math.sqrt(module.in_features)
    )


class UnitLowerInverse(torch.autograd.Function):
    """(I - A)^-1 for strictly lower triangular A [..., L, L], L a power of two; keeps only the
    result for the backward pass.

    Diagonal blocks are inverted and joined pairwise, from size 1 up to L: (D - C)^-1 = T + T C T
    for a pair whose diagonal blocks have the inverse T. Every intermediate is part of a true
    inverse. The shorter product form (I + A)(I + A^2)(I + A^4)... is not used: for keys that
    resemble each other its powers grow beyond 1e7 and cancel.
    """

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        size = a.shape[-1]
        index = torch.arange(size, device=a.device)
        inverse = torch.eye(size, dtype=a.dtype, device=a.device)
        half = 1
        while half < size:
            block, pair = index // half, index // (2 * half)
            joins = (pair[:, None] == pair[None, :]) & (block[:, None] > block[None, :])
            between = torch.where(joins, a, 0.0)
            inverse = inverse + (between if half == 1 else inverse @ between @ inverse)
            half *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return transposed @ grad @ transposed


class AffineScan(torch.autograd.Function):
    """S[c + 1] = M[c] S[c] + N[c]: one matrix product per chunk, forward and backward.

    m [C, n, K, K], n [C, n, K, V], start [n, K, V] -> (states at chunk starts [C, n, K, V],
    final state [n, K, V]).
    """

    @staticmethod
    def forward(ctx, m: Tensor, n: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        states = torch.empty(len(m) + 1, *start.shape, dtype=start.dtype, device=start.device)
        states[0] = start
        for c in range(len(m)):
            torch.baddbmm(n[c], m[c], states[c], out=states[c + 1])
        ctx.save_for_backward(m, states)
        return states[:-1], states[-1].clone()

    @staticmethod
    def backward(ctx, grad_states: Tensor, grad_final: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m, states = ctx.saved_tensors
        grads = torch.empty_like(
            states
        )  # grads[c]: with respect to the state at the start of chunk c
        grads[-1] = grad_final
        for c in range(len(m) - 1, -1, -1):
            torch.baddbmm(grad_states[c], m[c].transpose(-1, -2), grads[c + 1], out=grads[c])
        return grads[1:] @ states[:-1].transpose(-1, -2), grads[1:], grads[0]


class DecayScan(torch.autograd.Function):
    """S[c + 1] = decay[c] S[c] + added[c], element by element: one kernel per chunk, forward and
    backward.

    decay [C, B, H], added [C, B, H, P, N], start [B, H, P, N] -> (states at chunk starts, as
    added; final state, as start).
    """

    @staticmethod
    def forward(ctx, decay: Tensor, added: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        factor = decay[..., None, None]
        states = torch.empty(len(decay) + 1, *start.shape, dtype=start.dtype, device=start.device)
        states[0] = start
        for c in range(len(decay)):
            torch.addcmul(added[c], factor[c], states[c], out=states[c + 1])
        ctx.save_for_backward(decay, states)
        return states[:-1], states[-1].clone()

    @staticmethod
    def backward(ctx, grad_states: Tensor, grad_final: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        decay, states = ctx.saved_tensors
        factor = decay[..., None, None]
        grads = torch.empty_like(states)
        grads[-1] = grad_final
        for c in range(len(decay) - 1, -1, -1):
            torch.addcmul(grad_states[c], factor[c], grads[c + 1], out=grads[c])
        grad_decay = torch.linalg.vecdot(grads[1:].flatten(-2), states[:-1].flatten(-2))
        return grad_decay, grads[1:], grads[0]
