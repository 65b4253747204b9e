"""What both delta rules share: sizes, ring records, the triangular solve, outputs.

Owns everything that is the same in Gated DeltaNet and Kimi Delta Attention. Knows no decay over
several tokens: each rule hands in a `LookUp`, which says what a reader gets of an old state and of
a key. Start with `gated_delta/reference.py`, which uses all of this.

Legend: B rows, T tokens, HK key heads, HV value heads, r = HV/HK, K head_k_dim, V head_v_dim,
L ring slots, n slots as read (L rounded up to 16), m kinds of readers: k, or k and q. Value head h
uses key head h // r. State [B, HV, V, K].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.ops.ring import Cursor, at_tokens, causal_mask, product, read_slots, token_slots

EXACT_INPUTS = ("g", "beta")
"""Inputs that must be FP32: sigmoid(0.5) in bf16 is off by 1.3e-3."""

STORED = ("k", "v")
"""Records kept in the ring's storage; the others are FP32."""


@dataclass(frozen=True, kw_only=True)
class DeltaGeometry:
    """Sizes of one layer of a delta rule; a subclass says what shape a token's gate has."""

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
    def gate_shape(self) -> tuple[int, ...]:
        """Of one token's log decay."""
        raise NotImplementedError

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(HV, V, K)."""
        return (self.num_v_heads, self.head_v_dim, self.head_k_dim)

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Trailing shape of each per-token input [B, T, ...]."""
        key, value = (self.num_k_heads, self.head_k_dim), (self.num_v_heads, self.head_v_dim)
        return {"q": key, "k": key, "v": value, "g": self.gate_shape, "beta": (self.num_v_heads,)}


def ring_layout(geometry: DeltaGeometry, *, recompute: bool) -> dict[str, tuple[int, ...]]:
    """Ring records as (heads, width) or (heads,); `recompute` adds what u is recomputed from."""
    values = (geometry.num_v_heads, geometry.head_v_dim)
    layout = {
        "k": (geometry.num_k_heads, geometry.head_k_dim),
        "g": geometry.gate_shape,
        "u": values,
    }
    if recompute:
        layout |= {"v": values, "beta": (geometry.num_v_heads,)}
    return layout


def records(inputs: Any, *, recompute: bool = False) -> dict[str, Tensor]:
    """What the ring keeps of these tokens before u is known, [B, h, T, ...]."""
    names = ("k", "g", "v", "beta") if recompute else ("k", "g")
    return {name: getattr(inputs, name).transpose(1, 2) for name in names}


def parameters(inputs: Any) -> dict[str, Tensor]:
    """What `fold` needs beside the ring."""
    return {}


class LookUp(Protocol):
    """What readers get of an old state and of the keys, decayed to the token that reads.

    Args: state [B, HV, V, K]; k [B, HK, n, K] and g (log decays) of the slots; readers
    [B, HK, m * T, K] of the tokens at slots pos .. pos+T-1; `operand` rounds state, readers and k.

    Returns `read` [B, HV, V, m, T], from the state, and `weights` [B, HV, m, T, n], from the keys;
    weights of slots after the reader's are not used, but finite.
    """

    def __call__(
        self,
        state: Tensor,
        k: Tensor,
        g: Tensor,
        readers: Tensor,
        pos: Cursor,
        tokens: int,
        operand: str,
    ) -> tuple[Tensor, Tensor]: ...


def recurrence(state: Tensor, inputs: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token from `state` [B, HV, V, K], in its dtype.

    g [B, T, HV, K or 1] are the log decays; q, k, v and beta come from `inputs`. Returns outputs
    [B, T, HV, V] and the new state; changes nothing in place.
    """
    q, k, v = (t.to(state.dtype) for t in (inputs.q, inputs.k, inputs.v))
    g, beta = g.to(state.dtype), inputs.beta.to(state.dtype)
    heads_per_key = v.shape[2] // k.shape[2]
    q = q.repeat_interleave(heads_per_key, dim=2)
    k = k.repeat_interleave(heads_per_key, dim=2)
    outputs = []
    for t in range(v.shape[1]):
        state = state * torch.exp(g[:, t])[..., None, :]
        prediction = (state * k[:, t, :, None, :]).sum(-1)
        u = beta[:, t, :, None] * (v[:, t] - prediction)
        state = state + u[..., None] * k[:, t, :, None, :]
        outputs.append((state * q[:, t, :, None, :]).sum(-1))
    return torch.stack(outputs, dim=1), state


def window(
    look_up: LookUp,
    state: Tensor,
    ring: Mapping[str, Tensor],
    pos: Cursor,
    inputs: Any,
    operand: str,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The window of either rule: see `gated_delta.reference.window`."""
    dtype, tokens = state.dtype, inputs.q.shape[1]
    k, g = read(ring, ("k", "g"), pos + tokens, dtype)
    if "v" in ring:
        v, beta = read(ring, ("v", "beta"), pos + tokens, dtype)
        v, beta = at_tokens(v, pos, tokens), at_tokens(beta, pos, tokens)
    else:
        v, beta = inputs.v.to(dtype).transpose(1, 2), inputs.beta.to(dtype).transpose(1, 2)
    empty = isinstance(pos, int) and pos == 0
    history = None if empty else read(ring, ("u",), pos, dtype)[0].transpose(-1, -2)
    q = inputs.q.to(dtype).transpose(1, 2)  # [B, HK, T, K]
    readers = torch.cat((at_tokens(k, pos, tokens), q), dim=2)
    from_state, weights = look_up(state, k, g, readers, pos, tokens, operand)
    u = _solve(from_state, weights, v, beta, history, pos)
    written = _with_tokens(history, pos, u, weights.shape[-1])
    up_to_now, _ = causal_mask(pos, tokens, weights.shape[-1], state.device)
    answer = weights[:, :, 1].where(up_to_now, 0.0).transpose(-1, -2)
    outputs = from_state[..., 1, :] + product(written, answer, operand)  # [B, HV, V, T]
    return outputs.permute(0, 3, 1, 2), {"u": u.transpose(-1, -2)}


def corrections(
    look_up: LookUp,
    state: Tensor,
    ring: Mapping[str, Tensor],
    pos: Cursor,
    k: Tensor,
    g: Tensor,
    operand: str,
) -> Tensor:
    """u of the `pos` committed records, [B, HV, V, n], zero in the other slots.

    Solved for against `state` where the ring keeps v and beta, else what the ring holds. k and g
    are the ring's, as read.
    """
    if "v" not in ring:
        return read(ring, ("u",), pos, state.dtype)[0].transpose(-1, -2)
    v, beta = read(ring, ("v", "beta"), pos, state.dtype)
    from_state, weights = look_up(state, k, g, k, 0, k.shape[2], operand)
    return _solve(from_state, weights, v, beta, None, 0)


def read(
    ring: Mapping[str, Tensor], names: tuple[str, ...], end: Cursor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Records by name, as `ring.read_slots` reads them."""
    return tuple(read_slots(ring[name], end, dtype) for name in names)


def _solve(
    from_state: Tensor,
    weights: Tensor,
    v: Tensor,
    beta: Tensor,
    history: Tensor | None,
    pos: Cursor,
) -> Tensor:
    """Corrected values u [B, HV, V, T].

    from_state and weights as from a `LookUp`, readers k first; v [B, HV, T, V] and beta [B, HV, T]
    of the new tokens; history [B, HV, V, n] holds u of the slots below pos, or is None.
    """
    tokens, slots = weights.shape[-2:]
    _, before_now = causal_mask(pos, tokens, slots, weights.device)
    # Row i predicts v_i from what earlier tokens wrote: strictly lower triangular over the slots.
    predict = weights[:, :, 0].where(before_now, 0.0).transpose(-1, -2)  # [B, HV, n, T]
    right_side = v.transpose(-1, -2) - from_state[..., 0, :]
    if history is not None:
        right_side = right_side - product(history, predict)
    right_side = right_side * beta[:, :, None]  # [B, HV, V, T]
    if tokens == 1:
        return right_side
    # Solved from the right, uᵀ (I + A)ᵀ = Rᵀ, because that is the layout at hand.
    system = at_tokens(predict, pos, tokens) * beta[:, :, None]
    return torch.linalg.solve_triangular(
        system, right_side, upper=True, left=False, unitriangular=True
    )


def _with_tokens(history: Tensor | None, pos: Cursor, u: Tensor, slots: int) -> Tensor:
    """u of every slot, [B, HV, V, n]: the history with the new tokens' [B, HV, V, T] in place."""
    tokens = u.shape[-1]
    if isinstance(pos, Tensor):
        index = token_slots(pos, tokens).to(u.device)[:, None, None]
        return history.scatter(-1, index.expand_as(u), u)
    if history is not None:
        u = torch.cat((history[..., :pos], u), dim=-1)
    return F.pad(u, (0, slots - u.shape[-1])) if u.shape[-1] < slots else u
