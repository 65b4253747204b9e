"""Speculation with one order of sums: every logit is that of token-by-token decoding, bit for bit.

What is tested is everything but the arithmetic of a window: what is drafted, accepted, kept and
taken back, where rings are flushed, what attention and convolutions see. Nothing is left to
tolerance, so that a policy that rounds its state cannot hide a fault behind its rounding. How far a
window's own order of sums leads is tested in `test_speculative_long.py`.
"""

import functools

import pytest
import torch
from scripted import ScriptedDrafter, tokens_of
from tiny_models import TINY_ARCHITECTURES, random_tokens, tiny_model

from replayssm.engine.decode import generate, open_stream
from replayssm.engine.speculative import SpeculativeDecoder, speculate
from replayssm.models import Adapter, load
from replayssm.policy import parse_policy
from replayssm.study.corpus import heldout_problems

POLICIES = ("fp32", "fp16", "bf16", "fp8", "int8", "nvfp4", "fp32+nvfp4", "fp16+nvfp4")
TOKENS, PROMPT = 2000, 32


def stepwise(adapter, prompt, policy, tokens, sequence):
    """Tokens of greedy decoding of one prompt alone, and all logits but the first."""
    with torch.inference_mode():
        stream, logits = open_stream(
            adapter, torch.tensor([prompt]), policy, max_new_tokens=tokens, prompt_ids=[sequence]
        )
        chosen, seen = [int(logits.argmax())], []
        while len(chosen) < tokens:
            seen.append(stream.step(torch.tensor([chosen[-1:]]))[0, -1].clone())
            chosen.append(int(seen[-1].argmax()))
    return chosen, torch.stack(seen)


@pytest.mark.parametrize("policy", ["fp32@4", "nvfp4@5", "fp8-sr+nvfp4@3"])
@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_every_logit_of_every_architecture(name, policy):
    """Also, rows of a batch are what they are alone."""
    adapter, policy = Adapter(tiny_model(name), invariant=True), parse_policy(policy)
    prompts, tokens = random_tokens(3, 7).tolist(), 22
    alone = [stepwise(adapter, prompt, policy, tokens, row) for row, prompt in enumerate(prompts)]
    drafter = ScriptedDrafter([chosen for chosen, _ in alone], right=(0, 4, 2, 4, 1))
    decoder = SpeculativeDecoder(adapter, policy, drafter, drafts=4)
    kept = [[] for _ in prompts]
    decoder.observer = lambda row, logits: kept[row].append(logits.clone())
    decoder.start(prompts, max_new_tokens=tokens)
    while decoder.running:
        decoder.round()
    for row, (chosen, logits) in enumerate(alone):
        assert decoder.rows[row].tokens == chosen
        assert torch.equal(torch.cat(kept[row]), logits)


@functools.cache
def decoded(name, label, batch):
    """(adapter, prompts, 2,000 tokens of token-by-token decoding)."""
    model = load(name, device="cpu")
    adapter = Adapter(model.adapter.model, name=name, invariant=True)
    problems = [model.tokenizer(row["question"])["input_ids"] for row in heldout_problems()]
    prompts = [tokens[:PROMPT] for tokens in problems if len(tokens) >= PROMPT][:batch]
    policy = parse_policy(label)
    made = generate(adapter, torch.tensor(prompts), policy, max_new_tokens=TOKENS)
    return adapter, prompts, [list(row.tokens) for row in made]


@pytest.mark.slow
@pytest.mark.parametrize("drafts", range(1, 9))
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["builtin/gdn", "builtin/mamba2"])
def test_long_texts_equal_those_of_decoding(name, policy, batch, drafts):
    """Token for token, under every policy that does not round by chance."""
    adapter, prompts, want = decoded(name, policy, batch)
    got = speculate(
        adapter,
        prompts,
        parse_policy(policy),
        ScriptedDrafter(want, right=(8, 8, 3, 8, 0, 8, 1)),
        drafts=drafts,
        max_new_tokens=TOKENS,
    )
    assert tokens_of(got) == want
