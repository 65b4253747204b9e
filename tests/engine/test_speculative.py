"""Speculative decoding: the tokens of token-by-token decoding, whatever drafts are rejected."""

import pytest
import torch
from scripted import ScriptedDrafter, check_greedy, decoded, poison_rejected, tokens_of
from tiny_models import TINY_ARCHITECTURES, random_tokens, tiny_model

from replayssm.engine import tentative
from replayssm.engine.drafters import (
    ModelDrafter,
    NGramDrafter,
)
from replayssm.engine.speculative import Acceptance, SpeculativeDecoder, speculate
from replayssm.models import Adapter
from replayssm.policy import parse_policy

POLICIES = ("fp32", "fp16", "bf16", "fp8", "int8", "nvfp4", "fp16+nvfp4", "nvfp4@5")


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
@pytest.mark.parametrize("policy", ["fp32@4", "fp16+nvfp4@4"])
def test_every_architecture_speculates_as_it_decodes(name, policy):
    adapter, policy = Adapter(tiny_model(name)), parse_policy(policy)
    prompts = random_tokens(3, 7).tolist()
    want = decoded(adapter, prompts, policy, 18)
    drafter = ScriptedDrafter(want, right=(0, 3, 1, 5, 2))
    got = speculate(adapter, prompts, policy, drafter, drafts=5, max_new_tokens=18)
    assert tokens_of(got) == want or check_greedy(adapter, prompts, policy, got)
    assert len({row.acceptance.num_accepted for row in got}) > 1  # rows went their own ways


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
def test_every_deterministic_policy(name, policy):
    adapter, policy = Adapter(tiny_model(name)), parse_policy(policy)
    prompts = random_tokens(2, 9, seed=3).tolist()
    want = decoded(adapter, prompts, policy, 40)
    for drafts in (1, 3, 8):
        drafter = ScriptedDrafter(want, right=(8, 0, 2, 8, 1))
        got = speculate(adapter, prompts, policy, drafter, drafts=drafts, max_new_tokens=40)
        assert tokens_of(got) == want or check_greedy(adapter, prompts, policy, got)


@pytest.mark.parametrize("policy", ["fp16-sr", "fp8-sr+nvfp4@4"])
@pytest.mark.parametrize("undo", ["cursor", "snapshots"])
def test_stochastic_policies_with_equal_seeds_and_flush_positions(policy, undo):
    adapter, policy = Adapter(tiny_model("qwen3_5")), parse_policy(policy)
    prompts = random_tokens(2, 6).tolist()
    want = decoded(adapter, prompts, policy, 30, seed=5)
    drafter = ScriptedDrafter(want, right=(2, 4, 0))
    got = speculate(
        adapter, prompts, policy, drafter, drafts=4, max_new_tokens=30, seed=5, undo=undo
    )
    assert tokens_of(got) == want


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "mamba2"])
@pytest.mark.parametrize("right", range(7))
def test_partial_acceptance_at_every_count(name, right):
    """The same number accepted in every round, none and all included."""
    adapter, policy = Adapter(tiny_model(name)), parse_policy("nvfp4@32")
    prompts = random_tokens(1, 5).tolist()
    want = decoded(adapter, prompts, policy, 24)
    drafter = ScriptedDrafter(want, right=(right,))
    (got,) = speculate(adapter, prompts, policy, drafter, drafts=6, max_new_tokens=24)
    assert list(got.generation.tokens) == want[0]
    whole = [hits for hits, rounds in got.acceptance.by_place[:right] if hits == rounds]
    assert len(whole) == right  # every draft that was right was accepted ...
    assert all(hits == 0 for hits, _ in got.acceptance.by_place[right:])  # ... and no other
    if right == 0:
        assert (got.acceptance.num_accepted, got.acceptance.rounds) == (0, 23)


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
@pytest.mark.parametrize("schedule", ["aligned", "early"])
def test_rejected_records_leave_no_trace(name, schedule):
    """Ring records past the cursor, keys past a row's end and tapes become NaN after each round."""
    adapter, policy = Adapter(tiny_model(name)), parse_policy("fp16+nvfp4@6")
    prompts = random_tokens(2, 7, seed=1).tolist()
    want = decoded(adapter, prompts, policy, 30)

    def run(poison: bool):
        drafter = ScriptedDrafter(want, right=(2, 0, 4, 1))
        decoder = SpeculativeDecoder(adapter, policy, drafter, drafts=4, schedule=schedule)
        decoder.start(prompts, max_new_tokens=30)
        while decoder.running:
            decoder.round()
            if poison:
                poison_rejected(decoder._state)
        return [row.tokens for row in decoder.rows]

    clean = run(poison=False)
    assert run(poison=True) == clean
    if schedule == "aligned":
        assert clean == want


def test_a_window_before_a_full_ring_flushes_what_is_committed_only():
    """Schedule "early": flushes at other places than decoding's; in FP32, that is rounding."""
    adapter, prompts = Adapter(tiny_model("qwen3_5")), random_tokens(2, 7).tolist()
    policy = parse_policy("fp32@6")
    want = decoded(adapter, prompts, policy, 40)
    drafter = ScriptedDrafter(want, right=(3, 5, 0, 2))
    decoder = SpeculativeDecoder(adapter, policy, drafter, drafts=5, schedule="early")
    decoder.start(prompts, max_new_tokens=40)
    seen = set()
    (_, cache), *_ = decoder._state.session.updates(decoder._state.session.layer_indices[0])
    while decoder.running:
        flushed, filled = cache.flushes.clone(), cache.pos.clone()
        decoder.round()
        seen |= set(filled[cache.flushes > flushed].tolist())
        assert int(cache.pos.max()) <= 6
    assert [row.tokens for row in decoder.rows] == want
    assert min(seen) < 6  # earlier than full


@pytest.mark.parametrize("slots", [6, 8])
def test_rings_that_cannot_be_longer_shorten_windows(slots, monkeypatch):
    """As where kernels have no longer rings: the same texts, in more rounds."""
    adapter, policy = Adapter(tiny_model("kimi_linear")), parse_policy("fp16+nvfp4@6")
    prompts = random_tokens(3, 7).tolist()
    want = decoded(adapter, prompts, policy, 30)

    def run():
        drafter = ScriptedDrafter(want, right=(4, 0, 4, 2))
        decoder = SpeculativeDecoder(adapter, policy, drafter, drafts=4)
        decoder.start(prompts, max_new_tokens=30)
        rounds = 0
        while decoder.running:
            decoder.round()
            rounds += 1
        (_, cache), *_ = decoder._state.session.updates(decoder._state.session.layer_indices[0])
        assert [row.tokens for row in decoder.rows] == want
        return rounds, cache.ring_len

    free = run()
    monkeypatch.setattr(tentative, "_most_slots", lambda *about: slots)
    short = run()
    assert (free[1], short[1]) == (10, slots) and short[0] > free[0]


def test_flushes_at_other_places_are_seen():
    """The comparison with decoding tells a rounding at a wrong place from a near tie."""
    adapter, prompts = Adapter(tiny_model("qwen3_5")), random_tokens(2, 7).tolist()
    policy = parse_policy("nvfp4@6")
    want = decoded(adapter, prompts, policy, 120)
    drafter = ScriptedDrafter(want, right=(3, 5, 0, 2))
    got = speculate(
        adapter, prompts, policy, drafter, drafts=5, max_new_tokens=120, schedule="early"
    )
    assert tokens_of(got) != want
    with pytest.raises(AssertionError):
        check_greedy(adapter, prompts, policy, got)


def test_rows_are_flushed_where_decoding_flushes_them():
    adapter, policy = Adapter(tiny_model("mamba2")), parse_policy("fp16-sr@5")
    prompts = random_tokens(3, 7).tolist()
    want = decoded(adapter, prompts, policy, 41)
    drafter = ScriptedDrafter(want, right=(0, 6, 2))
    decoder = SpeculativeDecoder(adapter, policy, drafter, drafts=6)
    decoder.start(prompts, max_new_tokens=41)
    (_, cache), *_ = decoder._state.session.updates(decoder._state.session.layer_indices[0])
    while decoder.running:
        decoder.round()
        for row, position in enumerate(decoder._state.positions):
            read = position - 7
            if read and not decoder.rows[row].ended:  # a full ring is flushed as the row reads on
                assert int(cache.pos[row]) == (read - 1) % 5 + 1
                assert int(cache.flushes[row]) == 1 + (read - 1) // 5
    assert [row.tokens for row in decoder.rows] == want


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "kimi_linear"])
@pytest.mark.parametrize("make", ["ngram", "model"])
def test_a_row_is_preempted_and_resumed_elsewhere(name, make):
    adapter, policy = Adapter(tiny_model(name)), parse_policy("fp16-sr+nvfp4@6")
    prompts = [[5, 6, 7, 8] * 3, [9, 4, 9, 4, 9, 4], [31, 32, 33]]

    def decoder():
        drafter = NGramDrafter() if make == "ngram" else ModelDrafter(adapter)
        made = SpeculativeDecoder(adapter, policy, drafter, drafts=3, seed=2)
        made.start(prompts, max_new_tokens=30)
        return made

    def finish(made):
        while made.running:
            made.round()
        return [None if row is None else row.tokens for row in made.rows]

    want = finish(decoder())
    first, other = decoder(), decoder()
    for _ in range(3):
        first.round()
    taken = first.preempt(1)
    with pytest.raises(ValueError, match="row 1 is free"):
        first.preempt(1)
    for _ in range(2):
        first.round()
    other.preempt(0)
    other.resume(0, taken)  # into another batch, another place
    with pytest.raises(ValueError, match="row 0 is not free"):
        other.resume(0, taken)
    assert finish(other) == [want[1], want[1], want[2]]
    assert finish(first) == [want[0], None, want[2]]


def test_snapshots_give_the_same_tokens_and_cost_a_state_per_draft():
    adapter, prompts = Adapter(tiny_model("qwen3_5")), random_tokens(2, 7).tolist()
    policy = parse_policy("fp32@1")
    want = decoded(adapter, prompts, policy, 25)
    sizes = {}
    for undo in ("cursor", "snapshots"):
        drafter = ScriptedDrafter(want, right=(2, 0, 3))
        decoder = SpeculativeDecoder(adapter, policy, drafter, drafts=3, undo=undo)
        decoder.start(prompts, max_new_tokens=25)
        while decoder.running:
            decoder.round()
        assert [row.tokens for row in decoder.rows] == want
        sizes[undo] = decoder.state_bytes()
    assert sizes["cursor"]["draft"] == 0
    assert sizes["snapshots"]["draft"] >= sizes["snapshots"]["checkpoint"] > 0
    with pytest.raises(ValueError, match="with snapshots, only 'aligned'"):
        SpeculativeDecoder(adapter, policy, drafter, drafts=3, undo="snapshots", schedule="early")


def test_snapshots_are_exact_with_every_policy():
    """Token by token inside a window: not even another order of sums in the recurrence."""
    adapter, prompts = Adapter(tiny_model("nemotron_h")), random_tokens(2, 7).tolist()
    for policy in map(parse_policy, ("nvfp4", "fp8-sr+nvfp4@4")):
        want = decoded(adapter, prompts, policy, 25)
        drafter = ScriptedDrafter(want, right=(2, 0, 3))
        got = speculate(
            adapter, prompts, policy, drafter, drafts=3, max_new_tokens=25, undo="snapshots"
        )
        assert tokens_of(got) == want


# -- counting and ends -----------------------------------------------------------------------------
def test_the_bonus_token_is_not_an_accepted_draft():
    acceptance = Acceptance()
    acceptance.count(drafted=3, accepted=3)
    acceptance.count(drafted=3, accepted=1)
    acceptance.count(drafted=0, accepted=0)
    assert (acceptance.num_accepted, acceptance.drafted, acceptance.rounds) == (4, 6, 3)
    assert acceptance.rate == 4 / 6
    assert acceptance.tokens_per_round == 1 + 4 / 3
    assert acceptance.by_place == [[2, 2], [1, 2], [1, 2]]
    assert Acceptance().rate is None and Acceptance().tokens_per_round is None


def test_ends():
    adapter, policy = Adapter(tiny_model("qwen3_5")), parse_policy("fp32")
    prompts = random_tokens(2, 8).tolist()
    want = decoded(adapter, prompts, policy, 30)
    stop = want[0][11]
    drafter = ScriptedDrafter(want, right=(4,))
    got = speculate(
        adapter, prompts, policy, drafter, drafts=4, max_new_tokens=30, stop_tokens=[stop]
    )
    for row, whole in zip(got, want, strict=True):
        assert row.generation.stopped == (stop in whole)
        cut = whole[: whole.index(stop)] if stop in whole else whole
        assert list(row.generation.tokens) == cut
    for tokens in (1, 2, 3):
        drafter = ScriptedDrafter(want, right=(4,))
        got = speculate(adapter, prompts, policy, drafter, drafts=4, max_new_tokens=tokens)
        assert tokens_of(got) == [row[:tokens] for row in want]
    none = speculate(adapter, prompts, policy, None, drafts=0, max_new_tokens=9)
    assert tokens_of(none) == [row[:9] for row in want]
    for bad, message in (({"prompts": []}, "at least one token"), ({"tokens": 0}, "at least 1")):
        with pytest.raises(ValueError, match=message):
            speculate(
                adapter,
                bad.get("prompts", prompts),
                policy,
                None,
                drafts=0,
                max_new_tokens=bad.get("tokens", 4),
            )


def test_prompts_of_different_lengths_do_not_depend_on_each_other():
    adapter, policy = Adapter(tiny_model("nemotron_h")), parse_policy("fp16+nvfp4@6")
    prompts = [[5, 6, 7, 5, 6, 7], [9, 9], [40, 41, 42, 43, 44]]
    got = speculate(adapter, prompts, policy, NGramDrafter(), drafts=3, max_new_tokens=25)
    for row, prompt in enumerate(prompts):
        alone = decoded(adapter, [prompt], policy, 25, prompt_ids=[row])
        assert list(got[row].generation.tokens) == alone[0]


def test_logits_that_are_not_finite_are_named(tiny_model):
    model = tiny_model("mamba2")
    with torch.no_grad():
        model.get_output_embeddings().weight[:] = float("nan")
    with pytest.raises(ValueError, match="not finite under policy fp32: row 0, position 2"):
        speculate(
            Adapter(model), [[4, 5, 6]], parse_policy("fp32"), None, drafts=0, max_new_tokens=4
        )


def test_settings_that_cannot_be():
    adapter, policy = Adapter(tiny_model("qwen3_5")), parse_policy("fp32")
    with pytest.raises(ValueError, match="drafts must be 0 to 16, got 17"):
        SpeculativeDecoder(adapter, policy, NGramDrafter(), drafts=17)
    with pytest.raises(ValueError, match="need a drafter"):
        SpeculativeDecoder(adapter, policy, None, drafts=2)
    with pytest.raises(ValueError, match="do not fit a ring of 4"):
        SpeculativeDecoder(
            adapter, parse_policy("fp32@4"), NGramDrafter(), drafts=4, schedule="early"
        )
    with pytest.raises(ValueError, match="allowed are aligned, early"):
        SpeculativeDecoder(adapter, policy, NGramDrafter(), drafts=4, schedule="late")
    with pytest.raises(ValueError, match="allowed are cursor, snapshots"):
        SpeculativeDecoder(adapter, policy, NGramDrafter(), drafts=4, undo="magic")
