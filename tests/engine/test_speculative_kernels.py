"""Speculation on kernels: what may happen to a draft, against kernels that decode token by token.

Runs in Triton's interpreter without a GPU, and compiled with one (`pytest -m gpu`): there texts are
longer, windows are replayed from CUDA graphs, and every test runs for every recurrence. What the
torch backend does is tested in `test_speculative.py`.
"""

import copy
import functools

import pytest
import torch
from interpreter import DEVICE, KERNEL_MARKS, TRITON
from scripted import ScriptedDrafter, check_greedy, decoded, poison_rejected
from tiny_models import random_tokens, tiny_model

from replayssm.engine.decode import Generation
from replayssm.engine.drafters import NGramDrafter
from replayssm.engine.speculative import Speculated, SpeculativeDecoder
from replayssm.models import Adapter
from replayssm.policy import parse_policy

pytestmark = KERNEL_MARKS

NAMES = ["mamba2", "qwen3_5", "kimi_linear"]
EVERY = pytest.mark.parametrize("name", NAMES)


def one_of_them(name):
    """Every recurrence on a GPU; interpreted, which is slow, that of `name`."""
    return pytest.mark.parametrize("name", NAMES if DEVICE == "cuda" else [name])


POLICY = "fp16+nvfp4@4"
TOKENS = 60 if DEVICE == "cuda" else 8
DRAFTS = 3
L = 4  # of POLICY


@functools.cache
def adapter_of(name):
    return Adapter(copy.deepcopy(tiny_model(name)).to(DEVICE))


@functools.cache
def case(name, policy=POLICY, rows=2, tokens=TOKENS):
    """(adapter, policy, prompts, what kernels decode token by token)."""
    adapter, parsed = adapter_of(name), parse_policy(policy)
    prompts = random_tokens(rows, 5, seed=1).tolist()
    return adapter, parsed, prompts, decoded(adapter, prompts, parsed, tokens, backend="triton")


def start(name, right, *, policy=POLICY, rows=2, **options):
    """(decoder that has started, tokens it should write); drafts are right up to `right`."""
    adapter, parsed, prompts, want = case(name, policy, rows)
    drafter = ScriptedDrafter(want, right=right)
    decoder = SpeculativeDecoder(
        adapter, parsed, drafter, drafts=DRAFTS, backend="triton", **options
    )
    decoder.start(prompts, max_new_tokens=TOKENS)
    assert decoder.backends == (TRITON,)
    return decoder, want


def finish(decoder, after_round=lambda: None):
    while decoder.running:
        decoder.round()
        after_round()
    decoder.finish()
    return [None if row is None else row.tokens for row in decoder.rows]


def layer_cache(decoder):
    """Of the first recurrent layer: cursors are the same in all."""
    session = decoder._state.session
    ((_, cache),) = session.updates(session.layer_indices[0])
    return cache


def assert_decoded(name, texts, want, policy=POLICY):
    """The texts of decoding; a window sums in another order, so a code may fall on the other
    side."""
    if texts == want:
        return
    adapter, parsed, prompts, _ = case(name, policy, len(want))
    made = [Generation(tokens=tuple(text), stopped=False) for text in texts]
    results = [Speculated(generation=generation, acceptance=None) for generation in made]
    check_greedy(adapter, prompts, parsed, results)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])
def test_kernels_write_what_torch_decodes(name):
    """Rejections, rows that differ, a flush."""
    adapter, policy = adapter_of(name), parse_policy(POLICY)
    prompts, tokens = random_tokens(2, 5).tolist(), 9
    want = decoded(adapter, prompts, policy, tokens, backend="reference")
    drafter = ScriptedDrafter(want, right=(1, 3, 0))
    decoder = SpeculativeDecoder(adapter, policy, drafter, drafts=DRAFTS, backend="triton")
    decoder.start(prompts, max_new_tokens=tokens)
    assert finish(decoder) == want  # of this text; elsewhere, a code may fall on the other side


@EVERY
@pytest.mark.parametrize("right", range(DRAFTS + 1))
def test_partial_acceptance_at_every_count(name, right):
    """The same number accepted in every round, none and all included."""
    decoder, want = start(name, (right,), rows=1)
    assert_decoded(name, finish(decoder), want)
    if decoder.rows[0].tokens == want[0]:
        by_place = decoder.rows[0].acceptance.by_place
        assert all(hits == rounds for hits, rounds in by_place[:right])
        assert all(hits == 0 for hits, _ in by_place[right:])
        if right == 0:
            assert decoder.rows[0].acceptance.rounds == TOKENS - 1


@one_of_them("kimi_linear")
@pytest.mark.parametrize("schedule", ["aligned", "early"] if DEVICE == "cuda" else ["aligned"])
def test_rejected_records_leave_no_trace(name, schedule):
    """Ring records past the cursor, keys past a row's end and tapes become NaN after each round:
    every logit that a row keeps has the same bits."""
    seen = []
    for poison in (False, True):
        decoder, _ = start(name, (2, 0, 3, 1), schedule=schedule)
        logits = []
        decoder.observer = lambda row, kept, to=logits: to.append((row, kept.cpu().clone()))
        finish(decoder, (lambda on=decoder: poison_rejected(on._state)) if poison else lambda: None)
        seen.append(logits)
    assert [row for row, _ in seen[0]] == [row for row, _ in seen[1]]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(*seen, strict=True))


@one_of_them("mamba2")
def test_rings_wrap_where_decoding_flushes_them(name):
    """Rows of different acceptance; each is flushed, alone, after every L-th token that it keeps,
    so that windows begin at every slot and a flush lies between rounds of one row only."""
    decoder, want = start(name, (0, 3, 1), rows=3 if DEVICE == "cuda" else 2)
    cache, stood = layer_cache(decoder), set()

    def check():
        for row, position in enumerate(decoder._state.positions):
            read = position - 5
            if read and not decoder.rows[row].ended:  # a full ring is flushed as the row reads on
                assert int(cache.pos[row]) == (read - 1) % L + 1
                assert int(cache.flushes[row]) == 1 + (read - 1) // L
        stood.add(tuple(cache.pos.tolist()))

    texts = finish(decoder, check)
    assert_decoded(name, texts, want)
    assert any(len(set(slots)) > 1 for slots in stood)
    assert len({row.acceptance.num_accepted for row in decoder.rows}) > 1
    assert int(cache.flushes.min()) >= 2  # the hand-over, and a full ring


@one_of_them("qwen3_5")
def test_a_flush_inside_verification_folds_what_is_committed_only(name):
    """Schedule "early": a row whose ring cannot take the window is flushed before it, with the
    records of its last, partly rejected, window behind its cursor. In FP32 that is rounding."""
    decoder, want = start(name, (1, 3, 0, 2), policy="fp32@6", schedule="early")
    cache, flushed_at, before = layer_cache(decoder), set(), {}

    def check():
        for row, (filled, flushes) in enumerate(
            zip(cache.pos.tolist(), cache.flushes.tolist(), strict=True)
        ):
            was = before.get(row)
            if was is not None and flushes > was[1]:
                flushed_at.add(was[0])
            assert filled <= 6
            before[row] = filled, flushes
        poison_rejected(decoder._state)

    assert_decoded(name, finish(decoder, check), want, policy="fp32@6")
    assert min(flushed_at) < 6  # earlier than full


@one_of_them("qwen3_5")
def test_a_row_is_preempted_and_resumed_elsewhere(name):
    """With stochastic rounding: random bits go with the row, not with its place."""
    adapter, policy = adapter_of(name), parse_policy("fp16-sr+nvfp4@4")
    prompts = [[5, 6, 7, 8] * 3, [9, 4, 9, 4, 9, 4]]
    tokens = TOKENS if DEVICE == "cuda" else L + 2  # rows are flushed where they have gone to

    def started():
        made = SpeculativeDecoder(
            adapter, policy, NGramDrafter(), drafts=DRAFTS, seed=2, backend="triton"
        )
        made.start(prompts, max_new_tokens=tokens)
        return made

    want = finish(started())
    first, other = started(), started()
    for _ in range(2):
        first.round()
    taken = first.preempt(1)
    first.round()
    other.preempt(0)
    other.resume(0, taken)  # into another batch, another place
    assert finish(other) == [want[1], want[1]]
    assert finish(first) == [want[0], None]
