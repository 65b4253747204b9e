"""StateUpdate on Triton kernels: the reference's numbers, from the same caches.

Runs in Triton's interpreter without a GPU, compiled with one (`pytest -m gpu`).
"""

import io

import pytest
import torch
from interpreter import DEVICE, KERNEL_MARKS
from recurrence_cases import (
    TINY,
    decode,
    make_cache,
    make_inputs,
    make_update,
    relative,
    same_cache,
    take_tokens,
)

from replayssm.formats.codec import NonFiniteStateError
from replayssm.ops import capability

pytestmark = KERNEL_MARKS
RECURRENCE = pytest.mark.parametrize("recurrence", TINY)

# FP32 accuracy: sums of some dozens of products in any order.
ACCURATE = 1e-6
# Stored elements that land on the neighbouring code, because that difference crosses a boundary.
FLIPS = 5e-3


def both(recurrence, policy, rows=3, *, dtype=torch.float32, layer=3, sequence=None):
    """(reference update and cache, triton update and cache), equal caches of random states."""
    pairs = []
    for backend in ("reference", "triton"):
        update = make_update(
            recurrence, policy, TINY[recurrence], backend=backend, device=DEVICE, layer=layer
        )
        pairs.append((update, make_cache(update, rows, dtype=dtype, sequence=sequence)))
    assert same_cache(pairs[0][1], pairs[1][1]), "a hand-over is the reference's"
    return pairs


def tiny_inputs(recurrence, rows, tokens, **more):
    inputs = make_inputs(recurrence, TINY[recurrence], rows, tokens, **more)
    return type(inputs)(*(t.to(DEVICE) for t in inputs))


def flips(a, b):
    """Fraction of a checkpoint's stored elements that differ."""
    return float((codes(a) != codes(b)).double().mean())


def codes(cache):
    data = cache.checkpoint.data
    return data.view(torch.uint8) if data.element_size() == 1 else data


def spread(recurrence, update, cache, offsets):
    """Moves rows to different slots, by tokens of their own."""
    for row, count in enumerate(offsets):
        index = torch.tensor([row])
        part = cache.select(index)
        if count:
            update.step(part, tiny_inputs(recurrence, 1, count, seed=row))
        cache.assign(index, part)


@RECURRENCE
@pytest.mark.parametrize(
    "policy, dtype",
    [
        ("fp32@5", torch.float32),
        ("fp16-sr+nvfp4@4", torch.bfloat16),
        ("fp16+fp8@4:update=read", torch.float32),
    ],
)
def test_steps_equal_the_reference(recurrence, policy, dtype):
    """Single tokens and windows, across flushes."""
    (reference, a), (triton, b) = both(recurrence, policy, 2, dtype=dtype)
    assert triton.effective_backend == ("triton" if DEVICE == "cuda" else "triton (interpreted)")
    inputs = tiny_inputs(recurrence, 2, 9, ring=dtype)
    for start, stop in ((0, 1), (1, 8), (8, 9)):
        part = take_tokens(inputs, start, stop)
        assert relative(triton.step(b, part), reference.step(a, part)) < ACCURATE + FLIPS * (
            "fp32" not in policy
        )
    assert a.pos.tolist() == b.pos.tolist() and a.flushes.tolist() == b.flushes.tolist()
    assert a.saturated.tolist() == b.saturated.tolist() and not b.not_finite.any()
    assert "fp32" in policy or flips(a, b) < FLIPS
    assert relative(triton.state(b), reference.state(a)) < (1e-6 if "fp32" in policy else 1e-2)


@RECURRENCE
@pytest.mark.parametrize("policy", ["fp16@4", "fp16-sr+nvfp4@4", "int8-sr+mxfp4@4"])
def test_a_flush_of_an_unchanged_state_writes_the_reference_s_bytes(recurrence, policy):
    """Tokens that write nothing leave the FP32 state as it is, so that codes must be equal."""
    (reference, a), (triton, b) = both(recurrence, policy, 2)
    inputs = tiny_inputs(recurrence, 2, 4)
    idle = ("dt",) if recurrence == "mamba2" else ("beta", "g")
    inputs = inputs._replace(**{n: torch.zeros_like(getattr(inputs, n)) for n in idle})
    reference.step(a, inputs)
    triton.step(b, inputs)
    for name, tensor in a.state_dict().items():
        if name.startswith(("checkpoint", "read_copy")) or name in ("flushes", "saturated", "pos"):
            ours = b.state_dict()[name]
            assert torch.equal(ours.view(torch.uint8), tensor.view(torch.uint8)), name
    assert b.flushes.tolist() == [2, 2]


@RECURRENCE
@pytest.mark.parametrize("policy, tokens", [("fp16-sr+nvfp4@4", 1), ("fp32@4", 3)])
def test_rows_at_different_slots(recurrence, policy, tokens):
    (reference, a), (triton, b) = both(recurrence, policy, sequence=[7, 8, 9])
    spread(recurrence, reference, a, [0, 3, 2])
    b.load_state_dict(a.state_dict())
    inputs = tiny_inputs(recurrence, 3, 3)
    got, want = decode(triton, b, inputs, tokens), decode(reference, a, inputs, tokens)
    assert relative(got, want) < (ACCURATE if "fp32" in policy else FLIPS)
    assert a.pos.tolist() == b.pos.tolist() == [3, 2, 1]
    assert a.flushes.tolist() == b.flushes.tolist()


@RECURRENCE
def test_rejected_drafts_leave_no_trace_and_rows_accept_different_numbers(recurrence):
    """Between windows that count a draft of NaN: whatever of it survives would show."""
    (reference, a), (triton, b) = both(recurrence, "fp16-sr+nvfp4@8", 2)
    inputs = tiny_inputs(recurrence, 2, 8)
    poison = type(inputs)(
        *(t if t.dim() < 3 else torch.full_like(t[:, :3], float("nan")) for t in inputs)
    )
    for start, accepted in ((0, [3, 0]), (4, [1, 4])):
        before = {n: t.clone() for n, t in b.state_dict().items()}
        triton.window(b, poison)
        triton.commit(b, 0)
        drafts = take_tokens(inputs, start, start + 4)
        ours, theirs = triton.window(b, drafts), reference.window(a, drafts)
        assert relative(ours, theirs) < ACCURATE
        for name, tensor in b.state_dict().items():
            if not name.startswith(("ring", "parameters", "uncommitted")):
                assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name
        triton.commit(b, torch.tensor(accepted, device=DEVICE))
        reference.commit(a, torch.tensor(accepted))
    triton.window(b, poison)
    assert b.pos.tolist() == [4, 4]
    for rows in (torch.tensor([True, False]), None):
        triton.flush(b, rows)
        reference.flush(a, rows)
        assert b.pos.tolist() == a.pos.tolist() and b.flushes.tolist() == a.flushes.tolist()
    assert flips(a, b) < FLIPS and not b.not_finite.any()


@RECURRENCE
def test_a_cache_moves_between_backends(recurrence):
    """Saved under one, resumed under the other, in both directions."""
    policy = "fp16-sr+nvfp4@4"
    (reference, a), (triton, b) = both(recurrence, policy, 2)
    inputs = tiny_inputs(recurrence, 2, 7)
    for update, cache in ((reference, a), (triton, b)):
        update.step(cache, take_tokens(inputs, 0, 6))
    for source, other in ((a, triton), (b, reference)):
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        resumed = make_cache(other, 2, state=torch.zeros_like(other.state(b)), seed=0)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        assert same_cache(resumed, source)
        here = reference if source is a else triton
        rest = take_tokens(inputs, 6, 7)
        assert relative(other.step(resumed, rest), here.step(source.clone(), rest)) < ACCURATE


@RECURRENCE
def test_a_full_ring_is_flushed_before_the_next_token(recurrence):
    (reference, a), (triton, b) = both(recurrence, "fp32@4", 2)
    inputs = tiny_inputs(recurrence, 2, 6)
    for update, cache in ((reference, a), (triton, b)):
        update.window(cache, take_tokens(inputs, 0, 4))
        update.commit(cache, 4)
        assert cache.pos.tolist() == [4, 4]
    token = take_tokens(inputs, 4, 5)
    assert relative(triton.step(b, token), reference.step(a, token)) < ACCURATE
    assert b.pos.tolist() == [1, 1] and b.flushes.tolist() == [2, 2]


@RECURRENCE
def test_a_non_finite_state_is_counted_and_named(recurrence):
    _, (triton, cache) = both(recurrence, "fp16-sr@4", layer=7, sequence=[10, 11, 12])
    inputs = tiny_inputs(recurrence, 3, 4)
    value = inputs.x if recurrence == "mamba2" else inputs.v
    value[1, 2] = float("inf")
    triton.check_finite(cache)
    triton.step(cache, inputs)
    with pytest.raises(
        NonFiniteStateError, match=r"layer 7, row 1 \(sequence 11\): \d+ elements .* fp16-sr@4"
    ) as caught:
        triton.check_finite(cache)
    assert (caught.value.layer, caught.value.row) == (7, 1)


def test_flush_before_any_token_changes_nothing():
    for recurrence in TINY:
        _, (triton, cache) = both(recurrence, "nvfp4@4", 2)
        before = cache.clone()
        triton.flush(cache)
        assert same_cache(before, cache)


def test_bad_requests_are_refused_by_name(monkeypatch):
    _, (triton, cache) = both("mamba2", "fp32@4", 2)
    inputs = tiny_inputs("mamba2", 2, 5)
    with pytest.raises(ValueError, match="5 tokens does not fit.*4 slots"):
        triton.window(cache, inputs)
    with pytest.raises(ValueError, match="dt is torch.bfloat16, must be torch.float32"):
        triton.step(cache, inputs._replace(dt=inputs.dt.bfloat16()))
    with pytest.raises(ValueError, match="inputs of torch.float64 have no kernels"):
        triton.new_cache(2, sequence=[0, 1], seed=0, dtype=torch.float64)
    with pytest.raises(ValueError, match="cannot commit 1: the last window has 0 tokens"):
        triton.commit(cache, 1)
    long = both("mamba2", "fp32@40", 2)[1]
    with pytest.raises(ValueError, match="33 tokens is beyond the kernels' 32: use step"):
        long[0].window(long[1], tiny_inputs("mamba2", 2, 33))
    for policy, why in (("fp32:operand=bf16", "operand bf16"), ("fp32:ring=fp8", "ring fp8")):
        with pytest.raises(ValueError, match=f"'triton' is not possible: {why}"):
            make_update("mamba2", policy, backend="triton", device=DEVICE)
    monkeypatch.setattr(capability, "_interpreted", lambda: False)
    with pytest.raises(ValueError, match="'triton' is not possible: the device is 'cpu'"):
        make_update("mamba2", backend="triton", device="cpu")
    assert make_update("mamba2").effective_backend == "reference"


class TestWhatTheHostKnows:
    """Cursors of a cache on another device, followed by the host without asking for them."""

    L = 4

    @pytest.fixture
    def cache(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        self.capturing = False
        update = make_update("mamba2", "fp32@4", TINY["mamba2"], backend="reference")
        cache = make_cache(update, 3)
        return cache._map(lambda t: t.to("meta"))

    def test_one_number_moves_all(self, cache):
        update = make_update("mamba2", "fp32@4")
        assert cache.cursor == 0
        cache.advance(3)
        assert cache.cursor == 3 and cache.clone().cursor == 3
        update.replayed(cache, 1)
        assert cache.cursor == 0
        update.replayed(cache, 6)
        assert cache.cursor == 2

    def test_numbers_from_the_host_are_followed_row_by_row(self, cache):
        cache.advance(torch.tensor([1, 0, 3]))
        assert cache.cursor.tolist() == [1, 0, 3]
        cache.advance(1)
        assert cache.cursor.tolist() == [2, 1, 4]
        cache.emptied(torch.tensor([False, False, True]))
        assert cache.cursor.tolist() == [2, 1, 0]
        assert cache.select(torch.tensor([1, 1])).cursor.tolist() == [1, 1]
        part = cache.select(torch.tensor([1]))
        part.emptied(None)
        cache.assign(torch.tensor([1]), part)
        assert cache.cursor.tolist() == [2, 0, 0]
        cache.advance(torch.tensor([0, 2, 2]))
        assert cache.cursor == 2, "one number again"

    def test_numbers_of_the_device_are_not_known(self, cache):
        cache.advance(torch.ones(3, dtype=torch.int64, device="meta"))
        assert cache.known is None
        cache.advance(2)
        assert cache.known is None
        cache.emptied(None)
        assert cache.cursor == 0
        cache.emptied(torch.ones(3, dtype=torch.bool, device="meta"))
        assert cache.known is None

    def test_nothing_moves_while_a_graph_is_captured(self, cache):
        self.capturing = True
        cache.advance(2)
        cache.emptied(None)
        assert cache.cursor == 0

    def test_the_windows_of_a_step(self, cache):
        update = make_update("mamba2", "fp32@4")
        cache.advance(3)
        assert list(update._schedule(cache, 7)) == [
            (0, [False]),
            (1, [True]),
            (4, [True]),
            (2, [False]),
        ]
        cache.advance(torch.tensor([1, 0, 0]))
        assert list(update._schedule(cache, 3)) == [
            (0, [True, False, False]),
            (1, [False, True, True]),
            (2, [False, False, False]),
        ]
