"""Tiny random-weight models of every supported architecture.

The models are built from configurations, need no download and take a fraction of a second each.
Their weights are scaled so that the recurrent state matters for the logits: transformers' default
initialisation would leave them almost uniform and hide a dead state update.
"""

import functools

import torch

TINY_ARCHITECTURES = (
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "olmo_hybrid",
    "kimi_linear",
    "mamba2",
    "nemotron_h",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "zamba2",
)

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
    "intermediate_size": 96,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}


def tiny_config(name: str):
    """Configuration of the tiny model `name`, one of TINY_ARCHITECTURES."""
    import transformers

    if name in ("qwen3_5", "qwen3_5_moe"):
        rope = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        }
        extra = _COMMON | _ATTENTION | _DELTA | {"rope_parameters": rope}
        if name == "qwen3_5":
            return transformers.Qwen3_5TextConfig(**extra)
        return transformers.Qwen3_5MoeTextConfig(**extra, **_MOE)
    if name == "qwen3_next":
        return transformers.Qwen3NextConfig(**_COMMON, **_ATTENTION, **_DELTA, **_MOE)
    if name == "olmo_hybrid":
        delta = {key: value for key, value in _DELTA.items() if key != "head_dim"}
        return transformers.OlmoHybridConfig(**_COMMON, **_ATTENTION, **delta)
    if name == "kimi_linear":
        return transformers.KimiLinearConfig(
            **_COMMON,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=96,
            linear_num_heads=4,
            linear_head_dim=16,
            kv_lora_rank=24,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        )
    if name == "mamba2":
        common = {k: v for k, v in _COMMON.items() if k != "max_position_embeddings"}
        return transformers.Mamba2Config(
            **common, num_heads=8, head_dim=16, state_size=16, n_groups=2, expand=2, chunk_size=32
        )
    if name == "nemotron_h":
        common = {k: v for k, v in _COMMON.items() if k != "num_hidden_layers"}
        return transformers.NemotronHConfig(
            **common,
            **_ATTENTION,
            layers_block_type=[
                "linear_attention",
                "mlp",
                "full_attention",
                "linear_attention",
                "moe",
            ],
            head_dim=16,
            intermediate_size=96,
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=2,
            chunk_size=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
        )
    if name == "bamba":
        return transformers.BambaConfig(
            **_COMMON, **_ATTENTION, **_MAMBA, intermediate_size=96, attn_layer_indices=[1]
        )
    if name == "falcon_h1":
        return transformers.FalconH1Config(
            **_COMMON,
            **_ATTENTION,
            **_MAMBA,
            intermediate_size=96,
            mamba_d_ssm=128,
            lm_head_multiplier=0.5,
            embedding_multiplier=1.5,
            ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
            ssm_in_multiplier=1.25,
            ssm_out_multiplier=0.75,
            key_multiplier=0.5,
        )
    if name == "granitemoehybrid":
        return transformers.GraniteMoeHybridConfig(
            **_COMMON,
            **_ATTENTION,
            **_MAMBA,
            intermediate_size=32,
            shared_intermediate_size=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            logits_scaling=2.0,
            embedding_multiplier=1.5,
            residual_multiplier=0.8,
            attention_multiplier=0.25,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        )
    if name == "zamba2":
        return transformers.Zamba2Config(
            **_COMMON,
            num_attention_heads=4,
            num_key_value_heads=4,
            layers_block_type=["linear_attention", "hybrid", "linear_attention"],
            intermediate_size=96,
            n_mamba_heads=8,
            mamba_ngroups=2,
            mamba_d_state=16,
            chunk_size=32,
            adapter_rank=8,
            use_mem_rope=True,
        )
    raise ValueError(f"no tiny configuration for {name!r}; there is one for {TINY_ARCHITECTURES}")


@functools.cache
def tiny_model(name: str):
    """The shared tiny model, FP32, eval mode; a test that changes it takes a copy."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(20260)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(name)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            heads = parameter.shape[-1]
            if key.endswith("dt_bias"):
                # softplus(dt_bias) from .02 to .5: with A below, memories of 3 to 1,000 tokens.
                dt = torch.logspace(-1.7, -0.3, heads)
                parameter.copy_(dt + torch.log(-torch.expm1(-dt)))
            elif key.endswith("A_log"):
                rates = torch.linspace(0.05, 1.0, parameter.numel())
                parameter.copy_(rates.log().view_as(parameter))
            elif key.endswith("conv1d.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
            elif key.endswith(".D"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 + 0.5)
    return model


def spread(model, second: tuple[str, ...]) -> dict[str, int]:
    """A device map of `model` over two GPUs: modules whose names end in `second` on 1, others on 0.

    No entry lies within another: accelerate would bring the inputs of inner modules to the outer
    one's device.
    """
    moved = [name for name, _ in model.named_modules() if name.endswith(second)]
    places = dict.fromkeys(moved, 1)
    for name, _ in model.named_modules():
        holds_moved = any(f"{other}.".startswith(f"{name}." if name else "") for other in moved)
        placed = any(name.startswith(f"{other}.") for other in places)
        if not holds_moved and not placed:
            places[name] = 0
    return places


def random_tokens(rows: int, length: int, *, seed: int = 0, vocab: int = 128) -> torch.Tensor:
    """Token ids [rows, length], int64, none of them a special token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (rows, length), generator=generator)
