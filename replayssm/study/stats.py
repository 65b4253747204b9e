"""Statistics of a drift study: windows, quantiles, intervals, slopes, ring phases and control checks.

Owns every number that a table or figure shows, each named by its reducer (`kl_mean`, `kl_p99`, ...).
Pure numpy on the dense arrays of `store.Positions`; imports neither torch nor transformers and reads no
files. Legend: A arms, P prompts, T scored positions, S bootstrap samples, W windows.

Rules that decide what a number means:

* The unit of independence is the prompt. With ten or more prompts intervals come from resampling prompts,
  the same resample for every arm, so that differences between arms are paired. With fewer, blocks of
  positions are resampled inside each prompt and the interval is labelled "within these documents": it
  says nothing about other texts.
* A quantile q is given only when its window has at least 10 / (1 - q) values, otherwise it is missing.
* Rows with non-finite logits and infinite divergences are left out of means *and counted*; negative
  divergences are rounding and stay in (clamping them would bias the mean upwards).
"""

import math
from collections.abc import Iterable

import numpy as np

from .store import Positions

PROMPTS_FOR_CLUSTER_BOOTSTRAP = 10
BOOTSTRAP_SAMPLES = 1000
CONFIDENCE = 0.95
# Below this a negative KL is not rounding of float64 sums over FP32 logits.
NEGATIVE_KL_WARNING = -1e-5
# A fault that moves KL by less than this factor over the noise floor counts as undetected.
FAULT_DETECTION_FACTOR = 100.0

_QUANTILES = {"kl_median": 0.5, "kl_p90": 0.9, "kl_p99": 0.99, "kl_p999": 0.999}


# ------------------------------------------------------------------------------------------- windows
def geometric_windows(tokens: int, ring_len: int) -> list[tuple[int, int]]:
    """Windows [start, stop) of positions that cover 0..tokens, widths growing with position.

    Edges are 0 and ring_len times 1, 2, 3, 4, 6, 8, 12, ...: whole rings only, so that every window holds
    each ring phase equally often. The last window ends at `tokens` and is at least a ring wide.
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


def autocorrelation_time(series: np.ndarray) -> float:
    """Integrated autocorrelation time (in samples, >= 1) of a series [T]; NaN and inf are ignored.

    1 + 2 * sum of the autocorrelations up to the first lag M >= 5 * time (Sokal's self-consistent window).
    """
    values = series[np.isfinite(series)].astype(np.float64)
    values = values - values.mean() if values.size else values
    if values.size < 4 or not np.any(values):
        return 1.0
    size = 1 << (2 * values.size - 1).bit_length()
    spectrum = np.fft.rfft(values, size)
    correlation = np.fft.irfft(spectrum * spectrum.conj(), size)[: values.size]
    times = 2.0 * np.cumsum(correlation / correlation[0]) - 1.0
    lags = np.arange(values.size)
    inside = np.nonzero(lags >= 5.0 * times)[0]
    return float(max(1.0, times[inside[0] if inside.size else -1]))


# ----------------------------------------------------------------------------------------- bootstrap
class Bootstrap:
    """Paired resampling of a study: the same prompts or blocks for every arm and every statistic.

    `block` is the block length in scored positions of the within-document bootstrap; it is not used with
    PROMPTS_FOR_CLUSTER_BOOTSTRAP prompts or more.
    """

    def __init__(self, prompts: int, *, block: int, samples: int = BOOTSTRAP_SAMPLES, seed: int = 0):
        self.samples, self.seed, self.block = samples, seed, block
        self.clustered = prompts >= PROMPTS_FOR_CLUSTER_BOOTSTRAP
        if self.clustered:
            drawn = np.random.default_rng(seed).integers(prompts, size=(samples, prompts))
            self.weights = np.stack([np.bincount(row, minlength=prompts) for row in drawn])

    def describe(self) -> dict:
        return {
            "kind": "prompt_bootstrap" if self.clustered else "moving_block_bootstrap",
            "label": "over prompts" if self.clustered else "within these documents",
            "block_positions": None if self.clustered else self.block,
            "samples": self.samples,
            "confidence": CONFIDENCE,
        }

    def means(self, values: np.ndarray, key: int = 0) -> np.ndarray:
        """Resampled means [S, A] of `values` [A, P, T] over prompts and positions, NaN and inf left out.

        `key` names the window: equal keys and shapes draw equal blocks.
        """
        finite = np.isfinite(values)
        clean = np.where(finite, values, 0.0).astype(np.float64)
        if self.clustered:
            total = np.einsum("sp,ap->sa", self.weights, clean.sum(-1))
            count = np.einsum("sp,ap->sa", self.weights, finite.sum(-1))
        else:
            total, count = self._block_sums(clean, finite, key)
        with np.errstate(invalid="ignore"):
            return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    def _block_sums(self, clean, finite, key):
        arms, prompts, length = clean.shape
        # At least four blocks to a document, else every resample would be the document itself.
        block = max(1, min(self.block, length // 4))
        draws = max(1, length // block)
        rng = np.random.default_rng([self.seed, key, length])
        total = np.zeros((self.samples, arms))
        count = np.zeros((self.samples, arms))
        for prompt in range(prompts):
            starts = rng.integers(length - block + 1, size=(self.samples, draws))
            for source, into in ((clean, total), (finite, count)):
                running = np.concatenate(
                    [np.zeros((arms, 1)), np.cumsum(source[:, prompt], -1, dtype=np.float64)], -1
                )
                blocks = running[:, block:] - running[:, :-block]
                for arm in range(arms):  # one arm at a time: [S, draws] gathers stay small
                    into[:, arm] += blocks[arm][starts].sum(-1)
        return total, count


def interval(samples: np.ndarray) -> tuple[float | None, float | None]:
    """Percentile interval of bootstrap samples [S] at CONFIDENCE; (None, None) if any is missing."""
    if not samples.size or not np.isfinite(samples).all():
        return None, None
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(samples, [tail, 1.0 - tail])
    return float(low), float(high)


# ------------------------------------------------------------------------------------------ reducers
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
        row["kl_infinite_count"] = int(np.isposinf(kl[arm]).sum())
        row["kl_negative_count"] = int((kl[arm] < NEGATIVE_KL_WARNING).sum())
        rows.append(row)
    return rows


def growth_slopes(positions: Positions, windows: list, bootstrap: Bootstrap) -> list[dict]:
    """Per arm: slope of log window-mean KL against log position, its interval and what it says.

    The first window is left out (start-up). 0 is a plateau, 1 a random walk of the state error, 2 a bias.
    Needs three windows with a positive mean; otherwise the slope is missing.
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
        rows.append({"slope": slope, "slope_low": low, "slope_high": high, "growth": _growth(low, high)})
    return rows


def _growth(low: float, high: float) -> str:
    if low > 0.1:
        return "grows with position"
    if high < -0.1:
        return "falls with position"
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


# ------------------------------------------------------------------------------------------- summary
def summarise(positions: Positions, arms: list[dict], *, ring_len: int, tokens: int, seed: int = 0) -> dict:
    """Everything the tables and figures show, as one JSON-able dict.

    `arms`: descriptions in the order of `positions.arms` (label, control, ring_len, policy_digest, ...), see
    `spec.arms`. `tokens` is the length of the run in tokens, `ring_len` the reference's.
    """
    times = [
        [autocorrelation_time(series) for series in positions.kl[arm]] for arm in range(len(arms))
    ]
    stride = int(positions.position[1] - positions.position[0]) if len(positions.position) > 1 else 1
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
        rows.append({"ratio_to_floor": ratio, "ratio_to_floor_low": low, "ratio_to_floor_high": high})
    return rows


# ------------------------------------------------------------------------------------------ controls
def check_controls(positions: Positions, arms: list[dict]) -> dict:
    """What the control arms showed, and every reason not to trust the run (`failures`, empty if none)."""
    failures: list[str] = []
    by_control = {arm["control"]: index for index, arm in enumerate(arms) if arm["control"]}
    result: dict = {"second_fp32_kl_max": None, "floor_kl_mean": None, "fault_kl_mean": None}

    second = by_control.get("second_fp32")
    if second is not None:
        differs = ~(positions.kl[second] == 0.0)  # true for NaN, too
        finite = np.abs(positions.kl[second][np.isfinite(positions.kl[second])])
        result["second_fp32_kl_max"] = float(finite.max()) if finite.size else None
        if differs.any():
            failures.append(
                f"second FP32 row: KL must be exactly 0, is not at {int(differs.sum())} positions "
                f"(largest {result['second_fp32_kl_max']}): rows of one batch are not independent"
            )
    floor, fault = by_control.get("other_ring_len"), by_control.get("fault")
    if floor is not None:
        result["floor_kl_mean"] = arms[floor]["whole"]["kl_mean"]
    if fault is not None:
        found = arms[fault]["whole"]["kl_mean"]
        result["fault_kl_mean"] = found
        needed = FAULT_DETECTION_FACTOR * (result["floor_kl_mean"] or 0.0)
        if found is not None and not found > needed:
            failures.append(
                f"hook not live: the fault arm's mean KL is {found:.3g}, not above {needed:.3g} "
                f"({FAULT_DETECTION_FACTOR:g} x the noise floor)"
            )
    failures.extend(_identical_arms(positions, arms))
    return result | {"failures": failures}


def _identical_arms(positions: Positions, arms: list[dict]) -> list[str]:
    """Arms that must differ and do not: the policy never reached the state update."""
    failures, seen = [], {}
    for index, arm in enumerate(arms):
        if arm["control"] == "second_fp32":
            continue
        if not positions.kl[index].any():
            if not arm["exact"]:
                failures.append(f"hook not live: {arm['label']} has KL 0 at every position")
            continue
        twin = seen.setdefault(positions.kl[index].tobytes(), arm)
        if twin["identity"] != arm["identity"]:
            failures.append(
                f"hook not live: {twin['label']} and {arm['label']} gave identical results"
            )
    return failures
