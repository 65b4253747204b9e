"""Layers as servers decode them: one matrix product for all projections of an input, a kernel
before the recurrence or attention, and one behind.

Owns the forward of layers that we know, by the names of their classes: recurrent layers that read
a few tokens (`RECURRENT`, for `claimed_layer`), attention and MLPs; and that projections of the
same input lie side by side in memory (`lay_side_by_side`). Each computes what the library's forward
computes, with its own places of rounding (`ops/glue`), and goes to that where it is called in
another way. Must not know policies or sessions.

Shapes: B rows, T tokens, H heads.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from replayssm.models import attention
from replayssm.models.families.gated_delta import L2_NORM_EPS
from replayssm.models.patching import reach_operator
from replayssm.ops.gated_delta.reference import GatedDeltaInputs
from replayssm.ops.mamba2.reference import Mamba2Inputs

SILU = ("silu", "swish")
_MOST_TOKENS = 32  # which a program reads one after the other
_CACHES = ("cache", "cache_params", "past_key_values")  # as versions call it


# -- projections of one input ----------------------------------------------------------------------
# Class name -> its projections of the same input.
_TOGETHER = {
    "Qwen3_5GatedDeltaNet": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "Qwen3_5MoeGatedDeltaNet": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "Qwen3_5Attention": ("q_proj", "k_proj", "v_proj"),
    "Qwen3_5MoeAttention": ("q_proj", "k_proj", "v_proj"),
    "Qwen3_5MLP": ("gate_proj", "up_proj"),
    "Qwen3_5MoeMLP": ("gate_proj", "up_proj"),
    "NemotronHAttention": ("q_proj", "k_proj", "v_proj"),
}


def lay_side_by_side(model: nn.Module) -> None:
    """Moves weights of projections of the same input into one piece of memory, layer by layer: the
    parameters stay, with the same values, as views of it.
    """
    for module in model.modules():
        names = _TOGETHER.get(type(module).__name__)
        if names is not None:
            _lay([getattr(module, name) for name in names])


def _lay(projections: Sequence[nn.Linear]) -> None:
    weights = [projection.weight for projection in projections]
    alike = len({(w.dtype, w.device, w.shape[1]) for w in weights}) == 1
    plain = all(type(projection) is nn.Linear for projection in projections)
    if not (plain and alike) or _beside(weights):
        return
    # A parameter made in inference mode takes only what is made there.
    with torch.inference_mode(weights[0].is_inference()), torch.no_grad():
        together = torch.cat([weight.detach() for weight in weights])
        for weight, part in zip(weights, together.split([len(w) for w in weights]), strict=True):
            weight.data = part


def _beside(weights: Sequence[Tensor]) -> bool:
    """Whether weights [.., K] follow one another in memory."""
    place = weights[0].data_ptr()
    for weight in weights:
        if weight.data_ptr() != place or not weight.is_contiguous():
            return False
        place += weight.nbytes
    first = weights[0].untyped_storage().data_ptr()
    return all(weight.untyped_storage().data_ptr() == first for weight in weights)


def projected(x: Tensor, module: nn.Module) -> Sequence[Tensor]:
    """What the projections of `module` make of x [.., K], each [.., N]; in one product, if their
    weights lie side by side (the results are strided, then).
    """
    projections = [getattr(module, name) for name in _TOGETHER[type(module).__name__]]
    weights = [projection.weight for projection in projections]
    if any(projection.bias is not None for projection in projections) or not _beside(weights):
        return [projection(x) for projection in projections]
    sizes = [len(weight) for weight in weights]
    together = weights[0].as_strided((sum(sizes), x.shape[-1]), (x.shape[-1], 1))
    return linear(x, together).split(sizes, dim=-1)


# -- recurrent layers ------------------------------------------------------------------------------
def _decoding(mixer: nn.Module, x: Tensor, args: tuple, kwargs: dict) -> Tensor | None:
    """The convolution's last inputs [B, C, W], if a few tokens are read that continue them as our
    kernels do; otherwise None.
    """
    cache = _cache_of(kwargs)
    if args or x.shape[1] > _MOST_TOKENS or cache is None or mixer.activation not in SILU:
        return None
    layer = cache.layers[mixer.layer_idx]
    if not layer.has_previous_state[0] or getattr(layer, "record_past", False):
        return None
    state, weight = layer.conv_states[0], mixer.conv1d.weight
    usual = state.shape[-1] == weight.shape[-1] and state.is_contiguous()
    return state if usual and x.dtype == state.dtype == weight.dtype else None


def _note(mixer: nn.Module, x: Tensor, kwargs: dict) -> None:
    """Tells a tape of convolution inputs (`convolution.py`), if there is one, of several tokens'
    `x` [B, T, C]; a single one it finds in the inputs that are kept.
    """
    note = getattr(_cache_of(kwargs).layers[mixer.layer_idx], "note_conv_inputs", None)
    if note is not None and x.shape[1] > 1:
        note(x.transpose(1, 2))


def _cache_of(kwargs: dict):
    return next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)


def _projected_out(mixer: nn.Module, out: Tensor, gate: Tensor, **options) -> Tensor:
    """What a recurrent layer makes of its operator's outputs [B, T, H, width]: its gated norm, by
    the kernel with these `options`, and its last projection.
    """
    from replayssm.ops.glue.triton_glue import rms_norm

    norm = mixer.norm
    weight, eps = norm.weight, norm.variance_epsilon
    return mixer.out_proj(rms_norm(out.flatten(2), weight, eps, gate=gate, rounds=True, **options))


def _gated_delta(mixer: nn.Module, forward: Callable) -> Callable:
    from replayssm.ops.glue.triton_glue import AFTER
    from replayssm.ops.glue.triton_layers import delta_inputs

    def run(hidden_states: Tensor, *args, **kwargs) -> Tensor:
        state = _decoding(mixer, hidden_states, args, kwargs)
        if state is None or mixer.norm.weight.dtype != hidden_states.dtype:
            return forward(hidden_states, *args, **kwargs)
        qkv, z, b, a = projected(hidden_states, mixer)
        _note(mixer, qkv, kwargs)
        q, k, v, g, beta = delta_inputs(
            qkv,
            state,
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            (a, b),
            (mixer.A_log, mixer.dt_bias),
            key_heads=mixer.num_k_heads,
            value_width=mixer.head_v_dim,
            eps=L2_NORM_EPS,
            scale=mixer.head_k_dim**-0.5,
        )
        out = reach_operator(GatedDeltaInputs(q=q, k=k, v=v, g=g, beta=beta), continued=True)
        dtype = hidden_states.dtype
        return _projected_out(
            mixer, out, z, gated=AFTER, group=mixer.head_v_dim, dtype=dtype, narrow=True
        )

    return run


def _mamba2(mixer: nn.Module, forward: Callable) -> Callable:
    from replayssm.ops.glue.triton_layers import scan_inputs

    def run(hidden_states: Tensor, *args, **kwargs) -> Tensor:
        state = _decoding(mixer, hidden_states, args, kwargs)
        if state is None:
            return forward(hidden_states, *args, **kwargs)
        heads, width = mixer.num_heads, mixer.head_dim
        groups, states = mixer.n_groups, mixer.ssm_state_size
        sizes = [heads * width, len(mixer.conv1d.weight), heads]
        gate, x, dt = mixer.in_proj(hidden_states).split(sizes, dim=-1)
        _note(mixer, x, kwargs)
        low, high = mixer.time_step_limit
        x, dt, rate, skip = scan_inputs(
            x,
            state,
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            dt,
            (mixer.dt_bias, mixer.A_log, mixer.D),
            low=low,
            high=high,
        )
        x, B, C = x.split([heads * width, groups * states, groups * states], dim=-1)
        inputs = Mamba2Inputs(
            x=x.unflatten(2, (heads, width)),
            dt=dt,
            A=rate,
            B_=B.unflatten(2, (groups, states)),
            C=C.unflatten(2, (groups, states)),
            D=skip,
        )
        out = reach_operator(inputs, continued=True)
        dtype = hidden_states.dtype
        return _projected_out(mixer, out, gate, group=mixer.norm.group_size, dtype=dtype)

    return run


# Class name -> what makes the forward of a recurrent layer, from it and the forward it has.
RECURRENT: dict[str, Callable[[nn.Module, Callable], Callable]] = {
    "Qwen3_5GatedDeltaNet": _gated_delta,
    "Qwen3_5MoeGatedDeltaNet": _gated_delta,
    "NemotronHMamba2Mixer": _mamba2,
}


# -- attention and MLPs ----------------------------------------------------------------------------
def _attends_by_kernel(module: nn.Module, mask: Tensor | None, cache) -> bool:
    ours = module.config._attn_implementation == attention.NAME
    return ours and mask is None and cache is not None


def gated_attention(module: nn.Module, forward: Callable) -> Callable:
    """Heads of queries with a gate beside each, norms, and a rotation of their first elements."""
    from replayssm.ops.glue.triton_gates import gated
    from replayssm.ops.glue.triton_layers import rotated_heads

    def run(hidden_states: Tensor, position_embeddings, attention_mask=None, **kwargs):
        cache, width = _cache_of(kwargs), module.head_dim
        cos, sin = position_embeddings
        alike = hidden_states.dtype == module.q_norm.weight.dtype == cos.dtype
        if not (alike and _attends_by_kernel(module, attention_mask, cache)):
            return forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        q, k, v = (part.unflatten(-1, (-1, width)) for part in projected(hidden_states, module))
        q, gate = q.unflatten(2, (-1, 2)).unbind(3)
        weights = module.q_norm.weight, module.k_norm.weight
        angles = cos.contiguous(), sin.contiguous()
        q, k = rotated_heads(q, k, weights, angles, module.q_norm.eps)
        keys, values = cache.update(k.transpose(1, 2), v.transpose(1, 2), module.layer_idx)
        out, _ = attention.attend(
            module, q.transpose(1, 2), keys, values, None, scaling=module.scaling
        )
        out = gated(gate.flatten(0, 1), out.flatten(0, 1), sigmoid=True)
        return module.o_proj(out.view(*hidden_states.shape[:2], -1)), None

    return run


def plain_attention(module: nn.Module, forward: Callable) -> Callable:
    """Neither gates, norms nor rotations."""

    def run(hidden_states: Tensor, attention_mask=None, **kwargs):
        cache, width = _cache_of(kwargs), module.head_dim
        if not _attends_by_kernel(module, attention_mask, cache):
            return forward(hidden_states, attention_mask=attention_mask, **kwargs)
        q, k, v = (
            part.unflatten(-1, (-1, width)).transpose(1, 2)
            for part in projected(hidden_states, module)
        )
        keys, values = cache.update(k, v, module.layer_idx)
        out, _ = attention.attend(module, q, keys, values, None, scaling=module.scaling)
        return module.o_proj(out.flatten(2)), None

    return run


def gated_mlp(module: nn.Module, forward: Callable) -> Callable:
    from replayssm.ops.glue.triton_gates import gated

    if module.config.hidden_act not in SILU:
        return forward

    def run(x: Tensor) -> Tensor:
        gate, up = (part.reshape(-1, part.shape[-1]) for part in projected(x, module))
        return module.down_proj(gated(gate, up).view(*x.shape[:-1], -1))

    return run


def squared_mlp(module: nn.Module, forward: Callable) -> Callable:
    from replayssm.ops.glue.triton_gates import squared_relu

    if module.config.mlp_hidden_act != "relu2":
        return forward

    def run(x: Tensor) -> Tensor:
        return module.down_proj(squared_relu(module.up_proj(x)))

    return run
