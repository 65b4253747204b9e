"""Gated DeltaNet kernels against the float64 recurrence: outputs, records, rows.

Runs in Triton's interpreter without a GPU, compiled with one (`pytest -m gpu`). Unused ring slots
and outputs start as NaN everywhere, and the pool has its slots in another order than the rows, and
one to spare.
"""

import pytest
import torch
from delta_pool import (
    DEVICE,
    FP32_ACCURATE,
    GATED_DELTA,
    READ,
    SMALL,
    values,
)
from interpreter import KERNEL_MARKS
from poison import poisoned_outputs  # noqa: F401  (a fixture)
from recurrence_cases import relative, take_rows, take_tokens

from replayssm.formats.storage import STORAGES
from replayssm.ops.gated_delta.reference import GatedDeltaGeometry
from replayssm.ops.gated_delta.triton_launch import Launch
from replayssm.ops.gated_delta.triton_window import window

pytestmark = KERNEL_MARKS
make_pool = GATED_DELTA.make_pool
inputs_for = GATED_DELTA.inputs_for
expected = GATED_DELTA.expected


# ---- outputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp32", "fp32+fp32"], ids=["one-copy", "recompute"])
@pytest.mark.parametrize(
    "shape, ring_len, windows",
    [
        ("r1-k80-v96", 1, (1,)),
        ("r1-k80-v96", 16, (3, 1, 7)),
        ("r2-k96-v80", 5, (1, 4)),
        ("r2-k96-v80", 32, (27, 5)),
        ("r3-k16-v5", 5, (5,)),
        ("r3-k16-v5", 40, (1, 32, 2)),
    ],
)
def test_outputs_and_state_equal_the_float64_recurrence(shape, policy, ring_len, windows):
    shape = GATED_DELTA.shapes[shape]
    pool = make_pool(policy, shape, ring_len=ring_len)
    inputs = inputs_for(shape, 2, sum(windows))
    state = values(pool.checkpoint, pool.policy.checkpoint)[[2, 0]]
    outputs, done = [], 0
    for tokens in windows:
        outputs.append(pool.run(take_tokens(inputs, done, done + tokens)))
        pool.commit(tokens, tokens)
        done += tokens
    want, last = expected(state, inputs)
    assert relative(torch.cat(outputs, 1).cpu(), want) < FP32_ACCURATE
    pool.flush([True, True])
    assert relative(values(pool.checkpoint, pool.policy.checkpoint)[[2, 0]], last) < FP32_ACCURATE
    assert pool.cursors.pos.tolist() == [0, 0, 0] and pool.cursors.flushes.tolist() == [1, 0, 1]


@READ
def test_outputs_read_every_format_and_write_no_state(name):
    """Against the recurrence from the values that the codes stand for."""
    shape = dict(num_k_heads=1, num_v_heads=2, head_k_dim=80, head_v_dim=16)
    pool = make_pool(name, shape)
    inputs = inputs_for(shape, 2, 5)
    want, _ = expected(values(pool.read, pool.policy.read_storage)[[2, 0]], inputs)
    before = pool.bytes()
    one = pool.run(take_tokens(inputs, 0, 1))
    pool.commit(1, 1)
    four = pool.run(take_tokens(inputs, 1, 5))
    assert relative(torch.cat((one, four), 1).cpu(), want) < FP32_ACCURATE
    for part, stored in pool.bytes().items():
        if part.startswith("ring"):
            assert torch.isnan(pool.ring[part[5:]][:, :, 5:]).all()
        else:
            assert torch.equal(stored, before[part]), part


@pytest.mark.parametrize("decay", [-40.0, 0.0])
def test_extreme_decays(decay):
    inputs = inputs_for(SMALL, 2, 16)
    inputs = inputs._replace(g=torch.full_like(inputs.g, decay))
    pool = make_pool("fp32", SMALL)
    want, last = expected(pool.checkpoint.data.cpu()[[2, 0]], inputs)
    assert relative(pool.run(inputs).cpu(), want) < FP32_ACCURATE
    pool.commit(16, 16)
    pool.flush()
    assert relative(pool.checkpoint.data.cpu()[[2, 0]], last) < FP32_ACCURATE


def test_repeated_keys_do_not_spoil_the_solve():
    """β = 1 and equal keys: the worst case for a product form of the inverse."""
    inputs = inputs_for(SMALL, 2, 32)
    k = inputs.k[:, :1].expand_as(inputs.k)
    inputs = inputs._replace(k=k, g=inputs.g * 0, beta=torch.ones_like(inputs.beta))
    pool = make_pool("fp32", SMALL, ring_len=32)
    want, last = expected(pool.checkpoint.data.cpu()[[2, 0]], inputs)
    assert relative(pool.run(inputs).cpu(), want) < FP32_ACCURATE
    pool.commit(32, 32)
    pool.flush()
    assert relative(pool.checkpoint.data.cpu()[[2, 0]], last) < FP32_ACCURATE


def test_a_window_of_one_token_equals_decode():
    inputs = inputs_for(SMALL, 2, 4)
    one, other = make_pool("nvfp4", SMALL), make_pool("nvfp4", SMALL)
    for pool in (one, other):
        pool.run(take_tokens(inputs, 0, 3))
        pool.commit(3, 1)
    last = take_tokens(inputs, 3, 4)
    by_window = window(other.read, other.ring, other.policy, other.cursors, last)
    assert relative(one.run(last), by_window) < FP32_ACCURATE
    assert relative(one.ring["u"][2, :, :4], other.ring["u"][2, :, :4]) < FP32_ACCURATE


def test_launch_parameters_change_no_number():
    shape = GATED_DELTA.shapes["r3-k16-v5"] | {"head_v_dim": 40}
    inputs = inputs_for(shape, 2, 5)
    default, other = make_pool("fp16", shape), make_pool("fp16", shape)
    launch = Launch(block_v=16, num_warps=1, num_stages=1)
    for tokens in (take_tokens(inputs, 0, 1), take_tokens(inputs, 1, 5)):
        assert relative(other.run(tokens, launch), default.run(tokens)) < FP32_ACCURATE
        default.commit(1, 1)
        other.commit(1, 1)


@pytest.mark.parametrize("name", ["fp32", "fp16", "int8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("width", [64, 96, 128])
def test_one_warp_multiplies_bf16_tokens_on_tensor_cores(name, width):
    """Codes too, where their blocks fit: 4-bit ones, at widths that are powers of two."""
    shape = dict(num_k_heads=1, num_v_heads=2, head_k_dim=width, head_v_dim=24)
    pool = make_pool(name, shape, dtype=torch.bfloat16)
    inputs = inputs_for(shape, 2, 2, ring=torch.bfloat16)
    assert inputs.k.dtype == inputs.q.dtype == torch.bfloat16
    want, _ = expected(values(pool.read, pool.policy.read_storage)[[2, 0]], inputs)
    launch, outputs = Launch(block_v=32, num_warps=1), []
    for token in range(2):
        outputs.append(pool.run(take_tokens(inputs, token, token + 1), launch))
        pool.commit(1, 1)
    assert relative(torch.cat(outputs, 1).cpu(), want) < FP32_ACCURATE
    assert torch.equal(pool.ring["k"][2, :, :2], inputs.k[0].transpose(0, 1))


# ---- ring ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrive", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float16])
def test_tokens_are_rounded_on_append_before_they_are_used(arrive, held):
    """Outputs and state are those of the rounded tokens."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[held]
    pool = make_pool(f"fp32+fp32:ring={name}", SMALL, dtype=held)
    inputs = inputs_for(SMALL, 2, 5, ring=None if arrive == torch.float32 else arrive)
    rounded = inputs._replace(
        **{n: STORAGES[name].read(STORAGES[name].write(getattr(inputs, n).cpu())) for n in "kv"}
    )
    want, last = expected(pool.checkpoint.data.cpu()[[2, 0]], rounded)
    one = pool.run(take_tokens(inputs, 0, 1))
    pool.commit(1, 1)
    out = torch.cat((one, pool.run(take_tokens(inputs, 1, 5))), 1)
    assert relative(out.cpu(), want) < FP32_ACCURATE
    assert torch.equal(pool.ring["k"][2, :, :5].cpu(), rounded.k[0].transpose(0, 1).to(held))
    assert torch.equal(pool.ring["v"][0, :, :5].cpu(), rounded.v[1].transpose(0, 1).to(held))
    pool.commit(4, 4)
    pool.flush([1, 1])
    assert relative(pool.checkpoint.data.cpu()[[2, 0]], last) < FP32_ACCURATE


# ---- rows ------------------------------------------------------------------------------------


def test_rows_do_not_depend_on_slots_neighbours_or_padding():
    """A request alone and among desynchronised rows: the same bits, random ones included."""
    policy = "fp16-sr+nvfp4-sr"
    inputs = inputs_for(SMALL, 3, 6)
    state = torch.randn(3, *GatedDeltaGeometry(**SMALL).state_shape)

    def decoded(order, slots, requests):
        count = max(slots) + 1
        by_slot = torch.zeros(count, *state.shape[1:])
        for row, slot in zip(order, slots, strict=True):
            if slot >= 0:
                by_slot[slot] = state[row]
        pool = make_pool(policy, SMALL, slots=slots, ring_len=5, state=by_slot)
        for row, slot in zip(order, slots, strict=True):
            if slot >= 0:
                pool.cursors.sequence[slot] = requests[row]
        # Rows enter at different steps, so their rings fill at different steps.
        outputs = []
        for t in range(6):
            live = [slot if t >= row else -1 for row, slot in zip(order, slots, strict=True)]
            now = pool._replace(cursors=pool.cursors._replace(slots=torch.tensor(live).to(DEVICE)))
            rows = take_rows(inputs, list(order))
            outputs.append(now.step(take_tokens(rows, t, t + 1)))
        return torch.cat(outputs, 1), pool

    requests = {0: 5, 1: 9, 2: 4}
    out, pool = decoded((0, 1, 2, 0), (3, 0, 1, -1), requests)
    assert not out[3].any(), "outputs of a padding row are zero"
    assert pool.cursors.pos.tolist() == [0, 4, 0, 1] and pool.cursors.flushes.tolist() == [
        1,
        0,
        0,
        1,
    ]
    for row, slot in ((0, 3), (1, 0), (2, 1)):
        alone, other = decoded((row,), (0,), requests)
        assert torch.equal(alone[0], out[row])
        for name, stored in other.bytes().items():
            got = pool.bytes()[name]
            assert torch.equal(stored[0], got[slot]), name
    assert pool.cursors.arrivals.tolist() == [0] * 4
