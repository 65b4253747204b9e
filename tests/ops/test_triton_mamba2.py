"""Mamba-2 kernels against the float64 recurrence.

Runs in Triton's interpreter without a GPU, compiled with one (`pytest -m gpu`). Everything that a
kernel must not read is NaN: unused ring slots, spare slots, fresh outputs.
"""

from dataclasses import replace

import pytest
import torch
from interpreter import KERNEL_MARKS
from mamba2_pool import (
    DEVICE,
    GEOMETRIES,
    SMALL,
    assert_few_flips,
    error,
    flips,
    make_pool,
    oracle,
    random_inputs,
    tokens_of,
    values,
)

from replayssm.ops.mamba2 import triton_launch
from replayssm.ops.mamba2.reference import Mamba2Geometry
from replayssm.ops.mamba2.triton_decode import decode, step
from replayssm.ops.mamba2.triton_flush import flush
from replayssm.ops.mamba2.triton_launch import Launch
from replayssm.ops.mamba2.triton_window import window
from replayssm.ops.triton_common import commit

pytestmark = KERNEL_MARKS

POLICIES = [
    "fp32", "fp16", "bf16-sr", "fp8", "fp8-e5m2-sr", "int8-sr", "nvfp4", "nvfp4-sr", "nvfp4-46",
    "mxfp4", "mxfp8", "fp32+nvfp4", "fp16-sr+nvfp4", "fp8-sr+mxfp4",
]  # fmt: skip


# ---- outputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_decode_reads_every_format(policy):
    pool = make_pool(SMALL, f"{policy}@5", slots=4, rows=[2, -1, 0])
    inputs = random_inputs(SMALL, 3, 4)
    before = pool.bytes()
    read = values(pool.read)[[2, 0, 0]]
    want, _ = oracle(read, inputs)
    for t in range(4):
        got = pool.launch(decode, tokens_of(inputs, t, t + 1))
        commit(pool.cursors, torch.ones(3, dtype=torch.int64, device=DEVICE))
        live = [0, 2]
        assert error(got[live, 0], want[live, t]) < 5e-6
        assert (got[1] == 0).all(), "a padding row's output"
    after = pool.bytes()
    assert all(torch.equal(after[k], before[k]) for k in after if "copy" in k or "point" in k)
    assert pool.cursors.pos.tolist() == [4, 0, 4, 0]
    assert pool.ring["x"][[1, 3]].isnan().all(), "a slot without a row was written"


@pytest.mark.parametrize("policy", ["nvfp4", "fp32+nvfp4-46"])
@pytest.mark.parametrize("heads", [1, 2])
def test_one_warp_multiplies_on_tensor_cores(policy, heads):
    geometry = Mamba2Geometry(num_heads=4, head_dim=16, n_groups=2, d_state=128)
    pool = make_pool(geometry, f"{policy}@5", slots=3, rows=[2, -1, 0], dtype=torch.bfloat16)
    launch = Launch(heads=heads, block_p=16, num_warps=1)
    inputs = random_inputs(geometry, 3, 5, torch.bfloat16)
    assert triton_launch.dots(pool.read, pool.ring, inputs, pool.sizes, launch) is not None
    want, _ = oracle(values(pool.read)[[2, 0, 0]], inputs)
    for t in range(5):
        got = pool.launch(decode, tokens_of(inputs, t, t + 1), launch=launch)
        assert error(got[[0, 2], 0], want[[0, 2], t]) < 5e-6, t
        commit(pool.cursors, torch.ones(3, dtype=torch.int64, device=DEVICE))
    assert (got[1] == 0).all(), "a padding row's output"


@pytest.mark.parametrize("policy", ["fp32", "fp16-sr", "fp32+nvfp4"])
def test_heads_of_80_rows_in_runs_and_in_pieces(policy):
    """Runs of 16 rows next to each other, over the ends of heads and with some missing; whole
    heads, one or two at a time, of 64 and 16 rows; and the one kernel for few rows."""
    geometry = Mamba2Geometry(num_heads=6, head_dim=80, n_groups=2, d_state=128)
    runs = Launch(heads=4, block_p=16, num_warps=1)
    whole = Launch(block_p=128, num_warps=4)
    inputs = random_inputs(geometry, 2, 3, torch.bfloat16)
    several = None
    for launch in (runs, replace(runs, num_warps=4), whole, replace(whole, heads=2, num_warps=1)):
        pool = make_pool(geometry, f"{policy}@3", slots=2, rows=[1, 0], dtype=torch.bfloat16)
        want, _ = oracle(values(pool.read)[[1, 0]], inputs)
        for t in range(3):
            last = t == 2  # it flushes; a tile that writes a head's scale has that head alone
            written = launch if launch.heads == 1 or "nvfp4" not in policy else whole
            got = pool.launch(
                step if last else decode,
                tokens_of(inputs, t, t + 1),
                launch=launch,
                **({"flush_launch": written, "single": False} if last else {}),
            )
            assert error(got[:, 0], want[:, t]) < 5e-6, t
            if not last:
                commit(pool.cursors, torch.ones(2, dtype=torch.int64, device=DEVICE))
        assert pool.cursors.flushes.tolist() == [2, 2]
        assert error(values(pool.checkpoint), _final(pool, inputs)) < (
            1e-2 if policy == "fp16-sr" else 5e-6
        )
        if launch is whole:
            several = pool
    one = make_pool(geometry, f"{policy}@3", slots=2, rows=[1, 0], dtype=torch.bfloat16)
    for t in range(3):
        got = one.launch(step, tokens_of(inputs, t, t + 1))
        assert error(got[:, 0], want[:, t]) < 5e-6, t
    assert_few_flips(one, flips(one, several), writes=2)


def _final(pool, inputs):
    """States of slots 0 and 1 after the inputs of rows [1, 0], in float64."""
    return oracle(pool.state[[1, 0]].double(), inputs)[1][[1, 0]]


def test_products_on_tensor_cores_are_for_exact_operands():
    geometry = Mamba2Geometry(num_heads=4, head_dim=16, n_groups=2, d_state=128)
    inputs = random_inputs(geometry, 1, 1, torch.bfloat16)
    pool = make_pool(geometry, "nvfp4", slots=1, rows=[0], dtype=torch.bfloat16)
    one = Launch(block_p=16, num_warps=1)

    def dots(pool=pool, inputs=inputs, launch=one):
        return triton_launch.dots(pool.read, pool.ring, inputs, pool.sizes, launch)

    assert dots() is not None
    assert dots(inputs=inputs._replace(C=inputs.C.float())) is None
    assert dots(launch=replace(one, num_warps=2)) is None
    assert dots(launch=replace(one, eager=True)) is None
    assert dots(make_pool(geometry, "nvfp4", slots=1, rows=[0])) is None  # an FP32 ring
    four_blocks = make_pool(geometry, "mxfp4", slots=1, rows=[0], dtype=torch.bfloat16)
    assert dots(four_blocks) is None
    more_bits = make_pool(geometry, "fp16", slots=1, rows=[0], dtype=torch.bfloat16)
    assert dots(more_bits) is None


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("tokens", [2, 7, 16])
def test_window_equals_the_recurrence(name, tokens):
    geometry = GEOMETRIES[name]
    pool = make_pool(geometry, "fp32@20", slots=3, rows=[1, 2])
    inputs = random_inputs(geometry, 2, 3 + tokens, per_channel=True)
    want, _ = oracle(values(pool.read)[[1, 2]], inputs)
    first = pool.launch(window, tokens_of(inputs, 0, 3))
    assert error(first, want[:, :3]) < 5e-6
    # Rows stand at different slots: one commits all three tokens, the other only two.
    commit(pool.cursors, torch.tensor([3, 2], device=DEVICE))
    got = pool.launch(window, tokens_of(inputs, 3, 3 + tokens))
    assert error(got[0], want[0, 3:]) < 5e-6
    again = tokens_of(inputs, 0, 2)
    again = inputs._replace(
        x=torch.cat([again.x, inputs.x[:, 3:]], 1),
        dt=torch.cat([again.dt, inputs.dt[:, 3:]], 1),
        B_=torch.cat([again.B_, inputs.B_[:, 3:]], 1),
        C=torch.cat([again.C, inputs.C[:, 3:]], 1),
    )
    want, _ = oracle(values(pool.read)[[1, 2]], again)
    assert error(got[1], want[1, 2:]) < 5e-6


@pytest.mark.parametrize("policy", ["fp32@24", "fp32+fp32@24"])
def test_a_flush_folds_a_few_of_many_slots(policy):
    """As many as products need at least, and one more."""
    pool = make_pool(SMALL, policy, slots=3, rows=[1, 2])
    inputs = random_inputs(SMALL, 2, 17)
    states = values(pool.checkpoint)[[1, 2]]
    pool.launch(window, inputs)
    commit(pool.cursors, torch.tensor([16, 17], device=DEVICE))
    pool.launch(flush, None, rows=torch.ones(2, dtype=torch.bool, device=DEVICE))
    for row, tokens in enumerate((16, 17)):
        _, want = oracle(states, tokens_of(inputs, 0, tokens))
        assert error(values(pool.checkpoint)[1 + row].flatten(1), want[row].flatten(1)) < 5e-6
    assert pool.cursors.pos.tolist() == [0, 0, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_window_reads_every_format(policy):
    pool = make_pool(SMALL, policy, slots=2, rows=[-1, 1])
    inputs = random_inputs(SMALL, 2, 6)
    before = pool.bytes()
    want, _ = oracle(values(pool.read)[[0, 1]], inputs)
    got = pool.launch(window, inputs)
    assert error(got[1:], want[1:]) < 5e-6
    assert (got[0] == 0).all(), "a padding row's output"
    after = pool.bytes()
    assert all(torch.equal(after[k], before[k]) for k in after if "ring" not in k)


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("ring_len", [1, 5, 16, 32])
def test_steps_over_flushes_equal_the_recurrence(name, ring_len):
    geometry = GEOMETRIES[name]
    pool = make_pool(geometry, f"fp32@{ring_len}", slots=2, rows=[1])
    # A window fills most of the ring, steps cross its end.
    ahead = max(0, ring_len - 3)
    total = ahead + (3 if ring_len == 1 else 4)
    inputs = random_inputs(geometry, 1, total)
    want, state = oracle(values(pool.read)[[1]], inputs)
    if ahead:
        got = pool.launch(window, tokens_of(inputs, 0, ahead))
        assert error(got, want[:, :ahead]) < 5e-6
        commit(pool.cursors, torch.tensor([ahead], device=DEVICE))
    for t in range(ahead, total):
        got = pool.launch(step, tokens_of(inputs, t, t + 1))
        assert error(got[:, 0], want[:, t]) < 5e-6, t
    assert pool.cursors.pos.tolist() == [0, total % ring_len]
    assert pool.cursors.flushes.tolist() == [1, 1 + total // ring_len]
    pool.launch(flush, None, rows=torch.ones(1, dtype=torch.bool, device=DEVICE))
    assert error(values(pool.checkpoint)[1].flatten(1), state[0].flatten(1)) < 5e-6
    assert pool.cursors.pos.tolist() == [0, 0] and not pool.cursors.arrivals.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_inputs_and_ring(dtype):
    pool = make_pool(SMALL, "fp32+nvfp4@4", slots=1, rows=[0], dtype=dtype)
    inputs = random_inputs(SMALL, 1, 4, dtype)
    want, _ = oracle(values(pool.read), inputs)
    got = pool.launch(window, tokens_of(inputs, 0, 3))
    commit(pool.cursors, torch.tensor([3], device=DEVICE))
    assert error(got, want[:, :3]) < 5e-6
    assert error(pool.launch(step, tokens_of(inputs, 3, 4)), want[:, 3:]) < 5e-6
    _, state = oracle(pool.state.double(), inputs)
    assert error(values(pool.checkpoint).flatten(-2), state.flatten(-2)) < 5e-6


def test_ring_in_its_own_storage():
    """Records are rounded before use: every token sees what a flush will see."""
    pool = make_pool(SMALL, "fp32@4:ring=bf16", slots=1, rows=[0])
    inputs = random_inputs(SMALL, 1, 4)
    rounded = inputs._replace(
        x=inputs.x.bfloat16().float(), B_=inputs.B_.bfloat16().float(), D=None
    )
    want, state = oracle(pool.state.double(), rounded)
    got = pool.launch(window, inputs._replace(D=None))
    assert error(got, want) < 5e-6
    assert torch.equal(pool.ring["x"][0].transpose(0, 1).cpu(), inputs.x[0].bfloat16())
    commit(pool.cursors, torch.tensor([4], device=DEVICE))
    pool.launch(flush, None)
    assert error(values(pool.checkpoint).flatten(-2), state.flatten(-2)) < 5e-6
