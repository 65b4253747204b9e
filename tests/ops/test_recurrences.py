"""Every recurrence: the oracle against the formula, and window and fold against the oracle."""

import math

import pytest
import torch
from recurrence_cases import (
    GEOMETRIES,
    relative,
    run_window,
    setup,
    take_rows,
    take_tokens,
)

from replayssm.ops.gated_delta import GatedDeltaInputs
from replayssm.ops.kimi_delta import KimiDeltaInputs
from replayssm.ops.mamba2 import Mamba2Inputs
from replayssm.state_update import RECURRENCES

GEOMETRY = pytest.mark.parametrize("name", GEOMETRIES)
RECOMPUTE = pytest.mark.parametrize("recompute", [False, True], ids=["fold-u", "recompute-u"])


def test_mamba2_oracle_follows_the_formula_element_by_element():
    x, dt = torch.randn(1, 3, 4, 2).double(), torch.rand(1, 3, 4).double()
    A, D = -torch.rand(4).double(), torch.randn(4).double()
    B_, C = torch.randn(1, 3, 2, 3).double(), torch.randn(1, 3, 2, 3).double()
    ops = RECURRENCES["mamba2"][0]
    state = torch.randn(1, 4, 2, 3).double()
    outputs, last = ops.recurrence(state, Mamba2Inputs(x, dt, A, B_, C, D))
    for h in range(4):
        group = h // 2
        for p in range(2):
            S = state[0, h, p].tolist()
            for t in range(3):
                step, a = float(dt[0, t, h]), float(A[h])
                y = float(D[h] * x[0, t, h, p])
                for n in range(3):
                    S[n] = math.exp(a * step) * S[n]
                    S[n] += step * float(x[0, t, h, p]) * float(B_[0, t, group, n])
                    y += S[n] * float(C[0, t, group, n])
                assert y == pytest.approx(float(outputs[0, t, h, p]), abs=1e-13)
            assert S == pytest.approx(last[0, h, p].tolist(), abs=1e-13)


@pytest.mark.parametrize("recurrence", ["gated_delta", "kimi_delta"])
def test_delta_rule_oracles_follow_the_formula_element_by_element(recurrence):
    """A decay for each key channel, or the same for all."""
    q, k = torch.randn(1, 3, 2, 3).double(), torch.randn(1, 3, 2, 3).double() / 2
    v, beta = torch.randn(1, 3, 4, 2).double(), torch.rand(1, 3, 4).double()
    make, channels = (GatedDeltaInputs, 1) if recurrence == "gated_delta" else (KimiDeltaInputs, 3)
    g = -torch.rand(1, 3, 4, channels).double()
    inputs = make(q, k, v, g.squeeze(-1), beta)
    state = torch.randn(1, 4, 2, 3).double()
    outputs, last = RECURRENCES[recurrence][0].recurrence(state, inputs)
    for h in range(4):
        key = h // 2
        for row in range(2):
            S = state[0, h, row].tolist()
            for t in range(3):
                kt, qt = k[0, t, key].tolist(), q[0, t, key].tolist()
                alpha = g[0, t, h].exp().expand(3).tolist()
                S = [a * s for a, s in zip(alpha, S, strict=True)]
                predicted = sum(s * c for s, c in zip(S, kt, strict=True))
                u = float(beta[0, t, h]) * (float(v[0, t, h, row]) - predicted)
                S = [s + u * c for s, c in zip(S, kt, strict=True)]
                o = sum(s * c for s, c in zip(S, qt, strict=True))
                assert o == pytest.approx(float(outputs[0, t, h, row]), abs=1e-13)
            assert S == pytest.approx(last[0, h, row].tolist(), abs=1e-13)


def test_mamba2_skip_may_differ_by_channel():
    ops, inputs, state, _ = setup("mamba2-g3", 2, 4, 4)
    D = torch.randn(6, 16).double()
    with_skip = ops.recurrence(state, inputs._replace(D=D))[0]
    without = ops.recurrence(state, inputs._replace(D=None))[0]
    assert torch.allclose(with_skip, without + D * inputs.x)


@GEOMETRY
@RECOMPUTE
@pytest.mark.parametrize(
    "ring_len, history, tokens",
    [
        (1, 0, 1),
        (5, 0, 5),
        (5, 2, 3),
        (16, 0, 16),
        (16, 15, 1),
        (16, 3, 4),
        (32, 13, 7),
        (40, 0, 33),
    ],
)
def test_float64_window_and_fold_equal_the_recurrence(name, recompute, ring_len, history, tokens):
    ops, inputs, state, ring = setup(name, 2, history + tokens, ring_len, recompute=recompute)
    expected, last = ops.recurrence(state, inputs)
    parameters = ops.parameters(inputs)
    if history:
        part = take_tokens(inputs, 0, history)
        outputs = run_window(ops, state, ring, 0, part, recompute=recompute)
        assert torch.allclose(outputs, expected[:, :history], rtol=0, atol=1e-12)
    part = take_tokens(inputs, history, history + tokens)
    outputs = run_window(ops, state, ring, history, part, recompute=recompute)
    assert torch.allclose(outputs, expected[:, history:], rtol=0, atol=1e-12)
    folded = ops.fold(state, ring, history + tokens, parameters)
    assert torch.allclose(folded, last, rtol=0, atol=1e-12)


@GEOMETRY
@RECOMPUTE
@pytest.mark.parametrize("ring_len, tokens", [(5, 1), (16, 1), (16, 4), (32, 7)])
def test_float64_rows_at_different_cursors(name, recompute, ring_len, tokens):
    """Each row equals its own recurrence, whatever its neighbours do; unused slots are NaN."""
    pos = torch.tensor([0, ring_len - tokens, (ring_len - tokens) // 2])
    ops, inputs, state, ring = setup(name, 3, ring_len, ring_len, recompute=recompute)
    for row, start in enumerate(pos.tolist()):
        if start:
            mine = slice(row, row + 1)
            part = take_tokens(take_rows(inputs, mine), 0, start)
            run_window(
                ops,
                state[mine],
                {n: t[mine] for n, t in ring.items()},
                0,
                part,
                recompute=recompute,
            )
    new = [
        take_tokens(take_rows(inputs, slice(row, row + 1)), start, start + tokens)
        for row, start in enumerate(pos.tolist())
    ]
    joined = type(inputs)(
        *(parts[0] if parts[0].dim() < 3 else torch.cat(parts) for parts in zip(*new, strict=True))
    )
    outputs = run_window(ops, state, ring, pos, joined, recompute=recompute)
    folded = ops.fold(state, ring, pos + tokens, ops.parameters(inputs))
    for row, start in enumerate(pos.tolist()):
        mine = slice(row, row + 1)
        expected, last = ops.recurrence(
            state[mine], take_tokens(take_rows(inputs, mine), 0, start + tokens)
        )
        assert torch.allclose(outputs[mine], expected[:, start:], rtol=0, atol=1e-12)
        assert torch.allclose(folded[mine], last, rtol=0, atol=1e-12)


@GEOMETRY
def test_fp32_window_is_as_accurate_as_the_fp32_recurrence(name):
    """Within twice the error of the token loop in the same precision, plus a rounding floor."""
    ops, inputs, state, ring = setup(name, 2, 16, 16, dtype=torch.float32)
    exact, last = ops.recurrence(state.double(), inputs)
    loop, loop_last = ops.recurrence(state, inputs)
    outputs = run_window(ops, state, ring, 0, inputs)
    folded = ops.fold(state, ring, 16, ops.parameters(inputs))
    assert relative(outputs, exact) < 2 * relative(loop, exact) + 2e-7
    assert relative(folded, last) < 2 * relative(loop_last, last) + 2e-7


@pytest.mark.parametrize("rate", [0.0, 1e-7, 1.0, 200.0])
@pytest.mark.parametrize("name", ["mamba2-g3", "delta-r3", "kimi-r3"])
def test_extreme_decays_stay_finite_and_exact(name, rate):
    """From no decay at all to exp(-3200) over one window: no exp(-prefix) is ever formed."""
    ops, inputs, state, ring = setup(name, 2, 16, 16, dtype=torch.float32)
    if "mamba2" in name:
        inputs = inputs._replace(A=torch.full((6,), -rate), dt=torch.ones(2, 16, 6))
    else:
        inputs = inputs._replace(g=torch.full_like(inputs.g, -rate))
    expected, last = ops.recurrence(state.double(), inputs)
    outputs = run_window(ops, state, ring, 0, inputs)
    folded = ops.fold(state, ring, 16, ops.parameters(inputs))
    assert outputs.isfinite().all() and folded.isfinite().all()
    assert relative(outputs, expected) < 1e-6 and relative(folded, last) < 1e-6


@pytest.mark.parametrize("name", ["delta-r3", "kimi-r3"])
@pytest.mark.parametrize("spread", [1.0, 0.01, 0.0], ids=["random", "alike", "equal"])
def test_triangular_solve_stays_accurate_for_repeated_keys(name, spread):
    """Equal keys with beta = 1 make the powers of A explode: a Neumann product loses digits."""
    ops, inputs, state, ring = setup(name, 2, 16, 16, dtype=torch.float32)
    k = inputs.k[:, :1] + spread * (inputs.k - inputs.k[:, :1])
    k = torch.nn.functional.normalize(k, dim=-1)
    inputs = inputs._replace(k=k, beta=torch.ones(2, 16, 3), g=torch.zeros_like(inputs.g))
    expected, last = ops.recurrence(state.double(), inputs)
    outputs = run_window(ops, state, ring, 0, inputs)
    assert relative(outputs, expected) < 2e-6
    assert relative(ops.fold(state, ring, 16, {}), last) < 2e-6


@pytest.mark.parametrize("name", ["delta-r3", "kimi-r3"])
def test_correction_survives_cancellation(name):
    """State over five decades, v within 1 % of what the state predicts: a TF32 read fails."""
    ops, inputs, _, ring = setup(name, 4, 16, 16, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    magnitude = 10 ** (torch.rand(4, 3, 16, 32, generator=generator) * 5 - 3)
    state = magnitude * torch.randn(4, 3, 16, 32, generator=generator).sign()
    value = torch.einsum("bhvk,btk->bthv", state, inputs.k[:, :, 0])
    noise = 1 + 0.02 * (torch.rand(value.shape, generator=generator) - 0.5)
    inputs = inputs._replace(v=value * noise, g=torch.zeros_like(inputs.g))
    _, last = ops.recurrence(state.double(), inputs)
    run_window(ops, state, ring, 0, inputs)
    change = ops.fold(state, ring, 16, {}) - state
    assert relative(change, last - state.double()) < 2e-4
    ring_tf32 = {n: t.clone() for n, t in ring.items()}
    run_window(ops, state, ring_tf32, 0, inputs, operand="tf32")
    assert relative(ops.fold(state, ring_tf32, 16, {}) - state, last - state.double()) > 2e-3


@pytest.mark.parametrize("name", ["mamba2-g3", "delta-r3", "kimi-r3"])
def test_newest_record_is_folded_without_decay(name):
    """The exponent of the newest term is exactly 0, whatever came before it."""
    ops, inputs, state, ring = setup(name, 1, 16, 16, dtype=torch.float32)
    last = torch.zeros(16).index_fill(0, torch.tensor([15]), 1.0)
    if "mamba2" in name:
        inputs = inputs._replace(x=inputs.x * last[:, None, None])
        expected = torch.einsum(
            "h,hp,hn->hpn",
            inputs.dt[0, 15],
            inputs.x[0, 15],
            inputs.B_[0, 15].repeat_interleave(2, 0),
        )
    else:
        inputs = inputs._replace(beta=inputs.beta * last[:, None])
        u = inputs.beta[0, 15, :, None] * inputs.v[0, 15]
        expected = torch.einsum("hv,k->hvk", u, inputs.k[0, 15, 0])
    state = torch.zeros_like(state)
    run_window(ops, state, ring, 0, inputs)
    folded = ops.fold(state, ring, 16, ops.parameters(inputs))[0]
    assert torch.allclose(folded, expected, rtol=2.0**-22, atol=0)


@GEOMETRY
@pytest.mark.parametrize("operand, low, high", [("bf16", 5e-4, 2e-2), ("tf32", 5e-5, 2e-3)])
def test_operand_rounding_acts_on_window_and_fold(name, operand, low, high):
    ops, inputs, state, ring = setup(name, 2, 16, 16, dtype=torch.float32)
    expected, last = ops.recurrence(state.double(), inputs)
    outputs = run_window(ops, state, ring, 0, inputs, operand=operand)
    folded = ops.fold(state, ring, 16, ops.parameters(inputs), operand=operand)
    assert low < relative(outputs, expected) < high
    assert low / 10 < relative(folded, last) < high


def test_group_counts_must_divide():
    with pytest.raises(ValueError, match="num_heads 6.*n_groups 4"):
        RECURRENCES["mamba2"][1](num_heads=6, head_dim=8, n_groups=4, d_state=8)
    for name in ("gated_delta", "kimi_delta"):
        with pytest.raises(ValueError, match="num_v_heads 6.*num_k_heads 4"):
            RECURRENCES[name][1](num_k_heads=4, num_v_heads=6, head_k_dim=8, head_v_dim=8)
