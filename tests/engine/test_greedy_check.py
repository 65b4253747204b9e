"""Answers that are held against decoding: ties that rounding explains, and faults."""

import pytest
from scripted import decoded
from tiny_models import random_tokens, tiny_model

from replayssm.engine import greedy_check
from replayssm.models import Adapter
from replayssm.policy import parse_policy


def test_ties_are_found_and_faults_are_not_ties():
    adapter, policy = Adapter(tiny_model("qwen3_5")), parse_policy("fp16")
    prompts = random_tokens(2, 8).tolist()
    answers = decoded(adapter, prompts, policy, 12)
    found = greedy_check.check_greedy(adapter, prompts, answers, policy)
    assert (found.ties, found.reordered, found.tokens, found.faults()) == ([], [], 24, [])
    assert 0 < found.spread < 1e-4
    wrong = [list(row) for row in answers]
    wrong[1][7] = (wrong[1][7] + 1) % 128
    found = greedy_check.check_greedy(adapter, prompts, wrong, policy)
    first = found.faults()[0]
    assert (first.row, first.place, first.best) == (1, 7, answers[1][7])
    with pytest.raises(ValueError, match="equal lengths"):
        greedy_check.check_greedy(adapter, prompts, [answers[0], answers[1][:3]], policy)


def test_how_many_narrow_ties_rounding_explains():
    def faults(ties, reordered, *, gap=1e-5, tokens=100):
        tie = greedy_check.Tie(row=0, place=0, chosen=1, best=2, gap=gap)
        return len(
            greedy_check.GreedyCheck(
                tokens=tokens, ties=[tie] * ties, reordered=[tie] * reordered, spread=1e-4
            ).faults()
        )

    assert [faults(n, 0) for n in (0, 4, 5)] == [0, 0, 5]
    assert [faults(n, 8) for n in (20, 21)] == [0, 21]
    assert faults(6, 0, tokens=1000) == 0
    assert faults(1, 50, gap=3e-4) == 1, "a wide one is a fault, however many there are"
