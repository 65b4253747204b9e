"""From stored samples to numbers: outcomes, accuracies, comparisons, warnings.

Owns what a task run's folder holds beside the samples, scoring, and the summary that tables and
figures show. Runs no model and imports neither torch, transformers nor lm-eval, so stored answers
can be scored again anywhere.

    results/tasks/<experiment>/<run id>/
      evaluation.json   what was asked; its hash is the run id
      questions.jsonl   per task and question: digest, gold answer, group; never the text
      provenance.json   which code, packages and device answered
      status.json       started | complete | failed
      outcomes.csv      one row a sample: outcome, extracted answer, how it was found
      summary.json      everything that tables and figures show
    results/samples/    the answers themselves, shared by runs (see `samples`)
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from replayssm.study import compare
from replayssm.study.answers import OUTCOMES, Judgement, judge
from replayssm.study.samples import Sample, read_samples
from replayssm.study.store import RunFolder, atomic_path, read_json, write_json

# History of what the numbers mean. Raise it when a stored answer would be scored differently.
TASK_METRIC_VERSION = 1
_SPEC = "evaluation.json"  # not a drift run's name: each finds its own under one results folder
LARGEST_LETTER_SHARE = 0.6
_ENOUGH_LETTERS = 20  # questions below which a letter's share says nothing


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is known of a question without its text.

    question: digest; document: its place in the task; gold: right answer; group: None, or what
    results are also listed by.
    """

    question: str
    document: int
    gold: str
    group: str | None = None


class TaskRun:
    """One run's folder. Creating the object touches nothing."""

    def __init__(self, path: Path):
        self.folder = RunFolder(path)
        self.path = self.folder.path

    @property
    def results(self) -> Path:
        """The results root: tasks/<experiment>/<run id> lies below it."""
        return self.path.resolve().parents[2]

    @property
    def spec_path(self) -> Path:
        return self.path / _SPEC

    @property
    def questions_path(self) -> Path:
        return self.path / "questions.jsonl"

    def begin(self, document: dict, questions: dict[str, Sequence[Question]]) -> None:
        """Write what is asked, or check that the folder was made for it."""
        if self.spec_path.exists():
            found = read_json(self.spec_path)
            if found["identity"] != json.loads(json.dumps(document["identity"])):
                raise ValueError(f"{self.path} holds another specification than its name says")
        lines = [
            json.dumps({"task": task} | asdict(question)) + "\n"
            for task, asked in questions.items()
            for question in asked
        ]
        with atomic_path(self.questions_path) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8")
        write_json(self.spec_path, document)

    def document(self) -> dict:
        """evaluation.json; ValueError if a version wrote it whose numbers mean other things."""
        document = read_json(self.spec_path)
        if document.get("task_metric_version") != TASK_METRIC_VERSION:
            raise ValueError(
                f"{self.path} was written with task metric version "
                f"{document.get('task_metric_version')}, this is {TASK_METRIC_VERSION}"
            )
        return document

    def questions(self) -> dict[str, list[Question]]:
        """The questions of every task, in the order of the task."""
        asked: dict[str, list[Question]] = {}
        for line in self.questions_path.read_text(encoding="utf-8").splitlines():
            values = json.loads(line)
            asked.setdefault(values.pop("task"), []).append(Question(**values))
        return asked


def find_task_runs(where: Path) -> list[TaskRun]:
    """All task runs at or under `where`, sorted; ValueError if there is no such place."""
    if not where.is_dir():
        raise ValueError(f"no results folder at {where}")
    specs = [where / _SPEC] if (where / _SPEC).exists() else where.rglob(_SPEC)
    return [TaskRun(path.parent) for path in sorted(specs)]


def check_gold_letters(task: str, questions: Sequence[Question]) -> None:
    """ValueError if one letter is right so often that choosing it would pass for knowledge."""
    counts = Counter(question.gold for question in questions)
    letter, most = counts.most_common(1)[0]
    if len(questions) >= _ENOUGH_LETTERS and most > LARGEST_LETTER_SHARE * len(questions):
        raise ValueError(
            f"{task}: {letter} is the right letter of {most} of {len(questions)} questions; the "
            "choices are not shuffled, and a preference for a letter would count as knowledge"
        )


# -- scoring ---------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Scored:
    """All samples of one task under one arm: [Q][K], in the order of the questions."""

    samples: list[list[Sample]]
    judged: list[list[Judgement]]

    def right(self) -> np.ndarray:
        """[Q, K] of 0 and 1."""
        return np.array([[int(j.outcome == "right") for j in row] for row in self.judged])

    def tokens(self) -> np.ndarray:
        """[Q, K] new tokens, reasoning included."""
        return np.array([[s.new_tokens for s in row] for row in self.samples])

    def flat(self) -> Iterator[tuple[Sample, Judgement]]:
        for samples, judged in zip(self.samples, self.judged, strict=True):
            yield from zip(samples, judged, strict=True)


def score(kind: str, questions: Sequence[Question], samples: Sequence[Sample], k: int) -> Scored:
    """Judge the first `k` samples of every question; ValueError if one is not there."""
    found = {(sample.question, sample.sample): sample for sample in samples}
    rows, judged = [], []
    for question in questions:
        keys = [(question.question, number) for number in range(k)]
        missing = next((key for key in keys if key not in found), None)
        if missing is not None:
            raise ValueError(f"sample {missing[1]} of question {missing[0]} is not there")
        rows.append([found[key] for key in keys])
        judged.append([_judge(kind, question.gold, sample) for sample in rows[-1]])
    return Scored(samples=rows, judged=judged)


def _judge(kind: str, gold: str, sample: Sample) -> Judgement:
    return judge(
        kind,
        gold,
        answer_text=sample.answer,
        reasoning_text=sample.reasoning,
        reasoning_ended=sample.reasoning_ended,
        cut=sample.finish == "length",
        loop=sample.loop,
    )


def rescore(run: TaskRun) -> dict:
    """Score the stored samples of `run`, write outcomes and summary, and return the summary."""
    outcomes, summary = compute(run)
    with atomic_path(run.path / "outcomes.csv") as temporary:
        temporary.write_text(outcomes, encoding="utf-8", newline="")
    write_json(run.folder.summary_path, summary)
    return summary


def compute(run: TaskRun) -> tuple[str, dict]:
    """(outcomes.csv, summary) of a run from its samples; writes nothing."""
    document, asked = run.document(), run.questions()
    arms, tables, described = document["identity"]["arms"], [], []
    for task in document["identity"]["tasks"]:
        questions = asked[task["name"]]
        scored = []
        for arm in arms:
            _, samples = read_samples(run.results / "samples" / arm["samples"][task["name"]])
            scored.append(score(task["kind"], questions, samples, task["samples"]))
            tables += _rows(task["name"], arm["label"], scored[-1])
        described.append(
            _summarise(task, arms, questions, scored, margin=document["display"]["margin"])
        )
    summary = {"confidence": compare.CONFIDENCE, "tasks": described}
    return _csv(tables), summary


_COLUMNS = (
    "task", "arm", "question", "sample", "outcome", "answer", "how", "truncated", "loop",
    "answer_in_reasoning", "prompt_tokens", "new_tokens", "reasoning_tokens", "finish",
)  # fmt: skip


def _rows(task: str, arm: str, scored: Scored) -> list[list[object]]:
    rows = []
    for sample, judged in scored.flat():
        values = {"task": task, "arm": arm} | vars(sample) | vars(judged)
        values["truncated"], values["loop"] = int(judged.truncated), int(judged.loop)
        rows.append([values[name] for name in _COLUMNS])
    return rows


def _csv(rows: list[list[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows([["" if cell is None else cell for cell in row] for row in rows])
    return out.getvalue()


# -- summary ---------------------------------------------------------------------------------------
def _summarise(task: dict, arms: list[dict], questions, scored: list[Scored], *, margin) -> dict:
    reference = scored[0]
    described = []
    for arm, mine in zip(arms, scored, strict=True):
        row = {"label": arm["label"], "kind": arm["kind"]} | _describe(mine, questions)
        if arm["kind"] != "reference":
            row |= compare.paired_difference(reference.right(), mine.right())
            row |= compare.length_ratio(reference.tokens(), mine.tokens())
            row["verdict"] = compare.verdict(row["difference_low"], row["difference_high"], margin)
        described.append(row)
    compared = [row for row in described if row["kind"] == "policy"]
    for row, p in zip(compared, compare.holm([row["p"] for row in compared]), strict=True):
        row["p_holm"] = p
    gold = Counter(question.gold for question in questions) if task["kind"] == "letter" else None
    return {
        "task": task["name"],
        "kind": task["kind"],
        "max_new_tokens": task["max_new_tokens"],
        "margin": margin,
        "gold_letters": dict(sorted(gold.items())) if gold else None,
        "arms": described,
        "warnings": list(_warnings(task, described)),
    }


def _describe(scored: Scored, questions: Sequence[Question]) -> dict:
    pairs = list(scored.flat())
    total = len(pairs)
    outcomes = Counter(judged.outcome for _, judged in pairs)
    how = Counter(judged.how for _, judged in pairs)
    names = sorted({name for sample, _ in pairs for name in sample.filters})
    right = scored.right().mean(axis=1)
    groups: dict[str, list[float]] = {}
    for question, share in zip(questions, right, strict=True):
        if question.group is not None:
            groups.setdefault(question.group, []).append(float(share))
    return compare.accuracy(scored.right()) | {
        "outcomes": {name: outcomes[name] for name in OUTCOMES},
        "how": dict(sorted(how.items())),
        "truncated_rate": sum(judged.truncated for _, judged in pairs) / total,
        "loop_rate": sum(judged.loop for _, judged in pairs) / total,
        "answers_in_unfinished_reasoning": sum(
            judged.answer_in_reasoning is not None for _, judged in pairs
        ),
        "new_tokens_mean": float(scored.tokens().mean()),
        "filters": {
            name: sum(sample.filters.get(name, 0.0) for sample, _ in pairs) / total
            for name in names
        },
        "groups": {name: float(np.mean(values)) for name, values in groups.items()},
    }


def _warnings(task: dict, arms: list[dict]) -> Iterator[str]:
    """What a reader must know before believing an accuracy, one line each."""
    for arm in arms:
        label, total = arm["label"], sum(arm["outcomes"].values())
        strict = [v for name, v in arm["filters"].items() if "strict" in name]
        others = [v for name, v in arm["filters"].items() if "strict" not in name]
        if strict and max(strict) == 0.0 and others and max(others) > 0.0:
            yield (
                f"{label}: the strict filter finds no right answer at all, another one finds "
                f"{100 * max(others):.1f} %: the prompt does not ask for the form it looks for"
            )
        if arm["truncated_rate"] > 0.05:
            yield (
                f"{label}: {100 * arm['truncated_rate']:.1f} % of the answers were cut at "
                f"{task['max_new_tokens']} tokens; a higher max_gen_toks may change the accuracy"
            )
        unread = arm["outcomes"]["invalid"]
        if unread > 0.1 * total:
            yield f"{label}: no answer could be read in {unread} of {total} finished samples"
    reference = arms[0]
    if reference["accuracy"] in (0.0, 1.0):
        yield (
            f"the reference is at {100 * reference['accuracy']:.0f} %: this task cannot tell the "
            "policies apart for this model"
        )
