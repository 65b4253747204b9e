"""Mamba-2, few rows: one kernel answers a token, commits it and folds the ring it fills.

Its codes against `formats`, its outputs and states against float64 and against the kernels for many
rows. Runs as `test_triton_mamba2.py`: unused ring slots and outputs start as NaN.
"""

import math
from dataclasses import replace

import pytest
import torch
from interpreter import KERNEL_MARKS
from mamba2_pool import (
    DEVICE,
    FP32_ACCURATE,
    SMALL,
    THREE_GROUPS,
    assert_few_flips,
    flips,
    make_pool,
    oracle,
    random_inputs,
    to_device,
    tokens_of,
    values,
    written,
)
from poison import poisoned_outputs  # noqa: F401  (a fixture)
from recurrence_cases import TINY, make_cache, make_inputs, make_update, relative, take_tokens
from recurrence_cases import oracle as recurrence_of
from same_bits import assert_same_bits, pattern

from replayssm.formats.storage import STORAGES
from replayssm.ops.mamba2.reference import Mamba2Geometry
from replayssm.ops.mamba2.triton_decode import decode, step
from replayssm.ops.mamba2.triton_launch import Launch
from replayssm.ops.triton_common import commit, new_arrivals
from replayssm.policy import CHECKPOINT_STREAM, READ_COPY_STREAM

pytestmark = KERNEL_MARKS
STORED = pytest.mark.parametrize("name", STORAGES)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def fill(pool, inputs, counts):
    """Rows' first `counts` tokens as committed records."""
    for row, (slot, count) in enumerate(zip(pool.cursors.slots.tolist(), counts, strict=True)):
        for name, tokens in (("x", inputs.x), ("B", inputs.B_), ("dt", inputs.dt)):
            if slot >= 0:
                pool.ring[name][slot, :, :count] = tokens[row, :count].transpose(0, 1).to(DEVICE)
    commit(pool.cursors, torch.tensor(counts, device=DEVICE))


def tokens_at(inputs, times):
    """One token of every row, each at its own time."""

    def pick(tokens):
        return torch.stack([tokens[row, [time]] for row, time in enumerate(times)])

    cut = {name: pick(getattr(inputs, name)) for name in ("x", "dt", "B_", "C")}
    return inputs._replace(**cut)


def expected(states, inputs, held):
    """Outputs and states in float64, of records as a ring of `held` keeps them; D meets x as it
    came."""
    kept = inputs._replace(x=inputs.x.to(held), B_=inputs.B_.to(held), D=None)
    outputs, last = oracle(states, kept)
    if inputs.D is not None:
        D = inputs.D if inputs.D.dim() == 2 else inputs.D[:, None]
        outputs = outputs + D.double() * inputs.x.double()
    return outputs, last


# ---- codes -----------------------------------------------------------------------------------


def assert_flushed_in_one(policy, geometry, *, ring_len=5, arrive=FP32, held=FP32, skip="head"):
    """Two rows, and padding, fill their rings one step apart: what the steps answer and fold is
    that of float64, and what they round, of which one copy shows the FP32 value, is what `formats`
    makes of it. `skip`: what has a D, each "head" or "channel", or None."""
    rows, last = [2, -1, 0], ring_len - 1
    pool = make_pool(geometry, f"{policy}@{ring_len}", slots=3, rows=rows, dtype=held)
    inputs = random_inputs(geometry, 3, ring_len, arrive, per_channel=skip == "channel")
    if skip is None:
        inputs = inputs._replace(D=None)
    answers, _ = expected(values(pool.read)[[2, 1, 0]], inputs, held)
    _, folded = expected(values(pool.checkpoint)[[2, 1, 0]], inputs, held)
    behind = max(last - 1, 0)  # records of the last row
    fill(pool, inputs, [last, 0, behind])
    out = pool.launch(step, tokens_at(inputs, [last, 0, behind]), single=True).cpu()
    assert not out[1].any(), "a padding row's output"
    assert relative(out[0], answers[0, [last]]) < FP32_ACCURATE
    assert relative(out[2], answers[2, [behind]]) < FP32_ACCURATE
    if ring_len > 1:
        assert pool.cursors.pos.tolist() == [last, 0, 0]
        assert pool.cursors.flushes.tolist() == [1, 1, 2]
        later = pool.on([-1, -1, 0]).launch(step, tokens_at(inputs, [0, 0, last]), single=True)
        assert not later[:2].any(), "a padding row's output"
        assert relative(later[2].cpu(), answers[2, [last]]) < FP32_ACCURATE
    assert pool.cursors.flushes.tolist() == [2, 1, 2]
    assert not pool.cursors.pos.any() and not pool.cursors.arrivals.any()

    codes, storage, stream = pool.read_copy, pool.policy.read_copy, READ_COPY_STREAM
    state = pool.checkpoint.data.cpu()
    if pool.policy.checkpoint != STORAGES["fp32"]:
        codes, storage, stream = pool.checkpoint, pool.policy.checkpoint, CHECKPOINT_STREAM
        state = pool.read_copy.data.cpu()
    assert relative(state[[2, 0]], folded[[0, 2]]) < FP32_ACCURATE
    if codes is not None:
        want = written(pool, storage, state, stream)
        for part, tensor in want.tensors().items():
            assert_same_bits(codes.tensors()[part][[2, 0]], tensor[[2, 0]], part)
        assert torch.equal(pool.cursors.saturated[[2, 0]].cpu(), want.saturated[[2, 0]])


@STORED
def test_one_kernel_rounds_a_read_copy_as_formats_do(name):
    """A width that is no power of two, and rows in two tiles where no scale is for all of them."""
    geometry = Mamba2Geometry(num_heads=1, head_dim=32, n_groups=1, d_state=80)
    assert_flushed_in_one(f"fp32+{name}", geometry, arrive=BF16, held=BF16)


@STORED
def test_one_kernel_rounds_a_checkpoint_as_formats_do(name):
    """Columns are folded 32 at a time where no scale is for more."""
    geometry = Mamba2Geometry(num_heads=1, head_dim=16, n_groups=1, d_state=64)
    assert_flushed_in_one(f"{name}+fp32", geometry)


@pytest.mark.parametrize(
    "policy, head_dim, d_state, ring_len, arrive, held, skip",
    [
        ("fp32", 16, 128, 5, BF16, BF16, "channel"),
        ("fp32", 80, 64, 16, FP32, FP32, None),
        ("fp32+nvfp4", 16, 128, 16, BF16, BF16, "head"),
        ("nvfp4+fp32", 80, 128, 1, BF16, BF16, None),
        ("fp16-sr+fp32", 80, 64, 2, FP32, BF16, "channel"),
        ("fp32+fp16-sr", 16, 64, 32, BF16, BF16, "head"),
        ("int8-sr+fp32", 16, 64, 24, FP32, FP16, "channel"),
        ("fp32+mxfp4", 16, 256, 3, BF16, FP32, "head"),
    ],
)
def test_one_kernel_folds_rings_of_any_length(
    policy, head_dim, d_state, ring_len, arrive, held, skip
):
    """In one tile or several, of records that are read in pairs or not, with and without a D."""
    geometry = Mamba2Geometry(num_heads=1, head_dim=head_dim, n_groups=1, d_state=d_state)
    assert_flushed_in_one(policy, geometry, ring_len=ring_len, arrive=arrive, held=held, skip=skip)


@pytest.mark.parametrize(
    "policy, geometry", [("fp16-sr+fp32", THREE_GROUPS), ("fp32+nvfp4-sr", SMALL)]
)
def test_heads_of_a_group_share_its_records(policy, geometry):
    assert_flushed_in_one(policy, geometry, ring_len=3, arrive=BF16, held=BF16, skip="channel")


# ---- tokens and rings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy, start, pad, ring_pad",
    [("fp32", 0, 1, 0), ("fp32+nvfp4", 1, 1, 0), ("fp32", 0, 2, 1)],
)
def test_bf16_vectors_need_not_lie_in_pairs(policy, start, pad, ring_pad):
    """B and C where no two elements can be read at once: rows of an odd length, or an odd start,
    or slots of the ring."""
    geometry = replace(SMALL, num_heads=2)
    inputs, both = to_device(random_inputs(geometry, 2, 2, BF16)), []
    for apart in (False, True):
        pool = make_pool(geometry, f"{policy}@2", slots=3, rows=[2, 0], dtype=BF16)
        if apart:
            pool.ring["B"] = _padded(pool.ring["B"].flatten(1), 0, ring_pad).view_as(pool.ring["B"])
        outputs = []
        for t in range(2):
            token = tokens_of(inputs, t, t + 1)
            if apart:
                vectors = torch.cat([token.B_.flatten(1), token.C.flatten(1)], 1)
                B_, C = _padded(vectors, start, pad).chunk(2, dim=1)
                token = token._replace(B_=B_.view_as(token.B_), C=C.view_as(token.C))
            outputs.append(pool.launch(step, token, single=True))
        both.append((torch.cat(outputs, 1), pool))
    (want, dense), (out, pool) = both
    assert relative(out, want) < FP32_ACCURATE
    assert relative(pool.checkpoint.data, dense.checkpoint.data) < FP32_ACCURATE
    assert pool.cursors.flushes.tolist() == [2, 1, 2]
    assert_same_bits(pool.ring["B"], dense.ring["B"])


def _padded(rows, start, pad):
    """`rows` [R, C], each from element `start` of one that is so much, and `pad`, longer."""
    wide = rows.new_full((len(rows), start + rows.shape[1] + pad), math.nan)
    view = wide[:, start : start + rows.shape[1]]
    return view.copy_(rows)


@pytest.mark.parametrize("policy, value", [("fp32", math.nan), ("fp16+nvfp4", math.inf)])
def test_a_step_reads_nothing_past_the_cursor(policy, value):
    """A ring of more slots than are filled: the same bits whatever lies there."""
    inputs, pools = random_inputs(SMALL, 2, 10), []
    for poison in (0.25, value):
        pool = make_pool(SMALL, f"{policy}@24", slots=3, rows=[2, 0])
        for tensor in pool.ring.values():
            tensor.fill_(poison)
        fill(pool, inputs, [9, 3])
        pools.append((pool.launch(step, tokens_of(inputs, 9, 10), single=True), pool))
    (want, clean), (out, pool) = pools
    assert_same_bits(out, want)
    assert pool.cursors.pos.tolist() == [4, 0, 10]
    for name, tensor in pool.ring.items():
        for slot, count in ((2, 10), (0, 4)):
            assert_same_bits(tensor[slot, :, :count], clean.ring[name][slot, :, :count], name)
    for name, tensor in pool.states().items():
        assert_same_bits(tensor, clean.states()[name], name)


def test_a_decode_writes_the_record_and_nothing_else():
    """The same kernel without copies to write, though a ring is full after it."""
    decoded, stepped = (make_pool(SMALL, "fp32@3", slots=2, rows=[1]) for _ in range(2))
    inputs = random_inputs(SMALL, 1, 3)
    newest = tokens_of(inputs, 2, 3)
    for pool in (decoded, stepped):
        fill(pool, inputs, [2])
    before = decoded.bytes()
    out = decoded.launch(decode, newest, launch=Launch(block_p=16, eager=True))
    changed = {name for name, t in decoded.bytes().items() if not torch.equal(t, before[name])}
    assert changed == {"ring x", "ring B", "ring dt"}
    assert relative(out, stepped.launch(step, newest, single=True)) < FP32_ACCURATE
    for name, tensor in decoded.ring.items():
        assert_same_bits(tensor[1], stepped.ring[name][1], name)


def test_a_cache_brings_what_one_kernel_counts_with():
    """Three tokens through `StateUpdate`, over a flush: counters are back at zero after each."""
    update = make_update("mamba2", "fp32@2", TINY["mamba2"], backend="triton", device=DEVICE)
    cache = make_cache(update, 2)
    inputs = make_inputs("mamba2", TINY["mamba2"], 2, 3)
    want, state = recurrence_of("mamba2", update.state(cache).cpu(), inputs)
    counters = cache.kernel_arguments["cursors"][2]
    for t in range(3):
        out = update.step(cache, to_device(take_tokens(inputs, t, t + 1)))
        assert relative(out.cpu(), want[:, [t]]) < FP32_ACCURATE, t
        assert torch.equal(counters, new_arrivals(cache.pos)), t
    assert cache.pos.tolist() == [1, 1]
    assert relative(update.state(cache).cpu(), state) < FP32_ACCURATE


# ---- one kernel and several ------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy, geometry",
    [
        ("fp32", replace(SMALL, num_heads=2)),
        ("nvfp4", replace(SMALL, num_heads=2, d_state=64)),  # columns are folded in two parts
        ("fp32+nvfp4-sr", replace(SMALL, num_heads=2)),
        ("fp16-sr", replace(THREE_GROUPS, num_heads=3)),
        ("int8-sr+nvfp4", Mamba2Geometry(num_heads=1, head_dim=80, n_groups=1, d_state=16)),
    ],
)
def test_one_kernel_makes_the_step_that_several_make(policy, geometry):
    """Rows at all positions of a ring of 3, and padding, over more than a cycle; every step begins
    with what one kernel stored. See `flips` for what may differ."""
    rows = [3, -1, 0, 1]
    one, several = (make_pool(geometry, f"{policy}@3", slots=4, rows=rows) for _ in range(2))
    inputs, found = random_inputs(geometry, 4, 5), {}
    for pool in (one, several):
        fill(pool, inputs, [2, 0, 1, 0])
    for t in range(1, 5):
        token = tokens_of(inputs, t, t + 1)
        got = one.launch(step, token, single=True)
        want = several.launch(step, token, single=False)
        assert not got[1].any() and not want[1].any(), "a padding row's output"
        assert relative(got, want) < FP32_ACCURATE, t
        for name, count in flips(one, several).items():
            found[name] = found.get(name, 0) + count
        for name, tensor in several.states().items():
            tensor.copy_(one.states()[name])
        for name, tensor in several.ring.items():
            tensor.copy_(one.ring[name])
    assert one.cursors.pos.tolist() == [2, 1, 0, 0] and not one.cursors.arrivals.any()
    assert one.cursors.flushes.tolist() == [2, 2, 1, 3]
    assert_few_flips(one, found, writes=4)


def test_tiles_are_of_one_head():
    """Programs of other kernels may have more, and a launch that asks for them is refused."""
    pool, token = make_pool(SMALL, "fp32@3", slots=2, rows=[0]), random_inputs(SMALL, 1, 1)
    launch = Launch(heads=2, block_p=16, eager=True)
    for kernel, more in ((decode, {}), (step, {"single": True})):
        with pytest.raises(ValueError, match="heads 2.*allowed is 1"):
            pool.launch(kernel, token, launch=launch, **more)


@pytest.mark.parametrize("policy", ["nvfp4", "nvfp4-46", "fp32+nvfp4", "fp16-sr+nvfp4"])
def test_programs_share_a_head_that_has_a_scale(policy):
    """Tiles of 16 of 48 rows, a program each: the bits of one program for all of them, except where
    a compiler forms sums of another tile in another order: then a code in a thousand differs."""
    geometry = replace(SMALL, head_dim=48)
    inputs, pools = random_inputs(geometry, 2, 6), []
    if DEVICE == "cpu":
        pool = make_pool(geometry, f"{policy}@5", slots=3, rows=[2, 0])
        with pytest.raises(ValueError, match="block_p 16 cuts 4 heads.*wait for each other"):
            launch = Launch(block_p=16, num_warps=1)
            pool.launch(step, tokens_of(inputs, 0, 1), single=True, launch=launch)
        pytest.skip("in the interpreter programs do not run side by side")
    for size in (16, 64):
        pool = make_pool(geometry, f"{policy}@5", slots=3, rows=[2, 0])
        fill(pool, inputs, [2, 0])
        for t in range(6):
            launch = Launch(block_p=size, num_warps=1)
            pool.launch(step, tokens_of(inputs, t, t + 1), single=True, launch=launch)
        pools.append(pool)
    shared, whole = pools
    assert shared.cursors.flushes.tolist() == [2, 1, 2] and not shared.cursors.arrivals.any()
    for name, want in whole.states().items():
        got = shared.states()[name]
        if got.dtype == torch.float32:
            assert relative(got, want) < FP32_ACCURATE, name
        else:
            assert float((pattern(got) != pattern(want)).double().mean()) < 5e-3, name
