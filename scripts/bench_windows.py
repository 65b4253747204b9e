"""How much faster than token by token is reading a text in windows of 16, with nine rows?

Both ways give the same numbers (the tests say so); this measures what the windows are for. Prints a
table and, with --out FILE.csv or FILE.json, writes it.

    python scripts/bench_windows.py --out results/bench/windows.csv
    python scripts/bench_windows.py --device cuda --tokens 1024 --out results/bench/windows_gpu.csv
"""

import argparse
import csv
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from replayssm.engine.lockstep import Arm, Lockstep
from replayssm.models import load
from replayssm.policy import parse_policy

ROWS = (
    "fp32",
    "fp16",
    "fp16-sr",
    "fp8",
    "fp8-sr",
    "nvfp4",
    "fp32+nvfp4",
    "fp16-sr+nvfp4",
    "fp8-sr+nvfp4",
)
PROMPT = 64
WARM_UP = 64  # tokens that are not timed: on a GPU, kernels are compiled and graphs captured


def arms() -> list[Arm]:
    first, *rest = ROWS
    reference = Arm(label=first, policy=parse_policy(first), kind="reference")
    return [reference, *(Arm(label=name, policy=parse_policy(name)) for name in rest)]


def seconds_per_token(adapter, window: int, tokens: int) -> float:
    """Reads `tokens` tokens with nine rows in windows of `window`; what comes before is not
    counted.
    """
    text = torch.randint(0, adapter.vocab_size, (1, PROMPT + WARM_UP + tokens))
    engine = Lockstep(adapter, arms(), window=window)
    engine.start(text[:, :PROMPT], tokens=WARM_UP + tokens)
    for _ in engine.read(text[:, PROMPT : PROMPT + WARM_UP]):
        pass
    synchronize(adapter.device)
    start = time.perf_counter()
    for _ in engine.read(text[:, PROMPT + WARM_UP :]):
        pass
    synchronize(adapter.device)
    return (time.perf_counter() - start) / tokens


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(name: str, *, window: int, tokens: int, repeats: int, device: str = "cpu") -> dict:
    """One row of the table; ways alternate, so that a busy moment hits both."""
    adapter = load(name, device=device).adapter
    seconds_per_token(adapter, window, 2 * window)  # allocator and thread pool
    times: dict[int, list[float]] = {window: [], 1: []}
    for _ in range(repeats):
        for way in times:
            times[way].append(seconds_per_token(adapter, way, tokens))
    windows, single = (statistics.median(times[way]) for way in (window, 1))
    return {
        "model": name,
        "rows": len(ROWS),
        "window": window,
        "tokens": tokens,
        "repeats": repeats,
        "windows_ms_per_token": round(1e3 * windows, 3),
        "token_by_token_ms_per_token": round(1e3 * single, 3),
        "speedup": round(single / windows, 2),
        "threads": torch.get_num_threads(),
        "processor": processor(adapter.device),
        "torch": torch.__version__,
    }


def processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as handle:
        if path.suffix == ".json":
            json.dump(rows, handle, indent=1)
            handle.write("\n")
        else:
            writer = csv.DictWriter(handle, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["builtin/gdn", "builtin/mamba2"])
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=0, help="0: what torch chooses")
    parser.add_argument("--out", type=Path, help="FILE.csv or FILE.json")
    arguments = parser.parse_args()
    if arguments.out and arguments.out.suffix not in (".csv", ".json"):
        parser.error(f"--out {arguments.out}: must end in .csv or .json")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rows = []
    print(f"{'model':24} {'windows':>12} {'token by token':>16} {'speedup':>9}   (ms a token)")
    for name in arguments.models:
        row = measure(
            name,
            window=arguments.window,
            tokens=arguments.tokens,
            repeats=arguments.repeats,
            device=arguments.device,
        )
        rows.append(row)
        print(
            f"{name:24} {row['windows_ms_per_token']:12.2f} "
            f"{row['token_by_token_ms_per_token']:16.2f} {row['speedup']:8.1f}x",
            flush=True,
        )
    if arguments.out:
        write(arguments.out, rows)


if __name__ == "__main__":
    main()
