"""Teacher-forced scores: equal to one plain forward pass in FP32, independent of the batch."""

import pytest
import torch
from tiny_models import TINY_ARCHITECTURES, random_tokens, tiny_model

from replayssm.engine.scoring import ScoredText, score_texts
from replayssm.models import Adapter
from replayssm.policy import parse_policy


def texts(lengths=(5, 40, 17, 2, 33)):
    rows = random_tokens(len(lengths), max(lengths)).tolist()
    return [
        ScoredText(tokens=row[:n], scored=max(1, n // 2), sequence=n)
        for row, n in zip(rows, lengths, strict=True)
    ]


# The longest of the second set is read to the very end of a window.
@pytest.mark.parametrize("lengths", [(5, 40, 17, 2, 33), (20, 34)])
@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_fp32_scores_are_those_of_one_forward_pass(name, lengths):
    model, asked = tiny_model(name), texts(lengths)
    scores = score_texts(Adapter(model), asked, parse_policy("fp32@8"))
    for text, (score, greedy) in zip(asked, scores, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([text.tokens]), use_cache=False).logits[0].double()
        logp = torch.log_softmax(logits, -1)[-text.scored - 1 : -1]
        target = torch.tensor(text.tokens[-text.scored :])
        assert score == pytest.approx(float(logp.gather(-1, target[:, None]).sum()), abs=2e-3)
        assert greedy == bool((logp.argmax(-1) == target).all())


@pytest.mark.parametrize("policy", ["fp32", "nvfp4@8", "fp16-sr@4"])
def test_order_and_batch_size_change_no_bit(policy):
    adapter, policy = Adapter(tiny_model("qwen3_5")), parse_policy(policy)
    first = score_texts(adapter, texts(), policy)
    assert score_texts(adapter, texts()[::-1], policy)[::-1] == first
    assert score_texts(adapter, texts()[2:], policy, rows=16) == first[2:]


def test_the_policy_acts():
    adapter = Adapter(tiny_model("mamba2"))
    exact, coarse = (
        score_texts(adapter, texts(), parse_policy(name)) for name in ("fp32", "nvfp4")
    )
    assert all(abs(a[0] - b[0]) > 1e-3 for a, b in zip(exact, coarse, strict=True) if a[0] < -9)


def test_greedy_continuations_are_recognised():
    model = tiny_model("mamba2")
    prompt = random_tokens(1, 9)
    with torch.no_grad():
        whole = model.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=None)
    tokens = whole[0].tolist()
    other = [*tokens[:-1], (tokens[-1] + 1) % 128]
    asked = [ScoredText(tokens=t, scored=5) for t in (tokens, other)]
    scores = score_texts(Adapter(model), asked, parse_policy("fp32"))
    assert [greedy for _, greedy in scores] == [True, False]


def test_bad_texts():
    with pytest.raises(ValueError, match="1 to 2 can be scored, got 3"):
        ScoredText(tokens=[1, 2, 3], scored=3)
    adapter = Adapter(tiny_model("qwen3_5"))
    with pytest.raises(ValueError, match="4096 positions"):
        score_texts(adapter, [ScoredText(tokens=[1] * 4097, scored=1)], parse_policy("fp32"))
