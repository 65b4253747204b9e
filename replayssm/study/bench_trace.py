"""Where the device's time goes: a profiler's trace of some steps, divided into named parts.

Owns how a kernel is given to a part: by its name, or by the labelled stretch of the host's time in
which it was launched. Must not know what the parts are for.
"""

import json
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_LAUNCHES = ("cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
REST = "rest"


def device_time(
    step: Callable[[], None],
    steps: int,
    *,
    labels: Sequence[str],
    kernels: Mapping[str, Sequence[str]],
) -> dict:
    """Device milliseconds, launches and busiest kernels of one of `steps` calls of `step`.

    Args:
        labels: names of `record_function` stretches that are parts.
        kernels: for other parts, pieces of the names of their kernels; they go before labels.

    Returns {"parts": {part: ms, .., "rest": ms}, "launches": n, "kernels": [(name, calls, ms), ..]}
    per step; kernels by time, the twenty busiest.
    """
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return divide(events, steps, labels=labels, kernels=kernels)


def divide(
    events: Sequence[Mapping],
    steps: int,
    *,
    labels: Sequence[str],
    kernels: Mapping[str, Sequence[str]],
) -> dict:
    """The same from the events of a trace (Chrome's format, microseconds)."""
    launched, work = {}, []
    stretches = []
    for event in events:
        category, correlation = event.get("cat"), event.get("args", {}).get("correlation")
        if category in _LAUNCHES:
            launched[correlation] = event["ts"]
        elif category in _DEVICE:
            work.append((event["name"], correlation, event["dur"]))
        elif category == "user_annotation" and event["name"] in labels:
            stretches.append((event["ts"], event["ts"] + event["dur"], event["name"]))
    stretches.sort()
    starts = [start for start, _, _ in stretches]

    def part_of(name: str, correlation: int | None) -> str:
        for part, pieces in kernels.items():
            if any(piece in name for piece in pieces):
                return part
        at = launched.get(correlation)
        index = -1 if at is None else bisect_right(starts, at) - 1
        if index >= 0 and at <= stretches[index][1]:
            return stretches[index][2]
        return REST

    parts = dict.fromkeys([*labels, *kernels, REST], 0.0)
    calls, times = Counter(), Counter()
    for name, correlation, duration in work:
        parts[part_of(name, correlation)] += duration
        calls[name] += 1
        times[name] += duration
    per_step = 1e-3 / steps
    return {
        "parts": {part: round(total * per_step, 3) for part, total in parts.items()},
        "launches": round(len(work) / steps),
        "kernels": [
            (name, round(calls[name] / steps, 1), round(total * per_step, 3))
            for name, total in times.most_common(20)
        ],
    }
