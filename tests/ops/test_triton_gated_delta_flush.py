"""Gated DeltaNet flushes: codes against `formats`, states against float64, refusals.

And real sizes, on a GPU. Runs as `test_triton_gated_delta.py`. Flushes of few rows, in the kernel
that also answers them: `test_triton_gated_delta_few.py`.
"""

import math

import pytest
import torch
from delta_pool import (
    FP32_ACCURATE,
    GATED_DELTA,
    SMALL,
    STORED,
    as_bytes,
    assert_codes,
    values,
)
from interpreter import KERNEL_MARKS
from poison import poisoned_outputs  # noqa: F401  (a fixture)
from recurrence_cases import relative, take_tokens

from replayssm.formats.storage import STORAGES
from replayssm.ops.gated_delta.reference import (
    GatedDeltaGeometry,
    GatedDeltaInputs,
    recurrence,
)
from replayssm.ops.gated_delta.triton_launch import Launch
from replayssm.policy import CHECKPOINT_STREAM, READ_COPY_STREAM

pytestmark = KERNEL_MARKS
make_pool = GATED_DELTA.make_pool
inputs_for = GATED_DELTA.inputs_for
expected = GATED_DELTA.expected


# ---- flush -----------------------------------------------------------------------------------


def flushed(policy, shape, ring_len=5, slots=(2, 0)):
    """A pool after its rows flushed full rings, and the float64 state before rounding."""
    pool = make_pool(policy, shape, ring_len=ring_len, slots=slots)
    inputs = inputs_for(shape, len(slots), ring_len)
    _, last = expected(values(pool.checkpoint, pool.policy.checkpoint)[[*slots]], inputs)
    pool.run(inputs)
    pool.commit(*[ring_len] * len(slots))
    pool.cursors.flushes.fill_(6)
    pool.flush()
    return pool, last


@STORED
def test_read_copy_codes_are_those_of_formats(name):
    """u is recomputed against the FP32 checkpoint; the copy is rounded from the same FP32 state."""
    shape = dict(num_k_heads=1, num_v_heads=1, head_k_dim=80, head_v_dim=24)
    pool, last = flushed(f"fp32+{name}", shape)
    state = pool.checkpoint.data.cpu()
    assert relative(state[[2, 0]], last) < FP32_ACCURATE
    assert_codes(pool, pool.read_copy, STORAGES[name], state, READ_COPY_STREAM)


@STORED
def test_checkpoint_codes_are_those_of_formats(name):
    """The FP32 state that was rounded is seen through an FP32 read copy."""
    pool, last = flushed(f"{name}+fp32", SMALL)
    state = pool.read_copy.data.cpu()
    assert relative(state[[2, 0]], last) < FP32_ACCURATE
    saturated = assert_codes(pool, pool.checkpoint, STORAGES[name], state, CHECKPOINT_STREAM)
    assert torch.equal(pool.cursors.saturated[[2, 0]].cpu(), saturated[[2, 0]])


@pytest.mark.parametrize("policy", ["fp32+nvfp4", "nvfp4+fp32", "fp16+nvfp4"])
def test_wide_heads_with_a_scale_are_folded_half_a_row_at_a_time(policy):
    shape = dict(num_k_heads=1, num_v_heads=1, head_k_dim=128, head_v_dim=24)
    pool, last = flushed(policy, shape)
    got = values(pool.checkpoint, pool.policy.checkpoint)[[2, 0]]
    if policy == "fp32+nvfp4":
        assert relative(got, last) < FP32_ACCURATE
        state = pool.checkpoint.data.cpu()
        assert_codes(pool, pool.read_copy, STORAGES["nvfp4"], state, READ_COPY_STREAM)
    elif policy == "nvfp4+fp32":
        state = pool.read_copy.data.cpu()
        assert relative(state[[2, 0]], last) < FP32_ACCURATE
        assert_codes(pool, pool.checkpoint, STORAGES["nvfp4"], state, CHECKPOINT_STREAM)
    else:
        assert relative(got, last) < 4e-4
        assert relative(values(pool.read_copy, pool.policy.read_copy)[[2, 0]], last) < 0.15


def test_a_grid_has_the_programs_whose_registers_fit():
    """Each of four parts of a multiprocessor has room for whole warps only."""
    limits = {168: 12, 178: 8, 200: 8, 128: 16, None: 8}
    for registers, warps in limits.items():
        for each in (1, 4, 8):
            launch = Launch(block_v=128, num_warps=each, maxnreg=registers)
            assert launch.resident == warps // each
    assert Launch(block_v=64, programs=5).resident == 5


def test_only_rows_that_are_due_flush():
    pool = make_pool("fp32", SMALL, ring_len=5)
    pool.run(inputs_for(SMALL, 2, 5))
    pool.commit(4, 5)
    before = pool.checkpoint.data.clone()
    pool.flush()
    assert torch.equal(pool.checkpoint.data[1:], before[1:])
    assert not torch.equal(pool.checkpoint.data[0], before[0])
    assert pool.cursors.pos.tolist() == [0, 0, 4] and pool.cursors.flushes.tolist() == [1, 0, 0]
    pool.flush([True, False])
    assert pool.cursors.pos.tolist() == [0, 0, 0] and pool.cursors.flushes.tolist() == [1, 0, 1]


@pytest.mark.parametrize("single", [False, True])
def test_overflow_and_non_finite_states_are_counted(single):
    state = torch.full((3, *GatedDeltaGeometry(**SMALL).state_shape), 7e4)
    state[0, 1, 2, 3] = math.inf
    pool = make_pool("fp32+fp16", SMALL, ring_len=1, state=state)
    if single:
        pool.step(inputs_for(SMALL, 2, 1), single=True)
    else:
        pool.run(inputs_for(SMALL, 2, 1))
        pool.commit(1, 1)
        pool.flush()
    want = pool.policy.read_copy.write(pool.checkpoint.data.cpu()).saturated
    assert want[2] > 100 and torch.equal(pool.cursors.saturated[[2, 0]].cpu(), want[[2, 0]])
    not_finite = (~pool.checkpoint.data.isfinite()).flatten(1).sum(1)
    assert not_finite[0] > 0 and torch.equal(pool.cursors.not_finite, not_finite)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("policy", ["nvfp4", "fp32+nvfp4", "fp16-sr+nvfp4"])
def test_a_head_that_is_not_finite_spoils_no_other(policy, single):
    """Its scale is not a number, what is read of it neither; nobody waits for ever."""
    state = torch.randn(3, *GatedDeltaGeometry(**SMALL).state_shape)
    pool = make_pool(policy, SMALL, ring_len=1, state=state)
    inputs = inputs_for(SMALL, 2, 1)
    inputs.v[0, 0, 1, 3] = math.inf
    if single:
        pool.step(inputs, single=True)
    else:
        pool.run(inputs)
        pool.commit(1, 1)
        pool.flush()
    assert (pool.cursors.not_finite > 0).tolist() == [False, False, True]
    for name in ("checkpoint", "read_copy"):
        storage, copy = getattr(pool.policy, name), getattr(pool, name)
        if storage is not None:
            finite = storage.read(copy.map(lambda t: t.cpu())).isfinite().flatten(2).all(2)
            assert finite.tolist() == [[True, True], [True, True], [True, False]], name


# ---- refusals --------------------------------------------------------------------------------


def test_what_has_no_kernel_is_refused_by_name():
    inputs = inputs_for(SMALL, 2, 1)
    with pytest.raises(ValueError, match="operand 'bf16'"):
        make_pool("fp32:operand=bf16", SMALL).run(inputs)
    pool = make_pool("fp32", SMALL, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="ring k is torch.float8_e4m3fn"):
        pool.run(inputs)
    with pytest.raises(ValueError, match="6 tokens"):
        make_pool("fp32", SMALL, ring_len=5).run(inputs_for(SMALL, 2, 6))
    pool = make_pool("fp32+nvfp4", SMALL)
    with pytest.raises(ValueError, match="8 warps for 64 rows"):
        pool.step(inputs, single=False, flush_launch=Launch(block_v=64, num_warps=8))
    with pytest.raises(ValueError, match="read_copy is None, policy fp32"):
        pool._replace(read_copy=None).flush()


# ---- real sizes ------------------------------------------------------------------------------

QWEN = dict(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "policy, dtype",
    [
        ("fp32", torch.float32),
        ("fp32", torch.float16),
        ("fp32", torch.bfloat16),
        ("fp32+nvfp4", torch.bfloat16),
        ("fp32+fp8", torch.float16),
    ],
)
def test_gpu_real_sizes_against_float64(policy, dtype):
    """Two rings of tokens, by steps and by windows, and the state after the second flush."""
    pools = [make_pool(policy, QWEN, dtype=dtype, slots=(2, 0, 3, 1)) for _ in range(2)]
    inputs = inputs_for(QWEN, 4, 32, ring=dtype)
    by_step, by_window = pools
    outputs = torch.cat([by_step.step(take_tokens(inputs, t, t + 1)) for t in range(32)], 1)
    windows = []
    for start in (0, 16):
        windows.append(by_window.run(take_tokens(inputs, start, start + 16)))
        by_window.commit(16, 16, 16, 16)
        by_window.flush()
    # Later rings read copies of states that differ in the last bit, so single codes may differ.
    same = 32 if policy == "fp32" else 16
    assert relative(torch.cat(windows, 1)[:, :same], outputs[:, :same]) < FP32_ACCURATE
    state = make_pool(policy, QWEN, slots=(2, 0, 3, 1)).checkpoint.data[[2, 0, 3, 1]]
    wide = GatedDeltaInputs(*(t.double() for t in inputs))
    want, last = recurrence(state.double(), wide)
    for pool in pools:
        assert relative(pool.checkpoint.data[[2, 0, 3, 1]], last) < 1e-6
    if policy == "fp32":
        assert relative(outputs, want) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [(0,), (2, 0)])
@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("policy", ["nvfp4", "fp32+nvfp4", "fp16-sr+nvfp4", "fp32+fp32"])
def test_gpu_small_heads_with_an_fp32_ring(policy, size, slots):
    """Fewer rows than eight warps of a chained product cover: Triton 3.6 then reads past its
    operand in shared memory (seen at 64 rows)."""
    shape = dict(num_k_heads=2, num_v_heads=4, head_k_dim=size, head_v_dim=size)
    pool, last = flushed(policy, shape, ring_len=16, slots=slots)
    bound = {"nvfp4": 0.2, "fp16-sr+nvfp4": 1e-3}.get(policy, FP32_ACCURATE)
    assert relative(values(pool.checkpoint, pool.policy.checkpoint)[[*slots]], last) < bound
    if pool.read_copy is not None and policy.startswith("fp32"):
        storage = pool.policy.read_copy
        want = storage.write(values(pool.checkpoint, pool.policy.checkpoint))
        for name, tensor in want.tensors().items():
            got = pool.read_copy.tensors()[name].cpu()
            assert torch.equal(as_bytes(got[[*slots]]), as_bytes(tensor[[*slots]])), name


@pytest.mark.gpu
def test_gpu_error_after_4096_tokens():
    """FP32, decay .999: no accumulation beyond what FP32 itself does."""
    shape = QWEN | {"num_k_heads": 2, "num_v_heads": 4}
    pool = make_pool("fp32", shape, dtype=torch.bfloat16)
    inputs = inputs_for(shape, 2, 4096, ring=torch.bfloat16)
    inputs = inputs._replace(g=torch.full_like(inputs.g, math.log(0.999)))
    want, last = recurrence(
        pool.checkpoint.data[[2, 0]].double(), GatedDeltaInputs(*(t.double() for t in inputs))
    )
    outputs = torch.cat([pool.step(take_tokens(inputs, t, t + 1)) for t in range(4096)], 1)
    assert relative(outputs, want) < 1e-5
    assert relative(pool.checkpoint.data[[2, 0]], last) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["fp16-sr", "fp16-sr+nvfp4"])
def test_gpu_a_captured_step_replays_any_schedule(policy):
    """One graph, replayed over rows that flush at different steps: the bits of eager launches."""
    captured, eager = (make_pool(policy, QWEN, dtype=torch.bfloat16) for _ in range(2))
    inputs = inputs_for(QWEN, 2, 24, ring=torch.bfloat16)
    for pool in (captured, eager):
        pool.run(take_tokens(inputs, 0, 4))
        pool.commit(4, 1)
        pool.step(take_tokens(inputs, 4, 5))  # compiles
    static = GatedDeltaInputs(*(t[:, :1].clone() for t in inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = captured.step(static)
    for t in range(5, 24):
        for buffer, tensor in zip(static, inputs, strict=True):
            buffer.copy_(tensor[:, t : t + 1])
        graph.replay()
        assert torch.equal(outputs, eager.step(take_tokens(inputs, t, t + 1)))
    assert captured.cursors.flushes.tolist() == eager.cursors.flushes.tolist()
    for name, stored in captured.bytes().items():
        assert torch.equal(stored, eager.bytes()[name]), name
