"""Models of published sizes with random weights, and the last projection that benchmarks use."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from replayssm.models.errors import ModelError
from replayssm.models.random_weights import CONFIGURATIONS, RANDOM_PREFIX, random_model
from replayssm.models.session import ReplaySession, RowGroup
from replayssm.policy import parse_policy

TINY = [name for name in CONFIGURATIONS if name.endswith("-tiny")]
# Parameters in billions, and recurrent layers.
SIZES = {
    "qwen3.5-4b": (4.2, 24),
    "nemotron-3-nano-4b": (3.97, 21),
    "qwen3.5-moe-scaled": (8.0, 12),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_the_published_ones(name):
    make_config, values = CONFIGURATIONS[RANDOM_PREFIX + name]
    config = make_config(**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    billions, recurrent = SIZES[name]
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.1)
    assert config.layer_types.count("linear_attention") == recurrent


def logits(name, tokens, **options):
    adapter = random_model(name, **options)
    group = RowGroup(policy=parse_policy("fp32"), sequences=(0, 1), seeds=(0, 0))
    with torch.inference_mode(), ReplaySession(adapter, [group]):
        return adapter.forward(tokens, adapter.new_cache(), start=0)


@pytest.mark.parametrize("name", TINY)
def test_a_fast_model_says_the_same(name):
    """Its last projection delivers FP32, too; BF16 is rounded elsewhere."""
    tokens = torch.randint(512, (2, 5))
    exact, fast = (logits(name, tokens, fast=fast) for fast in (False, True))
    assert exact.dtype == fast.dtype == torch.float32
    assert (exact - fast).norm() < 0.05 * exact.norm()


def test_other_names_are_refused():
    with pytest.raises(ModelError, match="no random model 'random/x'; there are random/qwen3.5-4b"):
        random_model("random/x")
