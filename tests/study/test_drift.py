"""KL arithmetic: accuracy at the noise floor, infinities, no clamping, reference terms."""

import math

import numpy as np
import pytest
import torch

from replayssm.study import drift as module
from replayssm.study.drift import Drift, ReferenceTerms, exact_divergence, window_drift

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True, params=["torch", "kernels"])
def backend(request, monkeypatch):
    """Every test runs on both; kernels run in Triton's interpreter where there is no GPU."""
    if request.param == "kernels":
        pytest.importorskip("triton")
    monkeypatch.setattr(module, "uses_kernels", lambda device: request.param == "kernels")
    return request.param


def logits(rows, vocab, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


def of_probabilities(p):
    return torch.tensor(p, dtype=torch.float64).log().float()[None]


def drift(reference, *candidates, tokens=None):
    tokens = torch.zeros(len(reference), dtype=torch.int64) if tokens is None else tokens
    given = (reference, torch.stack(candidates), tokens)
    if module.uses_kernels(reference.device):
        given = [tensor.to(DEVICE) for tensor in given]
    *found, terms = window_drift(*given)
    return Drift(*(t.cpu() for t in found), ReferenceTerms(*(t.cpu() for t in terms)))


def long_double_kl(z, zc):
    """KL(p || q) of two rows of logits in extended precision."""

    def log_softmax(x):
        x = x.double().numpy().astype(np.longdouble)
        x = x - x.max()
        return x - np.log(np.exp(x).sum())

    log_p, log_q = log_softmax(z), log_softmax(zc)
    return float((np.exp(log_p) * (log_p - log_q)).sum())


@pytest.mark.parametrize("noise", [1e-6, 1e-5, 1e-3, 0.3])
def test_kl_keeps_its_digits_down_to_the_noise_floor(noise):
    z = logits(6, 5000)
    zc = (z + noise * logits(6, 5000, seed=1, scale=1.0)).float()
    found = drift(z, zc)
    expected = [long_double_kl(a, b) for a, b in zip(z, zc, strict=True)]
    backward = [long_double_kl(b, a) for a, b in zip(z, zc, strict=True)]
    np.testing.assert_allclose(found.kl[0], expected, rtol=1e-5, atol=1e-19)
    np.testing.assert_allclose(found.kl_reverse[0], backward, rtol=1e-5, atol=1e-19)


def test_equal_logits_give_exactly_zero():
    z = logits(9, 777)
    found = drift(z, z.clone(), z + 1e-3)
    assert (found.kl[0] == 0).all() and (found.kl_reverse[0] == 0).all()
    assert (found.delta_logp[0] == 0).all() and found.top1_match[0].all()


def test_a_common_shift_is_no_divergence_and_is_not_clamped():
    z = (logits(64, 512) * 64).round() / 64  # so that adding 1 is exact in FP32
    found = drift(z, z + 1.0)
    assert found.kl.abs().max() < 1e-14
    # Rounding errors of both signs would show a clamp as a one-sided distribution.
    assert (found.kl < 0).any() or (found.kl == 0).all()


def test_swapped_neighbours_give_the_full_vocabulary_value():
    p = [0.6, 0.2, 0.1, 0.05, 0.0100, 0.0099]
    p.append(1.0 - sum(p))
    q = p.copy()
    q[4], q[5] = q[5], q[4]
    found = drift(of_probabilities(p), of_probabilities(q))
    assert found.kl.item() == pytest.approx(1.0e-6, rel=0.02)
    assert found.kl.item() == pytest.approx(1e-4 * math.log(0.0100 / 0.0099), rel=1e-3)


def test_tokens_suppressed_in_both_arms_contribute_nothing():
    z, zc = logits(3, 50), logits(3, 50, seed=1)
    kept = drift(z[:, 2:], zc[:, 2:], tokens=torch.tensor([4, 5, 6]))
    z[:, :2], zc[:, :2] = -torch.inf, -torch.inf
    found = drift(z, zc, tokens=torch.tensor([6, 7, 8]))
    for name in ("kl", "kl_reverse", "delta_logp"):
        np.testing.assert_allclose(getattr(found, name), getattr(kept, name), rtol=1e-12)
    np.testing.assert_allclose(found.reference.entropy, kept.reference.entropy, rtol=1e-12)
    assert not found.nonfinite.any()


def test_a_token_only_the_candidate_excludes_is_an_infinite_divergence():
    z, zc = logits(2, 50), logits(2, 50, seed=1)
    zc[0, 7] = -torch.inf
    found = drift(z, zc, tokens=torch.tensor([7, 7]))
    assert found.kl[0, 0] == torch.inf and torch.isfinite(found.kl[0, 1])
    assert torch.isfinite(found.kl_reverse[0, 0])
    assert found.delta_logp[0, 0] == -torch.inf
    assert not found.nonfinite.any()


def test_a_token_only_the_reference_excludes_is_infinite_backwards():
    z, zc = logits(1, 50), logits(1, 50, seed=1)
    z[0, 7] = -torch.inf
    found = drift(z, zc)
    assert torch.isfinite(found.kl[0, 0]) and found.kl_reverse[0, 0] == torch.inf


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_spoiled_row_is_flagged_and_only_that_one(value):
    z = logits(4, 50)
    bad = z.clone()
    bad[2, 3] = value
    found = drift(z, z.clone(), bad)
    assert found.nonfinite.tolist() == [[False] * 4, [False, False, True, False]]
    assert torch.isnan(found.kl[1, 2]) and torch.isnan(found.delta_logp[1, 2])
    assert not found.top1_match[1, 2]
    assert found.reference.finite.all()


def test_a_spoiled_reference_spoils_every_arm():
    z = logits(2, 50)
    z[1, 0] = torch.nan
    found = drift(z, logits(2, 50), logits(2, 50))
    assert found.reference.finite.tolist() == [True, False]
    assert found.nonfinite[:, 1].all() and not found.nonfinite[:, 0].any()


def test_all_suppressed_is_not_a_distribution():
    zc = torch.full((1, 10), -torch.inf)
    assert drift(logits(1, 10), zc).nonfinite.all()


def test_differences_too_large_for_the_quick_form():
    z, zc = logits(3, 40), logits(3, 40, seed=1)
    zc[1, 5] += 900.0
    found = drift(z, zc)
    for row in range(3):
        forward, backward, _, _ = exact_divergence(z[row], zc[row])
        assert found.kl[0, row].item() == pytest.approx(forward.item(), rel=1e-12)
        assert found.kl_reverse[0, row].item() == pytest.approx(backward.item(), rel=1e-12)
    assert found.kl[0, 1] > 500


def test_reference_terms_and_forced_token():
    z, zc = logits(5, 30), logits(5, 30, seed=1)
    tokens = torch.tensor([3, 1, 4, 1, 5])
    found = drift(z, zc, tokens=tokens)
    log_p, log_q = z.double().log_softmax(-1), zc.double().log_softmax(-1)
    rows = torch.arange(5)
    best = log_p.sort(-1, descending=True).values
    np.testing.assert_allclose(found.reference.entropy, -(log_p.exp() * log_p).sum(-1))
    np.testing.assert_allclose(found.reference.top1_prob, best[:, 0].exp())
    np.testing.assert_allclose(found.reference.top2_margin, best[:, 0] - best[:, 1])
    np.testing.assert_allclose(found.delta_logp[0], (log_q - log_p)[rows, tokens])
    assert found.top1_match[0].tolist() == (log_p.argmax(-1) == log_q.argmax(-1)).tolist()


def test_a_tie_with_the_best_token_still_matches():
    z = torch.tensor([[0.0, 2.0, 1.0]])
    assert drift(z, torch.tensor([[3.0, 3.0, 0.0]])).top1_match.all()
    assert not drift(z, torch.tensor([[3.0, 2.9, 0.0]])).top1_match.any()


def test_results_do_not_depend_on_how_rows_are_cut(monkeypatch):
    z, zc = logits(13, 64), logits(13, 64, seed=1)
    whole = drift(z, zc)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 64 * 3)
    pieces = drift(z, zc)
    np.testing.assert_allclose(pieces.kl, whole.kl, rtol=1e-13)
    assert pieces.top1_match.tolist() == whole.top1_match.tolist()


def test_narrow_logits_are_refused():
    with pytest.raises(ValueError, match="float32"):
        drift(logits(1, 8).bfloat16(), logits(1, 8))


def test_many_blocks_of_vocabulary_and_rows():
    """The last block of vocabulary is not a whole one; ties and the best token lie anywhere."""
    z = logits(5, 2500, scale=1.0)
    z[0, 2499] = z[1, 0] = z[2, 1500] = 9.0
    z[3, [7, 2400]] = 9.0
    zc = z + logits(5, 2500, seed=1, scale=1e-3)
    found = drift(z, zc, z.flip(-1))
    for arm, other in enumerate((zc, z.flip(-1))):
        expected = [long_double_kl(a, b) for a, b in zip(z, other, strict=True)]
        np.testing.assert_allclose(found.kl[arm], expected, rtol=1e-8)
    best = z.topk(2).values.double()
    np.testing.assert_allclose(found.reference.top2_margin, best[:, 0] - best[:, 1])
    assert found.reference.top2_margin[3] == 0
    matches = [bool(row[row.flip(-1).argmax()] == row.max()) for row in z]
    assert found.top1_match[1].tolist() == matches
