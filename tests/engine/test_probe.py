"""The probe: errors per head against what the caches hold, gates against a loop over tokens."""

import pytest
import torch
from tiny_models import random_tokens

from replayssm.engine.lockstep import Arm, Lockstep
from replayssm.models import Adapter
from replayssm.policy import parse_policy


def arms(*policies, **last):
    """The reference, then policies; keywords belong to the last."""
    labels = ["fp32", *policies]
    return [
        Arm(
            label=f"{index}: {label}",
            policy=parse_policy(label),
            kind="policy" if index else "reference",
            **(last if index == len(policies) else {}),
        )
        for index, label in enumerate(labels)
    ]


def run(model, chosen, *, tokens=64, prompts=2, probe=True):
    """An engine after `tokens` tokens, and its logits."""
    engine = Lockstep(Adapter(model), chosen, probe=probe)
    text = random_tokens(prompts, 10 + tokens)
    engine.start(text[:, :10], tokens=tokens)
    logits = torch.cat([w.logits.clone() for w in engine.read(text[:, 10:])], dim=2)
    return engine, logits


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_errors_are_those_of_the_caches(name, tiny_model):
    engine, _ = run(tiny_model(name), arms("fp32", "fp16", "fp8", "fp32+nvfp4", "nvfp4"))
    found = engine.measure_states()
    assert tuple(states.layer for states in found) == engine.layers
    for states in found:
        exact = engine.states(states.layer)  # rings are empty: checkpoints as stored
        difference = (exact - exact[0]).flatten(3).norm(dim=-1)
        torch.testing.assert_close(
            states.checkpoint_error, difference / exact[0].flatten(2).norm(dim=-1)
        )
        assert (states.checkpoint_error[:2] == 0).all() and (states.output_error[:2] == 0).all()
        fp16, fp8, read, nvfp4 = states.checkpoint_error[2:].mean((1, 2))
        assert 1e-5 < fp16 < fp8 < nvfp4
        # A read copy enters no state but through the inputs of later layers.
        assert (read < 1e-6) == (states.layer == engine.layers[0])
        assert 0.05 < states.read_error[4].mean() < 0.3
        assert states.read_error[[0, 1, 2, 3, 5]].isnan().all()
        output = states.output_error[2:].mean((1, 2))
        assert output[0] < output[1] < output[3] and output[2] > 1e-3
        assert (states.underflowed[0] == 0).all() and (states.underflowed[5] > 0).any()
        assert (states.state_norm > 0).all()


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_gates_are_summed_over_tokens_and_writes(name, tiny_model):
    engine, _ = run(tiny_model(name), arms("fp16", "fp16@32", "fp16@8", "fp16", refresh=32))
    seen: dict[int, list] = {layer: [] for layer in engine.layers}
    family, session = engine.adapter.family, engine._stream.session
    observe = session.observer

    def record(layer, inputs, out):
        seen[layer].append(family.log_decay(inputs)[:2].double())
        observe(layer, inputs, out)

    session.observer = record
    text = random_tokens(2, 106)
    engine.start(text[:, :10], tokens=96)
    session = engine._stream.session
    observe, session.observer = session.observer, record
    for _ in engine.read(text[:, 10:]):
        pass
    for states in engine.measure_states():
        decays = torch.cat(seen[states.layer], dim=1)  # [P, 96, H]
        assert (decays <= 0).all()
        torch.testing.assert_close(states.log_decay, decays.mean(1))
        for arm, (ring_len, since) in enumerate(((16, 0), (16, 0), (32, 0), (8, 0), (16, 64))):
            later = decays.flip(1).cumsum(1).flip(1)  # log decay from token i to the end
            written = [at for at in range(since, 96, ring_len)]
            expected = 1 + sum(torch.exp(2 * later[:, at]) for at in written)
            torch.testing.assert_close(states.writes[arm], expected)


def test_a_probe_changes_nothing(tiny_model):
    policies = arms("fp16-sr", "fp8+nvfp4")
    with_probe, without = (
        run(tiny_model("qwen3_5"), policies, probe=probe)[1] for probe in (True, False)
    )
    assert torch.equal(with_probe, without)


def test_only_with_empty_rings_and_a_probe(tiny_model):
    engine, _ = run(tiny_model("mamba2"), arms("fp16@32"), tokens=48)
    with pytest.raises(AssertionError, match="not folded"):
        engine.measure_states()
    engine, _ = run(tiny_model("mamba2"), arms("fp16"), probe=False)
    with pytest.raises(AssertionError, match="without a probe"):
        engine.measure_states()


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_a_resumed_probe_goes_on(name, tiny_model):
    chosen = arms("fp16-sr", "nvfp4", "fp8", refresh=32)
    model = tiny_model(name)
    whole, expected = run(model, chosen, tokens=96)
    text = random_tokens(2, 106)
    first = Lockstep(Adapter(model), chosen, probe=True)
    first.start(text[:, :10], tokens=96)
    for _ in first.read(text[:, 10:42]):
        pass
    second = Lockstep(Adapter(model), chosen, probe=True)
    second.load_engine_state(first.engine_state())
    logits = torch.cat([w.logits.clone() for w in second.read(text[:, 42:])], dim=2)
    assert torch.equal(logits, expected[:, :, 32:])
    for a, b in zip(whole.measure_states(), second.measure_states(), strict=True):
        assert torch.equal(a.checkpoint_error, b.checkpoint_error)
        assert torch.equal(a.writes, b.writes) and torch.equal(a.log_decay, b.log_decay)


# -- refresh ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_a_refreshed_state_is_the_exact_one_rounded_once(name, tiny_model):
    chosen = [*arms("nvfp4"), Arm(label="again", policy=parse_policy("nvfp4"), refresh=32)]
    engine, logits = run(tiny_model(name), chosen, tokens=96)
    assert torch.equal(logits[1, :, :32], logits[2, :, :32]), "nothing is due before 32 tokens"
    assert not torch.equal(logits[1, :, 32:48], logits[2, :, 32:48])
    with torch.inference_mode():
        engine._refresh(96)
    storage = chosen[1].policy.checkpoint
    for layer in engine.layers:
        exact, _, refreshed = engine.states(layer)
        assert torch.equal(refreshed, storage.read(storage.write(exact)))


@pytest.mark.parametrize("policy, every", [("fp16", 24), ("fp16@32", 16), ("fp16", 0)])
def test_refresh_must_fall_on_writes(policy, every, tiny_model):
    with pytest.raises(ValueError, match=f"refresh every {every} tokens must be a multiple"):
        Lockstep(Adapter(tiny_model("mamba2")), arms(policy, refresh=every))
