"""What rounding once per flush does to a decaying sum: the error law, and where it fails.

A scalar recurrence h <- a h + noise is stepped L tokens at a time and its state rounded after each
flush. u = 2^-(mantissa_bits + 1). While rounding errors are independent, the relative error after
t tokens is rho * u * sqrt((1 - a^2t) / (1 - a^2L)), with rho = .425 for nearest and .60 for
stochastic rounding (log-uniform significands). It stops being so when the update of one flush is
smaller than the rounding step, sqrt(1 - a^2L) < u: there nearest rounding stagnates.
"""

import math

import pytest
import torch

from replayssm.formats.number import BF16, E4M3, E5M2, FP16
from replayssm.formats.rounding import NEAREST_EVEN, round_to_format, stochastic
from replayssm.formats.storage import STORAGES, Storage

RHO = {"nearest_even": 0.425, "stochastic": 0.60}


def unit(storage: Storage) -> float:
    return 2.0 ** -(storage.format.mantissa_bits + 1)


def update_over_step(storage: Storage, a: float, L: int) -> float:
    """Below 1: stagnation."""
    return math.sqrt(1 - a ** (2 * L)) / unit(storage)


def error_over_law(storage: Storage, a: float, L: int, flushes: list[int], shape) -> list[float]:
    """Relative error divided by the law after the given numbers of flushes.

    Starts from a stationary state of variance 64, well inside the range of 8-bit formats.
    """
    generator = torch.Generator().manual_seed(0)
    truth = 8 * torch.randn(shape, generator=generator, dtype=torch.float64)
    held, decay = truth.to(torch.float32), a**L
    results = []
    for flush in range(1, flushes[-1] + 1):
        noise = 8 * torch.randn(shape, generator=generator, dtype=torch.float64)
        noise *= math.sqrt(1 - decay**2)
        truth = decay * truth + noise
        bits = torch.randint(0, 2**16, shape, generator=generator, dtype=torch.int32)
        bits = bits if storage.needs_random_bits else None
        held = storage.read(storage.write((decay * held.double() + noise).float(), bits))
        if flush in flushes:
            error = ((held - truth).norm() / truth.norm()).item()
            law = math.sqrt((1 - decay ** (2 * flush)) / (1 - decay**2))
            results.append(error / (RHO[storage.rounding.mode] * unit(storage) * law))
    return results


@pytest.mark.parametrize("mode", [NEAREST_EVEN, stochastic()], ids=lambda m: m.mode)
@pytest.mark.parametrize(
    ("fmt", "a", "L", "flushes"),
    [
        (FP16, 0.99, 1, [30, 300]),
        (FP16, 0.999, 16, [30, 250]),
        (BF16, 0.99, 1, [30, 300]),
        (BF16, 0.9, 16, [2, 20]),
        (BF16, 0.9999, 16, [100, 400]),
        (E4M3, 0.99, 16, [10, 60]),
        (E4M3, 0.999, 16, [30, 250]),
        (E5M2, 0.99, 16, [10, 60]),
    ],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_error_follows_the_law_away_from_stagnation(fmt, mode, a, L, flushes):
    storage = Storage(format=fmt, rounding=mode)
    assert update_over_step(storage, a, L) > 2
    for ratio in error_over_law(storage, a, L, flushes, (1, 1, 64, 64)):
        assert ratio == pytest.approx(1, abs=0.15)


def test_nearest_fp8_stagnates_where_the_criterion_says_so_and_stochastic_does_not():
    """a = .9999, L = 1, row scales.

    Nearest ends at four times its law and is still leaving it: the state itself grows, together
    with the scales that are derived from it. Stochastic rounding keeps a constant share of its law,
    about .7; not 1, because the fractions f of a step that it meets are small here, and f (1 - f)
    is the variance it adds.
    """
    nearest, unbiased = STORAGES["fp8"], STORAGES["fp8-sr"]
    assert update_over_step(nearest, 0.9999, 1) < 0.25
    shape = (1, 1, 16, 64)
    early, late = error_over_law(nearest, 0.9999, 1, [400, 4096], shape)
    assert late > 3 and late > 2 * early
    early, late = error_over_law(unbiased, 0.9999, 1, [400, 4096], shape)
    assert 0.5 < early < 1.1 and 0.5 < late < 1.1


def test_fp8_does_not_stagnate_at_sixteen_tokens_a_flush():
    for name in ("fp8", "fp8-sr"):
        assert update_over_step(STORAGES[name], 0.999, 16) > 2
        for ratio in error_over_law(STORAGES[name], 0.999, 16, [50, 250], (1, 1, 16, 64)):
            assert ratio == pytest.approx(0.95, abs=0.15)


@pytest.mark.parametrize("fmt", [FP16, BF16, E4M3, E5M2], ids=lambda f: f.name)
def test_decay_below_half_a_unit_is_lost_to_nearest_rounding_alone(fmt):
    """Every significand is stuck for 1 - a < u/2 and none for 1 - a > u; stochastic never is."""
    u = 2.0 ** -(fmt.mantissa_bits + 1)
    v = torch.arange(1, 2, 2 * u, dtype=torch.float32)
    for loss, stuck in ((0.49 * u, 1.0), (1.01 * u, 0.0)):
        decayed = (v.double() * (1 - loss)).float()
        kept, _ = round_to_format(decayed, fmt)
        assert (kept == v).double().mean() == stuck
        r = torch.arange(2**16, dtype=torch.int32)[:, None].expand(-1, 8)
        some = decayed[:: -(-len(v) // 8)][:8]
        r = r[:, : len(some)]
        drawn, _ = round_to_format(some.expand(2**16, -1), fmt, stochastic(16), r)
        assert (drawn.double().mean(0) - some.double()).abs().max() <= 2 * u * 2.0**-16


def test_error_of_a_read_copy_does_not_grow():
    """A copy rounded from an exact state carries one rounding, however old the state is."""
    generator = torch.Generator().manual_seed(0)
    state = torch.zeros(1, 1, 64, 64, dtype=torch.float64)
    errors = []
    for _ in range(1, 401):
        noise = torch.randn(state.shape, generator=generator, dtype=torch.float64)
        state = 0.999 * state + noise
        copy = STORAGES["nvfp4"].read(STORAGES["nvfp4"].write(state.float()))
        errors.append(((copy - state).norm() / state.norm()).item())
    assert max(errors) < 0.11 and min(errors) > 0.08
