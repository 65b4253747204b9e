"""Kimi Delta Attention in plain torch: float64-capable oracle and the reference of every kernel.

Owns the mathematics of a decay per key channel (README.md beside this file has the derivation; what
Gated DeltaNet has in common with it is in `../delta_rule.py`). Knows no cache and no format of the
state: ring tensors arrive decoded, states are FP32 (or float64 in tests).

Legend: B rows, T tokens, HK key heads, HV value heads, r = HV/HK, K head_k_dim, V head_v_dim,
L ring slots, n slots as read (L rounded up to 16), m kinds of readers. Value head h uses key head
h // r. State [B, HV, V, K].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.ops import delta_rule
from replayssm.ops.delta_rule import EXACT_INPUTS, STORED, parameters, records, ring_layout
from replayssm.ops.ring import Cursor, at_tokens, product, round_operand

__all__ = [
    "EXACT_INPUTS",
    "STORED",
    "KimiDeltaGeometry",
    "KimiDeltaInputs",
    "fold",
    "parameters",
    "records",
    "recurrence",
    "ring_layout",
    "window",
]

# Tokens and slots of one block of pairs: a block holds this many squared decay factors a channel.
PAIRS = 16


class KimiDeltaInputs(NamedTuple):
    """Inputs of T tokens. q and k are L2-normalised, q is scaled by K^-1/2; g <= 0 is the log decay
    of each key channel and beta the write strength, both FP32."""

    q: Tensor  # [B, T, HK, K]
    k: Tensor  # [B, T, HK, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV, K]
    beta: Tensor  # [B, T, HV]


@dataclass(frozen=True, kw_only=True)
class KimiDeltaGeometry(delta_rule.DeltaGeometry):
    """Sizes of one layer of Kimi Delta Attention; every key channel of a state has its decay."""

    @property
    def gate_shape(self) -> tuple[int, int]:
        """(HV, K)."""
        return (self.num_v_heads, self.head_k_dim)


def recurrence(state: Tensor, inputs: KimiDeltaInputs) -> tuple[Tensor, Tensor]:
    """Token by token from `state` [B, HV, V, K], in its dtype.

    Returns outputs [B, T, HV, V] and the new state; changes nothing in place.
    """
    return delta_rule.recurrence(state, inputs, inputs.g)


def window(
    state: Tensor,
    ring: Mapping[str, Tensor],
    pos: Cursor,
    inputs: KimiDeltaInputs,
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
        operand: rounding of the operands of products: of decayed readers where they meet the state,
            of k and q before their decay where they meet each other. u is solved for with exact
            products of these, so that it does not depend on how tokens are grouped into windows.

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
    computed from what was read, is folded as it is. With a rounded operand u and the decayed k are
    what gets rounded.
    """
    k, g = delta_rule.read(ring, ("k", "g"), pos, state.dtype)
    u = delta_rule.corrections(_look_up, state, ring, pos, k, g, operand)  # [B, HV, V, n]
    log_decay = _cumulative(g)  # [B, HV, n, K]
    total = log_decay[:, :, -1:]  # unused slots add nothing, so the last entry is the whole decay
    decayed = _repeat(k, state.shape[1]) * _decay(total - log_decay, state.dtype)
    return torch.addcmul(product(u, decayed, operand), _decay(total, state.dtype), state)


def _look_up(
    state: Tensor,
    k: Tensor,
    g: Tensor,
    readers: Tensor,
    pos: Cursor,
    tokens: int,
    operand: str,
) -> tuple[Tensor, Tensor]:
    """See `delta_rule.LookUp`; g [B, HV, n, K].

    A factor of the decay belongs to each pair of tokens and each channel, so pairs are taken in
    blocks of PAIRS tokens by PAIRS slots: the memory of a long window stays that of a short one.
    """
    batch, v_heads, v_dim, k_dim = state.shape
    slots = k.shape[2]
    kinds = readers.shape[2] // tokens
    log_decay = _cumulative(g)
    log_decay_now = at_tokens(log_decay, pos, tokens)  # [B, HV, T, K]
    readers = _repeat(readers, v_heads).view(batch, v_heads, kinds, tokens, k_dim)

    now = _decay(log_decay_now, state.dtype)[:, :, None]
    decayed = (readers * now).view(batch, v_heads, kinds * tokens, k_dim)
    read = product(state, decayed.transpose(-1, -2), operand)
    read = read.view(batch, v_heads, v_dim, kinds, tokens)

    readers = round_operand(readers, operand).transpose(2, 3)  # [B, HV, T, m, K]
    k = _repeat(round_operand(k, operand), v_heads)
    weights = state.new_zeros(batch, v_heads, kinds, tokens, slots)
    for token, slot in _blocks(pos, tokens, slots):
        between = log_decay_now[:, :, token, None] - log_decay[:, :, None, slot]
        keys = _decay(between, state.dtype).mul_(k[:, :, None, slot])  # [B, HV, T', n', K]
        pairs = product(keys, readers[:, :, token].contiguous().transpose(-1, -2))
        weights[..., token, slot] = pairs.permute(0, 1, 4, 2, 3)
    return read, weights


def _blocks(pos: Cursor, tokens: int, slots: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of tokens and slots that between them hold every slot up to a token's own."""
    furthest = pos if isinstance(pos, int) else int(pos.max())
    for token in range(0, tokens, PAIRS):
        end = min(token + PAIRS, tokens)
        for slot in range(0, min(furthest + end, slots), PAIRS):
            yield slice(token, end), slice(slot, slot + PAIRS)


def _cumulative(g: Tensor) -> Tensor:
    """Cumulative log decays [B, HV, n, K], in float64.

    A channel's decay can be e^-30 at some tokens and 1 at others of one ring. Where a sum of -500
    has built up, FP32 differences are off by 3e-5; these are exact until they are rounded to FP32.
    """
    return g.to(torch.float64).cumsum(2)


def _decay(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """exp of (differences of) cumulative log decays, in (0, 1]; no exp(-G) is ever formed."""
    return log_decay.clamp(max=0.0).to(dtype).exp_()


def _repeat(x: Tensor, v_heads: int) -> Tensor:
    """Of each key head [B, HK, ...], one copy for each of its value heads [B, HV, ...]."""
    return x.repeat_interleave(v_heads // x.shape[1], dim=1)
