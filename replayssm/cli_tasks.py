"""The commands about tasks: eval, rescore, lm-eval.

Owns their argument names and what they print; `cli` owns errors and exit codes. Imports are made
inside the commands, so that `--help` does not wait for torch, and `rescore` needs no model.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def add_commands(command: Callable, *, execution: Callable, names: Callable) -> None:
    """Add the commands. `command(name, function, text)` makes a parser, `execution` adds the
    options that decide where and how fast, `names` reads "A,B".
    """
    run = command("eval", _eval, "Score policies on tasks; resumes, and reuses stored answers.")
    run.add_argument("config", help="a YAML file, or the name of a packaged experiment (tasks)")
    run.add_argument("--models", type=names, metavar="A,B", help="instead of the file's models")
    run.add_argument("--policies", type=names, metavar="A,B", help="instead of the file's")
    run.add_argument("--tasks", type=names, metavar="A,B", help="instead of the file's tasks")
    run.add_argument("--limit", type=int, help="only the first so many questions of each task")
    run.add_argument("--samples", type=int, help="answers a question gets")
    run.add_argument("--batch-size", type=int, help="sequences decoded at once")
    run.add_argument("--data-dir", help="folder with task data, instead of the hub")
    run.add_argument("--gpqa-archive", metavar="ZIP", help="the official archive of GPQA")
    run.add_argument(
        "--gpqa-password", help="of the archive (or set REPLAYSSM_GPQA_PASSWORD); never stored"
    )
    execution(run)

    again = command("rescore", _rescore, "Score stored answers again, and redraw; needs no model.")
    again.add_argument(
        "runs", type=Path, metavar="RUNS", help="a run, an experiment, or all of results/tasks"
    )
    again.add_argument(
        "--check", action="store_true", help="only check that everything follows from the answers"
    )

    harness = command(
        "lm-eval",
        _lm_eval,
        "Run lm-eval's own command line with the model `replayssm` known to it, also where torch "
        "was told to load no extensions. Unless --include_path is given, the tasks of this package "
        "are included.",
    )
    harness.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="run ...", help="arguments of lm-eval"
    )


def _eval(arguments: argparse.Namespace) -> int:
    from replayssm.study.task_spec import load_task_spec

    keys = ("models", "policies", "tasks", "limit", "samples", "batch_size")
    given = {key: getattr(arguments, key) for key in keys if getattr(arguments, key) is not None}
    spec = load_task_spec(arguments.config, given)

    import torch

    from replayssm import models
    from replayssm.models.session import describe_backends
    from replayssm.study.task_report import write_task_report
    from replayssm.study.task_tables import load_task_record, task_markdown
    from replayssm.study.tasks import run_tasks

    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ValueError(f"--threads must be at least 1, is {arguments.threads}")
        torch.set_num_threads(arguments.threads)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    backend = arguments.backend or spec.backend

    def open_model(name: str) -> models.LoadedModel:
        tasks = ", ".join(task.name for task in spec.tasks)
        loaded = models.load(
            name,
            dtype=spec.dtype,
            device=device,
            trust_remote_code=arguments.trust_remote_code,
            device_map=arguments.device_map,
        )
        policies = {arm.label: arm.policy for arm in spec.arms()}
        told = describe_backends(loaded.adapter, policies, backend=backend)
        print(
            f"{name}: {tasks} under {len(policies)} arms, on {device}, backend: {told}",
            file=sys.stderr,
        )
        return loaded

    results = run_tasks(
        spec,
        out=arguments.out,
        backend=backend,
        open_model=open_model,
        options={
            "data_dir": arguments.data_dir,
            "gpqa_archive": arguments.gpqa_archive,
            "gpqa_password": arguments.gpqa_password,
        },
        progress=not arguments.no_progress,
    )
    runs = []
    for result in results:
        runs.append(result.run)
        print(task_markdown(load_task_record(result.run)))
        rate = f"{result.tokens:,} tokens in {result.seconds:,.0f} s" if result.generated else ""
        if result.generated and result.seconds >= 1:
            rate += f" ({result.tokens / result.seconds:,.0f} tok/s)"
        print(f"{result.generated} answers generated{rate and ', ' + rate}: {result.run.path}\n")
        for task in result.summary["tasks"]:
            for line in task["warnings"]:
                print(f"replayssm: warning: {task['task']}: {line}", file=sys.stderr)
    for path in write_task_report(runs):
        if path.suffix in (".md", ".png"):
            print(f"Wrote {path}")
    return 0


def _rescore(arguments: argparse.Namespace) -> int:
    from replayssm.study.task_report import check_task_report, write_task_report
    from replayssm.study.task_results import find_task_runs, rescore

    runs = [
        run for run in find_task_runs(arguments.runs) if run.folder.status()["status"] == "complete"
    ]
    if not runs:
        raise ValueError(f"no complete task run under {arguments.runs}")
    if arguments.check:
        problems = check_task_report(runs)
        for problem in problems:
            print(f"replayssm: {problem}", file=sys.stderr)
        if not problems:
            print(f"outcomes, tables and figures of {len(runs)} runs follow from their answers")
        return 1 if problems else 0
    for run in runs:
        rescore(run)
        print(f"Scored {run.path}")
    for path in write_task_report(runs):
        print(f"Wrote {path}")
    return 0


def _lm_eval(arguments: argparse.Namespace) -> int:
    from replayssm.study.lm_eval_model import run_command_line
    from replayssm.study.task_data import evals_folder

    given = list(arguments.arguments)
    own = not any(argument.startswith("--include_path") for argument in given)
    if given[:1] == ["run"] and len(given) > 1 and own:
        given += ["--include_path", str(evals_folder())]
    run_command_line(given)
    return 0
