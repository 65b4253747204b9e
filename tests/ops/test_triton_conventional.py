"""The conventional kernels against the token recurrence in float64; interpreted without a GPU."""

import pytest
import torch
from recurrence_cases import GEOMETRIES, make_inputs, make_update, random_state, take_tokens

from replayssm.ops.gated_delta import triton_conventional as delta_rules
from replayssm.ops.mamba2 import triton_conventional as mamba2
from replayssm.ops.triton_conventional import SWEEP, ConventionalLaunch
from replayssm.state_update import RECURRENCES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
KERNELS = {
    "mamba2": mamba2.conventional,
    "gated_delta": delta_rules.conventional,
    "kimi_delta": delta_rules.conventional,
}
LAUNCH = ConventionalLaunch(rows=8, num_warps=2)
# What a state may be off after three tokens: FP32 arithmetic, else three roundings.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def relative(a, b):
    return float((a.cpu().double() - b).norm() / b.norm())


def on_device(inputs):
    return type(inputs)(*(t.to(DEVICE) for t in inputs))


def case(name, tokens=3, rows=3, ring=torch.bfloat16):
    """(recurrence, inputs, state [rows, ...]) of an odd geometry."""
    recurrence, geometry = GEOMETRIES[name]
    inputs = make_inputs(recurrence, geometry, rows, tokens, ring=ring)
    return recurrence, inputs, random_state(make_update(recurrence, geometry=geometry), rows)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_tokens_equal_the_recurrence(name, dtype):
    recurrence, inputs, start = case(name)
    start = start.to(dtype)
    state = torch.full((5, *start.shape[1:]), torch.nan, dtype=dtype, device=DEVICE)
    slots = torch.tensor([4, 0, 2], device=DEVICE)
    state[slots] = start.to(DEVICE)
    outputs = [
        KERNELS[recurrence](state, slots, on_device(take_tokens(inputs, t, t + 1)), launch=LAUNCH)
        for t in range(3)
    ]
    wanted, last = RECURRENCES[recurrence][0].recurrence(start.double(), inputs)
    assert relative(torch.cat(outputs, 1), wanted) < TOLERANCE[dtype]
    assert relative(state[slots], last) < TOLERANCE[dtype]
    assert state[[1, 3]].isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_many_tokens_equal_one_at_a_time(name, dtype):
    recurrence, inputs, start = case(name)
    kernel, slots = KERNELS[recurrence], torch.tensor([2, 0, 1], device=DEVICE)
    one, many, kept = (start.to(DEVICE, dtype, copy=True) for _ in range(3))
    outputs, states = [], []
    for t in range(3):
        outputs.append(kernel(one, slots, on_device(take_tokens(inputs, t, t + 1)), launch=LAUNCH))
        states.append(one[slots])
    together = kernel(many, slots, on_device(inputs), launch=LAUNCH)
    assert torch.equal(together, torch.cat(outputs, 1)) and torch.equal(many, one)
    snapshots = torch.full((3, 3, *start.shape[1:]), torch.nan, dtype=dtype, device=DEVICE)
    verified = kernel(kept, slots, on_device(inputs), launch=LAUNCH, snapshots=snapshots)
    assert torch.equal(verified, together) and torch.equal(snapshots, torch.stack(states, 1))
    assert torch.equal(kept.cpu(), start.to(dtype)), "snapshots leave the state alone"


@pytest.mark.parametrize("name", ["mamba2-p5-n7", "delta-r2-odd", "kimi-r2-odd"])
@pytest.mark.parametrize("launch", SWEEP, ids=lambda launch: launch.label)
def test_every_launch_of_the_sweep_gives_the_same(name, launch):
    recurrence, inputs, start = case(name, tokens=1)
    state, slots = start.clone().to(DEVICE), torch.arange(3, device=DEVICE)
    out = KERNELS[recurrence](state, slots, on_device(inputs), launch=launch)
    wanted, last = RECURRENCES[recurrence][0].recurrence(start.double(), inputs)
    assert relative(out, wanted) < 1e-6 and relative(state, last) < 1e-6


@pytest.mark.parametrize("name", ["mamba2-g3", "delta-r3"])
def test_padding_rows_are_left_alone(name):
    recurrence, inputs, start = case(name, tokens=1)
    state = start.to(DEVICE).clone()
    KERNELS[recurrence](
        state, torch.tensor([-1, 1, -1], device=DEVICE), on_device(inputs), launch=LAUNCH
    )
    assert torch.equal(state[[0, 2]].cpu(), start[[0, 2]])
    assert not torch.equal(state[1].cpu(), start[1])


def test_a_skip_per_channel():
    recurrence, inputs, start = case("mamba2-g3", tokens=1)
    inputs = inputs._replace(D=torch.randn(start.shape[1:3]))
    state, slots = start.clone().to(DEVICE), torch.arange(3, device=DEVICE)
    out = mamba2.conventional(state, slots, on_device(inputs), launch=LAUNCH)
    assert relative(out, RECURRENCES[recurrence][0].recurrence(start.double(), inputs)[0]) < 1e-6


@pytest.mark.parametrize("name", ["mamba2-g3", "delta-r3"])
def test_what_is_refused(name):
    recurrence, inputs, start = case(name, tokens=2)
    slots, kernel = torch.arange(3, device=DEVICE), KERNELS[recurrence]
    one = on_device(take_tokens(inputs, 0, 1))
    with pytest.raises(ValueError, match="state is torch.float64, allowed are torch.float32"):
        kernel(start.double(), slots, one, launch=LAUNCH)
    with pytest.raises(ValueError, match=r"state is \[3, .*, expected \[S, "):
        kernel(start[:, :1], slots, one, launch=LAUNCH)
    with pytest.raises(ValueError, match="must be dense"):
        kernel(start.transpose(0, 1).contiguous().transpose(0, 1), slots, one, launch=LAUNCH)
    for snapshots, message in (
        (start[:, None], r"snapshots are .* \[3, 1, .*, expected torch.float32 \[3, 2, "),
        (torch.stack([start, start], 1).half(), "snapshots are torch.float16"),
        (torch.stack([start, start]).transpose(0, 1), "snapshots have strides"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel(start, slots, on_device(inputs), launch=LAUNCH, snapshots=snapshots)
    gate = "dt" if recurrence == "mamba2" else "beta"
    with pytest.raises(ValueError, match=f"{gate} is torch.bfloat16, must be torch.float32"):
        kernel(start, slots, one._replace(**{gate: getattr(one, gate).bfloat16()}), launch=LAUNCH)
