"""Mamba-2 in plain torch: float64-capable oracle and the reference of every kernel.

Owns the mathematics (README.md beside this file has the derivation). Knows no cache and no format
of the state: ring tensors arrive decoded, states are FP32 (or float64 in tests).

Legend: B rows, T tokens, H heads, P head_dim, G groups, N d_state, r = H/G heads a group, L ring
slots, n slots as read (L rounded up to 16). Head h reads group h // r. State [B, H, P, N].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.ops.ring import Cursor, at_tokens, causal_mask, decay_between, product, read_slots


class Mamba2Inputs(NamedTuple):
    """Inputs of T tokens. dt is post-softplus (>= 0) and FP32, A < 0; D is the skip, or None."""

    x: Tensor  # [B, T, H, P]
    dt: Tensor  # [B, T, H]
    A: Tensor  # [H]
    B_: Tensor  # [B, T, G, N]
    C: Tensor  # [B, T, G, N]
    D: Tensor | None = None  # [H] or [H, P]


@dataclass(frozen=True, kw_only=True)
class Mamba2Geometry:
    """Sizes of one Mamba-2 layer."""

    num_heads: int
    head_dim: int
    n_groups: int
    d_state: int

    def __post_init__(self) -> None:
        if self.num_heads % self.n_groups:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of n_groups {self.n_groups}"
            )

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(H, P, N)."""
        return (self.num_heads, self.head_dim, self.d_state)

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Trailing shape of each per-token input [B, T, ...]."""
        heads, group = self.num_heads, (self.n_groups, self.d_state)
        return {"x": (heads, self.head_dim), "dt": (heads,), "B_": group, "C": group}


EXACT_INPUTS = ("dt",)
"""Inputs that must be FP32: a decay in bf16 forgets at another rate."""


def recurrence(state: Tensor, inputs: Mamba2Inputs) -> tuple[Tensor, Tensor]:
    """Token by token from `state` [B, H, P, N], in its dtype.

    Returns outputs [B, T, H, P] and the new state; changes nothing in place.
    """
    dtype = state.dtype
    x, dt, A, B_, C = (t.to(dtype) for t in inputs[:5])
    heads_per_group = x.shape[2] // B_.shape[2]
    B_ = B_.repeat_interleave(heads_per_group, dim=2)
    C = C.repeat_interleave(heads_per_group, dim=2)
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(A * dt[:, t])[..., None, None]
        increment = (dt[:, t, :, None] * x[:, t])[..., None] * B_[:, t, :, None, :]
        state = decay * state + increment
        outputs.append((state * C[:, t, :, None, :]).sum(-1))
    return torch.stack(outputs, dim=1) + _skip(inputs, dtype), state


def ring_layout(geometry: Mamba2Geometry, *, recompute: bool) -> dict[str, tuple[int, ...]]:
    """Ring records as (heads, width) or (heads,); none holds a read, so `recompute` is a no-op."""
    return {
        "x": (geometry.num_heads, geometry.head_dim),
        "B": (geometry.n_groups, geometry.d_state),
        "dt": (geometry.num_heads,),
    }


STORED = ("x", "B")
"""Records kept in the ring's storage; the others are FP32."""


def records(inputs: Mamba2Inputs, *, recompute: bool = False) -> dict[str, Tensor]:
    """What the ring keeps of these tokens, [B, h, T, ...]."""
    return {
        "x": inputs.x.transpose(1, 2),
        "B": inputs.B_.transpose(1, 2),
        "dt": inputs.dt.transpose(1, 2),
    }


def parameters(inputs: Mamba2Inputs) -> dict[str, Tensor]:
    """What `fold` needs beside the ring."""
    return {"A": inputs.A}


def window(
    state: Tensor,
    ring: Mapping[str, Tensor],
    pos: Cursor,
    inputs: Mamba2Inputs,
    *,
    operand: str = "fp32",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs of T tokens on top of `state` and the ring; the state is never formed.

    Args:
        state: what outputs read, [B, H, P, N].
        ring: decoded records, the T new ones already appended at slots pos .. pos+T-1.
        pos: slots committed before this window.
        inputs: the new tokens; x, B_ and dt are read from the ring, so that a token's value does
            not depend on when it was appended; D multiplies the x given here.
        operand: rounding of the operands of every product.

    Returns:
        Outputs [B, T, H, P] in the dtype of `state`, and no further records.
    """
    dtype = state.dtype
    batch, tokens, groups, _ = inputs.C.shape
    _, heads, head_dim, d_state = state.shape
    x, B_, dt = _read(ring, pos + tokens, dtype)
    slots = dt.shape[2]
    C = inputs.C.to(dtype).transpose(1, 2).contiguous()  # [B, G, T, N]

    log_decay = (inputs.A.to(dtype)[:, None] * dt).cumsum(-1)  # [B, H, n]
    log_decay_now = at_tokens(log_decay, pos, tokens)  # [B, H, T]
    weights = decay_between(log_decay_now, log_decay).mul_(dt[:, :, None])  # [B, H, T, n]
    bc = product(C, B_.transpose(-1, -2), operand)  # [B, G, T, n]
    weights = weights.view(batch, groups, -1, tokens, slots).mul_(bc[:, :, None])
    up_to_now, _ = causal_mask(pos, tokens, slots, state.device)
    weights = weights.view(batch, heads, tokens, slots).where(up_to_now, 0.0)

    read = state.view(batch, groups, -1, d_state)  # [B, G, r*P, N]
    outputs = product(read, C.transpose(-1, -2), operand).view(batch, heads, head_dim, tokens)
    outputs = outputs.mul_(log_decay_now.clamp(max=0.0).exp_()[:, :, None])
    outputs += product(x.transpose(-1, -2), weights.transpose(-1, -2), operand)  # [B, H, P, T]
    return outputs.permute(0, 3, 1, 2) + _skip(inputs, dtype), {}


def fold(
    state: Tensor,
    ring: Mapping[str, Tensor],
    pos: Cursor,
    parameters: Mapping[str, Tensor],
    *,
    operand: str = "fp32",
) -> Tensor:
    """The state after the `pos` committed records, [B, H, P, N]; changes nothing in place.

    The increment is (weight * x) Bᵀ: with a rounded operand the decayed x is what gets rounded.
    """
    dtype = state.dtype
    batch, heads, head_dim, d_state = state.shape
    x, B_, dt = _read(ring, pos, dtype)
    groups, slots = B_.shape[1:3]
    log_decay = (parameters["A"].to(dtype)[:, None] * dt).cumsum(-1)
    total = log_decay[..., -1:]  # unused slots add nothing, so the last entry is the whole decay
    weights = dt * (total - log_decay).clamp_(max=0.0).exp_()  # [B, H, n]
    weighted = (x * weights[..., None]).transpose(-1, -2)  # [B, H, P, n]
    increment = product(weighted.reshape(batch, groups, -1, slots), B_, operand)
    decay = total.clamp(max=0.0).exp_()[..., None]
    return increment.view(batch, heads, head_dim, d_state).addcmul_(decay, state)


def _read(ring: Mapping[str, Tensor], end: Cursor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(read_slots(ring[name], end, dtype) for name in ("x", "B", "dt"))


def _skip(inputs: Mamba2Inputs, dtype: torch.dtype) -> Tensor | float:
    if inputs.D is None:
        return 0.0
    D = inputs.D.to(dtype)
    return (D if D.dim() == 2 else D[:, None]) * inputs.x.to(dtype)
