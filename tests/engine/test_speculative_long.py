"""Speculation by replayed passes, and over long texts of the built-in models.

The latter takes minutes a case (`pytest -m slow`), on a GPU if there is one. Windows sum in their
own order there; `test_speculative_exact.py` has one order for windows and single tokens.
"""

import functools
import warnings

import pytest
import torch
from scripted import ScriptedDrafter, check_greedy, tokens_of
from test_graphs import Recorded, recorded  # noqa: F401
from tiny_models import random_tokens, tiny_model

from replayssm.engine.decode import generate
from replayssm.engine.drafters import ModelDrafter
from replayssm.engine.speculative import SpeculativeDecoder, speculate
from replayssm.models import Adapter, load
from replayssm.policy import parse_policy
from replayssm.study.corpus import heldout_problems

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, PROMPT = 2000, 32
POLICIES = ("fp32", "fp16", "bf16", "fp8", "int8", "nvfp4", "fp32+nvfp4", "fp16+nvfp4")


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has real graphs")
@pytest.mark.parametrize("name", ["mamba2", "bamba"])
def test_passes_are_replayed_whatever_the_rows_keep(name, recorded):  # noqa: F811
    """A pass is captured for each width, and each place of a drafter's; rings decide nothing."""
    adapter, smaller = Adapter(tiny_model(name)), Adapter(tiny_model("mamba2"))
    prompts = random_tokens(2, 7).tolist()

    def run(mode):
        drafter = ModelDrafter(smaller, policy=parse_policy("fp32@7"), graphs=mode)
        decoder = SpeculativeDecoder(
            adapter, parse_policy("fp16-sr+nvfp4@5"), drafter, drafts=3, graphs=mode
        )
        decoder.start(prompts, max_new_tokens=50)
        while decoder.running:
            decoder.round()
        return [row.tokens for row in decoder.rows]

    want = run("off")
    assert Recorded.captures == 0
    assert run("auto") == want
    # At most: windows of 1 to 4 tokens, a drafter's four tokens; which of them come up depends on
    # what is accepted, and so on the random model.
    assert 0 < Recorded.captures <= 8 + 4 and Recorded.replays > 40


@functools.cache
def _model(name):
    return load(name, device=DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["builtin/gdn", "builtin/mamba2"])
def test_long_texts_are_those_of_decoding(name, policy, batch):
    """2,000 tokens, drafts 1 to 8; where decoding chooses otherwise, rounding explains it."""
    model, policy = _model(name), parse_policy(policy)
    problems = [model.tokenizer(row["question"])["input_ids"] for row in heldout_problems()]
    prompts = [tokens[:PROMPT] for tokens in problems if len(tokens) >= PROMPT][:batch]
    made = generate(model.adapter, torch.tensor(prompts), policy, max_new_tokens=TOKENS)
    want = [list(row.tokens) for row in made]
    ties, same = [], 0
    for drafts in range(1, 9):
        drafter = ScriptedDrafter(want, right=(8, 8, 3, 8, 0, 8, 1))
        got = speculate(
            model.adapter, prompts, policy, drafter, drafts=drafts, max_new_tokens=TOKENS
        )
        same += sum(a == b for a, b in zip(tokens_of(got), want, strict=True))
        if tokens_of(got) != want:
            ties += check_greedy(model.adapter, prompts, policy, got)
    if ties:
        listed = "; ".join(f"{tie.chosen} for {tie.best} by {tie.gap:.1e}" for tie in ties)
        warnings.warn(
            f"{name} {policy.label} batch {batch}: {same} of {8 * batch} texts equal, "
            f"{len(ties)} ties (in standard deviations of the logits): {listed}",
            stacklevel=1,
        )
