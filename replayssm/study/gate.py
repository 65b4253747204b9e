"""Whether policies keep limits, judged from stored results: the verdict of `replayssm gate`.

Owns what counts as evidence for a policy (drift runs and task runs under one folder, the worst of
them where there are several) and the line a policy gets. Measures nothing, draws nothing, and
imports neither torch, transformers nor matplotlib, so that it can stand in a build pipeline.

What is compared with a limit:

* mean KL and top-1 agreement of a run's last quarter, as measured: what the tables call "safe";
* accuracy: the lower bound of the paired interval of (policy - FP32), the worst task. A loss that
  the questions cannot exclude is not excluded: the tables' "not worse".

A policy whose number is missing fails, as does one measured in a run whose controls failed or whose
logits were not finite.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from replayssm.study.formatting import number, percent, without_seed
from replayssm.study.store import RunRecord, find_runs, load_run
from replayssm.study.task_results import find_task_runs
from replayssm.study.task_tables import TaskRecord, load_task_record, points


@dataclass(frozen=True, kw_only=True)
class GateLimits:
    """What a policy must keep; None: not asked.

    max_mean_kl: nats per token; min_top1: share of positions, 0 to 1; max_accuracy_drop: loss of
    accuracy, 0 to 1 (0.02: two points). Raises ValueError for a value outside its range.
    """

    max_mean_kl: float | None = None
    min_top1: float | None = None
    max_accuracy_drop: float | None = None

    def __post_init__(self):
        if self.max_mean_kl is not None and not self.max_mean_kl >= 0.0:
            raise ValueError(f"max-mean-kl must be 0 or more, is {self.max_mean_kl}")
        for name in ("min_top1", "max_accuracy_drop"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= 1.0:
                raise ValueError(f"{name.replace('_', '-')} must be from 0 to 1, is {value}")

    @property
    def empty(self) -> bool:
        return self == GateLimits()

    def describe(self) -> str:
        """The limits that are set, in words."""
        parts = []
        if self.max_mean_kl is not None:
            parts.append(f"mean KL <= {self.max_mean_kl:g}")
        if self.min_top1 is not None:
            parts.append(f"top-1 agreement >= {percent(self.min_top1)}")
        if self.max_accuracy_drop is not None:
            parts.append(f"accuracy drop <= {100 * self.max_accuracy_drop:g} points")
        return ", ".join(parts) or "none"


@dataclass(kw_only=True)
class Evidence:
    """What is known of one policy on one model: the worst of all runs, seeds and tasks.

    kl, top1: last quarter; accuracy_low: lower bound of (policy - FP32), accuracy: the difference
    itself, of the task in `task`; broken: why its numbers must not be used, one phrase each. None:
    not measured.
    """

    model: str
    policy: str
    bytes_per_element: float | None = None
    bytes_per_token: float | None = None
    kl: float | None = None
    top1: float | None = None
    accuracy: float | None = None
    accuracy_low: float | None = None
    task: str | None = None
    broken: list[str] = field(default_factory=list)

    def failures(self, limits: GateLimits) -> list[str]:
        """Why the policy does not keep `limits`, one phrase each with the number."""
        return self.broken + [text for kept, text in self._compared(limits) if not kept]

    def passed(self, limits: GateLimits) -> list[str]:
        """The numbers that keep `limits`, one phrase each."""
        return [text for kept, text in self._compared(limits) if kept]

    def _compared(self, limits: GateLimits) -> Iterable[tuple[bool, str]]:
        most, least, drop = limits.max_mean_kl, limits.min_top1, limits.max_accuracy_drop
        if most is not None:
            kept = self.kl is not None and self.kl <= most
            yield _compare("mean KL", self.kl, kept, number, "<=", most)
        if least is not None:
            kept = self.top1 is not None and self.top1 >= least
            yield _compare("top-1 agreement", self.top1, kept, percent, ">=", least)
        if drop is not None:
            if self.accuracy_low is None:
                yield False, f"accuracy not measured (limit: drop of {100 * drop:g} points)"
            else:
                kept = self.accuracy_low >= -drop
                yield (
                    kept,
                    f"accuracy of {self.task} {points(self.accuracy)} points, lower bound "
                    f"{points(self.accuracy_low)} {'>=' if kept else '<'} {points(-drop)}",
                )


def _compare(what: str, value: float | None, kept: bool, show, sign: str, limit: float):
    if value is None:
        return False, f"{what} not measured (limit: {sign} {show(limit)})"
    opposite = {"<=": ">", ">=": "<"}[sign]
    return kept, f"{what} {show(value)} {sign if kept else opposite} {show(limit)}"


# -- collecting ------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Collected:
    """All evidence at or under a folder, ordered by model, then policy as first met.

    unfinished: runs that were left out, one line each; own_limits: model -> the strictest limits
    that its runs were configured with.
    """

    evidence: list[Evidence]
    unfinished: list[str]
    own_limits: dict[str, GateLimits]


def collect(where: Path) -> Collected:
    """Read all drift and task runs at or under `where`; ValueError if none is complete."""
    unfinished, drifts, tasks = [], [], []
    for folder in find_runs(where):
        status = folder.status()["status"]
        if status == "complete":
            drifts.append(load_run(folder))
        else:
            unfinished.append(f"run {folder.path} is not complete (status: {status})")
    for run in find_task_runs(where):
        status = run.folder.status()["status"]
        if status == "complete":
            tasks.append(load_task_record(run))
        else:
            unfinished.append(f"run {run.path} is not complete (status: {status})")
    if not drifts and not tasks:
        raise ValueError(f"no complete run under {where} ({len(unfinished)} unfinished or failed)")
    found: dict[tuple[str, str], Evidence] = {}
    own_limits: dict[str, GateLimits] = {}
    for record in drifts:
        _add_drift(found, record)
        limits, before = record.document["display"]["limits"], own_limits.get(record.model)
        kl, top1 = limits["kl_mean"], limits["top1_agreement_mean"]
        own_limits[record.model] = GateLimits(
            max_mean_kl=kl if before is None else min(kl, before.max_mean_kl),
            min_top1=top1 if before is None else max(top1, before.min_top1),
        )
    for record in tasks:
        _add_tasks(found, record)
    models = list(dict.fromkeys(model for model, _ in found))
    ordered = sorted(found.values(), key=lambda evidence: models.index(evidence.model))
    return Collected(evidence=ordered, unfinished=unfinished, own_limits=own_limits)


def _entry(found: dict, model: str, label: str) -> Evidence:
    policy = without_seed(label)
    return found.setdefault((model, policy), Evidence(model=model, policy=policy))


def _worst(old: float | None, new: float | None, choose) -> float | None:
    known = [value for value in (old, new) if value is not None]
    return choose(known) if known else None


def _add_drift(found: dict, record: RunRecord) -> None:
    distrust = [f"run {record.run_id}: {line}" for line in record.summary["controls"]["failures"]]
    for arm in record.summary["arms"]:
        if arm["kind"] != "policy":
            continue
        entry, quarter = _entry(found, record.model, arm["label"]), arm["last_quarter"]
        entry.kl = _worst(entry.kl, quarter["kl_mean"], max)
        entry.top1 = _worst(entry.top1, quarter["top1_agreement_mean"], min)
        entry.bytes_per_element = arm["bytes_per_state_element"]
        entry.bytes_per_token = _worst(entry.bytes_per_token, arm["bytes_per_token"], max)
        entry.broken += distrust
        for name, what in (
            ("nonfinite_count", "logit rows were not finite"),
            ("kl_infinite_count", "divergences were infinite"),
        ):
            if arm["whole"][name]:
                entry.broken.append(f"run {record.run_id}: {arm['whole'][name]:,} {what}")


def _add_tasks(found: dict, record: TaskRecord) -> None:
    for task in record.summary["tasks"]:
        for arm in task["arms"]:
            if arm["kind"] == "control":
                continue
            entry, reference = _entry(found, record.model, arm["label"]), arm["kind"] == "reference"
            low = 0.0 if reference else arm["difference_low"]
            if low is None:
                entry.broken.append(f"run {record.run_id}: {task['task']} gave no interval")
            elif entry.accuracy_low is None or low < entry.accuracy_low:
                entry.accuracy_low, entry.task = low, task["task"]
                entry.accuracy = 0.0 if reference else arm["difference"]


# -- the gate --------------------------------------------------------------------------------------
def gate(where: Path, limits: GateLimits) -> tuple[list[str], bool]:
    """One line a policy, "PASS" or "FAIL" first, and whether all passed.

    A run that is not complete fails, too: the gate does not know what it would have shown. Raises
    ValueError if no limit is set or nothing can be read.
    """
    if limits.empty:
        raise ValueError(
            "no limit is given: at least one of --max-mean-kl, --min-top1, --max-accuracy-drop"
        )
    collected = collect(where)
    lines, good = [], True
    for evidence in collected.evidence:
        failures = evidence.failures(limits)
        good &= not failures
        reasons = "; ".join(failures or evidence.passed(limits))
        name = f"{evidence.model} {evidence.policy}"
        lines.append(f"{'FAIL' if failures else 'PASS'} {name}: {reasons}")
    lines += [f"FAIL {line}" for line in collected.unfinished]
    return lines, good and not collected.unfinished
