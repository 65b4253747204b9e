"""Rows, groups, hand-over and isolation of a session."""

import pytest
import torch
from tiny_models import TINY_ARCHITECTURES, random_tokens

from replayssm.engine.stream import Stream
from replayssm.models import Adapter, ReplaySession, RowGroup
from replayssm.policy import parse_policy


def group(policy: str, *ids: int, seed: int = 0, factor: float = 1.0) -> RowGroup:
    return RowGroup(
        policy=parse_policy(policy),
        sequences=ids,
        seeds=(seed,) * len(ids),
        log_decay_factor=factor,
    )


def run(adapter, groups, tokens, *, source, prompt=8, steps=(16, 3)) -> torch.Tensor:
    """Logits of all decode steps, [rows, tokens, vocabulary]; `tokens` holds one row per prompt."""
    with torch.inference_mode():
        stream = Stream(adapter, groups, source=source, capacity=tokens.shape[1])
        stream.prefill(tokens[:, :prompt])
        stream.hand_over()
        rows = tokens[source]
        out = []
        for step in steps:
            out.append(stream.step(rows[:, stream.position : stream.position + step]))
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_same_prompt_before_and_after_another(name, tiny_model):
    """A session starts from zero state: nothing of an earlier text remains (a reported fault)."""
    adapter = Adapter(tiny_model(name))
    first, second = random_tokens(2, 27, seed=1), random_tokens(2, 27, seed=2)
    groups = [group("fp16-sr+nvfp4", 0, 1)]
    a, b, again = (run(adapter, groups, t, source=[0, 1]) for t in (first, second, first))
    assert torch.equal(a, again) and not torch.equal(a, b)


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "mamba2"])
def test_groups_do_not_touch_each_other(name, tiny_model):
    """Rows with other policies, ring lengths and faults beside it leave a row as it is alone."""
    adapter, tokens = Adapter(tiny_model(name)), random_tokens(2, 27)
    groups = [
        group("fp32", 0, 1),
        group("nvfp4@3", 0, 1),
        group("fp16-sr+nvfp4", 0, 1, seed=5),
        group("fp32", 0, 1, factor=1.01),
    ]
    together = run(adapter, groups, tokens, source=[0, 1] * 4)
    for index, alone in enumerate(groups):
        want = run(adapter, [alone], tokens, source=[0, 1])
        got = together[2 * index : 2 * index + 2]
        # The batch size changes the summation order of the shared layers, so FP32 rounding remains,
        # and a value may round to the other neighbour of a coarse format.
        tolerance = 1e-4 if alone.policy.label == "fp32" else 0.05
        assert float((got - want).abs().max() / want.std()) < tolerance
    reference, fault = together[:2], together[6:]
    assert float((fault - reference).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_neighbours_that_step_together_have_the_bits_they_have_alone(name, tiny_model, monkeypatch):
    adapter, tokens = Adapter(tiny_model(name)), random_tokens(2, 40)
    groups = [
        *(group(policy, 0, 1) for policy in ("fp32", "fp16-sr", "nvfp4")),
        *(group(policy, 0, 1, factor=1.01) for policy in ("fp32", "fp16")),
        *(group(policy, 0, 1) for policy in ("fp32@3", "fp8@3", "fp32")),
    ]
    companies = ReplaySession(adapter, groups)._companies
    assert companies == [range(0, 3), range(3, 5), range(5, 7), range(7, 8)]
    together = run(adapter, groups, tokens, source=[0, 1] * 8)
    alone = [range(index, index + 1) for index in range(len(groups))]
    monkeypatch.setattr(ReplaySession, "_companies", alone)
    assert torch.equal(together, run(adapter, groups, tokens, source=[0, 1] * 8))


def test_policies_differ_and_coarser_is_worse(tiny_model):
    adapter, tokens = Adapter(tiny_model("mamba2")), random_tokens(2, 41)
    names = ["fp32", "fp16", "fp8", "nvfp4"]
    logits = run(
        adapter,
        [group(name, 0, 1) for name in names],
        tokens,
        source=[0, 1] * len(names),
        steps=(16, 16),
    )
    errors = [(logits[2 * i : 2 * i + 2] - logits[:2]).abs().mean().item() for i in range(4)]
    assert errors[0] == 0 and errors == sorted(errors) and errors[1] > 0
    assert errors[3] > 5 * errors[2] > 25 * errors[1]


def test_hand_over_copies_prefill_rows_in_any_order(tiny_model):
    adapter, tokens = Adapter(tiny_model("qwen3_5")), random_tokens(3, 27)
    straight = run(adapter, [group("fp32", 0, 1, 2)], tokens, source=[0, 1, 2])
    swapped = run(adapter, [group("fp32", 2, 0), group("fp32", 1)], tokens, source=[2, 0, 1])
    assert torch.allclose(swapped, straight[[2, 0, 1]], atol=1e-4)


def test_prefilling_every_row_equals_copying_one(tiny_model):
    """Prefill rounds nothing, so one row per prompt stands for all its arms.

    Bit for bit, because 2 x 8 and 4 x 8 tokens are both a multiple of 8.
    """
    adapter, tokens = Adapter(tiny_model("qwen3_5")), random_tokens(2, 27)
    groups = [group("fp32", 0, 1), group("nvfp4", 0, 1)]
    copied = run(adapter, groups, tokens, source=[0, 1, 0, 1])
    repeated = run(adapter, groups, tokens.repeat(2, 1), source=[0, 1, 2, 3])
    assert torch.equal(copied, repeated)


def test_states_are_the_effective_state(tiny_model):
    """Checkpoint plus ring: after any number of tokens it is the state the prefill would have."""
    adapter, tokens = Adapter(tiny_model("mamba2")), random_tokens(2, 30)
    with torch.inference_mode():
        stream = Stream(adapter, [group("fp32", 0, 1)], source=[0, 1], capacity=30)
        stream.prefill(tokens[:, :7])
        stream.hand_over()
        stream.step(tokens[:, 7:30])
        whole = ReplaySession(adapter, [group("fp32", 0, 1)])
        with whole:
            adapter.forward(tokens, adapter.new_cache(), start=0)
    for layer, (seen, want) in zip(
        stream.session.layer_indices, whole.prefill_states(), strict=True
    ):
        (got,) = stream.session.states(layer)
        assert seen == 30
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="layer 99"):
        stream.session.states(99)


def test_misuse_is_refused(tiny_model):
    adapter, tokens = Adapter(tiny_model("mamba2")), random_tokens(2, 12)
    with pytest.raises(ValueError, match="at least one row group"):
        ReplaySession(adapter, [])
    with pytest.raises(ValueError, match="sequences"):
        RowGroup(policy=parse_policy("fp32"), sequences=(0, 1), seeds=(0,))
    with torch.inference_mode():
        stream = Stream(adapter, [group("fp32", 0, 1)], source=[0, 1], capacity=12)
        stream.prefill(tokens[:, :8])
        stream.hand_over()
        with pytest.raises(ValueError, match="decodes 2 rows"):
            stream.step(tokens[:1, 8:])
        with pytest.raises(RuntimeError, match="already decoding"):
            stream.session.hand_over([], source=[0, 1])


def test_packed_rows_are_refused(tiny_model):
    adapter = Adapter(tiny_model("bamba"))
    session = ReplaySession(adapter, [group("fp32", 0)])
    with torch.inference_mode(), session, pytest.raises(ValueError, match="packed"):
        adapter.model(
            input_ids=random_tokens(1, 8),
            seq_idx=torch.zeros(1, 8, dtype=torch.int32),
            use_cache=True,
        )
