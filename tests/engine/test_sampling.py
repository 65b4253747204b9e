"""Token choice is a pure function of logits, seed, prompt and position."""

import pytest
import torch

from replayssm.engine.sampling import Sampler


def test_greedy_takes_the_smallest_id_among_equals():
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, 0.5]])
    assert Sampler().choose(logits, prompts=[0, 1], position=4).tolist() == [1, 0]


def test_sampling_follows_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(20000, 4)
    sampler = Sampler(temperature=2.0, seed=9)
    chosen = sampler.choose(logits, prompts=range(20000), position=3)
    share = torch.bincount(chosen, minlength=4) / 20000
    want = torch.softmax(logits[0] / 2.0, -1)
    assert torch.allclose(share, want, atol=4 * (want * (1 - want) / 20000).max().sqrt())


def test_choice_depends_on_seed_prompt_and_position_only():
    logits = torch.zeros(3, 1000)

    def choose(prompts, position, seed):
        sampler = Sampler(temperature=1.0, seed=seed)
        return sampler.choose(logits[: len(prompts)], prompts=prompts, position=position).tolist()

    a = choose([4, 5, 6], 10, 1)
    assert a == choose([4, 5, 6], 10, 1) and len(set(a)) == 3
    assert choose([6, 4], 10, 1) == [a[2], a[0]]
    assert choose([4, 5, 6], 11, 1) != a != choose([4, 5, 6], 10, 2)


def test_never_chooses_an_impossible_token():
    logits = torch.full((4096, 8), float("-inf"))
    logits[:, 3] = 0.0
    chosen = Sampler(temperature=0.7).choose(logits, prompts=range(4096), position=0)
    assert (chosen == 3).all()


def test_bad_arguments():
    for temperature in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="temperature"):
            Sampler(temperature=temperature)
    with pytest.raises(ValueError, match="seed"):
        Sampler(seed=1 << 32)
