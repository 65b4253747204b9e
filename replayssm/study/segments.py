"""Segments of a run: exact sums and quantiles per prompt, so that thinned records lose nothing.

Owns what a row of segments.parquet is computed from. Pure numpy on `records.Positions`; reads no
files. A segment is a window of positions of `stats.geometric_windows`; beside them stands, for each
ring phase, one row over the whole run.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from replayssm.study.records import SEGMENT_SCHEMA, Positions, typed_table
from replayssm.study.stats import geometric_windows, kl_quantile

_QUANTILES = {"kl_p50": 0.5, "kl_p90": 0.9, "kl_p99": 0.99, "kl_p999": 0.999}


def segment_table(
    positions: Positions, ring_lens: Sequence[int], *, ring_len: int, tokens: int
) -> pa.Table:
    """Rows ordered by prompt, then segments (all arms), then phases; `ring_lens`: of each arm."""
    rows = []
    where = positions.position
    windows = [
        (start, stop, (where >= start) & (where < stop))
        for start, stop in geometric_windows(tokens, ring_len)
    ]
    for prompt in range(positions.kl.shape[1]):
        for start, stop, inside in windows:
            if not inside.any():
                continue
            for arm in range(len(ring_lens)):
                counts = positions.saturated[arm, prompt]
                first, last = np.flatnonzero(inside)[[0, -1]]
                before = counts[first - 1] if first else 0
                row = {"saturated": int(counts[last] - before), "phase": None}
                rows.append(row | _row(positions, arm, prompt, inside, start, stop))
        for arm, length in enumerate(ring_lens):
            for phase in range(length):
                inside = where % length == phase
                if inside.any():
                    row = {"saturated": 0, "phase": phase}
                    rows.append(row | _row(positions, arm, prompt, inside, 0, tokens))
    columns = {name: [row[name] for row in rows] for name in SEGMENT_SCHEMA.names}
    return typed_table(SEGMENT_SCHEMA, columns, list(positions.arms))


def _row(
    positions: Positions, arm: int, prompt: int, inside: np.ndarray, start: int, stop: int
) -> dict:
    kl = positions.kl[arm, prompt, inside].astype(np.float64)
    kept = np.isfinite(kl)
    finite = kl[kept]

    def total(values: np.ndarray) -> float:
        return float(values[inside][kept].sum(dtype=np.float64))

    return {
        "prompt": prompt,
        "start": start,
        "stop": stop,
        "arm": arm,
        "count": int(kept.sum()),
        "nonfinite": int(positions.nonfinite[arm, prompt, inside].sum()),
        "infinite": int(np.isposinf(kl).sum()),
        "kl_sum": float(finite.sum()),
        "kl_square_sum": float((finite * finite).sum()),
        "kl_reverse_sum": total(np.nan_to_num(positions.kl_reverse[arm, prompt], posinf=0.0)),
        "excess_nll_sum": -total(np.nan_to_num(positions.delta_logp[arm, prompt], neginf=0.0)),
        "ref_entropy_sum": total(positions.ref_entropy[prompt]),
        "top1_matches": int(positions.top1_match[arm, prompt, inside][kept].sum()),
        **{name: kl_quantile(finite, q) for name, q in _QUANTILES.items()},
        "kl_max": float(finite.max()) if finite.size else None,
    }
