"""Policies compared question by question: differences with intervals, tests, and what they can see.

Owns the statistics of accuracy. Pure numpy; knows neither samples nor tasks. The unit is the
question: with k samples each, a question's score is the mean of its samples.

Sources: exact McNemar test on discordant pairs; interval of a paired difference with half a count
added to every cell (Agresti & Min 2005), which does not collapse where no question differs; paired
bootstrap and sign-flip test for k > 1; Holm (1979); sample size as in Miller, arXiv 2411.00640.

Legend: Q questions, K samples a question.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
POWER = 0.8
RESAMPLES = 10_000
_EXACT_FLIPS = 16  # sign-flip test: all sign patterns up to this many differing questions


def _z(probability: float) -> float:
    return NormalDist().inv_cdf(probability)


def accuracy(scores: np.ndarray, *, seed: int = 0) -> dict:
    """Mean of `scores` [Q, K] (0 or 1) with an interval: Wilson for K = 1, over questions else.

    Also pass_at_k: the share of questions with any right sample.
    """
    questions, samples = scores.shape
    mean = float(scores.mean())
    if samples == 1:
        low, high = wilson(int(scores.sum()), questions)
    else:
        low, high = _bootstrap(scores.mean(axis=1)[None], lambda means: means[0], seed)
    return {
        "questions": questions,
        "samples": samples,
        "accuracy": mean,
        "accuracy_low": low,
        "accuracy_high": high,
        "pass_at_k": float(scores.any(axis=1).mean()),
    }


def wilson(right: int, total: int) -> tuple[float, float]:
    """Wilson score interval of a proportion."""
    z = _z(0.5 + CONFIDENCE / 2)
    share, scale = right / total, 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)


def mcnemar_exact(lost: int, won: int) -> float:
    """Two-sided p of `lost` against `won` discordant pairs under even odds; 1 if there are none."""
    total, fewer = lost + won, min(lost, won)
    tail = sum(math.comb(total, i) for i in range(fewer + 1))
    return min(1.0, 2 * tail / 2**total)


def paired_interval(lost: int, won: int, questions: int) -> tuple[float, float]:
    """Interval of (won - lost) / questions for one sample a question (Agresti & Min)."""
    total, b, c = questions + 2, lost + 0.5, won + 0.5
    error = math.sqrt((b + c) - (c - b) ** 2 / total) / total
    z = _z(0.5 + CONFIDENCE / 2)
    return max(-1.0, (c - b) / total - z * error), min(1.0, (c - b) / total + z * error)


def minimum_detectable(questions: int, variance: float) -> float:
    """Smallest true difference found with 80 % power at 5 %, from the variance of a question's
    difference: for one sample a question, the share of questions that differ.
    """
    return (_z(0.5 + CONFIDENCE / 2) + _z(POWER)) * math.sqrt(variance / questions)


def sign_flip(differences: np.ndarray, *, seed: int = 0) -> float:
    """Two-sided p that questions' mean `differences` [Q] are symmetric about 0.

    Exact for few differing questions, else from random sign patterns (never below 1 / RESAMPLES).
    """
    moved = differences[differences != 0.0]
    if not moved.size:
        return 1.0
    observed = abs(moved.sum()) - 1e-12 * np.abs(moved).sum()  # equal sums are ties, not rounding
    if moved.size <= _EXACT_FLIPS:
        patterns = np.arange(1 << moved.size)[:, None] >> np.arange(moved.size) & 1
        return float((np.abs((2 * patterns - 1) @ moved) >= observed).mean())
    rng = np.random.default_rng(seed)
    hits = 0
    for _ in range(RESAMPLES // 1000):  # in pieces: questions x resamples would be large
        signs = rng.integers(0, 2, size=(1000, moved.size)) * 2 - 1
        hits += int((np.abs(signs @ moved) >= observed).sum())
    return (hits + 1) / (RESAMPLES + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm-adjusted p values, in the given order."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def paired_difference(reference: np.ndarray, policy: np.ndarray, *, seed: int = 0) -> dict:
    """Policy minus reference over the same questions, both [Q, K] of 0 and 1.

    lost and won count samples that went wrong and right. Raises ValueError for unequal shapes.
    """
    if reference.shape != policy.shape or reference.ndim != 2 or not reference.size:
        raise ValueError(
            f"scores must both be [questions, samples], got {reference.shape} and {policy.shape}"
        )
    questions, samples = reference.shape
    means = policy.mean(axis=1) - reference.mean(axis=1)
    lost, won = int((reference > policy).sum()), int((policy > reference).sum())
    if samples == 1:
        low, high = paired_interval(lost, won, questions)
        p, test = mcnemar_exact(lost, won), "exact McNemar"
        variance = max((lost + won) / questions, 1 / (questions + 2))
    else:
        if means.any():
            low, high = _bootstrap(means[None], lambda resampled: resampled[0], seed)
        else:
            low, high = paired_interval(0, 0, questions)
        p, test = sign_flip(means, seed=seed), "paired sign flip"
        variance = max(float(means.var(ddof=1)) if questions > 1 else 0.0, 1 / (questions + 2))
    return {
        "difference": float(means.mean()),
        "difference_low": low,
        "difference_high": high,
        "lost": lost,
        "won": won,
        "discordance": (lost + won) / reference.size,
        "p": p,
        "test": test,
        "minimum_detectable": minimum_detectable(questions, variance),
    }


def verdict(low: float, high: float, margin: float) -> str:
    """What an interval of (policy - reference) says about a loss of more than `margin`.

    "not worse" (within the margin), "worse" (surely a loss, and not surely within the margin) or
    "undecided".
    """
    if low > -margin:
        return "not worse"
    return "worse" if high < 0.0 else "undecided"


def length_ratio(reference: np.ndarray, policy: np.ndarray, *, seed: int = 0) -> dict:
    """Tokens of `policy` over tokens of `reference` ([Q, K] each), resampled over questions."""
    sums = np.stack([policy.sum(axis=1), reference.sum(axis=1)]).astype(np.float64)
    if not sums[1].sum():
        return {"length_ratio": None, "length_ratio_low": None, "length_ratio_high": None}

    def ratio(means: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return means[0] / means[1]

    low, high = _bootstrap(sums, ratio, seed)
    return {
        "length_ratio": float(sums[0].sum() / sums[1].sum()),
        "length_ratio_low": low,
        "length_ratio_high": high,
    }


def _bootstrap(values: np.ndarray, statistic, seed: int) -> tuple[float | None, float | None]:
    """Percentile interval of `statistic` of means of `values` [S, Q] over resampled questions."""
    rng, questions = np.random.default_rng(seed), values.shape[1]
    drawn = []
    for _ in range(RESAMPLES // 500):  # in pieces, as above
        index = rng.integers(questions, size=(500, questions))
        drawn.append(statistic(values[:, index].mean(axis=-1)))
    results = np.concatenate(drawn)
    if not np.isfinite(results).all():
        return None, None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(results, [tail, 1 - tail])
    return float(low), float(high)
