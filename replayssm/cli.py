"""The `replayssm` command: run, drift, status, report, policies, models; what judges and explains
drift runs is in `cli_study`, tasks are in `cli_tasks`, benchmarks in `cli_bench`, text in
`cli_generate`.

Owns argument names, what is printed, and exit codes. Imports are made inside the commands, so that
`--help`, `status`, `models` and `report` do not wait for torch.

Exit codes: 0 done; 1 measured, but a control failed or `report --check` found a stale file, so the
numbers must not be used, or a policy is outside the limits of `gate`; 2 bad input or environment
(one line on stderr, `--debug` shows the traceback).
"""

import argparse
import errno
import os
import sys
from pathlib import Path

from replayssm import cli_bench, cli_generate, cli_study, cli_tasks
from replayssm.models.errors import HookNotLiveError

_EPILOG = (
    "Exit codes: 0 done, 1 measured but not to be trusted (a control failed, a figure is stale) or "
    "outside the limits of gate or recommend, 2 bad input."
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = _parser().parse_args(argv)
    # Read when transformers is imported, which only some commands do.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        return arguments.command(arguments)
    except KeyboardInterrupt:
        print(
            "\nreplayssm: interrupted; the same command continues where it stopped", file=sys.stderr
        )
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except HookNotLiveError as error:
        if arguments.debug:
            raise
        print(f"replayssm: hook not live: {_one_line(error)}", file=sys.stderr)
        return 1
    except (ValueError, OSError, MemoryError) as error:
        if arguments.debug:
            raise
        print(f"replayssm: {_one_line(error)}", file=sys.stderr)
        return 2


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" ({error.filename})" if error.filename else ""
        return f"the disk is full{where}; nothing is half-written, the same command continues"
    return " ".join(str(error).split()) or type(error).__name__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replayssm",
        description="Which number format can a hybrid model's recurrent state be kept in, and what "
        "does it cost?",
        epilog=_EPILOG,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text, parents=[common], epilog=_EPILOG
        )
        sub.set_defaults(command=function)
        return sub

    run = command("run", _run, "Measure a configuration; continues or reuses what is there.")
    run.add_argument(
        "config", help="a YAML file, or the name of a packaged experiment (quick, kl_drift)"
    )
    run.add_argument("--models", type=_names, metavar="A,B", help="instead of the file's models")
    run.add_argument(
        "--policies", type=_names, metavar="A,B", help="instead of the file's policies"
    )
    run.add_argument("--tokens", type=int, help="tokens per prompt, instead of the file's")
    run.add_argument("--prompts", type=int, help="number of prompts, instead of the file's")
    _execution(run)

    drift = command("drift", _drift, "Measure the drift of policies on a model, without a file.")
    drift.add_argument("--model", required=True, type=_names, metavar="A[,B]", dest="models")
    drift.add_argument(
        "--policies", required=True, type=_names, metavar="A,B", help="see `replayssm policies`"
    )
    drift.add_argument("--tokens", type=int, help="tokens per prompt after the prefill")
    drift.add_argument("--prompts", type=int)
    drift.add_argument("--prefill", type=int, help="tokens read before the first measured one")
    drift.add_argument("--text", help="builtin/mixed (default), file:PATH, or generate")
    drift.add_argument("--ring-len", type=int, help="ring length L of policies that do not say @L")
    drift.add_argument(
        "--seeds", type=_integers, metavar="N,N", help="of stochastic rounding, one arm each"
    )
    drift.add_argument("--stride", type=int, help="score every n-th position")
    drift.add_argument("--dtype", help="of weights and activations: float32 (default) or bfloat16")
    drift.add_argument("--temperature", type=float, help="of --text generate; 0 is greedy")
    drift.add_argument(
        "--name", default="drift", help="experiment name: the folder the run goes to"
    )
    _execution(drift)

    cli_generate.add_commands(command, names=_names, integers=_integers)
    cli_tasks.add_commands(command, execution=_execution, names=_names)
    cli_bench.add_commands(command, names=_names, integers=_integers)
    cli_study.add_commands(command, execution=_execution, names=_names, measure=_measure)

    status = command("status", _status, "List runs and how far they are.")
    status.add_argument("runs", nargs="?", type=Path, default=Path("results/runs"), metavar="RUNS")

    report = command("report", _report, "Draw tables and figures from run folders; needs no model.")
    report.add_argument(
        "runs", type=Path, metavar="RUNS", help="a run, an experiment, or all of results/runs"
    )
    report.add_argument(
        "--out", type=Path, help="where tables/ and figures/ are (default: beside runs/)"
    )
    report.add_argument("--check", action="store_true", help="only check that they show the data")

    policies = command(
        "policies", _policies, "List named policies: cost, and what each rounds where."
    )
    policies.add_argument(
        "names", nargs="*", metavar="POLICY", help="only these (any policy of the grammar)"
    )
    policies.add_argument("--ring-len", type=int, default=16)
    policies.add_argument(
        "--device", default="cuda", help="cuda (default) or cpu: where the backend column is for"
    )

    command("models", _models, "List supported architectures and built-in models.")
    return parser


def _execution(parser: argparse.ArgumentParser) -> None:
    """Options that decide where and how fast, not what: none is part of a run's identity."""
    parser.add_argument(
        "--out", type=Path, default=Path("results"), help="results folder (default: results)"
    )
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument(
        "--backend",
        help="of the state update: auto (default: Triton kernels on a GPU, where there are some "
        "for the policy, else torch), triton, or reference (torch)",
    )
    parser.add_argument(
        "--device-map",
        metavar="auto",
        help="spread the model over all GPUs, by the package accelerate (auto, balanced, ...)",
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="allow code shipped with a model"
    )
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _integers(text: str) -> list[int]:
    return [int(part) for part in _names(text)]


# -- commands --------------------------------------------------------------------------------------
def _run(arguments: argparse.Namespace) -> int:
    from replayssm.study.config import load_spec

    keys = ("models", "policies", "tokens", "prompts")
    overrides = {
        key: getattr(arguments, key) for key in keys if getattr(arguments, key) is not None
    }
    return _measure(load_spec(arguments.config, overrides), arguments)


def _drift(arguments: argparse.Namespace) -> int:
    from replayssm.study.config import from_mapping

    keys = (
        "models",
        "policies",
        "tokens",
        "prompts",
        "prefill",
        "text",
        "ring_len",
        "seeds",
        "stride",
        "dtype",
    )
    values = {key: getattr(arguments, key) for key in keys if getattr(arguments, key) is not None}
    if arguments.temperature is not None:
        values["generate"] = {"temperature": arguments.temperature}
    return _measure(from_mapping(values, name=arguments.name, where="drift"), arguments)


def _measure(spec, arguments: argparse.Namespace) -> int:
    """Run `spec`, print each run's summary as it is ready, draw the report."""
    import torch

    from replayssm.presets import presets_of
    from replayssm.study import report, tables
    from replayssm.study.runner import run_study
    from replayssm.study.store import load_run
    from replayssm.study.subject import ModelSubject

    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ValueError(f"--threads must be at least 1, is {arguments.threads}")
        torch.set_num_threads(arguments.threads)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for line in spec.warnings():
        print(f"replayssm: warning: {line}", file=sys.stderr)
    for policy in spec.policies:
        if engines := ", ".join(presets_of(policy.label)):
            print(
                f"replayssm: note: {policy.label} is nearest to what {engines} do today; what "
                "differs: replayssm policies NAME",
                file=sys.stderr,
            )

    def open_subject(model: str) -> ModelSubject:
        subject = ModelSubject(
            model,
            dtype=spec.dtype,
            device=device,
            trust_remote_code=arguments.trust_remote_code,
            device_map=arguments.device_map,
            backend=arguments.backend or spec.backend,
        )
        print(
            f"{model}: {spec.prompts} prompts x {spec.tokens:,} tokens, {len(spec.arms())} arms "
            f"beside the reference, on {device}, backend: {subject.backends(spec)}",
            file=sys.stderr,
        )
        return subject

    records, nonfinite, failures = [], [], []
    progress = not arguments.no_progress
    for result in run_study(spec, out=arguments.out, open_subject=open_subject, progress=progress):
        record = load_run(result.folder)
        records.append(record)
        nonfinite += result.nonfinite
        failures += result.failures
        print(tables.summary_markdown(record))
        print(f"{'Reused' if result.reused else 'Measured'}: {result.folder.path}\n")
    written = report.write_report(records, arguments.out)
    print("\n".join(f"Wrote {path}" for path in written if path.suffix in (".md", ".png")))
    for line in [*nonfinite, *failures]:
        print(f"replayssm: {line}", file=sys.stderr)
    return 2 if nonfinite else 1 if failures else 0


def _status(arguments: argparse.Namespace) -> int:
    from replayssm.study.listings import status_table

    print(status_table(arguments.runs))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from replayssm.study import report

    records = report.load_records(arguments.runs)
    out = arguments.out or report.default_output(arguments.runs)
    if arguments.check:
        problems = report.check_report(records, out)
        for problem in problems:
            print(f"replayssm: {problem}", file=sys.stderr)
        if not problems:
            print(f"tables and figures under {out} show the data of {len(records)} runs")
        return 1 if problems else 0
    for path in report.write_report(records, out):
        print(f"Wrote {path}")
    return 0


def _policies(arguments: argparse.Namespace) -> int:
    from replayssm.study.listings import policies_text

    print(policies_text(arguments.names, ring_len=arguments.ring_len, device=arguments.device))
    return 0


def _models(arguments: argparse.Namespace) -> int:
    from replayssm.study.listings import models_text

    print(models_text())
    return 0
