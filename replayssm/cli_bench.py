"""The commands that take times: bench kernels.

Owns their argument names and what they print; `cli` owns errors and exit codes. Imports are made
inside the commands, so that `--help` does not wait for torch, and `--redraw` needs no GPU.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def add_commands(command: Callable, *, names: Callable, integers: Callable) -> None:
    """Add the commands. `command(name, function, text)` makes a parser; `names` and `integers` read
    "A,B".
    """
    bench = command("bench", None, "Measure speed: `bench kernels`.")
    benches = bench.add_subparsers(required=True, metavar="WHAT")
    text = (
        "Time one decode step under each policy against conventional kernels, on the GPU here; "
        "results are checked against float64 before they are timed (exit code 1: one was wrong)."
    )
    kernels = benches.add_parser("kernels", help=text, description=text)
    kernels.set_defaults(command=_kernels)
    kernels.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks"
    )
    kernels.add_argument("--layers", type=names, metavar="A,B", help="default: all five")
    kernels.add_argument("--batch", type=integers, metavar="N,N", dest="batches")
    kernels.add_argument("--ring-len", type=integers, metavar="L,L", dest="ring_lens")
    kernels.add_argument(
        "--policies", type=names, metavar="A,B", help="any of the grammar, see `replayssm policies`"
    )
    kernels.add_argument(
        "--states", type=names, metavar="A,B", help="conventional states: fp32, fp16, bf16"
    )
    kernels.add_argument("--window", type=int, metavar="T", help="tokens of the window (8)")
    kernels.add_argument("--seconds", type=float, help="of replays for one time")
    kernels.add_argument(
        "--quick", action="store_true", help="batches 1 and 256, FP32 states, shorter times"
    )
    kernels.add_argument(
        "--out", type=Path, help="folder of the records (default: results/bench/kernels)"
    )
    kernels.add_argument(
        "--redraw",
        action="store_true",
        help="only draw table and figures from the records in --out; needs no GPU",
    )


def _kernels(arguments: argparse.Namespace) -> int:
    from replayssm.study import bench_records

    out = arguments.out or bench_records.DEFAULT_OUT
    if arguments.redraw:
        record = bench_records.load_record(out)
    else:
        record = _measured(arguments)
        bench_records.write_record(record, out)
    for line in record.missing:
        print(f"replayssm: warning: {line}", file=sys.stderr)
    for path in [out / bench_records.RECORD_FILE, *bench_records.write_report(record, out)]:
        print(f"{'Read' if arguments.redraw and path.suffix == '.json' else 'Wrote'} {path}")
    for row in record.bad:
        print(f"replayssm: {bench_records.row_line(row)}", file=sys.stderr)
    return 1 if record.bad else 0


def _measured(arguments: argparse.Namespace):
    from replayssm.study.bench_kernels import KernelBench, run_kernel_bench
    from replayssm.study.bench_records import row_line

    keys = ("layers", "batches", "ring_lens", "policies", "states", "window", "seconds")
    given = {key: getattr(arguments, key) for key in keys if getattr(arguments, key) is not None}
    bench = KernelBench.quick(**given) if arguments.quick else KernelBench(**given)
    return run_kernel_bench(bench, emit=lambda row: print(row_line(row), flush=True))
