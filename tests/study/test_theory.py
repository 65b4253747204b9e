"""The scalar theory, by simulation with the project's own formats and rounding."""

import numpy as np
import pytest
import torch

from replayssm.formats.storage import STORAGES
from replayssm.study import theory

ELEMENTS = (64, 64)


def measured(name, *, decay, ring_len, tokens, seed=0):
    """Relative error after `tokens` of a stationary scalar recurrence that is stored every L."""
    storage, rng = STORAGES[name], torch.Generator().manual_seed(seed)
    a = decay**ring_len
    exact = torch.randn(1, 1, *ELEMENTS, generator=rng, dtype=torch.float64)
    change = (1.0 - a * a) ** 0.5
    one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

    def stored(x, write):
        bits = storage.draw_bits(
            x.shape, seed=one, layer=0, stream=0, flush_index=zero + write, sequence=zero
        )
        return storage.read(storage.write(x.float(), bits)).double()

    state, found = stored(exact, 0), {}
    for write in range(1, max(tokens) // ring_len + 1):
        noise = change * torch.randn(exact.shape, generator=rng, dtype=torch.float64)
        exact, state = a * exact + noise, stored(a * state + noise, write)
        if write * ring_len in tokens:
            found[write * ring_len] = float((state - exact).norm() / exact.norm())
    return np.array([found[t] for t in tokens])


def line(name, *, decay, ring_len, tokens):
    write = theory.write_error(STORAGES[name].to_dict())
    return theory.shared_error(write, np.array(tokens), log_decay=np.log(decay), ring_len=ring_len)


@pytest.mark.parametrize("name", ["fp16", "fp16-sr", "fp8", "fp8-sr"])
@pytest.mark.parametrize("decay, ring_len", [(0.9, 1), (0.9, 16), (0.99, 16), (0.999, 16)])
def test_error_follows_the_line_away_from_stagnation(name, decay, ring_len):
    tokens = [8 * ring_len, 64 * ring_len, 256 * ring_len]
    found = measured(name, decay=decay, ring_len=ring_len, tokens=tokens)
    expected = line(name, decay=decay, ring_len=ring_len, tokens=tokens)
    np.testing.assert_allclose(found, expected, rtol=0.15)


@pytest.mark.parametrize(
    "decay, ring_len, flagged", [(0.999, 1, True), (0.9999, 16, True), (0.999, 16, False)]
)
def test_the_three_stagnation_cases(decay, ring_len, flagged):
    write = theory.write_error(STORAGES["fp8"].to_dict())
    assert theory.stagnates(write, log_decay=np.log(decay), ring_len=ring_len) == flagged
    tokens = [4096 if ring_len == 1 else 16384]
    (ratio,) = measured("fp8", decay=decay, ring_len=ring_len, tokens=tokens) / line(
        "fp8", decay=decay, ring_len=ring_len, tokens=tokens
    )
    assert ratio > 2.0 if flagged else ratio == pytest.approx(1.0, abs=0.15)


def test_stochastic_rounding_stays_on_its_line_where_nearest_stagnates():
    case = {"decay": 0.9999, "ring_len": 16, "tokens": [16384]}
    write = theory.write_error(STORAGES["fp8-sr"].to_dict())
    assert not theory.stagnates(write, log_decay=np.log(0.9999), ring_len=16)
    np.testing.assert_allclose(measured("fp8-sr", **case), line("fp8-sr", **case), rtol=0.15)


@pytest.mark.parametrize("name, storage", STORAGES.items())
def test_one_write_of_a_gaussian_matrix(name, storage):
    if name == "fp32":
        assert theory.write_error(storage.to_dict()).error < 1e-7
        return
    x = torch.randn(8, 4, 64, 128, generator=torch.Generator().manual_seed(1))
    rows = torch.arange(8)
    bits = storage.draw_bits(x.shape, seed=rows, layer=0, stream=0, flush_index=rows, sequence=rows)
    found = float((storage.read(storage.write(x, bits)) - x).norm() / x.norm())
    assert theory.write_error(storage.to_dict()).error == pytest.approx(found, rel=0.1)


def test_limits_of_the_series():
    write = theory.write_error(STORAGES["bf16"].to_dict())
    early = theory.shared_error(write, 64, log_decay=-1e-9, ring_len=16)
    assert early == pytest.approx(2 * write.error, rel=1e-6)
    assert theory.shared_error(write, 64, log_decay=0.0, ring_len=16) == 2 * write.error
    late = theory.shared_error(write, 1e6, log_decay=-0.01, ring_len=16)
    assert late == pytest.approx(theory.plateau_error(write, log_decay=-0.01, ring_len=16))
    assert theory.plateau_error(write, log_decay=0.0, ring_len=16) == np.inf
    assert theory.memory_length(0.0) == np.inf and theory.memory_length(-0.01) == 100
    assert (theory.read_copy_error(write, np.arange(3)) == write.error).all()
    with pytest.raises(ValueError, match="must be <= 0"):
        theory.shared_error(write, 1, log_decay=0.1, ring_len=1)


def test_residual_of_an_exact_format_is_missing():
    assert np.isnan(theory.residual([0.0], [0.0])).all()
    assert theory.residual([3.0], [2.0]) == 1.5


def test_the_kl_shape_is_the_mean_of_its_heads():
    heads = np.log([0.9, 0.999])
    tokens = np.array([16, 1024, 65536])
    shape = theory.kl_shape(tokens, log_decay=heads, ring_len=16, weights=[3.0, 1.0])
    apart = [theory.kl_shape(tokens, log_decay=g, ring_len=16) for g in heads]
    np.testing.assert_allclose(shape, (3 * apart[0] + apart[1]) / 4)
    assert theory.fitted_scale(7e-4 * shape, shape) == pytest.approx(7e-4)
    assert theory.fitted_scale(np.zeros(3), shape) is None
    np.testing.assert_allclose(theory.kl_line(shape, scale=2.0, read_copy=0.5), 0.5 + 2 * shape)


def test_unknown_formats_are_refused_by_name():
    with pytest.raises(ValueError, match="no theory for the format 'e3m4'"):
        theory.write_error({"format": {"name": "e3m4"}, "rounding": "nearest_even"})
