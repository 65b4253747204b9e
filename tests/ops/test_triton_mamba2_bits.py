"""Mamba-2 kernels: stored bits against `formats`, rows and slots, refusals.

Runs as `test_triton_mamba2.py`.
"""

from dataclasses import replace

import pytest
import torch
from interpreter import KERNEL_MARKS
from mamba2_pool import (
    DEVICE,
    GEOMETRIES,
    SMALL,
    error,
    make_pool,
    oracle,
    random_inputs,
    tokens_of,
    values,
    written,
)
from same_bits import pattern

from replayssm.ops.mamba2.reference import Mamba2Geometry, Mamba2Inputs
from replayssm.ops.mamba2.triton_decode import decode, step
from replayssm.ops.mamba2.triton_flush import flush
from replayssm.ops.mamba2.triton_launch import Launch
from replayssm.ops.mamba2.triton_window import window
from replayssm.ops.triton_common import commit
from replayssm.policy import CHECKPOINT_STREAM, READ_COPY_STREAM, parse_policy

pytestmark = KERNEL_MARKS


# ---- stored bits -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flush", "step in one launch", "step in several"])
@pytest.mark.parametrize("name", ["small", "head_dim80"])
@pytest.mark.parametrize("copy", ["nvfp4", "nvfp4-sr", "nvfp4-46", "fp8-sr", "fp16-sr", "mxfp4"])
def test_read_copy_has_the_reference_bits_of_the_state(copy, name, how):
    """The FP32 checkpoint shows the values that both copies were rounded from."""
    geometry = GEOMETRIES[name]
    pool = make_pool(geometry, f"fp32+{copy}@2", slots=2, rows=[1, 0])
    inputs = random_inputs(geometry, 2, 2)
    pool.launch(window, tokens_of(inputs, 0, 2))
    if how == "flush":
        commit(pool.cursors, torch.tensor([2, 2], device=DEVICE))
        pool.launch(flush, None)
    else:
        commit(pool.cursors, torch.tensor([1, 1], device=DEVICE))
        pool.launch(step, tokens_of(inputs, 1, 2), single=how == "step in one launch")
    folded = pool.checkpoint.data.cpu()
    storage = pool.policy.read_copy
    want = written(pool, storage, folded, READ_COPY_STREAM)
    for part, tensor in want.tensors().items():
        got = pool.read_copy.tensors()[part]
        assert torch.equal(pattern(got), pattern(tensor)), f"{copy} {part}"
    assert torch.equal(pool.cursors.saturated.cpu(), want.saturated)
    assert pool.cursors.flushes.tolist() == [2, 2] and pool.cursors.pos.tolist() == [0, 0]
    _, state = oracle(pool.state[[1, 0]].double(), inputs)
    assert error(folded[[1, 0]].flatten(-2), state.flatten(-2)) < 5e-6


@pytest.mark.parametrize("policy", ["fp16-sr", "bf16-sr", "fp8-sr", "int8", "nvfp4", "mxfp8"])
def test_flush_rounds_the_checkpoint_as_the_reference(policy):
    """An empty ring folds to the state itself, so the input of the rounding is known exactly."""
    pool = make_pool(SMALL, policy, slots=2, rows=[0, 1])
    was = values(pool.checkpoint).float() + 0.0  # a fold gives no negative zero
    pool.launch(flush, None, rows=torch.tensor([0, 1], device=DEVICE))
    storage = pool.policy.checkpoint
    want = written(pool, storage, was, CHECKPOINT_STREAM)
    for part, tensor in want.tensors().items():
        got = pool.checkpoint.tensors()[part]
        assert torch.equal(pattern(got[1]), pattern(tensor[1])), f"{policy} {part}"
    assert pool.cursors.flushes.tolist() == [1, 2]


# ---- rows and slots --------------------------------------------------------------------------


@pytest.mark.parametrize("single", [True, False])
def test_rows_flush_at_their_own_steps(single):
    pool = make_pool(SMALL, "fp32@3", slots=3, rows=[0, 1, 2])
    inputs = random_inputs(SMALL, 3, 5)
    want, _ = oracle(pool.state.double(), inputs)
    # Row 1 runs one token ahead, row 2 two, in launches of their own.
    pool.on([1]).launch(step, _row(tokens_of(inputs, 0, 1), [1]), single=single)
    for t in (0, 1):
        pool.on([2]).launch(step, _row(tokens_of(inputs, t, t + 1), [2]), single=single)
    for t in range(3):
        cut = [_row(tokens_of(inputs, t + ahead, t + ahead + 1), [ahead]) for ahead in range(3)]
        mixed = Mamba2Inputs(*(
            a if n in ("A", "D") else torch.cat([a, b, c])
            for n, a, b, c in zip(Mamba2Inputs._fields, *cut, strict=True)
        ))  # fmt: skip
        got = pool.launch(step, mixed, single=single)
        for ahead in range(3):
            assert error(got[ahead, 0], want[ahead, t + ahead]) < 5e-6
    assert pool.cursors.pos.tolist() == [0, 1, 2]
    assert pool.cursors.flushes.tolist() == [2, 2, 2]


def _row(inputs, rows):
    cut = {n: t[rows] for n, t in inputs._asdict().items() if n not in ("A", "D")}
    return inputs._replace(**cut)


@pytest.mark.parametrize("policy", ["fp16-sr+nvfp4@2", "nvfp4-sr@2"])
def test_slots_and_neighbours_change_no_bit(policy):
    """The same two requests, alone and with a third, in other slots and another order."""
    inputs = random_inputs(SMALL, 3, 4)

    def run(slots, order):
        pool = make_pool(SMALL, policy, slots=5, rows=slots)
        # Request r lives in slot slots[order.index(r)], with its own state, seed and sequence.
        home = make_pool(SMALL, policy, slots=3, rows=[0, 1, 2])
        for slot, request in zip(slots, order, strict=True):
            if slot < 0:
                continue
            pool.checkpoint.put_([slot], home.checkpoint.select([request]))
            if pool.read_copy is not None:
                pool.read_copy.put_([slot], home.read_copy.select([request]))
            for name in ("seed", "sequence"):
                getattr(pool.cursors, name)[slot] = getattr(home.cursors, name)[request]
        outputs = [
            pool.launch(step, _row(tokens_of(inputs, t, t + 1), list(order))) for t in range(4)
        ]
        found = {}
        for row, (slot, request) in enumerate(zip(slots, order, strict=True)):
            if slot >= 0:
                stored = pool.checkpoint.tensors() | {
                    f"copy {k}": v
                    for k, v in (pool.read_copy.tensors() if pool.read_copy else {}).items()
                }
                found[request] = [pattern(o[row]) for o in outputs] + [
                    pattern(t[slot : slot + 1]) for t in stored.values()
                ]
        return found

    first = run([0, 1], [0, 1])
    other = run([4, -1, 2, 3], [2, 2, 1, 0])
    for request in (0, 1):
        for a, b in zip(first[request], other[request], strict=True):
            assert torch.equal(a, b)


def test_rejected_drafts_leave_no_trace():
    clean = make_pool(SMALL, "fp16-sr+nvfp4@6", slots=2, rows=[0, 1])
    drafted = make_pool(SMALL, "fp16-sr+nvfp4@6", slots=2, rows=[0, 1])
    inputs = random_inputs(SMALL, 2, 6)
    poison = inputs._replace(
        x=torch.full_like(inputs.x, torch.nan),
        B_=torch.full_like(inputs.B_, torch.nan),
        dt=torch.full_like(inputs.dt, torch.nan),
    )
    accepted = torch.tensor([2, 1], device=DEVICE)
    clean.launch(window, tokens_of(inputs, 0, 2))
    commit(clean.cursors, accepted)
    # The same two tokens with four drafts behind them, none accepted.
    drafted.launch(window, Mamba2Inputs(*(
        a if n in ("A", "D") else torch.cat([a[:, :2], b[:, 2:]], 1)
        for n, a, b in zip(Mamba2Inputs._fields, inputs, poison, strict=True)
    )))  # fmt: skip
    commit(drafted.cursors, accepted)
    for pool in (clean, drafted):
        pool.result = pool.launch(window, tokens_of(inputs, 2, 5))
        commit(pool.cursors, torch.tensor([3, 3], device=DEVICE))
        pool.launch(flush, None, rows=torch.tensor([1, 1], device=DEVICE))
    assert torch.equal(clean.result, drafted.result)
    for name, data in clean.bytes().items():
        if "ring" not in name:
            assert torch.equal(data, drafted.bytes()[name]), name


@pytest.mark.parametrize("policy", ["fp32", "fp32+nvfp4"])
def test_a_full_ring_gives_no_numbers_and_writes_nothing(policy):
    """A caller's mistake: however a step is launched, its cursor counts on, and no flush is due."""
    pool = make_pool(SMALL, f"{policy}@3", slots=2, rows=[0])
    inputs = random_inputs(SMALL, 1, 3)
    pool.launch(window, tokens_of(inputs, 0, 3))
    commit(pool.cursors, torch.tensor([3], device=DEVICE))
    before = pool.bytes()
    assert pool.launch(decode, tokens_of(inputs, 0, 1)).isnan().all()
    assert pool.launch(window, tokens_of(inputs, 0, 2)).isnan().all()
    after = pool.bytes()
    assert all(torch.equal(after[k], before[k]) for k in after)
    for count, single in ((4, True), (5, False), (6, True)):
        assert pool.launch(step, tokens_of(inputs, 0, 1), single=single).isnan().all()
        assert pool.cursors.pos.tolist() == [count, 0], single
    after = pool.bytes()
    assert all(torch.equal(after[k], before[k]) for k in after if k != "pos")


def test_launch_parameters_and_strided_inputs_do_not_change_results():
    geometry = Mamba2Geometry(num_heads=8, head_dim=32, n_groups=2, d_state=32)
    inputs = random_inputs(geometry, 2, 2)
    packed = torch.zeros(2, 2, 8 * 32 + 2 * 2 * 32)
    x, B_, C = packed.split([8 * 32, 2 * 32, 2 * 32], dim=-1)
    x.copy_(inputs.x.flatten(2))
    B_.copy_(inputs.B_.flatten(2))
    C.copy_(inputs.C.flatten(2))
    strided = inputs._replace(
        x=x.unflatten(2, (8, 32)), B_=B_.unflatten(2, (2, 32)), C=C.unflatten(2, (2, 32))
    )
    results = []
    for given, launches in (
        (inputs, (None, None)),
        (strided, (Launch(heads=4, block_p=16), Launch(heads=1, block_p=16, loop=4))),
    ):
        pool = make_pool(geometry, "fp16-sr@4", slots=3, rows=[2, 0])
        few = launches[0] is None  # rows
        got = [pool.launch(step, tokens_of(given, 0, 1), launch=launches[0], single=few)]
        got.append(pool.launch(window, given, launch=launches[1]))
        pool.launch(flush, None, rows=torch.tensor([1, 1], device=DEVICE), launch=launches[0])
        results.append(([*got], pool.bytes()))
    (first, first_bytes), (second, second_bytes) = results
    for a, b in zip(first, second, strict=True):
        assert error(a, b.cpu()) < 1e-6
    assert all(torch.equal(first_bytes[k], second_bytes[k]) for k in first_bytes)


# ---- refusals --------------------------------------------------------------------------------


def test_refusals_name_the_value():
    pool = make_pool(SMALL, "fp32", slots=2, rows=[0])
    inputs = random_inputs(SMALL, 1, 1)
    with pytest.raises(ValueError, match=r"C is \[1, 1, 2, 16\], expected \[1, 1, 2, 32\]"):
        pool.launch(decode, inputs._replace(C=inputs.C[..., :16]))
    with pytest.raises(ValueError, match="dt is torch.float16"):
        pool.launch(decode, inputs._replace(dt=inputs.dt.half()))
    with pytest.raises(ValueError, match="block_p 24"):
        pool.launch(decode, inputs, launch=Launch(block_p=24))
    with pytest.raises(ValueError, match="operand 'bf16' has no kernel"):
        replace(pool, policy=parse_policy("fp32:operand=bf16")).launch(decode, inputs)
    with pytest.raises(ValueError, match="ring fp8 has scales"):
        fp8 = pool.ring["x"].to(torch.float8_e4m3fn), pool.ring["B"].to(torch.float8_e4m3fn)
        ring = pool.ring | {"x": fp8[0], "B": fp8[1]}
        replace(pool, policy=parse_policy("fp32:ring=fp8"), ring=ring).launch(decode, inputs)
    with pytest.raises(ValueError, match="checkpoint is fp32, policy fp16 says fp16"):
        replace(pool, policy=parse_policy("fp16")).launch(step, inputs)
