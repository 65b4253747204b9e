"""From task runs to tables and figures on disk, and the check that they still show the samples.

Owns file names; everything is redrawn from the stored samples, so being stale is a difference in
bytes. Imports neither torch nor transformers nor lm-eval.
"""

import json
from collections import defaultdict
from pathlib import Path

from replayssm.study.store import atomic_path
from replayssm.study.task_figures import accuracy_by_policy
from replayssm.study.task_results import TaskRun, compute
from replayssm.study.task_tables import TaskRecord, load_task_record, task_csv, task_markdown


def task_outputs(runs: list[TaskRun]) -> dict[Path, bytes]:
    """Path -> content of every table and figure of `runs` (complete, of one results folder)."""
    records = [(run, load_task_record(run)) for run in runs]
    files: dict[Path, bytes] = {}
    groups: dict[tuple[Path, str], list[TaskRecord]] = defaultdict(list)
    for run, record in records:
        groups[run.results, record.experiment].append(record)
    for (root, experiment), group in sorted(groups.items(), key=lambda item: str(item[0])):
        stem = root / "tables" / f"tasks-{experiment}"
        text = f"# {experiment}\n\n" + "\n".join(task_markdown(record) for record in group)
        files[stem.with_name(f"{stem.name}.md")] = text.encode()
        files[stem.with_name(f"{stem.name}.csv")] = task_csv(group).encode()
        models = [record.model for record in group]
        for record in group:
            name = record.model.removeprefix("builtin/").rstrip("/").split("/")[-1]
            if models.count(record.model) > 1:
                name += f"-{record.run_id}"
            for task in record.summary["tasks"]:
                for kind, content in accuracy_by_policy(record, task).items():
                    file = f"tasks-{experiment}-{name}-{task['task']}.{kind}"
                    files[root / "figures" / file] = content
    return files


def write_task_report(runs: list[TaskRun]) -> list[Path]:
    """Write all tables and figures of `runs`; returns their paths."""
    files = task_outputs(runs)
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)
    return list(files)


def check_task_report(runs: list[TaskRun]) -> list[str]:
    """What does not follow from the stored samples any more, one line each; writes nothing."""
    problems = []
    for run in runs:
        outcomes, summary = compute(run)
        expected = {
            run.path / "outcomes.csv": outcomes,
            run.folder.summary_path: json.dumps(summary, indent=1, ensure_ascii=False) + "\n",
        }
        for path, text in expected.items():
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                problems.append(f"{path} does not follow from the stored samples")
    for path, content in task_outputs(runs).items():
        if not path.exists():
            problems.append(f"{path} is missing")
        elif path.read_bytes() != content:
            problems.append(f"{path} is stale or was edited")
    return problems
