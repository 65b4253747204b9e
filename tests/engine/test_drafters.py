"""Drafters: what they say of a text, and that they can be wound back."""

import pytest
import torch
from scripted import decoded, tokens_of
from tiny_models import random_tokens, tiny_model

from replayssm.engine.drafters import ModelDrafter, NGramDrafter, check_vocabulary, multi_token_head
from replayssm.engine.sampling import Sampler
from replayssm.engine.speculative import SpeculativeDecoder, speculate
from replayssm.models import Adapter, UnsupportedModelError
from replayssm.policy import parse_policy


def test_prompt_lookup():
    drafter = NGramDrafter(longest=3, shortest=1)
    drafter.start([[0]] * 2)
    text = [1, 2, 3, 4, 9, 2, 3, 7, 1, 2, 3]
    drafts = drafter.draft([text, text], [4, 2])
    assert drafts.counts == [4, 2]
    assert drafts.tokens.tolist() == [[4, 9, 2, 3], [4, 9, 0, 0]]  # 1 2 3, not the later 2 3
    drafts = drafter.draft([[*text, 9], text], [4, 0])
    assert drafts.tokens.tolist() == [[2, 3, 7, 1], [0, 0, 0, 0]] and drafts.counts == [4, 0]
    assert drafter.draft([[*text, 9, 88], text], [4, 4]).counts[0] == 0
    with pytest.raises(ValueError, match="shortest"):
        NGramDrafter(longest=1, shortest=2)


@pytest.mark.parametrize("name", ["qwen3_5", "zamba2"])
def test_a_model_that_drafts_for_itself_is_always_right(name):
    adapter, policy = Adapter(tiny_model(name)), parse_policy("fp32")
    prompts = random_tokens(2, 8).tolist()
    got = speculate(adapter, prompts, policy, ModelDrafter(adapter), drafts=4, max_new_tokens=30)
    assert tokens_of(got) == decoded(adapter, prompts, policy, 30)
    assert all(row.acceptance.rate == 1.0 for row in got)


def test_a_drafter_that_is_wrong_is_wound_back():
    """What the drafter would say after any round is what it says of the text from the start."""
    adapter, smaller = Adapter(tiny_model("qwen3_5")), Adapter(tiny_model("mamba2"))
    policy = parse_policy("fp16")
    prompts = random_tokens(2, 8).tolist()
    drafter = ModelDrafter(smaller, policy=parse_policy("fp32@5"))
    decoder = SpeculativeDecoder(adapter, policy, drafter, drafts=4)
    decoder.start(prompts, max_new_tokens=40)
    for _ in range(6):
        decoder.round()
        texts = [row.text for row in decoder.rows]
        fresh = ModelDrafter(smaller)
        with torch.inference_mode():
            ahead = drafter.draft(texts, [3, 3])
            drafter.keep([0, 0])  # it was only asked
            fresh.start(
                [text[:-1] for text in texts], drafts=3, room=8, ids=[0, 1], sampler=Sampler()
            )
            assert torch.equal(ahead.tokens, fresh.draft(texts, [3, 3]).tokens)
    while decoder.running:
        decoder.round()
    assert [row.tokens for row in decoder.rows] == decoded(adapter, prompts, policy, 40)


def test_drafters_that_cannot_be():
    adapter = Adapter(tiny_model("qwen3_5"))
    with pytest.raises(UnsupportedModelError, match="no class that runs the multi-token head"):
        multi_token_head(adapter)
    other = Adapter(tiny_model("mamba2"))
    check_vocabulary(adapter, other)
