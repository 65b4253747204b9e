"""Statistics of a drift study: windows, quantiles, intervals, slopes, ring phases and control
checks.

Owns every number that a table or figure shows, each named by its reducer (`kl_mean`, `kl_p99`,
...). Pure numpy on the dense arrays of `records.Positions`; imports neither torch nor transformers
and reads no files. Legend: A arms, P prompts, T scored positions, S bootstrap samples, W windows.

Rules that decide what a number means:

* The unit of independence is the prompt. With ten or more prompts intervals come from resampling
  prompts, the same resample for every arm, so that differences between arms are paired. With fewer,
  blocks of positions are resampled inside each prompt and the interval is labelled "within these
  documents": it says nothing about other texts.
* A quantile q is given only when its window has at least 10 / (1 - q) values, otherwise it is
missing.
* Rows with non-finite logits and infinite divergences are left out of means *and counted*; negative
  divergences are rounding and stay in (clamping them would bias the mean upwards).
"""

import math
from collections.abc import Iterable

import numpy as np

from replayssm.study.attribution import attribute
from replayssm.study.bootstrap import Bootstrap, autocorrelation_time, interval
from replayssm.study.controls import check_controls
from replayssm.study.records import Positions

# Below this a negative KL is not rounding of float64 sums over FP32 logits.
NEGATIVE_KL_WARNING = -1e-5

_QUANTILES = {"kl_median": 0.5, "kl_p90": 0.9, "kl_p99": 0.99, "kl_p999": 0.999}


# -- windows ---------------------------------------------------------------------------------------
def geometric_windows(tokens: int, ring_len: int) -> list[tuple[int, int]]:
    """Windows [start, stop) of positions that cover 0..tokens, widths growing with position.

    Edges are 0 and ring_len times 1, 2, 3, 4, 6, 8, 12, ...: whole rings only, so that every window
    holds each ring phase equally often. The last window ends at `tokens` and is at least a ring
    wide.
    """
    edges, step = [0], ring_len
    while step < tokens:
        edges.append(step)
        if step > ring_len:
            edges.append(step + step // 2 - step // 2 % ring_len)
        step *= 2
    edges = [edge for edge in edges if edge == 0 or edge + ring_len <= tokens]
    edges.append(tokens)
    return list(zip(edges[:-1], edges[1:], strict=True))


def last_quarter(tokens: int) -> tuple[int, int]:
    """Positions [start, stop) of the last quarter of a run: the headline window."""
    return tokens - max(1, tokens // 4), tokens


# -- reducers --------------------------------------------------------------------------------------
def _optional(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _mean(values: np.ndarray) -> float | None:
    kept = values[np.isfinite(values)]
    return _optional(kept.mean(dtype=np.float64)) if kept.size else None


def kl_quantile(values: np.ndarray, q: float) -> float | None:
    """Quantile q of finite values, or None when fewer than 10 / (1 - q) of them (q = .5: 20)."""
    kept = values[np.isfinite(values)]
    if kept.size < math.ceil(round(10.0 / (1.0 - q), 6)):
        return None
    return float(np.quantile(kept.astype(np.float64), q))


def window_statistics(positions: Positions, inside: np.ndarray, bootstrap: Bootstrap) -> list[dict]:
    """One dict per arm with every statistic of the positions selected by `inside` [T] bool."""
    kl, reverse = positions.kl[..., inside], positions.kl_reverse[..., inside]
    nll = -positions.delta_logp[..., inside]
    bad = positions.nonfinite[..., inside]
    top1 = np.where(bad, np.nan, positions.top1_match[..., inside])
    saturated = _increase(positions.saturated, inside).sum(-1)
    key = int(positions.position[inside][0])
    resampled = {
        "kl_mean": (kl, bootstrap.means(kl, key)),
        "top1_agreement_mean": (top1, bootstrap.means(top1, key)),
        "excess_nll_mean": (nll, bootstrap.means(nll, key)),
    }
    rows = []
    for arm in range(kl.shape[0]):
        row: dict = {"tokens": int(kl[arm].size)}
        for name, (values, samples) in resampled.items():
            row[name] = _mean(values[arm])
            row[f"{name}_low"], row[f"{name}_high"] = interval(samples[:, arm])
        row |= {name: kl_quantile(kl[arm], q) for name, q in _QUANTILES.items()}
        finite = kl[arm][np.isfinite(kl[arm])]
        row["kl_max"] = float(finite.max()) if finite.size else None
        row["kl_min"] = float(finite.min()) if finite.size else None
        row["kl_reverse_mean"] = _mean(reverse[arm])
        row["nonfinite_count"] = int(bad[arm].sum())
        row["saturated_count"] = int(saturated[arm])
        row["kl_infinite_count"] = int(np.isposinf(kl[arm]).sum())
        row["kl_negative_count"] = int((kl[arm] < NEGATIVE_KL_WARNING).sum())
        rows.append(row)
    return rows


def _increase(counts: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """How much running counts [A, P, T] grew over the positions `inside` [T] bool, [A, P]."""
    first, last = np.flatnonzero(inside)[[0, -1]]
    return counts[..., last] - (counts[..., first - 1] if first else 0)


def growth_slopes(positions: Positions, windows: list, bootstrap: Bootstrap) -> list[dict]:
    """Per arm: slope of log window-mean KL against log position, its interval and what it says.

    The first window is left out (start-up). 0 is a plateau, 1 a random walk of the state error, 2 a
    bias. Needs three windows with a positive mean; otherwise the slope is missing.
    """
    masks = [_inside(positions, *window) for window in windows[1:]]
    kept = [(w, m) for w, m in zip(windows[1:], masks, strict=True) if m.any()]
    x = np.log([math.sqrt((start + 1) * stop) for (start, stop), _ in kept])
    observed, samples = [], []
    for (start, _), mask in kept:
        values = positions.kl[..., mask]
        observed.append([_mean(arm) or 0.0 for arm in values])
        samples.append(bootstrap.means(values, start))
    rows = []
    for arm in range(positions.kl.shape[0]):
        y = np.array([row[arm] for row in observed])
        s = np.array([row[:, arm] for row in samples])
        if len(y) < 3 or (y <= 0).any() or not (s > 0).all():
            rows.append({"slope": None, "slope_low": None, "slope_high": None, "growth": None})
            continue
        centred = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
        slope = float(centred @ np.log(y))
        low, high = interval(centred @ np.log(s))
        rows.append(
            {"slope": slope, "slope_low": low, "slope_high": high, "growth": _growth(low, high)}
        )
    return rows


def _growth(low: float, high: float) -> str:
    if low > 0.1:
        return "grows"
    if high < -0.1:
        return "falls"
    return "flat" if high < 0.3 and low > -0.3 else "undecided"


def phase_table(positions: Positions, ring_lens: Iterable[int]) -> list[list[dict]]:
    """Per arm, a row per ring phase t mod L (L of that arm): mean KL and the number of tokens."""
    tables = []
    for arm, ring_len in enumerate(ring_lens):
        phase = positions.position % ring_len
        tables.append(
            [
                {
                    "phase": int(value),
                    "kl_mean": _mean(positions.kl[arm][:, phase == value]),
                    "tokens": int((phase == value).sum() * positions.kl.shape[1]),
                }
                for value in np.unique(phase)
            ]
        )
    return tables


def _inside(positions: Positions, start: int, stop: int) -> np.ndarray:
    return (positions.position >= start) & (positions.position < stop)


# -- summary ---------------------------------------------------------------------------------------
def summarise(
    positions: Positions, arms: list[dict], *, ring_len: int, tokens: int, seed: int = 0
) -> dict:
    """Everything the tables and figures show, as one JSON-able dict.

    `arms`: descriptions in the order of `positions.arms` (label, kind, control, ring_len, policy,
    ...), see `spec.Arm.describe`. `tokens` is the length of the run in tokens, `ring_len` the
    reference's.
    """
    times = [
        [autocorrelation_time(series) for series in positions.kl[arm]] for arm in range(len(arms))
    ]
    stride = (
        int(positions.position[1] - positions.position[0]) if len(positions.position) > 1 else 1
    )
    rings = math.ceil(4.0 * max(map(max, times)) * stride / ring_len)
    block = max(1, min(rings * ring_len // stride, len(positions.position) // 16))
    bootstrap = Bootstrap(positions.kl.shape[1], block=block, seed=seed)

    windows = [w for w in geometric_windows(tokens, ring_len) if _inside(positions, *w).any()]
    quarter = last_quarter(tokens)
    whole_rows = window_statistics(positions, np.ones(len(positions.position), bool), bootstrap)
    quarter_rows = window_statistics(positions, _inside(positions, *quarter), bootstrap)
    window_rows = [window_statistics(positions, _inside(positions, *w), bootstrap) for w in windows]
    slopes = growth_slopes(positions, windows, bootstrap)
    phases = phase_table(positions, [arm["ring_len"] for arm in arms])
    ratios = _ratios_to_floor(positions, arms, quarter, quarter_rows, bootstrap)
    inside = _inside(positions, *quarter)
    shares = attribute(positions, arms, inside, bootstrap, ring_len=ring_len)

    described = []
    for index, arm in enumerate(arms):
        curve = [
            {"start": start, "stop": stop} | rows[index]
            for (start, stop), rows in zip(windows, window_rows, strict=True)
        ]
        size = sum(len(positions.position) / time for time in times[index])
        described.append(
            dict(arm)
            | {
                "whole": whole_rows[index],
                "last_quarter": quarter_rows[index] | {"start": quarter[0], "stop": quarter[1]},
                "curve": curve,
                "phase": phases[index],
                "effective_sample_size": size,
            }
            | slopes[index]
            | ratios[index]
        )
    return {
        "interval": bootstrap.describe(),
        "prompts": int(positions.kl.shape[1]),
        "tokens": tokens,
        "scored_positions": int(len(positions.position)),
        "reference_entropy_mean": _mean(positions.ref_entropy),
        "arms": described,
        "attribution": shares,
        "controls": check_controls(positions, described),
    }


def _ratios_to_floor(positions, arms, quarter, quarter_rows, bootstrap) -> list[dict]:
    """Per arm: last-quarter mean KL over the noise floor's, with a paired interval."""
    empty = {"ratio_to_floor": None, "ratio_to_floor_low": None, "ratio_to_floor_high": None}
    floor = next((i for i, arm in enumerate(arms) if arm["control"] == "other_ring_len"), None)
    if floor is None or not (quarter_rows[floor]["kl_mean"] or 0.0) > 0.0:
        return [dict(empty) for _ in arms]
    samples = bootstrap.means(positions.kl[..., _inside(positions, *quarter)], quarter[0])
    rows = []
    for index, row in enumerate(quarter_rows):
        if row["kl_mean"] is None:
            rows.append(dict(empty))
            continue
        low, high = interval(samples[:, index] / samples[:, floor])
        ratio = row["kl_mean"] / quarter_rows[floor]["kl_mean"]
        rows.append(
            {"ratio_to_floor": ratio, "ratio_to_floor_low": low, "ratio_to_floor_high": high}
        )
    return rows
