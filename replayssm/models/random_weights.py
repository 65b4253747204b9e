"""Models of published sizes with random weights, for measuring speed where no weights can be had.

Owns the sizes. What such a model computes means nothing: its names begin with "random/" and no
study accepts them. Must not know policies, sessions or benchmarks.
"""

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from replayssm.models.adapter import Adapter
from replayssm.models.errors import ModelError
from replayssm.models.loading import as_device

RANDOM_PREFIX = "random/"

# 24 recurrent layers of HK16 HV32 K128 V128, and full attention in every fourth layer.
_QWEN3_5_4B = dict(
    vocab_size=248320,
    hidden_size=2560,
    intermediate_size=9216,
    num_hidden_layers=32,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    max_position_embeddings=262144,
    tie_word_embeddings=True,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    },
)
# The same in small, for tests.
_QWEN3_5_TINY = _QWEN3_5_4B | dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    rope_parameters=_QWEN3_5_4B["rope_parameters"] | {"mrope_section": [1, 1, 0]},
)
# Layers of a published mixture of experts (hidden size 2,048, 8 experts of 512 for a token, and one
# for all), 16 of its 40, with 128 of its 256 experts: 12 recurrent layers of HK16 HV32 K128 V128.
_QWEN3_5_MOE_SCALED = dict(
    vocab_size=248320,
    hidden_size=2048,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    max_position_embeddings=262144,
    rope_parameters=_QWEN3_5_4B["rope_parameters"],
    **{key: value for key, value in _QWEN3_5_4B.items() if key.startswith("linear_")},
)
# 21 recurrent layers of H96 P80 N128 G8, 17 MLPs, 4 of attention.
_BLOCKS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
_NEMOTRON_3_NANO_4B = dict(
    vocab_size=131072,
    hidden_size=3136,
    layers_block_type=[_BLOCKS[letter] for letter in "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"],
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12544,
    mamba_num_heads=96,
    mamba_head_dim=80,
    ssm_state_size=128,
    n_groups=8,
    max_position_embeddings=262144,
)
_NEMOTRON_3_TINY = _NEMOTRON_3_NANO_4B | dict(
    vocab_size=512,
    hidden_size=64,
    layers_block_type=[_BLOCKS[letter] for letter in "M-*M-"],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    mamba_num_heads=8,
    mamba_head_dim=16,
    ssm_state_size=16,
    n_groups=2,
)
CONFIGURATIONS: dict[str, tuple[type[PreTrainedConfig], dict]] = {
    RANDOM_PREFIX + "qwen3.5-4b": (Qwen3_5TextConfig, _QWEN3_5_4B),
    RANDOM_PREFIX + "nemotron-3-nano-4b": (NemotronHConfig, _NEMOTRON_3_NANO_4B),
    RANDOM_PREFIX + "qwen3.5-moe-scaled": (Qwen3_5MoeTextConfig, _QWEN3_5_MOE_SCALED),
    RANDOM_PREFIX + "qwen3.5-tiny": (Qwen3_5TextConfig, _QWEN3_5_TINY),
    RANDOM_PREFIX + "nemotron-3-tiny": (NemotronHConfig, _NEMOTRON_3_TINY),
}


def configuration_of(name: str) -> tuple[type[PreTrainedConfig], dict]:
    """Of a model of CONFIGURATIONS; ModelError for an unknown name."""
    if name not in CONFIGURATIONS:
        raise ModelError(
            f"there is no random model {name!r}; there are {', '.join(CONFIGURATIONS)}"
        )
    return CONFIGURATIONS[name]


def random_model(
    name: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    fast: bool = False,
) -> Adapter:
    """A model of CONFIGURATIONS on `device`, the same weights each time on one kind of device.

    fast: see `Adapter`. Raises ModelError for an unknown name, or a device that is not here.
    """
    make_config, values = configuration_of(name)
    torch.manual_seed(0)
    with as_device(device):
        model = AutoModelForCausalLM.from_config(make_config(**values), dtype=dtype)
    adapter = Adapter(model.eval(), name=name, fast=fast)
    for layer in adapter.layers:
        _remember(layer.mixer)
    return adapter


@torch.no_grad()
def _remember(mixer: nn.Module) -> None:
    """Memories from a token to a thousand, as both families are trained from: the library's own
    values forget within a token, and the state would not matter.
    """
    heads = len(mixer.dt_bias)
    steps = torch.logspace(-3, -1, heads)
    mixer.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus of it is a step
    mixer.A_log.copy_(torch.linspace(1, 16, heads).log())
