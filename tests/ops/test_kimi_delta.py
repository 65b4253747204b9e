"""Kimi Delta Attention: what a decay per key channel adds to what test_recurrences.py tests."""

import pytest
import torch
from recurrence_cases import (
    GEOMETRIES,
    make_inputs,
    relative,
    run_window,
    setup,
    take_tokens,
)

from replayssm.ops.gated_delta import GatedDeltaInputs
from replayssm.ops.kimi_delta import KimiDeltaInputs
from replayssm.state_update import RECURRENCES

KIMI = pytest.mark.parametrize("name", [name for name in GEOMETRIES if name.startswith("kimi")])
RECOMPUTE = pytest.mark.parametrize("recompute", [False, True], ids=["fold-u", "recompute-u"])


def mixed(shape, *log_decays, seed=0):
    """Log decays [..., K] in float64: each channel of each token draws one of `log_decays`."""
    generator = torch.Generator().manual_seed(seed)
    choice = torch.randint(len(log_decays), shape, generator=generator)
    return torch.tensor(log_decays, dtype=torch.float64)[choice]


@KIMI
@RECOMPUTE
@pytest.mark.parametrize(
    "log_decays",
    [(0.0,), (-20.0,), (-20.0, 0.0), (-20.0, -1e-3, 0.0), (-60.0, -1e-6)],
    ids=str,
)
@pytest.mark.parametrize("history, tokens", [(0, 64), (30, 34), (17, 1), (1, 40)])
def test_float64_windows_of_strong_and_mixed_decays(name, recompute, log_decays, history, tokens):
    """exp(-G) would be e^1280 after 64 tokens of -20; beside it, channels that forget nothing."""
    total = history + tokens
    ops, inputs, state, ring = setup(name, 2, total, total, recompute=recompute)
    inputs = inputs._replace(g=mixed(inputs.g.shape, *log_decays))
    expected, last = ops.recurrence(state, inputs)
    if history:
        run_window(ops, state, ring, 0, take_tokens(inputs, 0, history), recompute=recompute)
    part = take_tokens(inputs, history, total)
    outputs = run_window(ops, state, ring, history, part, recompute=recompute)
    assert torch.allclose(outputs, expected[:, history:], rtol=0, atol=1e-12)
    folded = ops.fold(state, ring, total, {})
    assert torch.allclose(folded, last, rtol=0, atol=1e-12)


@KIMI
def test_long_windows_at_different_cursors(name):
    """Blocks of tokens meet blocks of slots at every offset; unused slots are NaN."""
    pos = torch.tensor([0, 19, 48])
    ops, inputs, state, ring = setup(name, 3, 96, 96)
    inputs = inputs._replace(g=inputs.g * mixed(inputs.g.shape, 0.0, 1.0, 40.0))
    expected = []
    for row, start in enumerate(pos.tolist()):
        mine = slice(row, row + 1)
        tokens = type(inputs)(*(t[mine, : start + 40] for t in inputs))
        expected.append(ops.recurrence(state[mine], tokens))
        own = {n: t[mine] for n, t in ring.items()}
        if start:
            run_window(ops, state[mine], own, 0, take_tokens(tokens, 0, start))
    new = type(inputs)(
        *(
            torch.stack([t[row, start : start + 40] for row, start in enumerate(pos)])
            for t in inputs
        )
    )
    outputs = run_window(ops, state, ring, pos, new)
    folded = ops.fold(state, ring, pos + 40, {})
    for row, (out, last) in enumerate(expected):
        assert torch.allclose(outputs[row], out[0, pos[row] :], rtol=0, atol=1e-12)
        assert torch.allclose(folded[row], last[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_equal_channels_are_gated_deltanet(dtype, tolerance):
    gated, inputs, state, gated_ring = setup("delta-r3", 2, 20, 20, dtype=dtype)
    kimi, _, _, ring = setup("kimi-r3", 2, 20, 20, dtype=dtype)
    channels = KimiDeltaInputs(*inputs)._replace(
        g=inputs.g[..., None].expand(-1, -1, -1, inputs.k.shape[-1])
    )
    assert isinstance(inputs, GatedDeltaInputs)
    expected = run_window(gated, state, gated_ring, 0, inputs)
    assert relative(run_window(kimi, state, ring, 0, channels), expected) < tolerance
    expected = gated.fold(state, gated_ring, 20, {})
    assert relative(kimi.fold(state, ring, 20, {}), expected) < tolerance


def test_slow_tokens_after_fast_ones_keep_their_digits():
    """A channel that forgot at -40 a token and then at -0.01: FP32 differences of its sums, of
    about -640, would leave outputs off by 1e-5."""
    ops, inputs, state, ring = setup("kimi-r3", 2, 32, 32, dtype=torch.float32)
    g = torch.full_like(inputs.g, -40.0)
    g[:, 16:] = -0.01 * torch.rand(g[:, 16:].shape, generator=torch.Generator().manual_seed(0))
    inputs = inputs._replace(g=g)
    expected, last = ops.recurrence(state.double(), inputs)
    outputs = run_window(ops, state, ring, 0, inputs)
    assert relative(outputs[:, 16:], expected[:, 16:]) < 1e-6
    assert relative(ops.fold(state, ring, 32, {}), last) < 1e-6


def test_a_window_needs_no_more_memory_than_its_blocks():
    """64 tokens on 64 slots at K = 128: no tensor of all pairs and channels exists at once."""
    sizes = dict(num_k_heads=1, num_v_heads=1, head_k_dim=128, head_v_dim=16)
    ops = RECURRENCES["kimi_delta"][0]
    inputs = make_inputs("kimi_delta", sizes, 1, 64)
    ring = {
        "k": torch.zeros(1, 1, 64, 128),
        "g": torch.zeros(1, 1, 64, 128),
        "u": torch.zeros(1, 1, 64, 16),
    }
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Sizes():
        run_window(ops, torch.zeros(1, 1, 16, 128), ring, 0, inputs)
    assert largest <= 16 * 16 * 128
