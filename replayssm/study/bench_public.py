"""Public token-by-token kernels to compare with, where their packages are installed.

Owns which functions these are and how they are called. They are looked up by name when a benchmark
asks, because none of them is a dependency. Times and judges nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.study.bench_workload import Inputs

Updated = tuple[Tensor, Tensor]  # outputs [B, 1, heads, rows], states after [B, ...]


@dataclass(frozen=True, kw_only=True)
class Update:
    """A way to update FP32, FP16 or BF16 states token by token.

    Attributes:
        source: the package it is from.
        detail: how it is launched, where there is a choice.
        prepare: (states of all slots, slots of the rows [B], consecutive, inputs) -> a launch.
        transposed: states are kept [.., cols, rows].
        output_tolerance: relative error that its outputs' dtype explains.
    """

    source: str
    detail: str = ""
    prepare: Callable[[Tensor, Tensor, Inputs], Callable[[], Updated]]
    transposed: bool = False
    output_tolerance: float


def public_updates(recurrence: str) -> tuple[list[Update], list[str]]:
    """Those installed, and for each other one a line that says so."""
    found, missing = [], []
    for module, function, prepare, transposed in _PUBLIC[recurrence]:
        package = module.split(".")[0]
        try:
            kernel = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            missing.append(f"{package}'s {function} is not measured: {error}")
            continue
        found.append(
            Update(
                source=package,
                prepare=lambda *arguments, prepare=prepare, kernel=kernel: prepare(
                    kernel, *arguments
                ),
                transposed=transposed,
                output_tolerance=1e-2,  # outputs in BF16
            )
        )
    return found, missing


def block_of(states: Tensor, slots: Tensor) -> Tensor:
    """A view of the states at consecutive slots; waits for the device."""
    first = int(slots[0])
    return states[first : first + len(slots)]


def _selective_state_update(kernel, states: Tensor, slots: Tensor, inputs) -> Callable:
    state = block_of(states, slots)
    batch, heads, rows, cols = state.shape
    # One dt, A and D per head: told by strides of zero, or the kernel reads A for every element.
    dt = inputs.dt[:, 0, :, None].expand(batch, heads, rows)
    A = inputs.A[:, None, None].expand(heads, rows, cols)
    D = inputs.D[:, None].expand(heads, rows)
    bias = torch.zeros_like(inputs.A)[:, None].expand(heads, rows)
    x, B_, C = inputs.x[:, 0], inputs.B_[:, 0], inputs.C[:, 0]

    def launch() -> Updated:
        out = kernel(state, x, dt, A, B_, C, D=D, dt_bias=bias, dt_softplus=False)
        return out[:, None], state

    return launch


def _fused_recurrent(kernel, states: Tensor, slots: Tensor, inputs) -> Callable:
    state = block_of(states, slots)

    def launch() -> Updated:
        return kernel(
            inputs.q,
            inputs.k,
            inputs.v,
            g=inputs.g,
            beta=inputs.beta,
            scale=1.0,
            initial_state=state,
            output_final_state=True,
        )

    return launch


_PUBLIC = {
    "mamba2": (
        (
            "mamba_ssm.ops.triton.selective_state_update",
            "selective_state_update",
            _selective_state_update,
            False,
        ),
    ),
    "gated_delta": (
        (
            "fla.ops.gated_delta_rule",
            "fused_recurrent_gated_delta_rule",
            _fused_recurrent,
            True,
        ),
    ),
    "kimi_delta": (("fla.ops.kda", "fused_recurrent_kda", _fused_recurrent, True),),
}
