"""Where StateUpdate rounds, and that it rounds nowhere else."""

import pytest
import torch
from recurrence_cases import (
    PLAIN,
    decode,
    make_cache,
    make_inputs,
    make_update,
    oracle,
    random_state,
    relative,
)

RECURRENCE = pytest.mark.parametrize("recurrence", PLAIN)


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
    """The ring's u is taken as it is without a separate read copy, and computed again with one."""
    inputs = make_inputs("gated_delta", PLAIN["gated_delta"], 2, 16)
    inputs = inputs._replace(g=torch.zeros_like(inputs.g))
    for policy, records, folds_u in (
        ("fp8", {"k", "g", "u"}, True),
        ("fp8+nvfp4:update=read", {"k", "g", "u"}, True),
        ("fp8+nvfp4", {"k", "g", "u", "v", "beta"}, False),
    ):
        update = make_update("gated_delta", policy)
        cache = make_cache(update, 2)
        assert set(cache.ring) == records
        update.window(cache, inputs)
        update.commit(cache, 16)
        folded = update.state(cache)
        cache.ring["u"].zero_()
        without_u = update.state(cache)
        checkpoint = update.policy.checkpoint.read(cache.checkpoint)
        assert torch.equal(without_u, checkpoint if folds_u else folded)
        assert not torch.equal(folded, checkpoint)


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
