"""Gated DeltaNet in plain torch: float64-capable oracle and the reference of every kernel.

Owns the mathematics (README.md beside this file has the derivation). Knows no cache and no format
of the state: ring tensors arrive decoded, states are FP32 (or float64 in tests).

Legend: B rows, T tokens, HK key heads, HV value heads, r = HV/HK, K head_k_dim, V head_v_dim,
L ring slots, n slots as read (L rounded up to 16). Value head h uses key head h // r.
State [B, HV, V, K].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.ops.ring import (
    Cursor,
    at_tokens,
    causal_mask,
    decay_between,
    product,
    read_slots,
    token_slots,
)


class GatedDeltaInputs(NamedTuple):
    """Inputs of T tokens. q and k are L2-normalised, q is scaled by K^-1/2; g <= 0 is the log decay
    and beta the write strength, both FP32."""

    q: Tensor  # [B, T, HK, K]
    k: Tensor  # [B, T, HK, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV]
    beta: Tensor  # [B, T, HV]


@dataclass(frozen=True, kw_only=True)
class GatedDeltaGeometry:
    """Sizes of one Gated DeltaNet layer."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int

    def __post_init__(self) -> None:
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"num_v_heads {self.num_v_heads} is not a multiple of "
                f"num_k_heads {self.num_k_heads}"
            )

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(HV, V, K)."""
        return (self.num_v_heads, self.head_v_dim, self.head_k_dim)

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Trailing shape of each per-token input [B, T, ...]."""
        key = (self.num_k_heads, self.head_k_dim)
        value, gate = (self.num_v_heads, self.head_v_dim), (self.num_v_heads,)
        return {"q": key, "k": key, "v": value, "g": gate, "beta": gate}


EXACT_INPUTS = ("g", "beta")
"""Inputs that must be FP32: sigmoid(0.5) in bf16 is off by 1.3e-3."""


def recurrence(state: Tensor, inputs: GatedDeltaInputs) -> tuple[Tensor, Tensor]:
    """Token by token from `state` [B, HV, V, K], in its dtype.

    Returns outputs [B, T, HV, V] and the new state; changes nothing in place.
    """
    q, k, v, g, beta = (t.to(state.dtype) for t in inputs)
    heads_per_key = v.shape[2] // k.shape[2]
    q = q.repeat_interleave(heads_per_key, dim=2)
    k = k.repeat_interleave(heads_per_key, dim=2)
    outputs = []
    for t in range(v.shape[1]):
        state = state * torch.exp(g[:, t])[..., None, None]
        prediction = (state * k[:, t, :, None, :]).sum(-1)
        u = beta[:, t, :, None] * (v[:, t] - prediction)
        state = state + u[..., None] * k[:, t, :, None, :]
        outputs.append((state * q[:, t, :, None, :]).sum(-1))
    return torch.stack(outputs, dim=1), state


def ring_layout(geometry: GatedDeltaGeometry, *, recompute: bool) -> dict[str, tuple[int, ...]]:
    """Ring records as (heads, width) or (heads,); `recompute` adds what u is recomputed from."""
    values = (geometry.num_v_heads, geometry.head_v_dim)
    layout = {
        "k": (geometry.num_k_heads, geometry.head_k_dim),
        "g": (geometry.num_v_heads,),
        "u": values,
    }
    if recompute:
        layout |= {"v": values, "beta": (geometry.num_v_heads,)}
    return layout


STORED = ("k", "v")
"""Records kept in the ring's storage; the others are FP32."""


def records(inputs: GatedDeltaInputs, *, recompute: bool = False) -> dict[str, Tensor]:
    """What the ring keeps of these tokens before u is known, [B, h, T, ...]."""
    names = ("k", "g", "v", "beta") if recompute else ("k", "g")
    return {name: getattr(inputs, name).transpose(1, 2) for name in names}


def parameters(inputs: GatedDeltaInputs) -> dict[str, Tensor]:
    """What `fold` needs beside the ring."""
    return {}


def window(
    state: Tensor,
    ring: Mapping[str, Tensor],
    pos: Cursor,
    inputs: GatedDeltaInputs,
    *,
    operand: str = "fp32",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs of T tokens on top of `state` and the ring; the state is never formed.

    Args:
        state: what outputs read, [B, HV, V, K].
        ring: decoded records, the T new ones already appended at slots pos .. pos+T-1, u excepted.
        pos: slots committed before this window.
        inputs: the new tokens; k and g (v and beta where the ring keeps them) are read from the
            ring, so that a token's value does not depend on when it was appended.
        operand: rounding of the operands of products; u is solved for with exact ones, so that it
            does not depend on how tokens are grouped into windows.

    Returns:
        Outputs [B, T, HV, V] in the dtype of `state`, and the record {"u": [B, HV, T, V]}.
    """
    dtype, tokens = state.dtype, inputs.q.shape[1]
    k, g = _read(ring, ("k", "g"), pos + tokens, dtype)
    if "v" in ring:
        v, beta = _read(ring, ("v", "beta"), pos + tokens, dtype)
        v, beta = at_tokens(v, pos, tokens), at_tokens(beta, pos, tokens)
    else:
        v, beta = inputs.v.to(dtype).transpose(1, 2), inputs.beta.to(dtype).transpose(1, 2)
    empty = isinstance(pos, int) and pos == 0
    history = None if empty else _read(ring, ("u",), pos, dtype)[0].transpose(-1, -2)
    q = inputs.q.to(dtype).transpose(1, 2)  # [B, HK, T, K]
    u, outputs = _solve(state, k, g.cumsum(-1), v, beta, history, pos, q, operand)
    return outputs.permute(0, 3, 1, 2), {"u": u.transpose(-1, -2)}


def fold(
    state: Tensor,
    ring: Mapping[str, Tensor],
    pos: Cursor,
    parameters: Mapping[str, Tensor],
    *,
    operand: str = "fp32",
) -> Tensor:
    """The state after the `pos` committed records, [B, HV, V, K]; changes nothing in place.

    Where the ring keeps v and beta, u is recomputed against `state`; otherwise the ring's u,
    computed from what was read, is folded as it is.
    """
    dtype = state.dtype
    batch, v_heads, v_dim, k_dim = state.shape
    k, g = _read(ring, ("k", "g"), pos, dtype)
    k_heads, slots = k.shape[1:3]
    log_decay = g.cumsum(-1)  # [B, HV, n]
    if "v" in ring:
        v, beta = _read(ring, ("v", "beta"), pos, dtype)
        u, _ = _solve(state, k, log_decay, v, beta, None, 0, None, operand)  # [B, HV, V, n]
    else:
        u = _read(ring, ("u",), pos, dtype)[0].transpose(-1, -2)
    total = log_decay[..., -1:]  # unused slots add nothing, so the last entry is the whole decay
    weighted = u * (total - log_decay).clamp_(max=0.0).exp_()[:, :, None]  # [B, HV, V, n]
    increment = product(weighted.reshape(batch, k_heads, -1, slots), k, operand)
    decay = total.clamp(max=0.0).exp_()[..., None]
    return torch.addcmul(increment.view(batch, v_heads, v_dim, k_dim), decay, state)


def _solve(
    state: Tensor,
    k: Tensor,
    log_decay: Tensor,
    v: Tensor,
    beta: Tensor,
    history: Tensor | None,
    pos: Cursor,
    q: Tensor | None,
    operand: str,
) -> tuple[Tensor, Tensor | None]:
    """Corrected values u [B, HV, V, T], and outputs of the same shape where q is given.

    k [B, HK, n, K] and log_decay [B, HV, n] (cumulative) cover the slots; v [B, HV, T, V] and beta
    [B, HV, T] the new tokens; history [B, HV, V, n] holds u of the slots below pos, or is None.
    """
    batch, v_heads, v_dim, k_dim = state.shape
    k_heads, slots = k.shape[1:3]
    tokens = v.shape[2]
    per_key = v_heads // k_heads
    k_now = at_tokens(k, pos, tokens)
    readers = k_now if q is None else torch.cat((k_now, q), dim=2)  # [B, HK, m*T, K], m = 1 or 2
    kinds = readers.shape[2] // tokens

    read = state.view(batch, k_heads, -1, k_dim)  # [B, HK, r*V, K]
    read = product(read, readers.transpose(-1, -2), operand)
    read = read.view(batch, v_heads, v_dim, kinds, tokens)
    log_decay_now = at_tokens(log_decay, pos, tokens)  # [B, HV, T]
    read = read * log_decay_now.clamp(max=0.0).exp_()[:, :, None, None]

    gram = product(readers, k.transpose(-1, -2), operand).view(
        batch, k_heads, 1, kinds, tokens, slots
    )
    decay = decay_between(log_decay_now, log_decay)
    weights = gram * decay.view(batch, k_heads, per_key, 1, tokens, slots)
    weights = weights.view(batch, v_heads, kinds, tokens, slots)
    up_to_now, before_now = causal_mask(pos, tokens, slots, state.device)
    # Row i predicts v_i from what earlier tokens wrote: strictly lower triangular over the slots.
    predict = weights[:, :, 0].where(before_now, 0.0).transpose(-1, -2)  # [B, HV, n, T]
    right_side = v.transpose(-1, -2) - read[..., 0, :]
    if history is not None:
        right_side = right_side - product(history, predict)
    right_side = right_side * beta[:, :, None]  # [B, HV, V, T]
    if tokens == 1:
        u = right_side
    else:
        # Solved from the right, uᵀ (I + A)ᵀ = Rᵀ, because that is the layout at hand.
        system = at_tokens(predict, pos, tokens) * beta[:, :, None]
        u = torch.linalg.solve_triangular(
            system, right_side, upper=True, left=False, unitriangular=True
        )
    if q is None:
        return u, None
    written = _with_tokens(history, pos, u, slots)
    answer = weights[:, :, 1].where(up_to_now, 0.0).transpose(-1, -2)
    return u, read[..., 1, :] + product(written, answer, operand)


def _with_tokens(history: Tensor | None, pos: Cursor, u: Tensor, slots: int) -> Tensor:
    """u of every slot, [B, HV, V, n]: the history with the new tokens' [B, HV, V, T] in place."""
    tokens = u.shape[-1]
    if isinstance(pos, Tensor):
        index = token_slots(pos, tokens).to(u.device)[:, None, None]
        return history.scatter(-1, index.expand_as(u), u)
    if history is not None:
        u = torch.cat((history[..., :pos], u), dim=-1)
    return F.pad(u, (0, slots - u.shape[-1])) if u.shape[-1] < slots else u


def _read(
    ring: Mapping[str, Tensor], names: tuple[str, ...], end: Cursor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    return tuple(read_slots(ring[name], end, dtype) for name in names)
