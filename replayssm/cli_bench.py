"""The commands that take times: bench kernels, bench decode, bench speculate, bench study.

Owns their argument names and what they print; `cli` owns errors and exit codes. Imports are made
inside the commands, so that `--help` does not wait for torch, and `--redraw` needs no GPU.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def add_commands(command: Callable, *, names: Callable, integers: Callable) -> None:
    """Add the commands. `command(name, function, text)` makes a parser; `names` and `integers` read
    "A,B".
    """
    bench = command(
        "bench", None, "Measure speed: of kernels, whole steps, verifications, studies."
    )
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
    kernels.add_argument("--layers", type=names, metavar="A,B", help="default: all")
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
    for kind, text in _STEPS.items():
        _add_steps(benches, kind, text, names=names, integers=integers)
    _add_study(benches, names=names, integers=integers)


_STEPS = {
    "decode": "Time whole decode steps of a model under each policy against a conventional state "
    "in the same engine, at several batch sizes.",
    "speculate": "Time verifications of drafts by a whole model under each policy against a "
    "conventional state with a snapshot for each draft.",
}


def _add_steps(benches, kind: str, text: str, *, names: Callable, integers: Callable) -> None:
    text += (
        " Outputs are checked against float64 before they are timed. Exit codes: 0 all timed, 1 "
        "one was wrong or did not run, 2 bad input."
    )
    bench = benches.add_parser(kind, help=text, description=text)
    bench.set_defaults(command=_steps, kind=kind)
    bench.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks"
    )
    bench.add_argument(
        "--models",
        type=names,
        metavar="A,B",
        help="random/NAME (published sizes, random weights), built-in models, folders or hub ids "
        "(default: random/qwen3.5-4b,random/nemotron-3-nano-4b)",
    )
    bench.add_argument(
        "--batches", type=integers, metavar="N,N", help="sequences of a pass (1,32,128,256,512)"
    )
    bench.add_argument(
        "--contexts", type=integers, metavar="N,N", help="tokens a sequence holds (512)"
    )
    if kind == "speculate":
        bench.add_argument("--drafts", type=integers, metavar="N,N", help="1 to 16 (1,2,4,8,16)")
    bench.add_argument(
        "--policies",
        type=names,
        metavar="A,B",
        help="without @L; see `replayssm policies` (fp32,fp16-sr,fp32+nvfp4,fp16-sr+nvfp4)",
    )
    bench.add_argument("--ring-len", type=int, metavar="L", help="of all policies (16)")
    bench.add_argument(
        "--states",
        type=names,
        metavar="A,B",
        help="conventional states: fp32 (default), fp16, bf16",
    )
    bench.add_argument("--dtype", help="of weights and activations (bfloat16)")
    bench.add_argument("--seconds", type=float, help="of cycles for one time (0.5)")
    bench.add_argument("--backend", help="of the state update: auto (default), triton, reference")
    bench.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    bench.add_argument(
        "--out", type=Path, help=f"folder of the records (default: results/bench/{kind})"
    )
    bench.add_argument(
        "--redraw",
        action="store_true",
        help="only draw tables and figures from the record in --out; needs no model",
    )


def _steps(arguments: argparse.Namespace) -> int:
    from replayssm.study import bench_step_records as records

    out = arguments.out or records.default_out(arguments.kind)
    if arguments.redraw:
        record = records.load_record(arguments.kind, out)
    else:
        record = _measured_steps(arguments, out)
        print(f"Wrote {records.write_record(record, out)}")
    for path in records.write_report(record, out):
        print(f"Wrote {path}")
    for row in record.bad:
        print(f"replayssm: {records.row_line(row)}", file=sys.stderr)
    return 1 if record.bad else 0


def _measured_steps(arguments: argparse.Namespace, out: Path):
    import torch

    from replayssm.study import bench_step_records
    from replayssm.study.bench_step_settings import StepBench
    from replayssm.study.bench_steps import run_step_bench

    keys = ("kind", "models", "batches", "contexts", "drafts", "policies", "ring_len", "states")
    given = {key: getattr(arguments, key, None) for key in (*keys, "dtype", "seconds", "backend")}
    bench = StepBench(**{key: value for key, value in given.items() if value is not None})
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return run_step_bench(bench, device=device, emit=_keep(bench_step_records, out))


def _add_study(benches, *, names: Callable, integers: Callable) -> None:
    text = (
        "Time windows of a lockstep study at several lengths of text, by part, and extrapolate to "
        "131,072 tokens. random/qwen3.5-4b is that model's size with random weights."
    )
    study = benches.add_parser("study", help=text, description=text)
    study.set_defaults(command=_study)
    study.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks"
    )
    study.add_argument("--models", type=names, metavar="A,B", help="default: both built-in models")
    study.add_argument("--arms", help="eight (policies beside FP32; default) or study (29 arms)")
    study.add_argument("--prompts", type=int)
    study.add_argument("--windows", type=integers, metavar="T,T", help="tokens read at once (16)")
    study.add_argument("--dtype", help="of weights and activations (float32)")
    study.add_argument("--lengths", type=integers, metavar="N,N", help="tokens already read")
    study.add_argument("--repeats", type=int, help="windows timed at each length (8)")
    study.add_argument("--graphs", choices=("auto", "on", "off"), help="CUDA graphs")
    study.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    study.add_argument(
        "--out",
        type=Path,
        default=Path("results/bench/study"),
        help="folder of windows.csv and windows.json (default: results/bench/study)",
    )


def _study(arguments: argparse.Namespace) -> int:
    import torch

    from replayssm.study.bench_study import Case, run

    named = {
        "arms": arguments.arms,
        "prompts": arguments.prompts,
        "dtype": arguments.dtype,
        "lengths": arguments.lengths and tuple(arguments.lengths),
        "windows": arguments.repeats,
        "graphs": arguments.graphs,
    }
    given = {key: value for key, value in named.items() if value is not None}
    cases = [
        Case(model=model, window=window, **given)
        for model in arguments.models or ("builtin/gdn", "builtin/mamba2")
        for window in arguments.windows or (16,)
    ]
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    run(cases, device=device, out=arguments.out)
    for name in ("windows.csv", "windows.json"):
        print(f"Wrote {arguments.out / name}")
    return 0


def _kernels(arguments: argparse.Namespace) -> int:
    from replayssm.study import bench_records

    out = arguments.out or bench_records.DEFAULT_OUT
    if arguments.redraw:
        record = bench_records.load_record(out)
    else:
        record = _measured(arguments, out)
        bench_records.write_record(record, out)
    for line in record.missing:
        print(f"replayssm: warning: {line}", file=sys.stderr)
    for path in [out / bench_records.RECORD_FILE, *bench_records.write_report(record, out)]:
        print(f"{'Read' if arguments.redraw and path.suffix == '.json' else 'Wrote'} {path}")
    for row in record.bad:
        print(f"replayssm: {bench_records.row_line(row)}", file=sys.stderr)
    return 1 if record.bad else 0


def _measured(arguments: argparse.Namespace, out: Path):
    from replayssm.study import bench_records
    from replayssm.study.bench_kernels import KernelBench, run_kernel_bench

    keys = ("layers", "batches", "ring_lens", "policies", "states", "window", "seconds")
    given = {key: getattr(arguments, key) for key in keys if getattr(arguments, key) is not None}
    bench = KernelBench.quick(**given) if arguments.quick else KernelBench(**given)
    return run_kernel_bench(bench, emit=_keep(bench_records, out))


def _keep(records: ModuleType, out: Path) -> Callable[[Any], None]:
    """Prints the last row of a record so far, and writes the record: a run that dies leaves what it
    has measured. `records` is the module that owns records of that kind."""

    def keep(record: Any) -> None:
        print(records.row_line(record.rows[-1]), flush=True)
        records.write_record(record, out)

    return keep
