"""Speculation on a GPU: windows replayed from CUDA graphs, drafters, the built-in models.

What may happen to a draft is tested in `test_speculative_kernels.py`, on a GPU too.
"""

import copy

import pytest
import torch
from scripted import ScriptedDrafter, check_greedy
from tiny_models import random_tokens, tiny_config, tiny_model
from transformers import AutoModelForCausalLM

from replayssm.engine.decode import generate
from replayssm.engine.drafters import ModelDrafter
from replayssm.engine.sampling import Sampler
from replayssm.engine.speculative import SpeculativeDecoder, speculate
from replayssm.models import Adapter, load
from replayssm.policy import parse_policy

pytestmark = pytest.mark.gpu


def run(decoder, prompts, tokens):
    decoder.start(prompts, max_new_tokens=tokens)
    while decoder.running:
        decoder.round()
    decoder.finish()
    return [row.tokens for row in decoder.rows]


def model_on_gpu(name):
    """A tiny model; "kimi_linear" without experts, which cannot be captured in FP32."""
    if name != "kimi_linear":
        return copy.deepcopy(tiny_model(name)).cuda()
    config = tiny_config(name)
    config.mlp_layer_types = ["dense"] * config.num_hidden_layers
    return AutoModelForCausalLM.from_config(config).eval().cuda()


@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "kimi_linear"])
@pytest.mark.parametrize("policy", ["fp32@6", "fp16-sr+nvfp4"])
def test_replayed_windows_are_those_launched_one_by_one(name, policy):
    """The same kernels in the same order: the same bits, with rows at places of their own."""
    adapter, policy = Adapter(model_on_gpu(name)), parse_policy(policy)
    prompts = random_tokens(3, 7).tolist()
    made = generate(adapter, torch.tensor(prompts), policy, max_new_tokens=80)
    want = [list(row.tokens) for row in made]
    texts = {}
    for graphs in ("off", "on"):
        drafter = ScriptedDrafter(want, right=(4, 0, 2, 4, 1))
        decoder = SpeculativeDecoder(adapter, policy, drafter, drafts=4, graphs=graphs)
        texts[graphs] = run(decoder, prompts, 80)
        captured = [k for k in decoder._state._graphs._kept.values() if k.graph is not None]
        assert bool(captured) == (graphs == "on")
    assert texts["on"] == texts["off"]


@pytest.mark.parametrize("name", ["nemotron_h", "kimi_linear"])
def test_what_cannot_be_captured_is_run_without_graphs(name):
    """Experts in FP32: torch's product of groups asks the host how large they are (2.11). Texts are
    the same, and the reason is told."""
    adapter, policy = Adapter(copy.deepcopy(tiny_model(name)).cuda()), parse_policy("fp32@6")
    prompts, texts = random_tokens(2, 7).tolist(), []
    for graphs in ("off", "auto"):
        drafter = ScriptedDrafter([[5] * 40] * 2, right=(0,))
        decoder = SpeculativeDecoder(adapter, policy, drafter, drafts=3, graphs=graphs)
        texts.append(run(decoder, prompts, 40))
    assert texts[0] == texts[1]
    state = decoder._state
    told = state._graphs.describe(state._cache.cache)
    assert told == "graphs" or "capture failed" in told


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafter_replays_graphs_too(temperature):
    adapter, smaller = (Adapter(model_on_gpu(name)) for name in ("qwen3_5", "mamba2"))
    policy, prompts = parse_policy("fp16-sr+nvfp4"), random_tokens(2, 7).tolist()
    texts = []
    for graphs in ("off", "on"):
        decoder = SpeculativeDecoder(
            adapter,
            policy,
            ModelDrafter(smaller, graphs=graphs),
            drafts=3,
            sampler=Sampler(temperature=temperature, seed=4),
            graphs=graphs,
        )
        texts.append(run(decoder, prompts, 60))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["builtin/gdn", "builtin/mamba2"])
@pytest.mark.parametrize("policy", ["fp32", "fp16+nvfp4"])
def test_builtin_models_speculate_as_they_decode(name, policy):
    model, policy = load(name, device="cuda"), parse_policy(policy)
    texts = ("one two three four five six seven", "It was a dark and stormy night; the rain fell")
    encoded = [model.tokenizer(text)["input_ids"] for text in texts]
    prompts = [tokens[: min(map(len, encoded))] for tokens in encoded]
    made = generate(model.adapter, torch.tensor(prompts), policy, max_new_tokens=200)
    want = [list(row.tokens) for row in made]
    drafter = ScriptedDrafter(want, right=(8, 3, 0, 8))
    got = speculate(model.adapter, prompts, policy, drafter, drafts=8, max_new_tokens=200)
    same = [list(row.generation.tokens) for row in got] == want
    assert same or check_greedy(model.adapter, prompts, policy, got)
