"""A prompt that is kept: run once, the same bits for whoever continues it, within its bounds."""

import torch
from tiny_models import tiny_model

from replayssm.engine import prefills
from replayssm.engine.batching import Request, generate_many
from replayssm.engine.prefills import PrefillCache
from replayssm.models import Adapter
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
