"""Mamba-2 layers: mamba2, nemotron_h, bamba, falcon_h1, granitemoehybrid, zamba2.

Owns the argument layout of `mamba2_selective_state_update` (one token from a cached state),
`mamba2_chunk_scan` (everything else) and `mamba2_split_conv1d_scan_combined` (a fused path the
layers take only while training, without a cache). Must not know sessions, policies or caches.

Shapes: B rows, T tokens, H heads, P head dimension, N state size, G groups.

Facts of both transformers versions, and what we make of them:

* The one-token call gets A, D, dt and dt_bias expanded along P (and N) with stride 0; one slice of
  each is the value per head.
* dt arrives raw. Step size = softplus(dt + dt_bias), then clamped to the layer's `time_step_limit`,
  all in FP32 (the library adds and takes softplus in the dtype of the model, which for bf16 rounds
  the step size to 8 bits; the public kernels use FP32 as we do).
* The library clamps in `mamba2_chunk_scan` only. A token's step size would then depend on how many
  tokens were run together, so we take the clamp as part of the layer and apply it to every token.
  It is inactive by default in mamba2, bamba, falcon_h1, granitemoehybrid (limits 0 and infinity);
  nemotron_h and zamba2 use [time_step_min, infinity), and decoding one token at a time in the
  library then differs from its own full-sequence forward whenever a step size is below
  time_step_min. Ours agrees with the full sequence.
* falcon_h1 without its norm passes the gate z into the one-token call and applies it itself
  otherwise.
* Outputs are FP32 whatever the model dtype (as `mamba2_chunk_scan` does); the layers cast after the
  norm.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from replayssm.models.families import Execute, refuse_packing, state_placeholder
from replayssm.ops.mamba2.reference import Mamba2Inputs

SOFTPLUS_LINEAR_ABOVE = 20.0


class Mamba2:
    """The Mamba-2 family (see module docstring)."""

    recurrence = "mamba2"
    functions = (
        "mamba2_selective_state_update",
        "mamba2_chunk_scan",
        "mamba2_split_conv1d_scan_combined",
    )

    def __init__(self, *, fast: bool = False):
        self._step_size = _step_size_by_kernel if fast else _step_size

    def shapes(self, mixer: nn.Module) -> dict[str, int]:
        return {
            "num_heads": mixer.num_heads,
            "head_dim": mixer.head_dim,
            "n_groups": mixer.n_groups,
            "d_state": mixer.ssm_state_size,
        }

    def ring_dtype(self, mixer: nn.Module) -> torch.dtype:
        return mixer.in_proj.weight.dtype

    def call(self, name: str, mixer: nn.Module, execute: Execute, args: tuple, kwargs: dict) -> Any:
        if name == "mamba2_split_conv1d_scan_combined":
            return None  # "no fused kernel": the layer then goes through mamba2_chunk_scan
        if name == "mamba2_selective_state_update":
            return _one_token(mixer, self._step_size, execute, *args, **kwargs)
        return _many_tokens(mixer, self._step_size, execute, *args, **kwargs)

    def select_rows(self, inputs: Mamba2Inputs, rows: slice) -> Mamba2Inputs:
        return inputs._replace(
            x=inputs.x[rows], dt=inputs.dt[rows], B_=inputs.B_[rows], C=inputs.C[rows]
        )

    def scale_log_decay(self, inputs: Mamba2Inputs, factor: float) -> Mamba2Inputs:
        return inputs._replace(A=inputs.A * factor)

    def log_decay(self, inputs: Mamba2Inputs) -> Tensor:
        return inputs.dt * inputs.A


def _one_token(
    mixer: nn.Module,
    step_size: Callable[..., Tensor],
    execute: Execute,
    state: Tensor,  # the placeholder
    x: Tensor,  # [B, H, P]
    dt: Tensor,  # [B, H, P], stride 0 along P
    A: Tensor,  # [H, P, N], stride 0 along P and N
    B: Tensor,  # [B, G, N]
    C: Tensor,  # [B, G, N]
    D: Tensor | None = None,  # [H, P], stride 0 along P
    dt_bias: Tensor | None = None,  # [H, P], stride 0 along P
    dt_softplus: bool = False,
    z: Tensor | None = None,  # [B, H, P]
    **kwargs: Any,
) -> Tensor:
    refuse_packing(kwargs)
    inputs = Mamba2Inputs(
        x=x[:, None],
        dt=step_size(
            mixer, dt[:, None, :, 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus
        ),
        A=A[:, 0, 0].float(),
        B_=B[:, None],
        C=C[:, None],
        D=None if D is None else D[:, 0].float(),
    )
    out = execute(inputs, continued=True)[:, 0]  # [B, H, P] FP32
    return out if z is None else out * silu(z.float())


def _many_tokens(
    mixer: nn.Module,
    step_size: Callable[..., Tensor],
    execute: Execute,
    x: Tensor,  # [B, T, H, P]
    dt: Tensor,  # [B, T, H]
    A: Tensor,  # [H]
    B: Tensor,  # [B, T, G, N]
    C: Tensor,  # [B, T, G, N]
    chunk_size: int | None = None,
    D: Tensor | None = None,  # [H]
    dt_bias: Tensor | None = None,  # [H]
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    refuse_packing(kwargs)
    assert z is None, "no supported architecture gates inside the chunk scan"
    assert tuple(dt_limit) == tuple(mixer.time_step_limit), (dt_limit, mixer.time_step_limit)
    inputs = Mamba2Inputs(
        x=x,
        dt=step_size(mixer, dt, dt_bias, dt_softplus),
        A=A.float(),
        B_=B,
        C=C,
        D=None if D is None else D.float(),
    )
    out = execute(inputs, continued=initial_states is not None)  # [B, T, H, P] FP32
    return (out, state_placeholder(out)) if return_final_states else out


def _step_size(mixer: nn.Module, dt: Tensor, dt_bias: Tensor | None, softplus: bool) -> Tensor:
    """Step size [B, T, H] in FP32 from the raw projection `dt` [B, T, H] and `dt_bias` [H]."""
    dt = dt.float()
    if dt_bias is not None:
        dt = dt + dt_bias.float()
    if softplus:
        # exp() of the clamped value: the untaken branch of `where` must not overflow.
        small = torch.log1p(torch.exp(dt.clamp(max=SOFTPLUS_LINEAR_ABOVE)))
        dt = torch.where(dt > SOFTPLUS_LINEAR_ABOVE, dt, small)
    low, high = mixer.time_step_limit
    return dt.clamp(min=low, max=high) if (low, high) != (0.0, float("inf")) else dt


def _step_size_by_kernel(
    mixer: nn.Module, dt: Tensor, dt_bias: Tensor | None, softplus: bool
) -> Tensor:
    from replayssm.ops.glue.triton_gates import step_size

    low, high = mixer.time_step_limit
    return step_size(dt, dt_bias, softplus=softplus, low=low, high=high)
