"""A prompt that is kept: run once, the same bits for whoever continues it, within its bounds."""

import pytest
import torch
from tiny_models import TINY_ARCHITECTURES, random_tokens, tiny_model

from replayssm.engine import prefills
from replayssm.engine.batching import Request, generate_many
from replayssm.engine.prefills import PrefillCache
from replayssm.models import Adapter
from replayssm.models.kv_cache import cache_tensors
from replayssm.policy import parse_policy


def answers(adapter, name, kept=None):
    asked = [Request(prompt=[5, 6, 7 + i], max_new_tokens=9, sequence=i) for i in (0, 1, 0)]
    done = generate_many(adapter, asked, parse_policy(name), prefills=kept)
    return {completion.index: completion.tokens for completion in done}


def test_policies_share_prompts_and_answer_as_if_they_did_not(monkeypatch):
    adapter = Adapter(tiny_model("qwen3_5"))
    runs = []
    real = prefills.Stream.prefill
    monkeypatch.setattr(
        prefills.Stream, "prefill", lambda self, text: runs.append(text) or real(self, text)
    )
    names = ("fp32@4", "nvfp4@4", "fp16-sr@4")
    alone = [answers(adapter, name) for name in names]
    assert len(runs) == 9
    kept = PrefillCache(adapter)
    runs.clear()
    assert [answers(adapter, name, kept) for name in names] == alone
    assert len(runs) == 2


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


LENGTHS = (3, 63, 64, 65, 128, 150, 70, 197)


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
    for asked, together in ((range(8), 3), (range(7, -1, -1), 5), ([5], 8), ([6, 1, 7], 16)):
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
            assert torch.allclose(got[key], tensor, atol=1e-4 * float(tensor.std())), key


def test_equal_prompts_of_a_group_are_read_once(monkeypatch):
    adapter, runs = Adapter(tiny_model("mamba2")), []
    real = prefills.Stream.prefill
    monkeypatch.setattr(
        prefills.Stream, "prefill", lambda self, text: runs.append(text.shape) or real(self, text)
    )
    long, other = prompts()[5], prompts()[6]
    first, other, again = run_many(adapter, [long, other, long], together=8)
    assert_equal(first, again)
    assert runs == [(2, 64), (2, 64), (1, 22), (1, 6)]
    runs.clear()
    with torch.inference_mode():
        kept = PrefillCache(adapter)
        kept.run(long)
        (same,) = kept.run_many([long], together=8)
    assert len(runs) == 1 and same[0] is kept.run(long)[0]


def test_rows_are_filled_up_on_a_gpu(monkeypatch):
    adapter, seen = Adapter(tiny_model("mamba2")), []
    real = prefills.Stream.prefill
    monkeypatch.setattr(
        prefills.Stream, "prefill", lambda self, text: seen.append(text.shape) or real(self, text)
    )
    want = run_many(adapter, prompts()[5:], together=8)
    assert {rows for rows, _ in seen} == {3, 1}
    seen.clear()
    monkeypatch.setattr(prefills, "fills_rows", lambda device: True)
    for one, other in zip(run_many(adapter, prompts()[5:], together=8), want, strict=True):
        assert_equal(one, other)
    assert {rows for rows, _ in seen} == {8, 1}
