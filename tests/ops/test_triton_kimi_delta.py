"""Kimi Delta Attention kernels against the float64 recurrence, and codes against `formats`.

Runs in Triton's interpreter without a GPU, compiled with one (`pytest -m gpu`). Unused ring slots
and outputs start as NaN everywhere, and the pool has its slots in another order than the rows, and
one to spare. What holds of both delta rules is tested in `test_triton_delta_rules.py`; here is what
a decay per key channel touches.
"""

import math

import pytest
import torch
from delta_pool import DEVICE, FP32_ACCURATE, KIMI_DELTA, SMALL, assert_codes
from interpreter import KERNEL_MARKS
from poison import poisoned_outputs  # noqa: F401  (a fixture)
from recurrence_cases import relative, take_tokens

from replayssm.ops.gated_delta.triton_launch import Launch
from replayssm.ops.kimi_delta import reference as kimi_delta
from replayssm.ops.kimi_delta.reference import KimiDeltaInputs
from replayssm.policy import CHECKPOINT_STREAM, READ_COPY_STREAM

pytestmark = KERNEL_MARKS
KIMI = dict(num_k_heads=32, num_v_heads=32, head_k_dim=128, head_v_dim=128)
make_pool, inputs_for, expected = KIMI_DELTA.make_pool, KIMI_DELTA.inputs_for, KIMI_DELTA.expected


@pytest.mark.parametrize(
    "policy, windows", [("fp32", (16,)), ("fp32", (1,) * 16), ("fp32+fp32", (9, 7))]
)
@pytest.mark.parametrize("log_decays", [(-40.0,), (0.0,), (-20.0, 0.0), (-60.0, -1e-3)], ids=str)
def test_strong_and_mixed_decays(policy, windows, log_decays):
    """From e^-640 over a ring to no decay, in channels side by side and in turns in one channel."""
    inputs = inputs_for(SMALL, 2, 16)
    choice = torch.randint(len(log_decays), inputs.g.shape)
    inputs = inputs._replace(g=torch.tensor(log_decays)[choice].to(DEVICE))
    pool = make_pool(policy, SMALL)
    want, last = expected(pool.state(), inputs)
    assert relative(pool.run_in_windows(inputs, windows), want) < FP32_ACCURATE
    pool.flush()
    assert relative(pool.state(), last) < FP32_ACCURATE


@pytest.mark.parametrize("windows", [(32,), (1,) * 32])
def test_slow_tokens_after_fast_ones_keep_their_digits(windows):
    """Exponents are sums over the tokens between, not differences of sums of about -640."""
    inputs = inputs_for(SMALL, 2, 32)
    g = torch.full_like(inputs.g, -40.0)
    g[:, 16:] = inputs.g[:, 16:] * 0.01
    inputs = inputs._replace(g=g)
    pool = make_pool("fp32", SMALL, ring_len=32)
    want, last = expected(pool.state(), inputs)
    out = pool.run_in_windows(inputs, windows)
    assert relative(out[:, 16:], want[:, 16:]) < FP32_ACCURATE
    pool.flush()
    assert relative(pool.state(), last) < FP32_ACCURATE


def test_repeated_keys_do_not_spoil_the_solve():
    """β = 1 and equal keys: the worst case for a product form of the inverse."""
    inputs = inputs_for(SMALL, 2, 32)
    k = inputs.k[:, :1].expand_as(inputs.k)
    inputs = inputs._replace(k=k, g=inputs.g * 0, beta=torch.ones_like(inputs.beta))
    pool = make_pool("fp32", SMALL, ring_len=32)
    want, last = expected(pool.state(), inputs)
    assert relative(pool.run_in_windows(inputs, (32,)), want) < FP32_ACCURATE
    pool.flush()
    assert relative(pool.state(), last) < FP32_ACCURATE


def test_k_and_q_may_be_of_different_types():
    """The narrower one is used as it is."""
    inputs = inputs_for(SMALL, 2, 4)
    narrow = inputs._replace(k=inputs.k.bfloat16())
    wide = inputs._replace(k=narrow.k.float())
    for tokens in (1, 4):
        got = make_pool("fp32", SMALL).run(take_tokens(narrow, 0, tokens))
        assert torch.equal(got, make_pool("fp32", SMALL).run(take_tokens(wide, 0, tokens)))


def test_launch_parameters_change_no_number_and_padding_rows_nothing():
    shape = KIMI_DELTA.shapes["r3"] | {"head_v_dim": 40}
    inputs = inputs_for(shape, 2, 5)
    default, other = make_pool("fp16", shape), make_pool("fp16", shape)
    launch = Launch(block_v=16, num_warps=2, num_stages=1)
    for tokens in (take_tokens(inputs, 0, 1), take_tokens(inputs, 1, 5)):
        assert relative(other.run(tokens, launch), default.run(tokens)) < FP32_ACCURATE
        default.commit(1, 1)
        other.commit(1, 1)
    rows = torch.tensor([-1, 0], device=DEVICE)
    padded = make_pool("fp16", shape)
    padded = padded._replace(cursors=padded.cursors._replace(slots=rows))
    for tokens in (1, 4):
        assert not padded.run(take_tokens(inputs, 0, tokens))[0].any()
    assert torch.isnan(padded.ring["g"][2]).all()


@pytest.mark.parametrize("policy", ["fp32", "int8-sr", "fp32+nvfp4", "fp32+mxfp4", "fp32+mxfp8"])
@pytest.mark.parametrize("k_dim, v_dim, ring_len", [(128, 32, 16), (96, 80, 5), (64, 16, 24)])
def test_decode_of_few_rows_is_that_of_many(policy, k_dim, v_dim, ring_len):
    """One kernel, or two of which one finds weights; E2M1 words of 128 columns, and others."""
    shape = KIMI_DELTA.shapes["r3"] | {"head_k_dim": k_dim, "head_v_dim": v_dim}
    inputs = inputs_for(shape, 2, 4)
    few, many = (make_pool(policy, shape, ring_len=ring_len) for _ in range(2))
    for token in range(4):
        one = take_tokens(inputs, token, token + 1)
        got = few.run(one, Launch(block_v=16, num_warps=2, ahead=True))
        want = many.run(one, Launch(block_v=32, num_warps=1))
        assert relative(got, want) < FP32_ACCURATE
        few.commit(1, token % 2)  # rows whose rings are not alike
        many.commit(1, token % 2)
    for name, records in few.ring.items():
        same = records.nan_to_num(7), many.ring[name].nan_to_num(7)
        assert relative(*same) < FP32_ACCURATE


@pytest.mark.parametrize("policy", ["fp32+fp16-sr", "fp16-sr+fp32", "fp32+nvfp4"])
def test_codes_are_those_of_formats(policy):
    """What an FP32 copy shows was rounded is what the other copy holds, to the last bit."""
    pool = make_pool(policy, SMALL, ring_len=5)
    inputs = inputs_for(SMALL, 2, 5)
    _, last = expected(pool.state(), inputs)
    pool.run_in_windows(inputs, (5,))
    pool.cursors.flushes.fill_(6)
    pool.flush()
    exact, coded = pool.checkpoint, pool.read_copy
    storage, stream = pool.policy.read_copy, READ_COPY_STREAM
    if not policy.startswith("fp32"):
        exact, coded, storage, stream = coded, exact, pool.policy.checkpoint, CHECKPOINT_STREAM
    state = exact.data.cpu()
    assert relative(state[[2, 0]], last) < FP32_ACCURATE
    assert_codes(pool, coded, storage, state, stream)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "policy, dtype",
    [("fp32", torch.float32), ("fp32", torch.bfloat16), ("fp32+nvfp4", torch.bfloat16)],
)
def test_gpu_real_sizes_against_float64(policy, dtype):
    """Two rings of tokens, by steps and by windows, and the state after the second flush."""
    slots = (2, 0, 3, 1)
    by_step, by_window = (make_pool(policy, KIMI, dtype=dtype, slots=slots) for _ in range(2))
    inputs = inputs_for(KIMI, 4, 32, ring=dtype)
    state = by_step.state()
    outputs = torch.cat([by_step.step(take_tokens(inputs, t, t + 1)) for t in range(32)], 1)
    windows = []
    for start in (0, 16):
        windows.append(by_window.run(take_tokens(inputs, start, start + 16)))
        by_window.commit(16, 16, 16, 16)
        by_window.flush()
    # Later rings read copies of states that differ in the last bit, so single codes may differ.
    same = 32 if policy == "fp32" else 16
    assert relative(torch.cat(windows, 1)[:, :same], outputs[:, :same]) < 1e-6
    want, last = expected(state, inputs)
    for pool in (by_step, by_window):
        assert relative(pool.state(), last) < 1e-6
    if policy == "fp32":
        assert relative(outputs.cpu(), want) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["fp32", "fp32+nvfp4"])
def test_gpu_error_after_4096_tokens(policy):
    """Channels with decays of .999 and .9: no accumulation beyond what FP32 itself does."""
    shape = KIMI | {"num_k_heads": 2, "num_v_heads": 2}
    pool = make_pool(policy, shape, dtype=torch.bfloat16)
    inputs = inputs_for(shape, 2, 4096, ring=torch.bfloat16)
    g = torch.full_like(inputs.g, math.log(0.999))
    g[..., ::2] = math.log(0.9)
    inputs = inputs._replace(g=g)
    state = pool.checkpoint.data[[2, 0]].double()
    _, last = kimi_delta.recurrence(state, KimiDeltaInputs(*(t.double() for t in inputs)))
    for t in range(4096):
        pool.step(take_tokens(inputs, t, t + 1))
    assert relative(pool.checkpoint.data[[2, 0]], last) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("policy", ["nvfp4", "fp32+nvfp4", "fp32+fp32", "fp32+fp32@32"])
def test_gpu_small_heads_and_long_rings(policy, size):
    """Fewer rows than warps of a chained product cover, and more slots than are unrolled."""
    shape = dict(num_k_heads=2, num_v_heads=4, head_k_dim=size, head_v_dim=size)
    tokens = int(policy.partition("@")[2] or 16)
    pool = make_pool(policy, shape, ring_len=tokens)
    inputs = inputs_for(shape, 2, tokens)
    _, last = expected(pool.state(), inputs)
    pool.run_in_windows(inputs, (tokens,))
    pool.flush()
    assert relative(pool.state(), last) < (0.2 if policy == "nvfp4" else FP32_ACCURATE)
