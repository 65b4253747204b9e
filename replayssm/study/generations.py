"""What the arms wrote by themselves, and how it differs from what the reference wrote.

Owns the measures of a free run: length, first divergence, repetition. They describe, they do not
judge: where a text first differs depends on ties as much as on precision, and two good texts may
share no token. Imports neither torch nor transformers.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pyarrow as pa

from replayssm.study.answers import is_loop
from replayssm.study.records import GENERATION_SCHEMA, typed_table

REPEATED_TOKENS = 8
REFERENCE = "reference"


def generation_table(
    tokens: np.ndarray, *, stop_tokens: Collection[int], prompts: Sequence[int], arms: list[str]
) -> pa.Table:
    """Rows ordered by prompt, then arm. `tokens` [1 + A, P, N], the reference first, as written;
    what follows a stop token is ignored. `arms`: labels without the reference.
    """
    rows = []
    for index, prompt in enumerate(prompts):
        reference, _ = cut(tokens[0, index], stop_tokens)
        for arm in range(tokens.shape[0]):
            text, stopped = cut(tokens[arm, index], stop_tokens)
            rows.append(
                {
                    "prompt": prompt,
                    "arm": arm,
                    "length": len(text),
                    "stopped": stopped,
                    "first_divergence": first_divergence(reference, text),
                    "repeated_share": repeated_share(text),
                    "loop": bool(is_loop(text)),
                    "tokens": text,
                }
            )
    columns = {name: [row[name] for row in rows] for name in GENERATION_SCHEMA.names}
    return typed_table(GENERATION_SCHEMA, columns, [REFERENCE, *arms])


def cut(tokens: np.ndarray, stop_tokens: Collection[int]) -> tuple[list[int], bool]:
    """(tokens before the first stop token, whether there was one)."""
    ends = np.flatnonzero(np.isin(tokens, list(stop_tokens)))
    return (tokens[: ends[0]].tolist(), True) if ends.size else (tokens.tolist(), False)


def first_divergence(reference: Sequence[int], text: Sequence[int]) -> int | None:
    """Index of the first difference, an end where the other goes on included; None: equal."""
    for at, (a, b) in enumerate(zip(reference, text, strict=False)):
        if a != b:
            return at
    return None if len(reference) == len(text) else min(len(reference), len(text))


def repeated_share(text: Sequence[int], width: int = REPEATED_TOKENS) -> float | None:
    """Share of the n-grams of `width` tokens that occurred before in the text; None: too short."""
    grams = [tuple(text[at : at + width]) for at in range(len(text) - width + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else None


def summarise_generations(columns: Mapping[str, np.ndarray], *, tokens: int) -> dict:
    """One row per arm, the reference first, for summary.json.

    {"tokens": cap, "arms": [{"label", "length_mean", "length_ratio_mean" (over the reference's
    length of the same prompt), "stopped_share", "diverged_share", "first_divergence_median" (texts
    that never diverge count as `tokens`), "repeated_share_mean", "loop_share"}]}.
    """
    labels = list(dict.fromkeys(columns["arm"].tolist()))
    reference = columns["length"][columns["arm"] == REFERENCE].astype(np.float64)
    arms = []
    for label in labels:
        mine = {name: values[columns["arm"] == label] for name, values in columns.items()}
        diverged = mine["first_divergence"]
        never = np.isnan(diverged)
        repeated = mine["repeated_share"][~np.isnan(mine["repeated_share"])]
        usable = reference > 0
        ratios = mine["length"][usable] / reference[usable]
        arms.append(
            {
                "label": label,
                "length_mean": float(mine["length"].mean()),
                "length_ratio_mean": float(ratios.mean()) if ratios.size else None,
                "stopped_share": float(mine["stopped"].mean()),
                "diverged_share": float((~never).mean()),
                "first_divergence_median": float(np.median(np.where(never, tokens, diverged))),
                "repeated_share_mean": float(repeated.mean()) if repeated.size else None,
                "loop_share": float(mine["loop"].mean()),
            }
        )
    return {"tokens": tokens, "arms": arms}
