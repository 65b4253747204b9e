"""From what the probe saw to rows of states.parquet.

Owns the translation; the arithmetic is the probe's, the meaning of the columns that of `records`.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from torch import Tensor

from replayssm.engine.probe import LayerStates
from replayssm.study.records import STATE_SCHEMA, typed_table

_KEPT_BITS = 9  # of the significand, .1 %: far below what tells arms apart, half the bytes


def state_tables(
    measured: Sequence[LayerStates], *, prompts: Sequence[int], position: int, arms: list[str]
) -> list[pa.Table]:
    """One table per prompt, rows ordered by arm (the reference left out), layer, head."""
    tables = []
    for index, prompt in enumerate(prompts):
        parts = [_layer_columns(states, index) for states in measured]
        columns = {name: np.concatenate([part[name] for part in parts], 1) for name in parts[0]}
        count = columns["layer"].shape[1]
        columns["arm"] = np.repeat(np.arange(len(arms))[:, None], count, 1)
        columns["prompt"] = np.full((len(arms), count), prompt)
        columns["position"] = np.full((len(arms), count), position)
        flat = {name: values.reshape(-1) for name, values in columns.items()}
        tables.append(typed_table(STATE_SCHEMA, flat, arms))
    return tables


def _layer_columns(states: LayerStates, prompt: int) -> dict[str, np.ndarray]:
    """Columns [arms, heads] of one layer and prompt."""
    arms, _, heads = states.checkpoint_error[1:].shape
    shape = (arms, heads)

    def kept(values: Tensor) -> np.ndarray:
        return shortened(values.numpy()[1:, prompt])

    decay = shortened(states.log_decay.numpy()[prompt])
    saturated = states.saturated.numpy()[1:, prompt]
    return {
        "layer": np.full(shape, states.layer),
        "head": np.broadcast_to(np.arange(heads), shape),
        "checkpoint_error": kept(states.checkpoint_error),
        "read_error": kept(states.read_error),
        "output_error": kept(states.output_error),
        "state_norm": kept(states.state_norm),
        "underflowed": kept(states.underflowed),
        "layer_saturated": np.broadcast_to(saturated[:, None], shape),
        "log_decay": np.broadcast_to(decay, shape),
        "writes": kept(states.writes),
    }


def shortened(values: np.ndarray) -> np.ndarray:
    """Values rounded to `_KEPT_BITS` significant bits, float32; NaN and infinity stay."""
    significand, exponent = np.frexp(values.astype(np.float64))
    scale = 2.0**_KEPT_BITS
    return np.ldexp(np.round(significand * scale) / scale, exponent).astype(np.float32)
