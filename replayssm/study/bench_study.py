"""How fast a lockstep study runs, how much memory it takes, and where the time goes.

Owns the measurement of windows at given cache lengths, and its files. Must not know how anything it
times is computed. No text of 131,072 tokens is read: attention storage is set aside for all of it,
filled with random numbers, and a few windows are timed at each of several lengths; the time of a
whole run is the integral over them and is called an extrapolation.

What a window costs is what a study does with it: the forward pass of all rows and the reduction of
their logits to one drift per position, without fetching or storing the results.
"""

import csv
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import record_function

from replayssm.engine.graphs import StepGraphs
from replayssm.engine.lockstep import Arm, Lockstep
from replayssm.models.adapter import Adapter
from replayssm.models.loading import DTYPES, load
from replayssm.models.random_weights import RANDOM_PREFIX, random_model
from replayssm.models.session import ReplaySession
from replayssm.policy import parse_policy
from replayssm.study import drift
from replayssm.study.bench_arms import fill_attention, seek
from replayssm.study.bench_trace import device_time
from replayssm.study.provenance import environment

FULL_LENGTH = 131072
PROMPT = 16
PARTS = ("recurrence", "attention", "head", "drift")
# Pieces of kernel names: of ours, and of torch's for attention that is not plainly causal.
_ATTENTION = {"attention": ("_attend_kernel", "_join_kernel", "_append_kernel", "fmha", "flash")}
_EIGHT = (
    *("fp16", "fp16-sr", "fp8", "fp8-sr", "nvfp4"),
    *("fp32+nvfp4", "fp16-sr+nvfp4", "fp8-sr+nvfp4"),
)
_ONCE = ("fp32", "fp32@32", "bf16", "fp16", "fp8", "int8", "nvfp4", "fp32+nvfp4", "fp16+nvfp4")
_SEEDED = ("fp16-sr", "fp8-sr", "fp16-sr@32", "fp16-sr+nvfp4", "fp8-sr+nvfp4", "int8-sr")
# Arm sets: the eight policies of the target, and the size of a whole study (three seeds each where
# rounding is stochastic, FP32 twice, another ring length, a fault).
ARM_SETS = ("eight", "study")


def arm_set(name: str) -> list[Arm]:
    """Reference first; ValueError for an unknown name."""
    reference = Arm(label="reference", policy=parse_policy("fp32"), kind="reference")
    if name == "eight":
        return [reference, *(Arm(label=label, policy=parse_policy(label)) for label in _EIGHT)]
    if name == "study":
        once = [Arm(label=label, policy=parse_policy(label)) for label in _ONCE]
        seeded = [
            Arm(label=f"{label} #{seed}", policy=parse_policy(label), seed=seed)
            for label in _SEEDED
            for seed in range(3)
        ]
        fault = Arm(label="fault", policy=parse_policy("fp32"), kind="fault", fault=1.01)
        return [reference, *once, *seeded, fault]
    raise ValueError(f"arms {name!r}: allowed are {', '.join(ARM_SETS)}")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration that is timed.

    model: "builtin/NAME", a folder, or "random/NAME" (`models.random_weights`). lengths: tokens
    already read when windows are timed. windows: how many are timed at each length. graphs: see
    `engine.graphs`.
    """

    model: str
    arms: str = "eight"
    prompts: int = 1
    window: int = 16
    dtype: str = "float32"
    lengths: tuple[int, ...] = (1024, FULL_LENGTH // 2, FULL_LENGTH - 1024)
    windows: int = 8
    graphs: str = "auto"

    def __post_init__(self) -> None:
        arm_set(self.arms)
        for name in ("prompts", "window", "windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.lengths or min(self.lengths) < PROMPT:
            raise ValueError(f"lengths must be at least {PROMPT} tokens, got {self.lengths}")


def open_model(case: Case, device: str) -> Adapter:
    """The model of `case`, loaded or made up."""
    if case.model.startswith(RANDOM_PREFIX):
        return random_model(case.model, dtype=DTYPES[case.dtype], device=device)
    return load(case.model, dtype=case.dtype, device=device).adapter


@torch.inference_mode()
def measure(case: Case, adapter: Adapter, *, profiled: bool = True) -> Iterator[dict]:
    """One row of the table for each of the case's lengths, as they are measured."""
    device = adapter.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    engine = _engine(case, adapter)
    step = _stepper(engine, case)
    # Until the longest ring has been flushed, twice: kernels are compiled, then graphs captured.
    warm_up = 2 * max(1, max(arm.policy.ring_len for arm in engine.arms) // case.window) + 1
    for length in case.lengths:
        seek(engine._stream, length)
        for _ in range(warm_up):
            step()
        seconds = _seconds(step, case.windows, device)
        row = {
            "model": case.model,
            "dtype": case.dtype,
            "arms": case.arms,
            "rows": len(engine.arms) * case.prompts,
            "prompts": case.prompts,
            "window": case.window,
            "length": length,
            "backend": "+".join(engine.backends),
            "graphs": engine.effective()["graphs"],
            "window_ms": round(1e3 * seconds, 3),
            "tokens_per_second": round(case.prompts * case.window / seconds, 1),
            "peak_gib": _peak_gib(device),
        }
        if profiled:
            with _eager(engine):
                row["eager_window_ms"] = round(1e3 * _seconds(step, 2, device), 3)
                row |= _profile(step, adapter, min(4, case.windows))
        yield row


def _engine(case: Case, adapter: Adapter) -> Lockstep:
    """A lockstep whose attention storage holds random numbers for every length of `case`."""
    engine = Lockstep(adapter, arm_set(case.arms), window=case.window, graphs=case.graphs)
    prompts = torch.randint(adapter.vocab_size, (case.prompts, PROMPT))
    engine.start(prompts, tokens=max(case.lengths) + case.window * (4 * case.windows + 64))
    fill_attention(engine._stream.cache)
    return engine


def _stepper(engine: Lockstep, case: Case) -> Callable[[], None]:
    """A function that reads one window of random tokens and reduces its logits."""
    adapter = engine.adapter
    text = torch.randint(adapter.vocab_size, (case.prompts, case.window), device=adapter.device)

    def step() -> None:
        (window,) = engine.read(text)
        logits = window.logits
        with record_function("drift"):
            drift.window_drift(
                logits[0].flatten(0, 1), logits[1:].flatten(1, 2), window.tokens.reshape(-1)
            )

    return step


def _seconds(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Seconds of one of `steps` steps, all of their work on the device included."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    _synchronize(device)
    return (time.perf_counter() - start) / steps


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_gib(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 2)


# -- where the time goes ---------------------------------------------------------------------------
@contextmanager
def _eager(engine: Lockstep) -> Iterator[None]:
    """While active, no step is replayed: only launches one by one can be told apart."""
    stream = engine._stream
    before, stream.graphs = stream.graphs, StepGraphs(stream.session, mode="off")
    try:
        yield
    finally:
        stream.graphs = before


@contextmanager
def _labelled(adapter: Adapter) -> Iterator[None]:
    """While active, the recurrence and the last projection are named in a profile."""
    run_layer, open_heads = ReplaySession._run_layer, []

    def recurrence(*args, **kwargs):
        with record_function("recurrence"):
            return run_layer(*args, **kwargs)

    def enter(*_):
        open_heads.append(record_function("head"))
        open_heads[-1].__enter__()

    def leave(*_):
        open_heads.pop().__exit__(None, None, None)

    hooks = [
        adapter.head.register_forward_pre_hook(enter),
        adapter.head.register_forward_hook(leave),
    ]
    ReplaySession._run_layer = recurrence
    try:
        yield
    finally:
        ReplaySession._run_layer = run_layer
        for hook in hooks:
            hook.remove()


def _profile(step: Callable[[], None], adapter: Adapter, windows: int) -> dict:
    """Device milliseconds of a window by part, launches, and the busiest kernels."""
    with _labelled(adapter):
        found = device_time(
            step, windows, labels=("recurrence", "head", "drift"), kernels=_ATTENTION
        )
    parts = {f"{part}_ms": milliseconds for part, milliseconds in found["parts"].items()}
    total = round(sum(found["parts"].values()), 3)
    return parts | {"device_ms": total, "launches": found["launches"], "kernels": found["kernels"]}


# -- a whole run -----------------------------------------------------------------------------------
def extrapolate(rows: Sequence[dict], tokens: int = FULL_LENGTH) -> float | None:
    """Seconds to read `tokens` tokens of each prompt, from rows of one case at several lengths.

    Time is taken as linear in the length between rows, and from the nearest two to both ends (where
    it never falls with the length); None with fewer than two rows.
    """
    points = sorted((row["length"], row["window_ms"]) for row in rows)
    if len(points) < 2:
        return None

    def at(length: float, pair: Sequence[tuple[float, float]]) -> tuple[float, float]:
        (x0, y0), (x1, y1) = pair
        return length, max(0.0, y0 + max(0.0, y1 - y0) * (length - x0) / (x1 - x0))

    line = [at(0, points[:2]), *(p for p in points if 0 < p[0] < tokens), at(tokens, points[-2:])]
    area = sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(line))
    return round(area / rows[0]["window"] / 1e3, 1)


def run(
    cases: Sequence[Case], *, device: str, out: Path | None, show: Callable[[str], None] = print
) -> list[dict]:
    """Measure `cases`, print as it goes; write windows.csv and .json into `out`, if given."""
    results = []
    for case in cases:
        adapter = open_model(case, device)
        show(
            f"{case.model} {case.dtype}, arms {case.arms!r} x {case.prompts} prompts, "
            f"windows of {case.window}"
        )
        rows = []
        for row in measure(case, adapter, profiled=adapter.device.type == "cuda"):
            rows.append(row)
            show("  " + _line(row))
        seconds = extrapolate(rows)
        if seconds is not None:
            show(f"  {FULL_LENGTH:,} tokens, extrapolated: {seconds:.0f} s")
        results.append({"rows": rows, "extrapolated_seconds_131072_tokens": seconds})
        del adapter
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    if out is not None:
        _write(results, Path(out), device)
    return results


def _line(row: dict) -> str:
    text = (
        f"{row['length']:>7} read: {row['window_ms']:9.2f} ms a window, "
        f"{row['tokens_per_second']:9.1f} tok/s"
    )
    if "device_ms" in row:
        parts = ", ".join(f"{part} {row[f'{part}_ms']:.2f}" for part in (*PARTS, "rest"))
        text += (
            f" ({row['graphs']}; {row['eager_window_ms']:.2f} ms launched one by one); "
            f"device {row['device_ms']:.2f} ms ({parts}), {row['launches']} launches, "
            f"peak {row['peak_gib']} GiB"
        )
    return text


def _write(results: Sequence[dict], out: Path, device: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    rows = [
        {name: value for name, value in row.items() if name != "kernels"}
        for result in results
        for row in result["rows"]
    ]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with (out / "windows.csv").open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    document = {"environment": environment(torch.device(device)), "cases": list(results)}
    with (out / "windows.json").open("w", encoding="utf-8") as handle:
        json.dump(document, handle, indent=1)
        handle.write("\n")
