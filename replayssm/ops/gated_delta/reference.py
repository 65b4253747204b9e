"""Gated DeltaNet in plain torch: float64-capable oracle and the reference of every kernel.

Owns the mathematics (README.md beside this file has the derivation; what Kimi Delta Attention has
in common with it is in `../delta_rule.py`). Knows no cache and no format of the state: ring tensors
arrive decoded, states are FP32 (or float64 in tests).

Legend: B rows, T tokens, HK key heads, HV value heads, r = HV/HK, K head_k_dim, V head_v_dim,
L ring slots, n slots as read (L rounded up to 16), m kinds of readers. Value head h uses key head
h // r. State [B, HV, V, K].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.ops import delta_rule
from replayssm.ops.delta_rule import EXACT_INPUTS, STORED, parameters, records, ring_layout
from replayssm.ops.ring import Cursor, at_tokens, decay_between, product

__all__ = [
    "EXACT_INPUTS",
    "STORED",
    "GatedDeltaGeometry",
    "GatedDeltaInputs",
    "fold",
    "parameters",
    "records",
    "recurrence",
    "ring_layout",
    "window",
]


class GatedDeltaInputs(NamedTuple):
    """Inputs of T tokens. q and k are L2-normalised, q is scaled by K^-1/2; g <= 0 is the log decay
    and beta the write strength, both FP32."""

    q: Tensor  # [B, T, HK, K]
    k: Tensor  # [B, T, HK, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV]
    beta: Tensor  # [B, T, HV]


@dataclass(frozen=True, kw_only=True)
class GatedDeltaGeometry(delta_rule.DeltaGeometry):
    """Sizes of one Gated DeltaNet layer; a head's state decays as a whole."""

    @property
    def gate_shape(self) -> tuple[int]:
        """(HV,)."""
        return (self.num_v_heads,)


def recurrence(state: Tensor, inputs: GatedDeltaInputs) -> tuple[Tensor, Tensor]:
    """Token by token from `state` [B, HV, V, K], in its dtype.

    Returns outputs [B, T, HV, V] and the new state; changes nothing in place.
    """
    return delta_rule.recurrence(state, inputs, inputs.g[..., None])


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
    return delta_rule.window(_look_up, state, ring, pos, inputs, operand)


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
    batch, v_heads, v_dim, k_dim = state.shape
    k, g = delta_rule.read(ring, ("k", "g"), pos, state.dtype)
    k_heads, slots = k.shape[1:3]
    u = delta_rule.corrections(_look_up, state, ring, pos, k, g, operand)  # [B, HV, V, n]
    log_decay = g.cumsum(-1)  # [B, HV, n]
    total = log_decay[..., -1:]  # unused slots add nothing, so the last entry is the whole decay
    weighted = u * (total - log_decay).clamp_(max=0.0).exp_()[:, :, None]  # [B, HV, V, n]
    increment = product(weighted.reshape(batch, k_heads, -1, slots), k, operand)
    decay = total.clamp(max=0.0).exp_()[..., None]
    return torch.addcmul(increment.view(batch, v_heads, v_dim, k_dim), decay, state)


def _look_up(
    state: Tensor,
    k: Tensor,
    g: Tensor,
    readers: Tensor,
    pos: Cursor,
    tokens: int,
    operand: str,
) -> tuple[Tensor, Tensor]:
    """See `delta_rule.LookUp`; g [B, HV, n]."""
    batch, v_heads, v_dim, k_dim = state.shape
    k_heads, slots = k.shape[1:3]
    kinds = readers.shape[2] // tokens
    log_decay = g.cumsum(-1)  # [B, HV, n]
    log_decay_now = at_tokens(log_decay, pos, tokens)  # [B, HV, T]

    read = state.view(batch, k_heads, -1, k_dim)  # [B, HK, r*V, K]
    read = product(read, readers.transpose(-1, -2), operand)
    read = read.view(batch, v_heads, v_dim, kinds, tokens)
    read = read * log_decay_now.clamp(max=0.0).exp_()[:, :, None, None]

    gram = product(readers, k.transpose(-1, -2), operand)
    decay = decay_between(log_decay_now, log_decay)
    weights = gram.view(batch, k_heads, 1, kinds, tokens, slots) * decay.view(
        batch, k_heads, -1, 1, tokens, slots
    )
    return read, weights.view(batch, v_heads, kinds, tokens, slots)
