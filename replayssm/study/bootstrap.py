"""Intervals: paired resampling of prompts, or of blocks of positions inside prompts.

Owns how uncertainty is measured and labelled. Legend: A arms, P prompts, T positions, S samples.
Pure numpy; knows no statistics but the mean, and no files.
"""

import numpy as np

PROMPTS_FOR_CLUSTER_BOOTSTRAP = 10
BOOTSTRAP_SAMPLES = 1000
CONFIDENCE = 0.95


def autocorrelation_time(series: np.ndarray) -> float:
    """Integrated autocorrelation time (in samples, >= 1) of a series [T]; NaN and inf are ignored.

    1 + 2 * sum of the autocorrelations up to the first lag M >= 5 * time (Sokal's self-consistent
    window).
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


class Bootstrap:
    """Paired resampling of a study: the same prompts or blocks for every arm and every statistic.

    `block` is the block length in scored positions of the within-document bootstrap; it is not used
    with PROMPTS_FOR_CLUSTER_BOOTSTRAP prompts or more.
    """

    def __init__(
        self, prompts: int, *, block: int, samples: int = BOOTSTRAP_SAMPLES, seed: int = 0
    ):
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
        """Resampled means [S, A] of `values` [A, P, T] over prompts and positions, NaN and inf left
        out.

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
        # Gathering is all the work: where nothing is missing, every sample counts the same.
        whole = bool(finite.all())
        sources = [(clean, total)] if whole else [(clean, total), (finite, count)]
        count += prompts * draws * block * whole
        for prompt in range(prompts):
            starts = rng.integers(length - block + 1, size=(self.samples, draws))
            for source, into in sources:
                running = np.concatenate(
                    [np.zeros((arms, 1)), np.cumsum(source[:, prompt], -1, dtype=np.float64)], -1
                )
                blocks = running[:, block:] - running[:, :-block]
                for arm in range(arms):  # one arm at a time: [S, draws] gathers stay small
                    into[:, arm] += blocks[arm][starts].sum(-1)
        return total, count


def interval(samples: np.ndarray) -> tuple[float | None, float | None]:
    """Percentile interval of bootstrap samples [S]; (None, None) if any sample is missing."""
    if not samples.size or not np.isfinite(samples).all():
        return None, None
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(samples, [tail, 1.0 - tail])
    return float(low), float(high)
