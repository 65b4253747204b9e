"""Gated DeltaNet kernels against the float64 recurrence: outputs, records, rows.

Runs in Triton's interpreter without a GPU, compiled with one (`pytest -m gpu`). Unused ring slots
and outputs start as NaN everywhere, and the pool has its slots in another order than the rows, and
one to spare. What holds of both delta rules is tested in `test_triton_delta_rules.py`.
"""

import pytest
import torch
from delta_pool import (
    DEVICE,
    FP32_ACCURATE,
    GATED_DELTA,
    SMALL,
    values,
)
from interpreter import KERNEL_MARKS
from poison import poisoned_outputs  # noqa: F401  (a fixture)
from recurrence_cases import relative, take_rows, take_tokens

from replayssm.ops.gated_delta.reference import GatedDeltaGeometry
from replayssm.ops.gated_delta.triton_launch import Launch
from replayssm.ops.gated_delta.triton_window import window

pytestmark = KERNEL_MARKS
make_pool = GATED_DELTA.make_pool
inputs_for = GATED_DELTA.inputs_for
expected = GATED_DELTA.expected


# ---- outputs ---------------------------------------------------------------------------------


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
    shape = GATED_DELTA.shapes["r3"] | {"head_v_dim": 40}
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
    assert not pool.cursors.arrivals.any()
