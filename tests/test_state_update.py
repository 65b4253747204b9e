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
from replayssm.formats.number import BF16
from replayssm.policy import PRESETS, PrecisionPolicy, Storage, parse_policy

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
def test_state_is_what_the_last_output_was_read_from(recurrence):
    """Output-only, folded and flushed routes give the same read-out."""
    update = make_update(recurrence, "fp32")
    inputs = make_inputs(recurrence, PLAIN[recurrence], 2, 9)
    if recurrence == "mamba2":
        inputs = inputs._replace(D=None)
    reader = inputs.C if recurrence == "mamba2" else inputs.q
    reader = reader[:, -1].repeat_interleave(2, dim=1)
    cache = make_cache(update, 2)
    last = update.step(cache, inputs)[:, -1]
    read = torch.einsum("bhrc,bhc->bhr", update.state(cache), reader)
    assert relative(read, last) < 1e-6
    update.flush(cache)
    assert relative(torch.einsum("bhrc,bhc->bhr", update.state(cache), reader), last) < 1e-6


@RECURRENCE
def test_an_fp32_checkpoint_keeps_every_bit(recurrence):
    """Effective precision: with no decay and nothing written, flushes return the same bits."""
    update = make_update(recurrence, "fp32")
    inputs = make_inputs(recurrence, PLAIN[recurrence], 2, 48, ring=torch.bfloat16)
    idle = {"dt": 0.0} if recurrence == "mamba2" else {"g": 0.0, "beta": 0.0}
    inputs = inputs._replace(**{n: torch.zeros_like(getattr(inputs, n)) for n in idle})
    state = random_state(update, 2) * torch.logspace(-6, 6, 32)
    cache = make_cache(update, 2, state=state, dtype=torch.bfloat16)
    update.step(cache, inputs)
    assert cache.flushes.tolist() == [4, 4] and torch.equal(update.state(cache), state)


@RECURRENCE
def test_bf16_inputs_reach_an_fp32_state_unrounded(recurrence):
    """The increment of a flush is not rounded to the activation dtype (2^-9 a term, if it were)."""
    update = make_update(recurrence, "fp32")
    inputs = make_inputs(recurrence, PLAIN[recurrence], 2, 64, ring=torch.bfloat16)
    state = random_state(update, 2)
    cache = make_cache(update, 2, state=state, dtype=torch.bfloat16)
    assert relative(update.step(cache, inputs), oracle(recurrence, state, inputs)[0]) < 1e-6
    assert relative(update.state(cache), oracle(recurrence, state, inputs)[1]) < 1e-6


@RECURRENCE
@pytest.mark.parametrize("chunk", [1, 16, 50, 64])
def test_prefill_rounds_nothing_and_does_not_depend_on_its_chunk(recurrence, chunk):
    update = make_update(recurrence, "nvfp4:operand=bf16")
    inputs = make_inputs(recurrence, PLAIN[recurrence], 2, 130, ring=torch.bfloat16)
    state = random_state(update, 2)
    expected, last = oracle(recurrence, state, inputs)
    outputs, final = update.prefill(state, inputs, chunk=chunk)
    assert relative(outputs, expected) < 1e-6 and relative(final, last) < 1e-6
    outputs, final = update.prefill(None, inputs, chunk=chunk)
    assert relative(final, oracle(recurrence, torch.zeros_like(state), inputs)[1]) < 1e-6


@pytest.mark.parametrize("ring", ["bf16", "fp8", "int8"])
@RECURRENCE
def test_ring_entries_are_rounded_on_append_and_before_use(recurrence, ring):
    """As if the inputs had been rounded; the skip D x reads the current token's own x."""
    update = make_update(recurrence, f"fp32:ring={ring}")
    plain = make_update(recurrence, "fp32")
    inputs = make_inputs(recurrence, PLAIN[recurrence], 2, 40)
    storage = update.policy.ring
    names = ("x", "B_") if recurrence == "mamba2" else ("k",)
    rounded = inputs._replace(**{n: storage.read(storage.write(getattr(inputs, n))) for n in names})
    expected = plain.step(make_cache(plain, 2), rounded)
    if recurrence == "mamba2":
        expected = expected + inputs.D[:, None] * (inputs.x - rounded.x)
    for tokens in (40, 7):
        got = decode(update, make_cache(update, 2), inputs, tokens)
        assert relative(got, expected) < 1e-6
    assert relative(plain.step(make_cache(plain, 2), inputs), expected) > 1e-4


def test_operand_rounding_is_the_policys_choice_and_fp32_by_default():
    inputs = make_inputs("mamba2", PLAIN["mamba2"], 2, 64)
    errors = {}
    for operand in ("fp32", "bf16", "tf32"):
        policy = PrecisionPolicy(checkpoint=Storage(format=BF16), operand=operand)
        assert make_update("mamba2", policy).policy.operand == operand
        update = make_update("mamba2", f"fp32:operand={operand}")
        state = random_state(update, 2)
        cache = make_cache(update, 2, state=state)
        update.step(cache, inputs)
        errors[operand] = relative(update.state(cache), oracle("mamba2", state, inputs)[1])
    assert errors["fp32"] < 1e-6 < 1e-5 < errors["tf32"] < 1e-3 < errors["bf16"] < 1e-2


def test_read_copy_error_never_enters_a_mamba2_checkpoint():
    inputs = make_inputs("mamba2", PLAIN["mamba2"], 2, 70)
    states = []
    for policy in ("fp16-sr", "fp16-sr+nvfp4", "fp16-sr+fp8", "fp16-sr+nvfp4:update=read"):
        update = make_update("mamba2", policy)
        cache = make_cache(update, 2)
        update.step(cache, inputs)
        states.append(cache.checkpoint.data)
    assert all(torch.equal(states[0], other) for other in states[1:])


def test_update_source_decides_whether_read_errors_enter_a_delta_checkpoint():
    inputs = make_inputs("gated_delta", PLAIN["gated_delta"], 2, 70)
    state = random_state(make_update("gated_delta"), 2)
    expected = oracle("gated_delta", state, inputs)[1]
    errors = {}
    for policy in ("fp32+nvfp4", "fp32+nvfp4:update=read", "fp32+fp32:update=read", "fp32+fp32"):
        update = make_update("gated_delta", policy)
        cache = make_cache(update, 2, state=state)
        decode(update, cache, inputs, 5)
        errors[policy] = relative(update.state(cache), expected)
    assert errors["fp32+nvfp4"] < 1e-6 and errors["fp32+fp32:update=read"] < 1e-6
    assert errors["fp32+fp32"] < 1e-6 and errors["fp32+nvfp4:update=read"] > 1e-3


def test_a_single_copy_folds_the_very_u_its_outputs_used():
    """Bit for bit: without a read copy, recomputing u would be the same mathematics, other bits."""
    inputs = make_inputs("gated_delta", PLAIN["gated_delta"], 2, 16)
    update = make_update("gated_delta", "fp8")
    cache = make_cache(update, 2)
    assert set(cache.ring) == {"k", "g", "u"}
    update.window(cache, inputs)
    update.commit(cache, 16)
    u, k, g = (cache.ring[n] for n in ("u", "k", "g"))
    total = g.cumsum(-1)
    weighted = u * (total[..., -1:] - total).exp()[..., None]
    k = k.repeat_interleave(2, dim=1)
    expected = weighted.mT @ k + total[..., -1].exp()[
        ..., None, None
    ] * update.policy.checkpoint.read(cache.checkpoint)
    torch.testing.assert_close(update.state(cache), expected, rtol=1e-6, atol=1e-6)
    separate = make_update("gated_delta", "fp8+nvfp4")
    assert set(make_cache(separate, 2).ring) == {"k", "g", "u", "v", "beta"}


def test_both_copies_round_the_same_fp32_state():
    """The read copy is never a copy of the rounded checkpoint."""
    update = make_update("mamba2", "bf16+fp16")
    state = random_state(update, 2)
    cache = make_cache(update, 2, state=state)
    assert torch.equal(cache.read_copy.data, state.to(torch.float16))
    assert torch.equal(cache.checkpoint.data, state.to(torch.bfloat16))
    inputs = make_inputs("mamba2", PLAIN["mamba2"], 2, 16)
    update.window(cache, inputs)
    update.commit(cache, 16)
    folded = update.state(cache)
    update.flush(cache)
    assert torch.equal(cache.read_copy.data, folded.to(torch.float16))
    assert torch.equal(cache.checkpoint.data, folded.to(torch.bfloat16))


def test_beta_is_read_in_fp32():
    """sigmoid(0.5) is 0.62245935; through bf16 it would be 0.62109375."""
    geometry = dict(num_k_heads=1, num_v_heads=1, head_k_dim=16, head_v_dim=16)
    update = make_update("gated_delta", "fp32", geometry)
    inputs = make_inputs("gated_delta", geometry, 1, 1, ring=torch.bfloat16)
    beta = torch.sigmoid(torch.tensor([[[0.5]]]))
    inputs = inputs._replace(beta=beta, g=torch.zeros(1, 1, 1))
    cache = make_cache(update, 1, state=torch.zeros(1, 1, 16, 16), dtype=torch.bfloat16)
    update.step(cache, inputs)
    written = cache.ring["u"][0, 0, 0] / inputs.v[0, 0, 0].float()
    assert torch.allclose(written, torch.tensor(0.62245935), rtol=1e-6)


def test_slow_decay_survives_thousands_of_tokens():
    """alpha = 0.99992 over 4,096 tokens; a decay in bf16 would round to 1 or to 0.996."""
    update = make_update("mamba2", "fp32", dict(num_heads=1, head_dim=16, n_groups=1, d_state=16))
    inputs = make_inputs("mamba2", update.geometry.__dict__, 1, 4096)
    inputs = inputs._replace(A=torch.tensor([-8e-5]), dt=torch.ones(1, 4096, 1))
    cache = make_cache(update, 1)
    state = update.state(cache)
    update.step(cache, inputs)
    assert relative(update.state(cache), oracle("mamba2", state, inputs)[1]) < 2e-6


@RECURRENCE
def test_outputs_beyond_the_range_of_fp16_stay_finite(recurrence):
    update = make_update(recurrence, "fp32")
    inputs = make_inputs(recurrence, PLAIN[recurrence], 2, 16)
    cache = make_cache(update, 2, state=random_state(update, 2) * 1e6)
    outputs = update.step(cache, inputs)
    assert outputs.dtype == torch.float32 and outputs.isfinite().all()
    assert outputs.abs().max() > 65504


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
    if recurrence == "gated_delta":
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
    with pytest.raises(ValueError, match="not in this build"):
        build("mamba2", policy, layer=0, backend="triton", **geometry)
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
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with pytest.raises(RuntimeError, match="'high'.*'highest'"):
            update.step(cache, inputs)
    finally:
        torch.set_float32_matmul_precision(before)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        update.step(cache, inputs)
