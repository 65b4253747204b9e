"""Statistics of states.parquet beside the theory: what tables and figures show of the state level.

Owns pooling over prompts, quantiles over heads, residuals, and the theory's line for KL. Pure
numpy on flat columns; reads no files.

Prompts are pooled as root mean squares per head; a band over heads is the 10th to 90th percentile.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from replayssm.study import theory

DIGITS = 5


def summarise_states(columns: Mapping[str, np.ndarray], arms: Sequence[Mapping]) -> dict:
    """Everything that is shown of states.parquet, as one JSON-able dict.

    columns: `records.load_columns`. arms: descriptions as `spec.Arm.describe` makes them.

    {"layers", "heads": of every head, in the order of all lists over heads;
     "log_decay", "memory": per head, mean over prompts at the last position (memory in tokens, None
        where nothing decays);
     "positions": tokens read at each measurement;
     "arms": one each, {"label",
        "write_error", "read_write_error": theory's error of one write of checkpoint and read copy
            (None: exact, or no read copy),
        "curve": per position {"position", and for each of checkpoint, read, output, predicted:
            "<name>_median", "<name>_low", "<name>_high" over heads, None where there is none;
            "underflowed_mean", "saturated_sum" (over prompts and layers)},
        "checkpoint", "read", "output": per head at the last position (read: None without a copy),
        "predicted", "residual": per head, theory from the gates seen, and measured / predicted
            (None for an exact checkpoint),
        "stagnating": indices of heads whose checkpoint meets the criterion for stagnation}}
    """
    labels = [arm["label"] for arm in arms]
    cube = _cube(columns, labels)
    last = {name: values[:, :, -1] for name, values in cube.items()}  # [A, P, heads]
    positions = np.unique(columns["position"])
    decay = last["log_decay"][0].mean(0)
    found = {
        "layers": last["layer"][0, 0].astype(int).tolist(),
        "heads": last["head"][0, 0].astype(int).tolist(),
        "log_decay": _numbers(decay),
        "memory": _numbers(theory.memory_length(decay)),
        "positions": positions.tolist(),
        "arms": [],
    }
    for index, arm in enumerate(arms):
        mine = {name: values[index] for name, values in cube.items()}  # [P, positions, heads]
        found["arms"].append(_arm_summary(arm, mine, positions, decay))
    return found


def _arm_summary(arm: Mapping, mine: dict, positions: np.ndarray, decay: np.ndarray) -> dict:
    policy = arm["policy"]
    write = theory.write_error(policy["checkpoint"])
    read = policy["read_copy"] and theory.write_error(policy["read_copy"])
    exact = policy["checkpoint"]["format"] == "fp32"
    measured = {
        "checkpoint": _rms(mine["checkpoint_error"]),
        "read": _rms(mine["read_error"]) if read else None,
        "output": _rms(mine["output_error"]),
        "predicted": None if exact else _rms(theory.predicted_error(write, mine["writes"])),
    }  # [positions, heads]
    curve = []
    first_heads = np.flatnonzero(mine["head"][0, 0] == 0)
    for at, position in enumerate(positions.tolist()):
        point = {"position": position}
        for name, values in measured.items():
            bands = (None,) * 3 if values is None else np.nanquantile(values[at], (0.5, 0.1, 0.9))
            point |= {
                f"{name}_{band}": None if value is None else _number(value)
                for band, value in zip(("median", "low", "high"), bands, strict=True)
            }
        point["underflowed_mean"] = _number(mine["underflowed"][:, at].mean())
        point["saturated_sum"] = int(mine["layer_saturated"][:, at, first_heads].sum())
        curve.append(point)
    last = {name: None if v is None else v[-1] for name, v in measured.items()}
    stagnating = theory.stagnates(write, log_decay=decay, ring_len=policy["ring_len"])
    predicted = last["predicted"]
    return {
        "label": arm["label"],
        "write_error": None if exact else _number(write.error),
        "read_write_error": _number(read.error) if read else None,
        "curve": curve,
        **{name: None if v is None else _numbers(v) for name, v in last.items()},
        "residual": None
        if predicted is None
        else _numbers(theory.residual(last["checkpoint"], predicted)),
        "stagnating": np.flatnonzero(stagnating).tolist(),
    }


def kl_theory(states: Mapping, arms: Sequence[Mapping]) -> list[dict | None]:
    """The theory's KL line of each arm, over the windows of its `curve`; None where there is none.

    {"scale", "read_copy_kl", "kl": [per window of the curve]}: kl = read_copy_kl + scale * shape,
    shape from the gates seen (`theory.kl_shape`), heads equally weighted. read_copy_kl is the
    last-quarter KL of FP32 with the same read copy (0 without a read copy, missing if the run has
    no such arm: then there is no line). The one free number is the scale, fitted to the windows
    past the first; an exact checkpoint has no shape, its line is flat.
    """
    decay = np.array(states["log_decay"], dtype=np.float64)
    flat = {
        (str(arm["policy"]["read_copy"]), arm["ring_len"]): arm["last_quarter"]["kl_mean"]
        for arm in arms
        if arm["kind"] == "policy" and arm["policy"]["checkpoint"]["format"] == "fp32"
    }
    return [_kl_line(arm, decay, flat) for arm in arms]


def _kl_line(arm: Mapping, decay: np.ndarray, flat: Mapping) -> dict | None:
    if arm["kind"] != "policy" or arm["exact"]:
        return None
    policy, curve = arm["policy"], arm["curve"]
    read = 0.0
    if policy["read_copy"] is not None:
        read = flat.get((str(policy["read_copy"]), arm["ring_len"]))
        if read is None:
            return None
    if policy["checkpoint"]["format"] == "fp32":
        return {"scale": 0.0, "read_copy_kl": read, "kl": [_number(read)] * len(curve)}
    centres = np.sqrt([(window["start"] + 1) * window["stop"] for window in curve])
    shape = theory.kl_shape(centres, log_decay=decay, ring_len=arm["ring_len"])
    kl = np.array([np.nan if w["kl_mean"] is None else w["kl_mean"] for w in curve]) - read
    scale = theory.fitted_scale(kl[1:], shape[1:])
    if scale is None:
        return None
    line = theory.kl_line(shape, scale=scale, read_copy=read)
    return {"scale": _number(scale), "read_copy_kl": read, "kl": _numbers(line)}


# -- arrays ----------------------------------------------------------------------------------------
def _cube(columns: Mapping[str, np.ndarray], labels: list[str]) -> dict[str, np.ndarray]:
    """Columns as [arms, prompts, positions, heads of all layers]."""
    prompts, positions = (np.unique(columns[name]).size for name in ("prompt", "position"))
    shape = (prompts, positions, len(labels), -1)
    arms = columns["arm"].reshape(shape)
    if (arms != np.array(labels)[:, None]).any():
        raise ValueError(f"states.parquet does not hold the arms {labels} in that order")
    return {
        name: values.reshape(shape).transpose(2, 0, 1, 3)
        for name, values in columns.items()
        if name != "arm"
    }


def _rms(values: np.ndarray) -> np.ndarray:
    """Root mean square over prompts [P, ...], missing values left out."""
    squares = np.square(values.astype(np.float64))
    counts = np.isfinite(squares).sum(0)
    total = np.where(np.isfinite(squares), squares, 0.0).sum(0)
    return np.sqrt(np.divide(total, counts, out=np.full(total.shape, np.nan), where=counts > 0))


def _number(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None


def _numbers(values: np.ndarray) -> list[float | None]:
    return [_number(value) for value in np.asarray(values, dtype=np.float64).ravel()]
