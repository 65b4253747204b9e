"""What surrounds the recurrences, by kernels: norms, convolutions and gates of layers we know.

Owns which modules and functions of the library these are, by the names of their classes, and that
each gets the kernel with its own places of rounding (`ops/glue`). While `glue` is active for an
adapter, its model's norms run on them, and so do the convolutions of claimed layers; attention and
MLPs are those of `glue_layers.py`. Whatever a table does not name, or is called in another way,
stays the library's. Must not know policies or sessions.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from replayssm.models.errors import UnsupportedInputError
from replayssm.models.glue_layers import (
    SILU,
    gated_attention,
    gated_mlp,
    plain_attention,
    squared_mlp,
)
from replayssm.models.patching import replaced_forward, replaced_functions
from replayssm.ops.capability import no_device

if TYPE_CHECKING:
    from replayssm.models.adapter import Adapter

_ACTIVATIONS = (None, *SILU)  # of a convolution


def _centred_norm(module: nn.Module, forward: Callable) -> Callable:
    from replayssm.ops.glue.triton_glue import rms_norm

    def run(x: Tensor) -> Tensor:
        return rms_norm(x, module.weight, module.eps, centred=True)

    return run


def _norm(module: nn.Module, forward: Callable) -> Callable:
    from replayssm.ops.glue.triton_glue import rms_norm

    def run(hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, module.weight, module.variance_epsilon)

    return run


def _norm_then_gate(module: nn.Module, forward: Callable) -> Callable:
    from replayssm.ops.glue.triton_glue import AFTER, rms_norm

    weight, eps = module.weight, module.variance_epsilon

    def run(hidden_states: Tensor, gate: Tensor) -> Tensor:
        if hidden_states.dtype != weight.dtype:
            return forward(hidden_states, gate)
        return rms_norm(hidden_states, weight, eps, gate=gate, gated=AFTER, rounds=True)

    return run


def _gate_then_norm(module: nn.Module, forward: Callable) -> Callable:
    from replayssm.ops.glue.triton_glue import rms_norm

    weight, eps, group = module.weight, module.variance_epsilon, module.group_size

    def run(hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return rms_norm(hidden_states, weight, eps, gate=gate, group=group, rounds=True)

    return run


# Class name -> what makes its forward, from the module and the forward it has.
_MODULES: dict[str, Callable[[nn.Module, Callable], Callable]] = {
    "Qwen3_5RMSNorm": _centred_norm,
    "Qwen3_5RMSNormGated": _norm_then_gate,
    "Qwen3_5MLP": gated_mlp,
    "Qwen3_5Attention": gated_attention,
    "Qwen3_5MoeRMSNorm": _centred_norm,
    "Qwen3_5MoeRMSNormGated": _norm_then_gate,
    "Qwen3_5MoeMLP": gated_mlp,
    "Qwen3_5MoeAttention": gated_attention,
    "NemotronHRMSNorm": _norm,
    "NemotronHRMSNormGated": _gate_then_norm,
    "NemotronHMLP": squared_mlp,
    "NemotronHAttention": plain_attention,
}


def _convolution_step(
    original: Callable,
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """`causal_conv1d_update` of the library: inputs [B, C, T], conv_state [B, C, W] in place."""
    from replayssm.ops.glue.triton_glue import convolution_step

    alike = hidden_states.dtype == conv_state.dtype == weight.dtype
    whole = conv_state.shape[-1] == weight.shape[-1] and conv_state.is_contiguous()
    if hidden_states.shape[-1] != 1 or not (alike and whole and activation in _ACTIVATIONS):
        return original(hidden_states, conv_state, weight, bias, activation)
    silu = activation is not None
    return convolution_step(hidden_states, conv_state, weight.contiguous(), bias, silu=silu)


def _convolution(
    original: Callable,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs,
) -> Tensor:
    """`causal_conv1d_fn` of the library: [B, C, T] from inputs [B, C, T]."""
    from replayssm.ops.glue.triton_glue import convolution

    packed = kwargs.get("seq_idx") is not None or kwargs.get("cu_seq_lens_q") is not None
    if packed or hidden_states.dtype != weight.dtype or activation not in _ACTIVATIONS:
        return original(hidden_states, weight, bias, activation=activation, **kwargs)
    return convolution(hidden_states, weight.contiguous(), bias, silu=activation is not None)


SIDE_FUNCTIONS: dict[str, Callable] = {
    "causal_conv1d_update": _convolution_step,
    "causal_conv1d_fn": _convolution,
}
"""For `claimed_layer`, by the name of the library's function."""


@contextmanager
def glue(adapter: "Adapter") -> Iterator[None]:
    """While active, the adapter's model runs as the module docstring says.

    Raises UnsupportedInputError where kernels cannot run, and for a model on several devices:
    kernels are launched on the current one.
    """
    reason = no_device(adapter.device)
    if len(adapter.devices) > 1:
        reason = f"it is spread over {', '.join(map(str, adapter.devices))}; they need a single one"
    if reason is not None:
        raise UnsupportedInputError(f"{adapter.name!r} cannot be run by kernels: {reason}")
    with ExitStack() as stack:
        module = importlib.import_module(adapter.module_name)
        names = tuple(name for name in SIDE_FUNCTIONS if hasattr(module, name))
        stack.enter_context(replaced_functions(adapter.module_name, names, aside=True))
        for module in adapter.model.modules():
            make = _MODULES.get(type(module).__name__)
            if make is not None:
                stack.enter_context(
                    replaced_forward(module, lambda f, make=make, m=module: make(m, f))
                )
        yield
