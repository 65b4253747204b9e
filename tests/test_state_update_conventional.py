"""The conventional state behind a session's reader: the numbers of a ring of one slot."""

import copy

import pytest
import torch
from recurrence_cases import (
    TINY,
    make_cache,
    make_inputs,
    make_update,
    random_state,
    relative,
    take_tokens,
)
from tiny_models import random_tokens, tiny_model

from replayssm.engine.stream import Stream
from replayssm.models import Adapter
from replayssm.models.session import RowGroup
from replayssm.ops import capability
from replayssm.ops.triton_conventional import ConventionalLaunch
from replayssm.policy import parse_policy
from replayssm.state_update.triton_conventional import ConventionalReader

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
LAUNCH = ConventionalLaunch(rows=16, num_warps=1)


def prepared(recurrence, policy, tokens=3):
    update = make_update(recurrence, policy, TINY[recurrence], backend="reference", device=DEVICE)
    inputs = make_inputs(recurrence, TINY[recurrence], 2, tokens)
    inputs = type(inputs)(*(t.to(DEVICE) for t in inputs))
    return update, make_cache(update, 2, state=random_state(update, 2)), inputs


@pytest.mark.parametrize("policy", ["fp32@1", "fp16@1"])
@pytest.mark.parametrize("recurrence", TINY)
def test_it_is_a_ring_of_one_slot(recurrence, policy):
    update, cache, inputs = prepared(recurrence, policy)
    same, read = cache.clone(), ConventionalReader(LAUNCH)
    got = torch.cat([read(update, cache, take_tokens(inputs, t, t + 1)) for t in range(3)], 1)
    wanted = update.step(same, inputs)
    tolerance = 1e-6 if policy == "fp32@1" else 2e-3
    assert relative(got, wanted) < tolerance
    assert relative(update.state(cache), update.state(same)) < tolerance


@pytest.mark.parametrize("recurrence", TINY)
def test_snapshots_leave_the_state_alone(recurrence):
    update, cache, inputs = prepared(recurrence, "fp32@1")
    before, kept = update.state(cache).clone(), {}

    def snapshots(update, cache, tokens):
        return kept.setdefault(
            update.layer, torch.empty(2, tokens, *update.geometry.state_shape, device=DEVICE)
        )

    got = ConventionalReader(LAUNCH, snapshots=snapshots)(update, cache, inputs)
    assert torch.equal(update.state(cache), before)
    wanted = update.step(cache, inputs)
    assert relative(got, wanted) < 1e-6
    assert relative(kept[update.layer][:, -1], update.state(cache)) < 1e-6


@pytest.mark.parametrize("policy", ["fp32", "fp8@1", "fp16-sr@1", "fp32+nvfp4@1", "nvfp4@1"])
def test_other_policies_are_refused(policy):
    update, cache, inputs = prepared("mamba2", policy, tokens=1)
    with pytest.raises(ValueError, match="a conventional state is fp32@1, fp16@1 or bf16@1"):
        ConventionalReader(LAUNCH)(update, cache, inputs)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has kernels")
def test_other_devices_are_refused(monkeypatch):
    update, cache, inputs = prepared("kimi_delta", "fp32@1", tokens=1)
    monkeypatch.setattr(capability, "_interpreted", lambda: False)
    with pytest.raises(ValueError, match="not possible: the device is 'cpu'"):
        ConventionalReader(LAUNCH)(update, cache, inputs)


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "kimi_linear"])
def test_a_session_decodes_with_it(name):
    """Every recurrent layer reads conventionally, and the model says what it says with replay."""
    adapter, prompts = Adapter(copy.deepcopy(tiny_model(name)).to(DEVICE)), random_tokens(2, 5)
    logits, seen = {}, set()

    class Noted(ConventionalReader):
        def __call__(self, update, cache, inputs):
            seen.add(update.layer)
            return super().__call__(update, cache, inputs)

    for policy, reader in (("fp32@1", Noted(LAUNCH)), ("fp32@4", None)):
        group = RowGroup(policy=parse_policy(policy), sequences=(0, 1), seeds=(0, 0))
        stream = Stream(adapter, [group], source=range(2), capacity=16)
        stream.session.reader = reader or stream.session.reader
        with torch.inference_mode():
            stream.prefill(prompts)
            stream.hand_over()
            steps = random_tokens(2, 6).to(DEVICE).split(1, dim=1)
            logits[policy] = torch.cat([stream.step(token).clone() for token in steps], 1)
    assert seen == {layer.index for layer in adapter.layers}
    assert relative(logits["fp32@1"], logits["fp32@4"]) < 1e-5
