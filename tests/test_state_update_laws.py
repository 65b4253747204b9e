"""How a rounding error ages: measured through StateUpdate, against the closed-form law.

A state in its stationary distribution, decay a per token, a flush every L tokens, one-write error
rho u (rho = .425 to nearest, .60 stochastic; u the unit roundoff):

    E(t) = rho u sqrt((1 - a^(2(t + L))) / (1 - a^(2L)))     the hand-over is one write more

Nearest rounding leaves that line when it stagnates, sqrt(1 - a^(2L)) < u: a window's change is
smaller than half a spacing and is rounded away.
"""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from recurrence_cases import PLAIN, make_cache, make_inputs, make_update, oracle, relative

from replayssm.ops.gated_delta import GatedDeltaInputs
from replayssm.ops.kimi_delta import KimiDeltaInputs
from replayssm.ops.mamba2 import Mamba2Inputs

DECAYS = (0.9, 0.99, 0.999, 0.9999)
UNIT = {"fp16": 2.0**-11, "fp8": 2.0**-4}
RHO = {False: 0.425, True: 0.60}


def law(decay, ring_len, unit, rho, tokens):
    return (
        rho
        * unit
        * math.sqrt((1 - decay ** (2 * (tokens + ring_len))) / (1 - decay ** (2 * ring_len)))
    )


def stagnates(decay, ring_len, unit):
    return math.sqrt(1 - decay ** (2 * ring_len)) < unit


@functools.cache
def state_errors(policy, ring_len, tokens, *, width=32):
    """Relative L2 error of the state against float64, one head per decay, at powers of two."""
    heads = len(DECAYS)
    geometry = dict(num_heads=heads, head_dim=width, n_groups=1, d_state=width)
    update = make_update("mamba2", f"{policy}@{ring_len}", geometry)
    generator = torch.Generator().manual_seed(0)
    a = torch.tensor(DECAYS, dtype=torch.float64)
    A = a.log().float()
    stationary = torch.randn(1, heads, width, width, generator=generator)
    stationary = stationary / (1 - a.float() ** 2).sqrt().view(-1, 1, 1)
    cache = make_cache(update, 1, state=stationary)
    exact = stationary.double()
    dt, silent = torch.ones(1, ring_len, heads), torch.zeros(1, ring_len, 1, width)
    ages = torch.arange(ring_len - 1, -1, -1, dtype=torch.float64)
    weights = torch.exp(A.double()[:, None] * ages)
    decay = torch.exp(A.double() * ring_len).view(1, -1, 1, 1)
    errors = {}
    for done in range(ring_len, tokens + 1, ring_len):
        x = torch.randn(1, ring_len, heads, width, generator=generator)
        B_ = torch.randn(1, ring_len, 1, width, generator=generator)
        update.step(cache, Mamba2Inputs(x, dt, A, B_, silent))
        weighted = x[0].double().permute(1, 2, 0) * weights[:, None]
        exact = decay * exact + weighted @ B_[0, :, 0].double()
        if done >= 256 and done & (done - 1) == 0:
            error = (update.state(cache) - exact).flatten(2).norm(dim=-1)
            errors[done] = (error / exact.flatten(2).norm(dim=-1))[0].tolist()
    return errors


@pytest.mark.parametrize("policy", ["fp16", "fp16-sr", "fp8", "fp8-sr"])
def test_error_of_a_shared_state_follows_the_law(policy):
    """Within 15 % at L = 16, for every decay that does not stagnate."""
    unit, rho = UNIT[policy.split("-")[0]], RHO[policy.endswith("-sr")]
    for tokens, errors in state_errors(policy, 16, 4096).items():
        for decay, error in zip(DECAYS, errors, strict=True):
            if not stagnates(decay, 16, unit):
                ratio = error / law(decay, 16, unit, rho, tokens)
                assert 0.85 < ratio < 1.15, (tokens, decay, ratio)


def test_stagnation_criterion():
    unit = UNIT["fp8"]
    assert stagnates(0.9999, 16, unit) and stagnates(0.9999, 1, unit) and stagnates(0.999, 1, unit)
    assert not stagnates(0.999, 16, unit) and not stagnates(0.9999, 16, UNIT["fp16"])


def test_nearest_rounding_stagnates_without_a_ring_and_stochastic_does_not():
    """a = .9999, L = 1, E4M3: nearest ends far above its line, stochastic does not."""
    tokens = 2048
    nearest = state_errors("fp8", 1, tokens)[tokens]
    stochastic = state_errors("fp8-sr", 1, tokens)[tokens]
    line = law(0.9999, 1, UNIT["fp8"], RHO[False], tokens)
    assert nearest[3] > 1.5 * line and nearest[3] > 2 * stochastic[3]
    assert stochastic[3] < 1.15 * law(0.9999, 1, UNIT["fp8"], RHO[True], tokens)
    for head in (0, 1):
        ratio = nearest[head] / law(DECAYS[head], 1, UNIT["fp8"], RHO[False], tokens)
        assert 0.8 < ratio < 1.15


def test_a_ring_removes_stagnation():
    """a = .999: L = 1 stagnates, L = 16 is on its line; and the ring alone divides the error."""
    single = state_errors("fp8", 1, 2048)[2048][2]
    ring = state_errors("fp8", 16, 4096)[2048][2]
    assert single > 1.3 * law(0.999, 1, UNIT["fp8"], RHO[False], 2048)
    assert single > 4 * ring


def test_nearest_rounding_stagnates_late_with_a_ring():
    """a = .9999, L = 16: on the line at 4,096 tokens, off it at 16,384: no short study sees it."""
    errors = state_errors("fp8", 16, 16384)
    line = functools.partial(law, 0.9999, 16, UNIT["fp8"], RHO[False])
    assert errors[4096][3] < 1.15 * line(4096)
    assert errors[16384][3] > 1.3 * line(16384)


@pytest.mark.parametrize("recurrence", PLAIN)
@pytest.mark.parametrize("read_copy", ["nvfp4", "fp8"])
def test_error_of_a_read_copy_does_not_grow_with_t(recurrence, read_copy):
    """Output error with an FP32 checkpoint is the one-write error of the format at any age, while
    the same format as the only copy has drifted away from it."""
    tokens, width = 1536, 32
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(2, tokens, *shape, generator=generator)

    if recurrence == "mamba2":
        inputs = Mamba2Inputs(
            normal(4, width),
            torch.ones(2, tokens, 4),
            torch.full((4,), math.log(0.999)),
            normal(2, width),
            normal(2, width),
        )
    else:
        # Orthogonal to what is stored on average: beta small, so that alpha decides how errors age.
        unit = [F.normalize(normal(2, width), dim=-1) for _ in range(2)]
        kimi = recurrence == "kimi_delta"
        gate = torch.full((2, tokens, 4, width) if kimi else (2, tokens, 4), math.log(0.999))
        kind = KimiDeltaInputs if kimi else GatedDeltaInputs
        inputs = kind(*unit, normal(4, width), gate, torch.full((2, tokens, 4), 0.02))
    plain = make_update(recurrence, "fp32")
    state = torch.zeros(2, *plain.geometry.state_shape)
    exact = oracle(recurrence, state, inputs)[0]
    errors = {}
    for policy in (f"fp32+{read_copy}", read_copy):
        update = make_update(recurrence, policy)
        outputs = update.step(make_cache(update, 2, state=state), inputs)
        errors[policy] = [
            relative(outputs[:, t : t + 256], exact[:, t : t + 256]) for t in (256, 1280)
        ]
    early, late = errors[f"fp32+{read_copy}"]
    assert 0.8 < late / early < 1.15
    shared_early, shared_late = errors[read_copy]
    assert shared_late > 1.1 * shared_early and shared_late > 2 * late


def test_bf16_operands_alone_cost_more_than_an_fp16_checkpoint():
    """a = .99, L = 16, ring unrounded: the rounding that public kernels do in their products."""
    geometry = dict(num_heads=1, head_dim=64, n_groups=1, d_state=64)
    inputs = make_inputs("mamba2", geometry, 1, 1024)
    inputs = inputs._replace(A=torch.tensor([math.log(0.99)]), dt=torch.ones(1, 1024, 1))
    errors = {}
    for policy in ("fp32:operand=bf16", "fp16"):
        update = make_update("mamba2", policy, geometry)
        state = torch.zeros(1, 1, 64, 64)
        cache = make_cache(update, 1, state=state)
        update.step(cache, inputs)
        errors[policy] = relative(update.state(cache), oracle("mamba2", state, inputs)[1])
    assert 1e-3 < errors["fp32:operand=bf16"] < 4e-3
    assert 2e-4 < errors["fp16"] < 6e-4
