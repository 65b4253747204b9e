"""StateUpdate's contract: what each operation computes, writes, leaves alone and refuses."""

import pytest
import torch
from recurrence_cases import (
    GEOMETRIES,
    PLAIN,
    decode,
    make_cache,
    make_inputs,
    make_update,
    oracle,
    random_state,
    relative,
    same_cache,
    take_rows,
    take_tokens,
)

from replayssm.formats.codec import NonFiniteStateError
from replayssm.policy import PRESETS, parse_policy

RECURRENCE = pytest.mark.parametrize("recurrence", PLAIN)


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("ring_len", [1, 5, 16, 32])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_fp32_equals_the_token_recurrence_for_any_ring_and_schedule(name, ring_len, tokens):
    recurrence, geometry = GEOMETRIES[name]
    update = make_update(recurrence, f"fp32@{ring_len}", geometry)
    inputs = make_inputs(recurrence, geometry, 2, 64)
    state = random_state(update, 2)
    expected, last = oracle(recurrence, state, inputs)
    cache = make_cache(update, 2, state=state)
    assert relative(decode(update, cache, inputs, tokens), expected) < 1e-6
    assert relative(update.state(cache), last) < 1e-6
    assert cache.flushes.tolist() == [1 + 64 // ring_len] * 2
    assert cache.pos.tolist() == [64 % ring_len] * 2


@RECURRENCE
def test_ring_of_one_rounds_like_the_conventional_recurrence(recurrence):
    """L = 1, FP32: each token within a few ULP of the FP32 token loop from the same state."""
    update = make_update(recurrence, "fp32@1")
    inputs = make_inputs(recurrence, PLAIN[recurrence], 3, 20)
    cache = make_cache(update, 3)
    for t in range(20):
        part = take_tokens(inputs, t, t + 1)
        before = update.state(cache)
        loop_out, loop_state = update._ops.recurrence(before, part)
        out = update.step(cache, part)
        assert relative(out, loop_out) < 3e-7
        torch.testing.assert_close(update.state(cache), loop_state, rtol=1e-6, atol=1e-6)


@RECURRENCE
@pytest.mark.parametrize("policy", PRESETS)
@pytest.mark.parametrize("tokens", [16, 6])
def test_windows_equal_token_by_token_decode_under_every_policy(recurrence, policy, tokens):
    """Same numbers up to FP32 reassociation.

    Where the fold starts from inputs, checkpoints are bit-identical. Where it folds u, a stored
    element may flip to the neighbouring code when that difference crosses a rounding boundary:
    flips are counted, cycle by cycle, and must be rare.
    """
    update = make_update(recurrence, policy)
    inputs = make_inputs(recurrence, PLAIN[recurrence], 3, 96, ring=torch.bfloat16)
    single, free = (make_cache(update, 3, dtype=torch.bfloat16) for _ in range(2))
    flips, by_token, by_window = 0, [], []
    for start in range(0, 96, 16):
        part = take_tokens(inputs, start, start + 16)
        same_start = single.clone()
        by_token.append(decode(update, single, part, 1))
        by_window.append(decode(update, free, part, tokens))
        assert relative(decode(update, same_start, part, tokens), by_token[-1]) < 5e-7
        flips += int((same_start.checkpoint.data != single.checkpoint.data).sum())
    if recurrence == "mamba2" or "v" in single.ring:
        assert flips == 0 and torch.equal(free.checkpoint.data, single.checkpoint.data)
    elif not policy.startswith("fp32"):
        assert flips < 2e-3 * 6 * single.checkpoint.data.numel()
    exact = oracle(recurrence, random_state(update, 3), inputs)[0]
    by_token, by_window = torch.cat(by_token, 1), torch.cat(by_window, 1)
    assert relative(by_window, by_token) < 5e-7 + 0.1 * relative(by_token, exact)


@RECURRENCE
@pytest.mark.parametrize("policy", ["fp32", "fp16-sr", "nvfp4", "fp16-sr+nvfp4"])
def test_verify_changes_no_stored_byte_and_rejected_drafts_leave_no_trace(recurrence, policy):
    """Drafts are NaN: whatever of them survives would show."""
    update = make_update(recurrence, policy)
    inputs = make_inputs(recurrence, PLAIN[recurrence], 2, 24)
    clean, drafted = make_cache(update, 2), make_cache(update, 2)
    poison = type(inputs)(
        *(t if t.dim() < 3 else torch.full_like(t[:, :4], float("nan")) for t in inputs)
    )
    for t in range(24):
        part = take_tokens(inputs, t, t + 1)
        if t % 16 <= 12:
            before = drafted.clone()
            update.window(drafted, poison)
            after = drafted.state_dict()
            for name, tensor in before.state_dict().items():
                if not name.startswith(("ring.", "parameters.", "uncommitted")):
                    assert torch.equal(
                        tensor.contiguous().view(torch.uint8),
                        after[name].contiguous().view(torch.uint8),
                    ), name
            update.commit(drafted, 0)
        assert torch.equal(update.step(drafted, part), update.step(clean, part))
    assert torch.equal(update.state(drafted), update.state(clean))


@RECURRENCE
@pytest.mark.parametrize("policy", ["fp32@12", "fp16-sr+nvfp4@12"])
def test_partial_acceptance_per_row(recurrence, policy):
    """Rows accept 0 to 4 of 4 drafts and flush at different steps, like the same tokens alone."""
    update = make_update(recurrence, policy)
    geometry = PLAIN[recurrence]
    inputs = make_inputs(recurrence, geometry, 3, 40)
    garbage = make_inputs(recurrence, geometry, 3, 4, seed=9)
    cache = make_cache(update, 3)
    generator = torch.Generator().manual_seed(4)
    done, outputs = [0, 0, 0], [[], [], []]
    while min(done) < 30:
        update.flush(cache, cache.pos + 4 > 12)
        accepted = torch.randint(0, 5, (3,), generator=generator)
        accepted = torch.minimum(accepted, 30 - torch.tensor(done))
        parts = []
        for row, keep in enumerate(accepted.tolist()):
            mine = slice(row, row + 1)
            right = take_tokens(take_rows(inputs, mine), done[row], done[row] + keep)
            wrong = take_tokens(take_rows(garbage, mine), keep, 4)
            parts.append(
                type(inputs)(
                    *(
                        a if a.dim() < 3 else torch.cat((a, b), dim=1)
                        for a, b in zip(right, wrong, strict=True)
                    )
                )
            )
        drafts = type(inputs)(
            *(p[0] if p[0].dim() < 3 else torch.cat(p) for p in zip(*parts, strict=True))
        )
        out = update.window(cache, drafts)
        update.commit(cache, accepted)
        for row, keep in enumerate(accepted.tolist()):
            outputs[row].append(out[row, :keep])
            done[row] += keep
    state = random_state(update, 3)
    expected, last = oracle(recurrence, state, take_tokens(inputs, 0, 30))
    got = torch.stack([torch.cat(parts) for parts in outputs])
    exact = policy.startswith("fp32")
    assert relative(got, expected) < (1e-6 if exact else 0.1)
    assert relative(update.state(cache), last) < (1e-6 if exact else 2e-3)
    assert len(set(cache.flushes.tolist())) > 1, "rows were meant to flush at different steps"


@RECURRENCE
def test_fp16_overflow_saturates_and_is_counted_by_row(recurrence):
    update = make_update(recurrence, "fp16")
    state = random_state(update, 3)
    state[1, 0, 0, :2] = torch.tensor([1e5, -1e6])
    cache = make_cache(update, 3, state=state)
    assert cache.saturated.tolist() == [0, 2, 0]
    assert update.state(cache)[1, 0, 0, :2].tolist() == [65504.0, -65504.0]
    idle = "dt" if recurrence == "mamba2" else "beta"
    inputs = make_inputs(recurrence, PLAIN[recurrence], 3, 16)
    inputs = inputs._replace(**{idle: torch.zeros_like(getattr(inputs, idle))})
    if recurrence != "mamba2":
        inputs = inputs._replace(g=torch.zeros_like(inputs.g))
    update.step(cache, inputs)
    assert cache.saturated.tolist() == [0, 2, 0], "65504 itself does not saturate"


@RECURRENCE
@pytest.mark.parametrize("policy", ["fp32", "fp16", "nvfp4"])
def test_a_non_finite_state_is_named(recurrence, policy):
    update = make_update(recurrence, policy, layer=7)
    state = random_state(update, 3)
    cache = make_cache(update, 3, state=state, sequence=[10, 11, 12])
    bad = state.clone()
    bad[2, 1, 0, 3] = float("inf")
    message = r"layer 7, row 2 \(sequence 12\), head 1, at state write 1 under policy " + policy
    with pytest.raises(NonFiniteStateError, match=message) as caught:
        update.load(cache, bad)
    assert (caught.value.layer, caught.value.row, caught.value.head) == (7, 2, 1)
    assert torch.equal(update.state(cache), update.policy.checkpoint.read(cache.checkpoint))

    value = "x" if recurrence == "mamba2" else "v"
    inputs = make_inputs(recurrence, PLAIN[recurrence], 3, 16)
    getattr(inputs, value)[1, 5] = float("nan")
    update.window(cache, inputs)
    update.commit(cache, torch.tensor([3, 16, 4]))
    before = cache.clone()
    with pytest.raises(NonFiniteStateError, match="row 1 "):
        update.flush(cache, torch.tensor([False, True, False]))
    before.uncommitted = cache.uncommitted
    assert same_cache(before, cache), "a refused flush leaves the cache as it was"


@RECURRENCE
def test_flush_of_an_empty_ring_changes_nothing(recurrence):
    update = make_update(recurrence, "nvfp4-sr")
    cache = make_cache(update, 2)
    before = cache.clone()
    update.flush(cache)
    assert same_cache(before, cache)


def test_bad_requests_are_refused_by_name():
    geometry = PLAIN["mamba2"]
    policy = parse_policy("fp32")
    with pytest.raises(ValueError, match="'mamba3'.*mamba2, gated_delta"):
        make_update("mamba3", "fp32", geometry)
    update = make_update("mamba2")
    build = type(update)
    with pytest.raises(ValueError, match="'cuda'.*auto, reference, triton"):
        build("mamba2", policy, layer=0, backend="cuda", **geometry)
    assert build("mamba2", policy, layer=0, **geometry).effective_backend == "reference"
    with pytest.raises(ValueError, match=r"sequence has shape \[3\], expected \[2\]"):
        update.new_cache(2, sequence=[0, 1, 2], seed=0)

    cache = make_cache(update, 2)
    inputs = make_inputs("mamba2", geometry, 2, 20)
    with pytest.raises(ValueError, match="20 tokens does not fit.*16 slots"):
        update.window(cache, inputs)
    with pytest.raises(ValueError, match=r"x has shape \[2, 20, 4, 16\]"):
        update.step(cache, inputs._replace(x=inputs.x[..., :16]))
    with pytest.raises(ValueError, match="dt is torch.bfloat16, must be torch.float32"):
        update.step(cache, inputs._replace(dt=inputs.dt.bfloat16()))
    with pytest.raises(ValueError, match="3 rows, the cache has 2"):
        update.step(cache, make_inputs("mamba2", geometry, 3, 1))
    with pytest.raises(ValueError, match="no token"):
        update.step(cache, take_tokens(inputs, 0, 0))
    with pytest.raises(ValueError, match=r"state is torch.float64"):
        update.load(cache, update.state(cache).double())
    update.window(cache, take_tokens(inputs, 0, 4))
    for accepted in (5, -1, torch.tensor([4, 5])):
        with pytest.raises(ValueError, match="cannot commit"):
            update.commit(cache, accepted)
    with pytest.raises(ValueError, match=r"rows is torch.int64 \[1\], expected bool \[2\]"):
        update.flush(cache, torch.tensor([1]))
    with pytest.raises(ValueError, match=r"accepted has shape \[3\]"):
        update.commit(cache, torch.tensor([1, 1, 1]))
    update.commit(cache, 4)
    with pytest.raises(ValueError, match="cannot commit"):
        update.commit(cache, 1)
    narrow = make_cache(update, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="arrives as torch.float32, the ring holds torch.bfloat16"):
        update.step(narrow, inputs)


def test_narrowed_float32_products_are_refused():
    update = make_update("mamba2")
    cache = make_cache(update, 1)
    inputs = make_inputs("mamba2", PLAIN["mamba2"], 1, 4)
    try:
        torch.set_float32_matmul_precision("high")
        for call in (update.step, update.window):
            with pytest.raises(RuntimeError, match="'tf32' on cpu.*highest"):
                call(cache, inputs)
        with pytest.raises(RuntimeError, match="'tf32' on cpu"):
            update.prefill(None, inputs)
    finally:
        torch.set_float32_matmul_precision("highest")
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        update.step(cache, inputs)
