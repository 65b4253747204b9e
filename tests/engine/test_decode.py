"""Generation under one policy."""

import pytest
import torch
from tiny_models import TINY_ARCHITECTURES, random_tokens

from replayssm.engine.decode import generate
from replayssm.engine.sampling import Sampler
from replayssm.models import Adapter
from replayssm.policy import parse_policy

FP32 = parse_policy("fp32")


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_greedy_fp32_equals_the_model_itself(name, tiny_model):
    model, prompts = tiny_model(name), random_tokens(2, 9)
    out = generate(Adapter(model), prompts, FP32, max_new_tokens=20)
    text = prompts
    with torch.inference_mode():
        for _ in range(20):
            text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], dim=1)
    assert [list(row.tokens) for row in out] == text[:, 9:].tolist()
    assert not any(row.stopped for row in out)


def test_rows_stop_on_their_own(tiny_model):
    adapter, prompts = Adapter(tiny_model("mamba2")), random_tokens(2, 9)
    free = generate(adapter, prompts, FP32, max_new_tokens=20)
    stop = free[0].tokens[5]
    out = generate(adapter, prompts, FP32, max_new_tokens=20, stop_tokens=[stop])
    for row, whole in zip(out, free, strict=True):
        cut = whole.tokens.index(stop) if stop in whole.tokens else 20
        assert row.tokens == whole.tokens[:cut]
        assert row.stopped == (stop in whole.tokens)


def test_sampling_and_policies(tiny_model):
    adapter, prompts = Adapter(tiny_model("qwen3_5")), random_tokens(2, 9)

    def run(policy, seed, rows=(0, 1)):
        rows = list(rows)
        out = generate(
            adapter,
            prompts[rows],
            parse_policy(policy),
            max_new_tokens=24,
            sampler=Sampler(temperature=1.0, seed=seed),
            prompt_ids=rows,
        )
        return [row.tokens for row in out]

    assert run("fp16-sr", 1) == run("fp16-sr", 1)
    assert run("fp32", 1) != run("fp32", 2)
    assert run("fp32", 1) != run("nvfp4", 1)
    assert run("fp32", 1)[1:] == run("fp32", 1, rows=[1])


def test_bad_arguments(tiny_model):
    adapter, prompts = Adapter(tiny_model("qwen3_5")), random_tokens(2, 9)
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(adapter, prompts, FP32, max_new_tokens=0)
    with pytest.raises(ValueError, match="prompts must be"):
        generate(adapter, prompts[0], FP32, max_new_tokens=4)
    with pytest.raises(ValueError, match="positions"):
        generate(adapter, prompts, FP32, max_new_tokens=4096)
