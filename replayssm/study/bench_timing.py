"""Times on a CUDA device: graph replays, cycles of steps, copy bandwidth, clocks.

Owns how a time is taken. Knows nothing of what it times. Cycles are timed on a CPU, too, by its
clock, so that what measures them can be tried anywhere.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

FEWEST_REPLAYS = 5
MOST_REPLAYS = 100
FEWEST_CYCLES = 3
_COPY_BYTES = 1 << 31
_CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds of one launch: the median over replays, and the quartiles."""

    us: float
    low: float
    high: float
    replays: int


def graph_time(
    launches: Sequence[Callable[[], object]],
    *,
    reset: Callable[[], object] = lambda: None,
    seconds: float = 0.1,
) -> Timing:
    """Times `launches`, captured into one CUDA graph, per launch.

    The time includes the gaps between launches in a graph, as serving does. Replays are repeated
    for about `seconds`, after one that is not counted, and timed one by one with events.

    Args:
        launches: each was called before, so that nothing compiles now; none may wait for the
            device.
        reset: called before every replay, not timed.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()

    def replay() -> float:
        reset()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / len(launches)

    replay()
    first = replay()
    fits = int(seconds / (1e-6 * first * len(launches)))
    times = [replay() for _ in range(min(max(fits, FEWEST_REPLAYS), MOST_REPLAYS))]
    low, median, high = statistics.quantiles(times, n=4)
    return Timing(us=median, low=low, high=high, replays=len(times))


def captured(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The replay of `call`, which runs once for that, as a CUDA graph; on a CPU, `call` itself."""
    if device.type != "cuda":
        return call
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def cycle_time(
    calls: Sequence[Callable[[], object]],
    *,
    device: torch.device,
    seconds: float,
    per: int | None = None,
) -> Timing:
    """Times `calls`, made one after the other, again and again for about `seconds`: the mean over a
    cycle, divided by `per` instead of their number if given; `replays` are cycles.

    One cycle before that is not counted. On a GPU the host runs ahead of it, as a server's does.
    """

    def mark() -> torch.cuda.Event | float:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def times(cycles: int) -> list[float]:
        marks = [mark()]
        for _ in range(cycles):
            for call in calls:
                call()
            marks.append(mark())
        if device.type != "cuda":
            return [1e6 * (end - start) / divisor for start, end in pairwise(marks)]
        marks[-1].synchronize()
        return [1e3 * start.elapsed_time(end) / divisor for start, end in pairwise(marks)]

    divisor = per or len(calls)
    fits = int(seconds / (1e-6 * times(1)[0] * divisor))
    counted = times(min(max(fits, FEWEST_CYCLES), MOST_REPLAYS))
    low, median, high = statistics.quantiles(counted, n=4)
    return Timing(us=median, low=low, high=high, replays=len(counted))


def copy_bandwidth() -> float:
    """GB/s (1e9 bytes, read plus written) of the fastest way to read and write memory once.

    The driver's own copy can be much slower than a kernel: a kernel that copies and one that works
    in place are tried, too.
    """
    free, _ = torch.cuda.mem_get_info()
    count = min(_COPY_BYTES, free // 4) // 4
    source = torch.rand(count, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    ways = (
        lambda: target.copy_(source),
        lambda: torch.mul(source, 1.0, out=target),
        lambda: target.mul_(1.0),
    )
    for way in ways:
        way()
    fastest = min(graph_time([way] * 4).us for way in ways)
    return 2 * source.nbytes / fastest / 1e3


def cache_bytes() -> int:
    """Bytes of the device's second-level cache."""
    return torch.cuda.get_device_properties(torch.device("cuda")).L2_cache_size


def clocks() -> dict[str, str] | None:
    """Clocks, temperature and power as nvidia-smi tells them now; None where it is missing."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    index = torch.cuda.current_device() if len(lines) > 1 else 0
    if index >= len(lines):
        return None
    return dict(zip(_CLOCKS, (cell.strip() for cell in lines[index].split(",")), strict=False))
