"""Paired statistics on worked examples, and against simulations where there is no closed form."""

import numpy as np
import pytest

from replayssm.study import compare


def scores(*, both: int, lost: int, won: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    reference = [1] * both + [1] * lost + [0] * won + [0] * neither
    policy = [1] * both + [0] * lost + [1] * won + [0] * neither
    return np.array(reference)[:, None], np.array(policy)[:, None]


def test_mcnemar_worked_example():
    assert compare.mcnemar_exact(8, 14) == pytest.approx(0.286, abs=5e-4)
    assert compare.mcnemar_exact(14, 8) == compare.mcnemar_exact(8, 14)
    assert compare.mcnemar_exact(0, 0) == 1.0
    assert compare.mcnemar_exact(5, 5) == 1.0
    assert compare.mcnemar_exact(0, 6) == pytest.approx(2 / 64)


@pytest.mark.parametrize(
    "questions, points",
    [
        (198, (2.8, 4.5, 6.3, 8.9)),  # GPQA-Diamond
        (1319, (1.1, 1.7, 2.4, 3.5)),  # GSM8K test
        (1209, (1.1, 1.8, 2.6, 3.6)),
    ],
)
def test_minimum_detectable_differences(questions, points):
    got = [100 * compare.minimum_detectable(questions, d) for d in (0.02, 0.05, 0.1, 0.2)]
    assert got == pytest.approx(points, abs=0.06)


def test_a_whole_comparison():
    reference, policy = scores(both=120, lost=14, won=8, neither=56)
    result = compare.paired_difference(reference, policy)
    assert result["difference"] == pytest.approx(-6 / 198)
    assert (result["lost"], result["won"], result["test"]) == (14, 8, "exact McNemar")
    assert result["p"] == pytest.approx(0.286, abs=5e-4)
    assert result["difference_low"] < result["difference"] < result["difference_high"]
    assert result["minimum_detectable"] == pytest.approx(compare.minimum_detectable(198, 22 / 198))


def test_no_flip_is_not_certainty():
    reference, policy = scores(both=100, lost=0, won=0, neither=98)
    result = compare.paired_difference(reference, policy)
    assert (result["difference"], result["p"]) == (0.0, 1.0)
    assert -0.012 < result["difference_low"] < 0 < result["difference_high"] < 0.012
    many = np.repeat(reference, 4, axis=1)
    wide = compare.paired_difference(many, many)
    assert wide["difference_low"] == pytest.approx(result["difference_low"])


def test_paired_intervals_cover():
    rng = np.random.default_rng(0)
    for samples, runs, least in ((1, 1000, 0.93), (4, 100, 0.88)):
        hits = 0
        for _ in range(runs):
            skill = rng.beta(2, 2, size=100)[:, None]
            loss = np.minimum(skill, 0.05)
            drawn = [rng.random((100, samples)) < chance for chance in (skill, skill - loss)]
            got = compare.paired_difference(*(d.astype(int) for d in drawn))
            hits += got["difference_low"] <= -loss.mean() <= got["difference_high"]
        assert hits / runs >= least, samples


def test_sign_flip():
    assert compare.sign_flip(np.zeros(5)) == 1.0
    assert compare.sign_flip(np.array([0.5] * 6 + [0.0] * 9)) == pytest.approx(2 / 64)
    # One sample a question: the same patterns as McNemar's, exactly or nearly.
    small = np.array([1.0] * 4 + [-1.0] * 9)
    assert compare.sign_flip(small) == pytest.approx(compare.mcnemar_exact(4, 9))
    large = np.array([1.0] * 8 + [-1.0] * 14)
    assert compare.sign_flip(large) == pytest.approx(0.286, abs=0.02)
    assert compare.sign_flip(large) == compare.sign_flip(large)


def test_holm():
    assert compare.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert compare.holm([0.9, 0.5]) == pytest.approx([1.0, 1.0])
    assert compare.holm([]) == []


def test_wilson_and_accuracy():
    assert compare.wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert compare.wilson(7, 10) == pytest.approx((0.3968, 0.8922), abs=1e-4)
    one = compare.accuracy(np.array([[1], [0], [1], [1]]))
    assert (one["accuracy"], one["pass_at_k"], one["samples"]) == (0.75, 0.75, 1)
    two = compare.accuracy(np.array([[1, 0], [0, 0], [1, 1], [0, 1]]))
    assert (two["accuracy"], two["pass_at_k"]) == (0.5, 0.75)
    assert 0 <= two["accuracy_low"] < 0.5 < two["accuracy_high"] <= 1


def test_more_samples_narrow_the_paired_difference():
    rng = np.random.default_rng(1)
    skill = rng.beta(2, 2, size=198)[:, None]
    widths = []
    for samples in (1, 4, 16):
        drawn = [(rng.random((198, samples)) < skill).astype(int) for _ in range(2)]
        got = compare.paired_difference(*drawn)
        widths.append(got["difference_high"] - got["difference_low"])
    assert widths[1] < 0.65 * widths[0] and widths[2] < 0.65 * widths[1]


def test_verdicts():
    assert compare.verdict(-0.009, 0.02, 0.01) == "not worse"
    assert compare.verdict(-0.03, 0.02, 0.01) == "undecided"
    assert compare.verdict(-0.03, -0.005, 0.01) == "worse"


def test_length_ratio():
    reference = np.full((50, 2), 100)
    got = compare.length_ratio(reference, reference * 3 // 2)
    assert got["length_ratio"] == pytest.approx(1.5) == got["length_ratio_low"]
    assert compare.length_ratio(reference * 0, reference)["length_ratio"] is None


def test_unequal_shapes():
    with pytest.raises(ValueError, match="questions, samples"):
        compare.paired_difference(np.ones((3, 1)), np.ones((4, 1)))
