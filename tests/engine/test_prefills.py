"""A prompt that is kept: run once, the same bits for whoever continues it, within its bounds."""

import copy

import pytest
import torch
from interpreter import needs_interpreter
from tiny_models import TINY_ARCHITECTURES, random_tokens, tiny_model

from replayssm.engine import prefills
from replayssm.engine.batching import Request, generate_many
from replayssm.engine.prefills import PrefillCache
from replayssm.models import Adapter, attention
from replayssm.models.kv_cache import cache_tensors
from replayssm.models.loading import load
from replayssm.policy import parse_policy


def answers(adapter, name, kept=None):
    asked = [Request(prompt=[5, 6, 7 + i], max_new_tokens=9, sequence=i) for i in (0, 1, 0)]
    done = generate_many(adapter, asked, parse_policy(name), prefills=kept)
    return {completion.index: completion.tokens for completion in done}


@pytest.fixture
def runs(monkeypatch):
    """Every group of prompts that is run side by side."""
    seen = []
    real = prefills._Rows.run
    monkeypatch.setattr(
        prefills._Rows,
        "run",
        lambda self, keys, *rest: seen.append(keys) or real(self, keys, *rest),
    )
    return seen


def test_policies_share_prompts_and_answer_as_if_they_did_not(runs):
    adapter = Adapter(tiny_model("qwen3_5"))
    names = ("fp32@4", "nvfp4@4", "fp16-sr@4")
    alone = [answers(adapter, name) for name in names]
    assert [len(group) for group in runs] == [2, 2, 2]
    kept = PrefillCache(adapter)
    runs.clear()
    assert [answers(adapter, name, kept) for name in names] == alone
    assert [len(group) for group in runs] == [2]


def test_no_more_is_kept_than_there_is_room_for():
    adapter = Adapter(tiny_model("mamba2"))
    with torch.inference_mode():
        nothing = PrefillCache(adapter, max_bytes=0)
        assert nothing.run([5, 6])[0] is not nothing.run([5, 6])[0]
        state = nothing.run([5, 6])[0].session.prefill_states()
        one = 3 * sum(tensor.numel() * 4 for _, tensor in state) // 2
        some = PrefillCache(adapter, max_bytes=one)
        assert some.run([5, 6])[0] is some.run([5, 6])[0]
        assert some.run([5, 7])[0] is not some.run([5, 7])[0]


LENGTHS = (3, 63, 64, 65, 1, 150, 70, 197)


def prompts():
    return [random_tokens(1, n, seed=n)[0].tolist() for n in LENGTHS]


def read_out(stream, logits):
    """All that whoever continues a prefilled prompt gets."""
    found = {f"state.{i}": s for i, (_, s) in enumerate(stream.session.prefill_states())}
    assert {tokens for tokens, _ in stream.session.prefill_states()} == {stream.position}
    return found | cache_tensors(stream.cache) | {"logits": logits}


def run_many(adapter, asked, together):
    with torch.inference_mode():
        kept = PrefillCache(adapter, max_bytes=0)
        return [read_out(*done) for done in kept.run_many(asked, together=together)]


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_prompts_run_together_do_not_depend_on_each_other(name):
    adapter = Adapter(tiny_model(name))
    first = run_many(adapter, prompts(), together=8)
    for asked, together in ((range(7, -1, -1), 8), ([5], 8), ([6, 1, 7], 16)):
        again = run_many(adapter, [prompts()[i] for i in asked], together=together)
        for index, got in zip(asked, again, strict=True):
            assert_equal(got, first[index])


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_prompts_run_together_are_read_as_one_on_its_own_is(name):
    adapter = Adapter(tiny_model(name))
    alone = run_many(adapter, prompts(), together=1)
    for got, want in zip(run_many(adapter, prompts(), together=8), alone, strict=True):
        assert got.keys() == want.keys()
        for key, tensor in want.items():
            assert got[key].shape == tensor.shape, key
            assert torch.allclose(got[key], tensor, atol=1e-4 * float(tensor.std())), key


def test_more_prompts_than_rows_and_equal_ones(runs):
    adapter = Adapter(tiny_model("mamba2"))
    asked = [random_tokens(1, 3 + n, seed=n)[0].tolist() for n in range(11)]
    asked.insert(1, asked[0])
    got = run_many(adapter, asked, together=8)
    assert [len(group) for group in runs] == [7, 4]
    assert_equal(got[0], got[1])
    assert_equal(got[9], *run_many(adapter, [asked[9]], together=8))


def test_prompts_of_a_group_are_alike_in_length(runs):
    adapter = Adapter(tiny_model("mamba2"))
    asked = [random_tokens(1, n, seed=n)[0].tolist() for n in (300, 200, 90, 80, 5, 4)]
    run_many(adapter, asked, together=8)
    assert [[len(key) for key in group] for group in runs] == [[300, 200], [90, 80, 5, 4]]


def test_a_kept_prompt_is_not_run_again(runs):
    adapter, long = Adapter(tiny_model("mamba2")), prompts()[5]
    with torch.inference_mode():
        kept = PrefillCache(adapter)
        stream, _ = kept.run(long)
        (same,) = kept.run_many([long], together=8)
    assert not runs and same[0] is stream


def test_rows_are_filled_up_on_a_gpu(monkeypatch):
    adapter, seen = Adapter(tiny_model("qwen3_5")), []
    real = prefills.LaneCache.read
    monkeypatch.setattr(
        prefills.LaneCache,
        "read",
        lambda self, tokens, **rest: seen.append(len(tokens)) or real(self, tokens, **rest),
    )
    want = run_many(adapter, prompts()[5:], together=16)
    assert set(seen) == {8}
    seen.clear()
    monkeypatch.setattr(prefills, "fills_rows", lambda device: True)
    for one, other in zip(run_many(adapter, prompts()[5:], together=16), want, strict=True):
        assert_equal(one, other)
    assert set(seen) == {16}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_attention_by_kernel_reads_prompts_side_by_side(monkeypatch):
    """The GPU's path, in the interpreter."""
    needs_interpreter()
    adapter = Adapter(tiny_model("qwen3_5"))
    asked = [random_tokens(1, n, seed=n)[0].tolist() for n in (16, 37)]
    monkeypatch.setattr(prefills, "WINDOW", 16)
    want = run_many(adapter, asked, together=8)
    monkeypatch.setattr(attention, "runs_kernel", lambda device: True)
    got = run_many(adapter, asked, together=8)
    assert_equal(got[1], run_many(adapter, asked[::-1], together=8)[0])
    for one, other in zip(got, want, strict=True):
        for key, tensor in other.items():
            assert torch.allclose(one[key], tensor, atol=1e-4 * float(tensor.std())), key


def test_models_that_cannot_read_side_by_side(runs):
    for name, attend in (("qwen3_next", "sdpa"), ("bamba", "eager")):
        model = copy.deepcopy(tiny_model(name))
        model.set_attn_implementation(attend)
        got = run_many(Adapter(model), prompts()[5:], together=8)
        for one, other in zip(
            got, run_many(Adapter(model), prompts()[5:], together=1), strict=True
        ):
            assert_equal(one, other)
    assert not runs


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["builtin/gdn", "builtin/mamba2"])
def test_prompts_run_together_on_a_gpu(name):
    adapter = load(name, device="cuda", dtype="float32").adapter
    asked = [random_tokens(1, n, seed=n, vocab=2000)[0].tolist() for n in range(60, 560, 20)]
    first = run_many(adapter, asked, together=32)
    for index, got in enumerate(run_many(adapter, asked[::-2], together=32)):
        assert_equal(got, first[-1 - 2 * index])
    for got, want in zip(first, run_many(adapter, asked, together=1), strict=True):
        for key, tensor in want.items():
            assert got[key].shape == tensor.shape, key
            assert torch.allclose(got[key], tensor, atol=1e-3 * float(tensor.std())), key
