"""What holds of the kernels of both delta rules alike: outputs, records, drafts, room, steps.

Runs in Triton's interpreter without a GPU, compiled with one (`pytest -m gpu`). Unused ring slots
and outputs start as NaN everywhere, and the pool has its slots in another order than the rows, and
one to spare.
"""

import math

import pytest
import torch
from delta_pool import FP32_ACCURATE, GATED_DELTA, KIMI_DELTA, SMALL, as_bytes
from interpreter import KERNEL_MARKS
from poison import poisoned_outputs  # noqa: F401  (a fixture)
from recurrence_cases import relative, take_tokens

from replayssm.formats.storage import STORAGES

pytestmark = KERNEL_MARKS
RULES = pytest.mark.parametrize("rule", [GATED_DELTA, KIMI_DELTA], ids=lambda rule: rule.name)
# Codes and scales that may differ where a fold sums in another order.
DIFFERENT = {"gated_delta": 5e-3, "kimi_delta": 2e-2}


@RULES
@pytest.mark.parametrize("policy", ["fp32", "fp32+fp32"], ids=["one-copy", "recompute"])
@pytest.mark.parametrize(
    "shape, ring_len, windows",
    [
        ("r1", 1, (1,)),
        ("r1", 16, (3, 1, 7)),
        ("r2", 5, (1, 4)),
        ("r2", 32, (27, 5)),
        ("r2", 24, (9, 7)),  # as many of many slots as products need at least
        ("r3", 5, (5,)),
        ("r3", 40, (1, 32, 2)),
    ],
)
def test_outputs_and_state_equal_the_float64_recurrence(rule, shape, policy, ring_len, windows):
    pool = rule.make_pool(policy, rule.shapes[shape], ring_len=ring_len)
    inputs = rule.inputs_for(rule.shapes[shape], 2, sum(windows))
    want, last = rule.expected(pool.state(), inputs)
    assert relative(pool.run_in_windows(inputs, windows), want) < FP32_ACCURATE
    pool.flush([True, True])
    assert relative(pool.state(), last) < FP32_ACCURATE
    assert pool.cursors.pos.tolist() == [0, 0, 0] and pool.cursors.flushes.tolist() == [1, 0, 1]


@RULES
@pytest.mark.parametrize("name", [name for name in STORAGES if "-sr" not in name])
def test_outputs_read_every_format_and_write_no_state(rule, name):
    """Against the recurrence from the values that the codes stand for."""
    shape = dict(num_k_heads=1, num_v_heads=2, head_k_dim=80, head_v_dim=16)
    pool = rule.make_pool(name, shape)
    inputs = rule.inputs_for(shape, 2, 5)
    want, _ = rule.expected(pool.state(), inputs)
    before = pool.bytes()
    assert relative(pool.run_in_windows(inputs, (1, 4)), want) < FP32_ACCURATE
    for part, stored in pool.bytes().items():
        if part.startswith("ring"):
            assert torch.isnan(pool.ring[part[5:]][:, :, 5:]).all(), part
        else:
            assert torch.equal(stored, before[part]), part


@RULES
@pytest.mark.parametrize("arrive", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float16])
def test_tokens_are_rounded_on_append_before_they_are_used(rule, arrive, held):
    """Outputs and state are those of the rounded tokens; gates stay FP32."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[held]
    pool = rule.make_pool(f"fp32+fp32:ring={name}", SMALL, dtype=held)
    inputs = rule.inputs_for(SMALL, 2, 5, ring=None if arrive == torch.float32 else arrive)
    rounded = inputs._replace(
        **{n: STORAGES[name].read(STORAGES[name].write(getattr(inputs, n).cpu())) for n in "kv"}
    )
    want, last = rule.expected(pool.state(), rounded)
    assert relative(pool.run_in_windows(inputs, (1, 4)), want) < FP32_ACCURATE
    for row, slot in enumerate((2, 0)):
        for part, tokens in (("k", rounded.k), ("v", rounded.v), ("g", inputs.g)):
            ring = pool.ring[part][slot, :, :5]
            assert torch.equal(ring.cpu(), tokens[row].cpu().transpose(0, 1).to(ring.dtype)), part
    pool.flush([1, 1])
    assert relative(pool.state(), last) < FP32_ACCURATE


@RULES
def test_inputs_may_be_parts_of_one_projection(rule):
    """Views of one tensor give the same bits as dense tensors."""
    inputs = rule.inputs_for(SMALL, 2, 4)
    names = "qkv" if rule is GATED_DELTA else "qkvg"
    dense = [getattr(inputs, name) for name in names]
    flat = torch.cat([t.flatten(2) for t in dense], -1)
    parts = flat.split([t.flatten(2).shape[-1] for t in dense], -1)
    views = inputs._replace(
        **{n: p.view(t.shape) for n, p, t in zip(names, parts, dense, strict=True)}
    )
    assert not views.v.is_contiguous()
    for tokens in (1, 4):
        got = rule.make_pool("fp32", SMALL).run(take_tokens(views, 0, tokens))
        want = rule.make_pool("fp32", SMALL).run(take_tokens(inputs, 0, tokens))
        assert torch.equal(got, want)


@RULES
@pytest.mark.parametrize("policy", ["fp32", "fp32+nvfp4", "fp32+nvfp4:update=read"])
def test_rejected_drafts_leave_no_trace(rule, policy):
    """Rows accept 3 and 0 of 4 drafts; what they rejected is replaced by NaN and never read."""
    inputs = rule.inputs_for(SMALL, 2, 4)
    pool, clean = rule.make_pool(policy, SMALL), rule.make_pool(policy, SMALL)
    pool.run(inputs)
    pool.commit(3, 0)
    for name in pool.ring:
        pool.ring[name][2, :, 3:] = math.nan
        pool.ring[name][0] = math.nan
    clean.run(take_tokens(inputs, 0, 3))
    clean.commit(3, 0)
    following = rule.inputs_for(SMALL, 2, 2, seed=8)
    assert relative(pool.run(following), clean.run(following)) < FP32_ACCURATE
    pool.commit(2, 2)
    pool.flush([1, 1])
    assert torch.isfinite(pool.state()).all()


@RULES
def test_a_window_without_room_gives_nan_and_touches_no_neighbour(rule):
    inputs = rule.inputs_for(SMALL, 2, 4)
    pool = rule.make_pool("fp32", SMALL, ring_len=5)
    pool.run(inputs)
    pool.commit(4, 1)
    before = pool.bytes()
    out = pool.run(inputs)
    assert torch.isnan(out[0]).all() and torch.isfinite(out[1]).all()
    pool.commit(1, 0)
    assert torch.isnan(pool.run(take_tokens(inputs, 0, 1))[0]).all()
    for name, tensor in pool.ring.items():
        assert torch.equal(as_bytes(tensor[1]), before[f"ring {name}"][1]), name
        assert torch.isnan(tensor[1]).all(), name


@RULES
def test_update_source_read_folds_what_was_read(rule):
    """The correction made from a coarse copy enters the checkpoint, as the reference has it."""
    inputs = rule.inputs_for(SMALL, 2, 5)
    leaky = rule.make_pool("fp32+nvfp4:update=read", SMALL, ring_len=5)
    want = leaky.state().double()
    leaky.run_in_windows(inputs, (5,))
    u = leaky.ring["u"][[2, 0]].cpu().double()  # [2, HV, 5, V]
    leaky.flush()
    k = inputs.k.cpu().double().repeat_interleave(2, 2)
    for t in range(5):
        decay = inputs.g[:, t].cpu().double().exp().view(2, 2, 1, -1)  # of channels, or of all
        want = want * decay + u[:, :, t, :, None] * k[:, t, :, None]
    assert relative(leaky.state(), want) < FP32_ACCURATE


@RULES
@pytest.mark.parametrize("policy", ["fp32", "fp16-sr", "int8-sr", "nvfp4", "fp32+fp8"])
def test_step_is_decode_then_commit_then_flush(rule, policy):
    one, other = (rule.make_pool(policy, SMALL, ring_len=2) for _ in range(2))
    inputs = rule.inputs_for(SMALL, 2, 4)
    for t in range(4):
        token = take_tokens(inputs, t, t + 1)
        out = one.step(token)
        assert relative(out, other.run(token)) < FP32_ACCURATE
        other.commit(1, 1)
        other.flush()
        assert one.cursors.pos.tolist() == other.cursors.pos.tolist()
        assert one.cursors.flushes.tolist() == other.cursors.flushes.tolist()
        # The fold is the same sum in another order. A scale may move by its last bit, and now and
        # then a code falls to the other side.
        a, b = one.checkpoint.tensors(), other.checkpoint.tensors()
        for name in a:
            if a[name].dtype == torch.float32:
                assert relative(a[name], b[name]) < FP32_ACCURATE, name
            else:
                different = (a[name] != b[name]).double().mean()
                assert float(different) < DIFFERENT[rule.name], name
        for name, tensor in other.tensors().items():
            tensor.copy_(one.tensors()[name])
