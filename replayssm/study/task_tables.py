"""Tables of task runs: what a person reads about accuracies, and the CSV a program reads.

Owns wording, rounding and order. Pure functions of a run's specification and summary; computes no
statistics and imports neither torch nor transformers.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from replayssm.study.store import read_json
from replayssm.study.tables import markdown_table, number, percent
from replayssm.study.task_results import TaskRun

COLUMNS = (
    "policy", "accuracy", "interval", "difference", "interval of it", "lost / won", "p", "p (Holm)",
    "detectable", "verdict", "length", "invalid", "cut", "unfinished", "loop",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """A complete run as tables and figures read it."""

    run_id: str
    experiment: str
    model: str
    document: dict
    provenance: dict
    summary: dict


def load_task_record(run: TaskRun) -> TaskRecord:
    """Read a complete run; ValueError if it is not complete."""
    status = run.folder.status()["status"]
    if status != "complete":
        raise ValueError(f"{run.path} is not complete ({status}); run it again to finish it")
    document = run.document()
    return TaskRecord(
        run_id=run.path.name,
        experiment=document["identity"]["experiment"],
        model=document["identity"]["model"],
        document=document,
        provenance=read_json(run.folder.provenance_path),
        summary=read_json(run.folder.summary_path),
    )


def points(value: float | None) -> str:
    """A difference of accuracies in percentage points, with its sign."""
    return "–" if value is None else f"{100 * value:+.2f}"


def task_markdown(record: TaskRecord) -> str:
    """One run: for each task the policies against FP32, how answers were found, and warnings."""
    parts = [f"## {record.model}"]
    if record.document["display"]["question"]:
        parts.append(record.document["display"]["question"])
    for task in record.summary["tasks"]:
        parts.append(_headline(task))
        parts.append(markdown_table(COLUMNS, [_cells(arm) for arm in task["arms"]]))
        if task["arms"][0]["groups"]:
            parts.append(_group_table(task))
        parts.append(_how_table(task))
        parts.append("\n".join(_footer(task)))
    parts.append(
        f"- run {record.run_id}, {record.provenance['environments'][-1]['summary']}, "
        f"{100 * record.summary['confidence']:.0f} % intervals."
    )
    return "\n\n".join(parts) + "\n"


def _headline(task: dict) -> str:
    arm = task["arms"][0]
    times = "" if arm["samples"] == 1 else f" × {arm['samples']} samples"
    return (
        f"### {task['task']}: {arm['questions']:,} questions{times}, "
        f"at most {task['max_new_tokens']:,} new tokens"
    )


def _cells(arm: dict) -> list[str]:
    total = sum(arm["outcomes"].values())
    counts = arm["outcomes"]
    low, high = percent(arm["accuracy_low"]), percent(arm["accuracy_high"])
    cells = [arm["label"], percent(arm["accuracy"]), f"[{low}, {high}]"]
    if arm["kind"] == "reference":
        cells += ["–"] * 7 + ["1"]
    else:
        cells += [
            points(arm["difference"]),
            f"[{points(arm['difference_low'])}, {points(arm['difference_high'])}]",
            f"{arm['lost']} / {arm['won']}",
            number(arm["p"]),
            number(arm.get("p_holm")),
            f"{100 * arm['minimum_detectable']:.1f}",
            arm["verdict"],
            number(arm["length_ratio"]),
        ]
    cells.append(str(counts["invalid"]))
    cells.append(f"{counts['truncated']} ({percent(arm['truncated_rate'])})")
    cells += [str(counts["unfinished_reasoning"]), str(counts["loop"])]
    assert total == arm["questions"] * arm["samples"]
    return cells


def _group_table(task: dict) -> str:
    groups = list(task["arms"][0]["groups"])
    rows = [
        [arm["label"], *(percent(arm["groups"][group]) for group in groups)] for arm in task["arms"]
    ]
    return "Accuracy by group:\n\n" + markdown_table(["policy", *groups], rows)


def _how_table(task: dict) -> str:
    ways = sorted({way for arm in task["arms"] for way in arm["how"]})
    filters = sorted({name for arm in task["arms"] for name in arm["filters"]})
    header = ["policy", *(way.replace("_", " ") for way in ways), *filters]
    rows = [
        [
            arm["label"],
            *(str(arm["how"].get(way, 0)) for way in ways),
            *(percent(arm["filters"].get(name)) for name in filters),
        ]
        for arm in task["arms"]
    ]
    text = "How answers were found (counts)"
    if filters:
        text += ", and lm-eval's own scores by filter"
    return f"{text}:\n\n{markdown_table(header, rows)}"


def _footer(task: dict) -> list[str]:
    lines = [f"- WARNING: {line}." for line in task["warnings"]]
    margin = f"{100 * task['margin']:g}"
    lines.append(
        "- difference: percentage points against FP32, over the same questions; lost / won: right "
        "answers that became wrong, wrong ones that became right; detectable: the smallest true "
        "difference that this set finds with 80 % power."
    )
    lines.append(
        f"- not worse: the interval excludes a loss of {margin} points or more; worse: it excludes "
        "no loss; undecided: it excludes neither. The control is FP32 with another ring length: "
        "what it flips, rounding alone flips."
    )
    lines.append(
        "- length: new tokens relative to FP32; invalid: no answer could be read; cut: ended by "
        "the cap without an answer (in brackets: all that the cap ended); all of these count as "
        "wrong."
    )
    if task["gold_letters"]:
        counts = ", ".join(f"{letter} {n}" for letter, n in task["gold_letters"].items())
        lines.append(f"- right letters: {counts}.")
    return lines


_NUMBERS = (
    "questions", "samples", "accuracy", "accuracy_low", "accuracy_high", "pass_at_k", "difference",
    "difference_low", "difference_high", "lost", "won", "discordance", "p", "p_holm", "test",
    "minimum_detectable", "verdict", "length_ratio", "length_ratio_low", "length_ratio_high",
    "truncated_rate", "loop_rate", "answers_in_unfinished_reasoning", "new_tokens_mean",
)  # fmt: skip


def task_csv(records: Sequence[TaskRecord]) -> str:
    """One row per run, task and arm, with every statistic and the counts of outcomes."""
    outcomes = list(records[0].summary["tasks"][0]["arms"][0]["outcomes"])
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    header = ["model", "run_id", "task", "max_new_tokens", "margin", "label", "kind", *_NUMBERS]
    writer.writerow([*header, *outcomes])
    for record in records:
        for task in record.summary["tasks"]:
            about = [record.model, record.run_id, task["task"], task["max_new_tokens"]]
            for arm in task["arms"]:
                row = [*about, task["margin"], arm["label"], arm["kind"]]
                row += [arm.get(name) for name in _NUMBERS]
                row += [arm["outcomes"][name] for name in outcomes]
                writer.writerow(["" if cell is None else cell for cell in row])
    return out.getvalue()
