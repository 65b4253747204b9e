"""kimi_linear as published: names of weights and configuration keys, code in its repository."""

import json

import pytest
import torch
from safetensors import safe_open
from test_loading import save_tokenizer
from tiny_models import random_tokens

from replayssm.models import Adapter, ReplaySession, RowGroup, load
from replayssm.policy import parse_policy


@pytest.fixture
def published(tmp_path, tiny_model):
    """The tiny model in a folder like the published one, whose code for the model fails."""
    tiny_model("kimi_linear").save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for key in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads"):
        del config[key]
    config["linear_attn_config"] = {
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 3],
        "full_attn_layers": [2],
    }
    config["auto_map"] = {
        "AutoConfig": "configuration_kimi.KimiLinearConfig",
        "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
    }
    path.write_text(json.dumps(config))
    # The library asks for the configuration, too, where a tokenizer's code may run.
    (tmp_path / "configuration_kimi.py").write_text(
        "from transformers import PretrainedConfig\n"
        "class KimiLinearConfig(PretrainedConfig):\n    model_type = 'kimi_linear'\n"
    )
    (tmp_path / "modeling_kimi.py").write_text("raise RuntimeError('the model code ran')")
    return tmp_path


@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_the_published_layout_loads_without_its_model_code(
    published, tiny_model, trust_remote_code
):
    with safe_open(published / "model.safetensors", "pt") as weights:
        assert "model.layers.0.self_attn.q_conv1d.weight" in weights.keys()
        assert "model.layers.1.block_sparse_moe.experts.3.w1.weight" in weights.keys()
    loaded = load(str(published), trust_remote_code=trust_remote_code)
    assert [layer.index for layer in loaded.adapter.layers] == [0, 2]
    tokens = random_tokens(2, 7)
    want = tiny_model("kimi_linear")(tokens).logits.detach()
    assert torch.equal(loaded.model(tokens).logits, want)
    group = RowGroup(policy=parse_policy("fp32"), sequences=(0, 1), seeds=(0, 0))
    with torch.inference_mode(), ReplaySession(loaded.adapter, [group]):
        got = loaded.adapter.forward(tokens, loaded.adapter.new_cache(), start=0)
    assert float((got - want).abs().max() / want.std()) < 1e-4


def test_every_channel_has_its_own_decay(tiny_model):
    """The gate that reaches the operator differs between channels, and its scale is the fault."""
    adapter = Adapter(tiny_model("kimi_linear"))
    family, mixer = adapter.family, adapter.layers[0].mixer
    seen = []

    def execute(inputs, *, continued):
        seen.append((inputs, continued))
        return torch.zeros_like(inputs.v)

    qkv = [torch.randn(2, 5, 4, 16) for _ in range(3)]
    gate = mixer.forget_gate(torch.randn(2, 5, 64))
    out, state = family.call(
        "chunk_kimi_delta_attention",
        mixer,
        execute,
        tuple(qkv),
        dict(
            g=gate,
            beta=torch.rand(2, 5, 4),
            initial_state=None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        ),
    )
    ((inputs, continued),) = seen
    assert out.shape == (2, 5, 4, 16) and state.numel() == 1 and not continued
    assert torch.equal(inputs.g, gate) and inputs.g.shape == (2, 5, 4, 16)
    assert (gate <= 0).all() and gate[0, 0, 0].unique().numel() == 16
    assert torch.equal(family.scale_log_decay(inputs, 1.01).g, gate * 1.01)
    assert family.select_rows(inputs, slice(1, 2)).g.shape == (1, 5, 4, 16)
