"""Gated DeltaNet layers: qwen3_5, qwen3_5_moe, qwen3_next, olmo_hybrid.

Owns the argument layout of `torch_recurrent_gated_delta_rule` (one token from a cached state) and
`torch_chunk_gated_delta_rule` (everything else). Must not know sessions, policies or caches.

Shapes: B rows, T tokens, HK key heads, HV value heads, K key dimension, V value dimension.

Facts of both transformers versions, and what we make of them:

* q and k arrive raw; `use_qk_l2norm_in_kernel=True` asks for L2 normalisation with eps 1e-6, in
  FP32. We normalise here, in FP32, and scale q by K^-1/2: the operator gets what it folds and
  reads. For a bf16 model the ring therefore holds FP32 keys: the same numbers as a bf16 ring of raw
  keys that is normalised at replay, without rounding the normalised key once more.
* 5.17 repeats q and k to HV heads before the call, 5.24 passes HK heads. Repeats are consecutive
  copies, so every (heads / HK)-th head is taken: the ring keeps HK keys in both versions, with the
  same bits.
* A fast family (`get_family`) rounds the normalised q and k to the dtype of the model, as public
  kernels do, and leaves v as it is: half the bytes in the ring, and fewer products in windows.
* g is FP32 in both versions. beta is the sigmoid in the dtype of the model: FP32 for an FP32 model,
  but for a bf16 model it arrives rounded to bf16 (8 bits), and we use it as the layer computed it:
  the rounding is a property of the model as served, and every policy row gets the same beta.
* The state argument is K-first in the library, V-first with us; it never crosses this border.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from replayssm.models.errors import UnsupportedInputError
from replayssm.models.families import Execute, refuse_packing, state_placeholder
from replayssm.ops.gated_delta.reference import GatedDeltaInputs

L2_NORM_EPS = 1e-6


class GatedDelta:
    """The gated delta rule family (see module docstring)."""

    recurrence = "gated_delta"
    functions = ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule")
    inputs: type = GatedDeltaInputs  # of the operator

    def __init__(self, *, fast: bool = False):
        self._fast = fast

    def shapes(self, mixer: nn.Module) -> dict[str, int]:
        return {
            "num_k_heads": mixer.num_k_heads,
            "num_v_heads": mixer.num_v_heads,
            "head_v_dim": mixer.head_v_dim,
            "head_k_dim": mixer.head_k_dim,
        }

    def ring_dtype(self, mixer: nn.Module) -> torch.dtype:
        return next(mixer.parameters()).dtype if self._fast else torch.float32

    def call(self, name: str, mixer: nn.Module, execute: Execute, args: tuple, kwargs: dict) -> Any:
        del name  # both functions mean the same operator; T = 1 is no special case
        k_heads = self.shapes(mixer)["num_k_heads"]
        normalise = _l2_normalise_by_kernel if self._fast else _l2_normalise
        return _delta_rule(self.inputs, k_heads, normalise, execute, *args, **kwargs)

    def select_rows(self, inputs: Any, rows: slice) -> Any:
        return self.inputs(*(tensor[rows] for tensor in inputs))

    def scale_log_decay(self, inputs: Any, factor: float) -> Any:
        return inputs._replace(g=inputs.g * factor)

    def log_decay(self, inputs: Any) -> Tensor:
        return inputs.g


def _delta_rule(
    make_inputs: type,
    k_heads: int,
    normalise: Callable[..., Tensor],
    execute: Execute,
    query: Tensor,  # [B, T, HK or HV, K]
    key: Tensor,  # [B, T, HK or HV, K]
    value: Tensor,  # [B, T, HV, V]
    g: Tensor,  # log decay <= 0: [B, T, HV], or one for each key channel, [B, T, HV, K]
    beta: Tensor,  # [B, T, HV]
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    refuse_packing(kwargs)
    if not use_qk_l2norm_in_kernel:
        raise UnsupportedInputError(
            "the delta rule was called without L2 normalisation of q and k; no supported "
            "architecture does that"
        )
    copies = key.shape[2] // k_heads
    q = normalise(query[:, :, ::copies], scale=query.shape[-1] ** -0.5)
    k = normalise(key[:, :, ::copies])
    inputs = make_inputs(q=q, k=k, v=value.to(k.dtype), g=g.float(), beta=beta.float())
    out = execute(inputs, continued=initial_state is not None)  # [B, T, HV, V] FP32
    state = state_placeholder(out) if output_final_state else None
    # The gated norm that follows computes in FP32 but takes its result dtype from here.
    return out.to(query.dtype), state


def _l2_normalise(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """x / sqrt(|x|^2 + eps) along the last axis, times `scale`, in FP32."""
    x = x.float()
    x = x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + L2_NORM_EPS)
    return x if scale == 1.0 else x * scale


def _l2_normalise_by_kernel(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """The same, rounded to x's dtype."""
    from replayssm.ops.glue.triton_glue import unit_vectors

    return unit_vectors(x, L2_NORM_EPS, scale=scale)
