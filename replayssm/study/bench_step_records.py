"""Records of `bench decode` and `bench speculate`: what a row says, the files, the tables.

Owns the columns, the file names and the published figures that stand beside ours. A pure consumer
of what was measured: imports neither torch nor transformers, so tables are rewritten on a laptop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from replayssm.study.bench_files import load_document, write_document, write_files
from replayssm.study.tables import csv_text, markdown_table, number

FORMAT_VERSION = 1
DECODE, SPECULATE = "decode", "speculate"
TITLES = {
    DECODE: "Whole decode steps: milliseconds per step",
    SPECULATE: "Verification of drafts: milliseconds per round",
}
CONVENTIONAL = "conventional"

COLUMNS = {
    "model": "name of the model",
    "batch": "sequences",
    "context": "tokens that every sequence holds in its attention cache",
    "drafts": "drafts that a round verifies, in one pass with the token before them; 0: a decode "
    "step",
    "arm": "conventional: the recurrent state is read and written for every token, and to verify "
    "drafts it is written after each of them; replay: checkpoint and ring under a policy",
    "policy": "of a conventional arm the format of its state",
    "backend": "of the recurrent layers in effect",
    "graphs": "whether passes are replayed CUDA graphs",
    "ms": "median milliseconds of a whole pass of the model with the choice of the next tokens: "
    "the mean over a whole ring cycle, flushes included; empty if refused",
    "ms_low": "lower quartile over cycles",
    "ms_high": "upper quartile over cycles",
    "cycles": "cycles timed",
    "recurrent_ms": "the recurrent layers' updates alone, launched one after the other, likewise",
    "speedup": "conventional FP32's ms at this batch, context and drafts, over ms",
    "recurrent_speedup": "the same of recurrent_ms",
    "steps": "ms in conventional FP32 decode steps at this batch and context",
    "recurrent_steps": "the same of recurrent_ms",
    "tokens_per_second": "of all sequences, if every draft is right",
    "state_bytes": "of recurrent state of one sequence, over all layers, for decoding",
    "draft_bytes": "that verification needs beside that: ring slots beyond L, or a conventional "
    "state for each draft",
    "sequence_bytes": "of attention and convolution caches of one sequence at this context",
    "error": "largest relative difference of the first recurrent layer's outputs from the float64 "
    "recurrence on the model's own inputs",
    "launch": "launch parameters of the conventional kernel that was fastest",
    "status": "ok; wrong: the check failed, so it was not timed; failed: it did not run",
    "note": "why not ok; or, after a time, why torch computed it although kernels were asked for",
}

# Published speed-ups of a whole decode step with FP32 states and L = 16, by batch, on an H100.
PUBLISHED_SOURCE = "vLLM RFC #47572 and pull request #48792, FP32 states, L = 16, H100"
PUBLISHED = {
    "random/qwen3.5-4b": {1: 0.99, 8: 1.03, 32: 1.08, 64: 1.14, 128: 1.21, 256: 1.27, 512: 1.30},
    "random/nemotron-3-nano-4b": {1: 0.99, 32: 1.17, 128: 1.40, 512: 1.55},
}
PUBLISHED_RANGE = (
    "Published: a whole decode step 1.20–1.47×; verifying eight drafts in about one standard step. "
    "In the tables, by batch"
)


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One measurement; `COLUMNS` says what the fields mean."""

    model: str
    batch: int
    context: int
    drafts: int = 0
    arm: str
    policy: str
    backend: str = ""
    graphs: str = ""
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    cycles: int | None = None
    recurrent_ms: float | None = None
    speedup: float | None = None
    recurrent_speedup: float | None = None
    steps: float | None = None
    recurrent_steps: float | None = None
    tokens_per_second: float | None = None
    state_bytes: int | None = None
    draft_bytes: int | None = None
    sequence_bytes: int | None = None
    error: float | None = None
    launch: str = ""
    status: str = "unmeasured"
    note: str = ""

    def __post_init__(self):
        if (self.ms is not None) != (self.status == "ok"):
            raise ValueError(f"a row that is {self.status!r} with a time of {self.ms}")

    @property
    def name(self) -> str:
        """Arm and policy as tables and legends call them."""
        return f"{CONVENTIONAL} {self.policy}" if self.arm == CONVENTIONAL else self.policy


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One run.

    Attributes:
        kind: "decode" or "speculate": what it is of, and the name of its files.
        environment: `provenance.environment`.
        settings: what was asked for.
        clocks: what nvidia-smi said "before" and "after", or None.
        rows: the measurements.
    """

    kind: str
    environment: dict
    settings: dict
    clocks: dict
    rows: list[StepRow]

    @property
    def bad(self) -> list[StepRow]:
        """Rows without a time."""
        return [row for row in self.rows if row.status != "ok"]

    @property
    def models(self) -> list[str]:
        """Models with rows, in order."""
        return list(dict.fromkeys(row.model for row in self.rows))

    def contexts(self, model: str) -> list[int]:
        """Contexts of a model, ascending."""
        return sorted({row.context for row in self.rows if row.model == model})

    def select(self, **wanted) -> dict[str, list[StepRow]]:
        """`StepRow.name` -> rows whose fields are as `wanted`, by batch and drafts."""
        found: dict[str, list[StepRow]] = {}
        for row in self.rows:
            if all(getattr(row, name) == value for name, value in wanted.items()):
                found.setdefault(row.name, []).append(row)
        return {
            name: sorted(rows, key=lambda row: (row.batch, row.drafts))
            for name, rows in found.items()
        }


# -- files -----------------------------------------------------------------------------------------
def default_out(kind: str) -> Path:
    """The folder of a kind's files."""
    return Path("results/bench") / kind


def write_record(record: StepRecord, out: Path) -> Path:
    """Writes <kind>.json under `out`, which is created; returns its path."""
    path = out / f"{record.kind}.json"
    write_document(path, record, COLUMNS, version=FORMAT_VERSION)
    return path


def load_record(kind: str, out: Path) -> StepRecord:
    """The run stored under `out`; ValueError if it is missing, damaged or of another version."""
    return load_document(out / f"{kind}.json", StepRecord, StepRow, version=FORMAT_VERSION)


def write_report(record: StepRecord, out: Path) -> list[Path]:
    """Writes the rows as CSV, the tables and the figures under `out`; returns the paths."""
    from replayssm.study.bench_step_figures import step_figures

    files = {
        f"{record.kind}.csv": step_csv(record).encode(),
        f"{record.kind}.md": step_markdown(record).encode(),
        **step_figures(record),
    }
    return write_files(out, files)


def step_csv(record: StepRecord) -> str:
    """All rows, every column."""
    return csv_text(list(COLUMNS), [[asdict(row)[name] for name in COLUMNS] for row in record.rows])


def row_line(row: StepRow) -> str:
    """One measurement as one line."""
    what = f"{row.drafts} drafts" if row.drafts else "decode step"
    line = f"{row.model:26} batch {row.batch:3} context {row.context:5} {what:11} {row.name:18} "
    if row.ms is None:
        return line + f"{row.status}: {row.note}"
    line += f"{row.ms:8.3f} ms, recurrence {row.recurrent_ms:8.3f} ms"
    for value, unit in ((row.speedup, "x"), (row.steps if row.drafts else None, "steps")):
        if value is not None:
            line += f"  {value:5.2f} {unit}"
    return line + (f"  [{row.launch}]" if row.launch else "") + (row.note and f"  {row.note}")


# -- tables ----------------------------------------------------------------------------------------
def step_markdown(record: StepRecord) -> str:
    """Per model and context: times and speed-ups, the recurrent layers alone, memory."""
    parts = [f"# {TITLES[record.kind]}", "\n".join(f"- {line}" for line in _facts(record))]
    for model in record.models:
        for context in record.contexts(model):
            parts.append(f"## {model}, context {context:,}")
            if record.kind == DECODE:
                parts += _decode_tables(record, model, context)
            else:
                parts += _speculate_tables(record, model, context)
            parts += ["Memory of one sequence, MB:", _memory(record, model, context)]
    return "\n\n".join(parts) + "\n"


def _facts(record: StepRecord) -> list[str]:
    settings = record.settings
    random = all(model.startswith("random/") for model in record.models)
    weights = f"{settings['dtype']} weights" + (
        ", random: only times mean anything" if random else ""
    )
    surroundings = (
        "what surrounds those is the library's own code"
        if record.environment["device"].get("type") == "cpu"
        else "what surrounds those is computed as servers do: norms, convolutions and gates in one "
        "kernel each, the last projection, and keys of a delta rule, in the weights' dtype"
    )
    lines = [
        f"{record.environment['summary']}, {weights}.",
        f"A time is the mean over a whole ring cycle of L = {settings['ring_len']}, flushes "
        "included, of passes of the whole model with a greedy choice of the next token; the median "
        "over cycles. All arms run the same model over the same attention cache and differ in the "
        f"recurrent layers alone; {surroundings}. × is the speed-up over conventional FP32 in the "
        "same run.",
        "Before anything was timed, outputs of the first recurrent layer agreed with the float64 "
        "recurrence on the model's own inputs, before and after a flush, at every batch.",
        f"{PUBLISHED_RANGE}: {PUBLISHED_SOURCE}.",
    ]
    if record.kind == SPECULATE:
        lines.append(
            "A round reads the drafts and the token before them in one pass and keeps them all, "
            "until the ring takes no more. Conventional: the state is read once and written after "
            "every token, so that any draft can be rejected; all layers write the same snapshots, "
            "because a whole model's would not fit."
        )
    lines += [f"**{row_line(row).strip()}**" for row in record.rows if row.note]
    return lines


def _decode_tables(record: StepRecord, model: str, context: int) -> list[str]:
    groups = record.select(model=model, context=context)
    batches = _numbers(groups, "batch")
    header = ["policy", *(f"batch {batch}" for batch in batches)]

    def table(time: str, ratio: str) -> list[list[str]]:
        return [
            [name, *(_cell(_at(rows, batch=batch), time, ratio) for batch in batches)]
            for name, rows in groups.items()
        ]

    whole = table("ms", "speedup")
    published = PUBLISHED.get(model, {})
    if any(batch in published for batch in batches):
        cells = [f"{published[b]:.2f}×" if b in published else "–" for b in batches]
        whole.append(["published (fp32, H100)", *cells])
    return [
        "Whole step:",
        markdown_table(header, whole),
        "Recurrent layers alone:",
        markdown_table(header, table("recurrent_ms", "recurrent_speedup")),
    ]


def _speculate_tables(record: StepRecord, model: str, context: int) -> list[str]:
    parts = []
    for batch in _numbers(record.select(model=model, context=context), "batch"):
        groups = record.select(model=model, context=context, batch=batch)
        drafts = _numbers(groups, "drafts")
        header = ["policy", *(f"{n} drafts" if n else "decode step" for n in drafts)]
        for title, time, ratio in (
            ("whole model", "ms", "steps"),
            ("recurrent layers alone", "recurrent_ms", "recurrent_steps"),
        ):
            table = [
                [name, *(_cell(_at(rows, drafts=n), time, ratio, " steps") for n in drafts)]
                for name, rows in groups.items()
            ]
            parts += [
                f"Batch {batch}, {title}, in conventional FP32 decode steps:",
                markdown_table(header, table),
            ]
    return parts


def _memory(record: StepRecord, model: str, context: int) -> str:
    groups = record.select(model=model, context=context)
    drafts = [n for n in _numbers(groups, "drafts") if n]
    header = ["policy", "state", *(f"+ {n} drafts" for n in drafts), "attention and convolutions"]
    table = []
    for name, rows in groups.items():
        first = next((row for row in rows if row.status == "ok"), None)
        if first is not None:
            extra = [_megabytes(getattr(_at(rows, drafts=n), "draft_bytes", None)) for n in drafts]
            state = _megabytes(first.state_bytes)
            table.append([name, state, *extra, _megabytes(first.sequence_bytes)])
    return markdown_table(header, table)


def _numbers(groups: dict[str, list[StepRow]], name: str) -> list[int]:
    return sorted({getattr(row, name) for rows in groups.values() for row in rows})


def _at(rows: Sequence[StepRow], **wanted) -> StepRow | None:
    return next(
        (row for row in rows if all(getattr(row, name) == v for name, v in wanted.items())), None
    )


def _cell(row: StepRow | None, time: str, ratio: str, unit: str = "×") -> str:
    if row is None:
        return "–"
    if row.ms is None:
        return row.status
    share = getattr(row, ratio)
    ratios = "" if share is None else f" ({share:.2f}{unit})"
    return f"{getattr(row, time):.2f} ms{ratios}" + (", by torch" if row.note else "")


def _megabytes(size: int | None) -> str:
    return number(None if size is None else size / 1e6, 4)
