"""Kimi Delta Attention kernels against the float64 recurrence, and codes against `formats`.

Runs in Triton's interpreter without a GPU, compiled with one (`pytest -m gpu`). Unused ring slots
and outputs start as NaN everywhere, and the pool has its slots in another order than the rows, and
one to spare. What the kernels share with Gated DeltaNet is tested there; here is what a decay per
key channel touches.
"""

import math
from typing import NamedTuple

import pytest
import torch
from poison import poisoned_outputs  # noqa: F401  (a fixture)
from recurrence_cases import make_inputs, relative, take_tokens

from replayssm.formats.quantized import Quantized
from replayssm.formats.storage import STORAGES
from replayssm.ops.gated_delta.triton_launch import Launch
from replayssm.ops.kimi_delta.reference import (
    KimiDeltaGeometry,
    KimiDeltaInputs,
    recurrence,
    ring_layout,
)
from replayssm.ops.kimi_delta.triton_decode import decode, step
from replayssm.ops.kimi_delta.triton_flush import flush
from replayssm.ops.kimi_delta.triton_window import window
from replayssm.ops.triton_common import Cursors, commit, new_cursors
from replayssm.policy import CHECKPOINT_STREAM, READ_COPY_STREAM, PrecisionPolicy, parse_policy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes with NumPy, which warns where a GPU does not.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)

# FP32 accuracy: a sum of a hundred products in any order.
FP32_ACCURATE = 5e-7
LAYER = 9
SMALL = dict(num_k_heads=1, num_v_heads=2, head_k_dim=32, head_v_dim=16)
# Widths that are no power of two; one, two and three value heads a key head.
SHAPES = {
    "r1-k48-v24": dict(num_k_heads=2, num_v_heads=2, head_k_dim=48, head_v_dim=24),
    "r2-k96-v20": dict(num_k_heads=1, num_v_heads=2, head_k_dim=96, head_v_dim=20),
    "r3-k16-v5": dict(num_k_heads=1, num_v_heads=3, head_k_dim=16, head_v_dim=5),
}
KIMI = dict(num_k_heads=32, num_v_heads=32, head_k_dim=128, head_v_dim=128)
READ = pytest.mark.parametrize("name", [name for name in STORAGES if "-sr" not in name])


class Pool(NamedTuple):
    """S slots as a cache would hold them on the device."""

    policy: PrecisionPolicy
    checkpoint: Quantized
    read_copy: Quantized | None
    ring: dict[str, torch.Tensor]
    cursors: Cursors

    @property
    def read(self):
        return self.checkpoint if self.read_copy is None else self.read_copy

    def run(self, inputs, launch=None):
        """Outputs of all tokens in one launch; commits nothing."""
        op = decode if inputs.q.shape[1] == 1 else window
        return op(self.read, self.ring, self.policy, self.cursors, inputs, launch=launch)

    def step(self, inputs):
        """Outputs of one token, committed; full rings flushed."""
        copies = (self.checkpoint, self.read_copy)
        return step(*copies, self.ring, self.policy, self.cursors, inputs, layer=LAYER)

    def commit(self, *accepted):
        commit(self.cursors, torch.tensor(accepted, device=DEVICE))

    def flush(self, rows=None):
        rows = None if rows is None else torch.tensor(rows, device=DEVICE)
        copies = (self.checkpoint, self.read_copy)
        flush(*copies, self.ring, self.policy, self.cursors, {}, layer=LAYER, rows=rows)

    def state(self):
        """FP32 values of the checkpoint in the order of the rows, on the CPU."""
        stored = self.checkpoint.map(lambda t: t.cpu())
        return self.policy.checkpoint.read(stored)[self.cursors.slots.cpu()]


def make_pool(policy, shape, *, ring_len=16, slots=(2, 0), dtype=torch.float32):
    """A pool of one slot more than rows, holding random states; slot s is request 10 + s."""
    policy = parse_policy(policy)
    geometry = KimiDeltaGeometry(**shape)
    count = max(slots) + 1
    state = torch.randn(count, *geometry.state_shape, generator=torch.Generator().manual_seed(4))
    copies = []
    for storage in (policy.checkpoint, policy.read_copy):
        bits = None
        if storage is not None and storage.needs_random_bits:
            bits = torch.zeros(state.shape, dtype=torch.int32)
        copies.append(storage and storage.write(state, bits).map(lambda t: t.to(DEVICE)))
    recompute = policy.read_copy is not None and policy.update_source == "checkpoint"
    ring = {}
    for name, (heads, *width) in ring_layout(geometry, recompute=recompute).items():
        held = dtype if name in ("k", "v") else torch.float32
        size = (count, heads, ring_len, *width)
        ring[name] = torch.full(size, math.nan, dtype=held, device=DEVICE)
    numbers = torch.arange(count, device=DEVICE)
    rows = torch.tensor(slots, device=DEVICE)
    cursors = new_cursors(rows, sequence=numbers + 10, seed=numbers * 0 + 77)
    return Pool(policy, *copies, ring, cursors)


def inputs_for(shape, batch, tokens, **options):
    inputs = make_inputs("kimi_delta", shape, batch, tokens, **options)
    return KimiDeltaInputs(*(t.to(DEVICE) for t in inputs))


def expected(state, inputs):
    """Outputs and state of the float64 recurrence, on the CPU."""
    return recurrence(state.double(), KimiDeltaInputs(*(t.cpu() for t in inputs)))


def run_in_windows(pool, inputs, windows):
    """Outputs of all tokens, in windows of the given lengths, all committed."""
    outputs, done = [], 0
    for tokens in windows:
        outputs.append(pool.run(take_tokens(inputs, done, done + tokens)))
        pool.commit(*[tokens] * len(pool.cursors.slots))
        done += tokens
    return torch.cat(outputs, 1).cpu()


@pytest.mark.parametrize("policy", ["fp32", "fp32+fp32"], ids=["one-copy", "recompute"])
@pytest.mark.parametrize(
    "shape, ring_len, windows",
    [
        ("r1-k48-v24", 1, (1,)),
        ("r1-k48-v24", 16, (3, 1, 7)),
        ("r2-k96-v20", 5, (1, 4)),
        ("r2-k96-v20", 32, (27, 5)),
        ("r3-k16-v5", 5, (5,)),
        ("r3-k16-v5", 40, (1, 32, 2)),
    ],
)
def test_outputs_and_state_equal_the_float64_recurrence(shape, policy, ring_len, windows):
    shape = SHAPES[shape]
    pool = make_pool(policy, shape, ring_len=ring_len)
    inputs = inputs_for(shape, 2, sum(windows))
    want, last = expected(pool.state(), inputs)
    assert relative(run_in_windows(pool, inputs, windows), want) < FP32_ACCURATE
    pool.flush([True, True])
    assert relative(pool.state(), last) < FP32_ACCURATE
    assert pool.cursors.pos.tolist() == [0, 0, 0] and pool.cursors.flushes.tolist() == [1, 0, 1]


@READ
def test_outputs_read_every_format_and_write_no_state(name):
    """Against the recurrence from the values that the codes stand for."""
    shape = dict(num_k_heads=1, num_v_heads=2, head_k_dim=80, head_v_dim=16)
    pool = make_pool(name, shape)
    inputs = inputs_for(shape, 2, 5)
    before = {n: t.clone() for n, t in pool.checkpoint.tensors().items()}
    want, _ = expected(pool.state(), inputs)
    assert relative(run_in_windows(pool, inputs, (1, 4)), want) < FP32_ACCURATE
    for part, tensor in pool.checkpoint.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), before[part].view(torch.uint8)), part
    for name, tensor in pool.ring.items():
        assert torch.isnan(tensor[:, :, 5:]).all(), name


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
    assert relative(run_in_windows(pool, inputs, windows), want) < FP32_ACCURATE
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
    out = run_in_windows(pool, inputs, windows)
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
    assert relative(run_in_windows(pool, inputs, (32,)), want) < FP32_ACCURATE
    pool.flush()
    assert relative(pool.state(), last) < FP32_ACCURATE


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float16])
def test_tokens_are_rounded_on_append_before_they_are_used(held):
    """Outputs and state are those of the rounded tokens; gates stay FP32."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[held]
    pool = make_pool(f"fp32+fp32:ring={name}", SMALL, dtype=held)
    inputs = inputs_for(SMALL, 2, 5)
    rounded = inputs._replace(
        **{n: STORAGES[name].read(STORAGES[name].write(getattr(inputs, n).cpu())) for n in "kv"}
    )
    want, last = expected(pool.state(), rounded)
    assert relative(run_in_windows(pool, inputs, (1, 4)), want) < FP32_ACCURATE
    assert torch.equal(pool.ring["k"][2, :, :5].cpu(), rounded.k[0].cpu().transpose(0, 1).to(held))
    assert torch.equal(pool.ring["g"][0, :, :5], inputs.g[1].transpose(0, 1))
    pool.flush([1, 1])
    assert relative(pool.state(), last) < FP32_ACCURATE


def test_inputs_may_be_parts_of_one_projection():
    """q, k, v as views of one tensor give the same bits as dense tensors."""
    inputs = inputs_for(SMALL, 2, 4)
    flat = torch.cat([t.flatten(2) for t in inputs[:4]], -1)
    parts = flat.split([t.flatten(2).shape[-1] for t in inputs[:4]], -1)
    views = inputs._replace(
        **{n: p.view(t.shape) for n, p, t in zip("qkvg", parts, inputs[:4], strict=True)}
    )
    assert not views.g.is_contiguous()
    for tokens in (1, 4):
        got = make_pool("fp32", SMALL).run(take_tokens(views, 0, tokens))
        assert torch.equal(got, make_pool("fp32", SMALL).run(take_tokens(inputs, 0, tokens)))


def test_k_and_q_may_be_of_different_types():
    """The narrower one is used as it is."""
    inputs = inputs_for(SMALL, 2, 4)
    narrow = inputs._replace(k=inputs.k.bfloat16())
    wide = inputs._replace(k=narrow.k.float())
    for tokens in (1, 4):
        got = make_pool("fp32", SMALL).run(take_tokens(narrow, 0, tokens))
        assert torch.equal(got, make_pool("fp32", SMALL).run(take_tokens(wide, 0, tokens)))


@pytest.mark.parametrize("policy", ["fp32", "fp32+nvfp4", "fp32+nvfp4:update=read"])
def test_rejected_drafts_leave_no_trace(policy):
    """Rows accept 3 and 0 of 4 drafts; what they rejected is replaced by NaN and never read."""
    inputs = inputs_for(SMALL, 2, 4)
    pool, clean = make_pool(policy, SMALL), make_pool(policy, SMALL)
    pool.run(inputs)
    pool.commit(3, 0)
    for name in pool.ring:
        pool.ring[name][2, :, 3:] = math.nan
        pool.ring[name][0] = math.nan
    clean.run(take_tokens(inputs, 0, 3))
    clean.commit(3, 0)
    following = inputs_for(SMALL, 2, 2, seed=8)
    assert relative(pool.run(following), clean.run(following)) < FP32_ACCURATE
    pool.commit(2, 2)
    pool.flush([1, 1])
    assert torch.isfinite(pool.state()).all()


def test_a_window_without_room_gives_nan_and_touches_no_neighbour():
    inputs = inputs_for(SMALL, 2, 4)
    pool = make_pool("fp32", SMALL, ring_len=5)
    pool.run(inputs)
    pool.commit(4, 1)
    out = pool.run(inputs)
    assert torch.isnan(out[0]).all() and torch.isfinite(out[1]).all()
    pool.commit(1, 0)
    assert torch.isnan(pool.run(take_tokens(inputs, 0, 1))[0]).all()
    assert all(torch.isnan(tensor[1]).all() for tensor in pool.ring.values())


def test_launch_parameters_change_no_number_and_padding_rows_nothing():
    shape = SHAPES["r3-k16-v5"] | {"head_v_dim": 40}
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


@pytest.mark.parametrize("policy", ["fp32+fp16-sr", "fp16-sr+fp32", "fp32+nvfp4"])
def test_codes_are_those_of_formats(policy):
    """What an FP32 copy shows was rounded is what the other copy holds, to the last bit."""
    pool = make_pool(policy, SMALL, ring_len=5)
    inputs = inputs_for(SMALL, 2, 5)
    _, last = expected(pool.state(), inputs)
    run_in_windows(pool, inputs, (5,))
    pool.cursors.flushes.fill_(6)
    pool.flush()
    exact, coded = pool.checkpoint, pool.read_copy
    storage, stream = pool.policy.read_copy, READ_COPY_STREAM
    if not policy.startswith("fp32"):
        exact, coded, storage, stream = coded, exact, pool.policy.checkpoint, CHECKPOINT_STREAM
    state = exact.data.cpu()
    assert relative(state[[2, 0]], last) < FP32_ACCURATE
    per_slot = {n: getattr(pool.cursors, n).cpu() for n in ("seed", "sequence")}
    bits = storage.draw_bits(
        state.shape, layer=LAYER, stream=stream, flush_index=torch.full((3,), 6), **per_slot
    )
    for name, tensor in storage.write(state, bits).tensors().items():
        got = coded.tensors()[name].cpu()
        assert torch.equal(got[[2, 0]].view(torch.uint8), tensor[[2, 0]].view(torch.uint8)), name


def test_update_source_read_folds_what_was_read():
    """The correction made from a coarse copy enters the checkpoint, as the reference has it."""
    inputs = inputs_for(SMALL, 2, 5)
    leaky = make_pool("fp32+nvfp4:update=read", SMALL, ring_len=5)
    want = leaky.state().double()
    run_in_windows(leaky, inputs, (5,))
    u = leaky.ring["u"][[2, 0]].cpu().double()  # [2, HV, 5, V]
    leaky.flush()
    k = inputs.k.cpu().double().repeat_interleave(2, 2)
    for t in range(5):
        want = want * inputs.g.cpu().double()[:, t, :, None].exp()
        want = want + u[:, :, t, :, None] * k[:, t, :, None]
    assert relative(leaky.state(), want) < FP32_ACCURATE


@pytest.mark.parametrize("policy", ["fp32", "fp16-sr", "int8-sr", "nvfp4", "fp32+fp8"])
def test_step_is_decode_then_commit_then_flush(policy):
    one, other = make_pool(policy, SMALL, ring_len=2), make_pool(policy, SMALL, ring_len=2)
    inputs = inputs_for(SMALL, 2, 4)
    for t in range(4):
        token = take_tokens(inputs, t, t + 1)
        out = one.step(token)
        assert relative(out, other.run(token)) < FP32_ACCURATE
        other.commit(1, 1)
        other.flush()
        assert one.cursors.pos.tolist() == other.cursors.pos.tolist()
        assert one.cursors.flushes.tolist() == other.cursors.flushes.tolist()
        # The fold is the same sum in another order: now and then a code falls to the other side.
        if policy.startswith("fp32"):
            assert relative(one.checkpoint.data, other.checkpoint.data) < FP32_ACCURATE
        else:
            different = one.checkpoint.data != other.checkpoint.data
            assert float(different.double().mean()) < 2e-2
        for part in ("checkpoint", "read_copy"):
            stored = getattr(other, part)
            for name, tensor in ({} if stored is None else stored.tensors()).items():
                tensor.copy_(getattr(one, part).tensors()[name])
        for name, tensor in other.ring.items():
            tensor.copy_(one.ring[name])


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
