"""Free runs: the reference's row is plain generation, equal policies write equal texts."""

import pytest
import torch
from tiny_models import random_tokens

from replayssm.engine.decode import generate
from replayssm.engine.free_run import free_run
from replayssm.engine.lockstep import Arm
from replayssm.engine.sampling import Sampler
from replayssm.models import Adapter
from replayssm.policy import parse_policy

ARMS = [
    Arm(label=f"{kind} {policy}", policy=parse_policy(policy), kind=kind)
    for kind, policy in (("reference", "fp32"), ("policy", "nvfp4"), ("control", "fp32"))
]


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=1.0, seed=4)])
@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_equal_policies_write_equal_texts(name, sampler, tiny_model):
    adapter, prompts = Adapter(tiny_model(name)), random_tokens(2, 12)
    found = free_run(adapter, ARMS, prompts, tokens=40, sampler=sampler, prompt_ids=[5, 3])
    assert found.shape == (3, 2, 40)
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    alone = generate(
        adapter, prompts, ARMS[0].policy, max_new_tokens=40, sampler=sampler, prompt_ids=[5, 3]
    )
    assert [list(row.tokens) for row in alone] == found[0].tolist()


def test_it_ends_when_every_row_has_stopped(tiny_model):
    adapter, prompts = Adapter(tiny_model("mamba2")), random_tokens(2, 12)
    whole = free_run(adapter, ARMS, prompts, tokens=10)
    stop = set(whole[:, :, 2].flatten().tolist())
    cut = free_run(adapter, ARMS, prompts, tokens=10, stop_tokens=stop)
    assert cut.shape[2] <= 3 and torch.equal(cut, whole[:, :, : cut.shape[2]])


def test_bad_arguments(tiny_model):
    adapter = Adapter(tiny_model("mamba2"))
    with pytest.raises(ValueError, match="prompts must be"):
        free_run(adapter, ARMS, torch.zeros(3, dtype=torch.int64), tokens=1)
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        free_run(adapter, ARMS, random_tokens(1, 3), tokens=0)
