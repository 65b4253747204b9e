"""Records of `replayssm bench kernels`: what a row says, the files, the table.

Owns the columns and the file names. A pure consumer of what was measured: imports neither torch nor
transformers, so tables are rewritten on a laptop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from replayssm.study.bench_files import load_document, write_document, write_files
from replayssm.study.tables import csv_text, markdown_table, number

FORMAT_VERSION = 1
DEFAULT_OUT = Path("results/bench/kernels")
RECORD_FILE = "kernels.json"

COLUMNS = {
    "layer": "name of the layer",
    "recurrence": "mamba2, gated_delta or kimi_delta",
    "batch": "rows of a launch",
    "ring_len": "L; empty for a conventional kernel",
    "policy": "precision policy; for a conventional kernel the format of its state",
    "kernel": "cycle: rows aligned, L - 1 decodes and one step that flushes all; step: rows "
    "staggered, B/L of them flush each time; window: T tokens, nothing committed; conventional: "
    "reads and writes the whole state for one token",
    "source": "replayssm, or the package of a public kernel",
    "tokens": "tokens of a launch and row, T",
    "us": "median microseconds of a step, the mean over a whole ring cycle; empty if refused",
    "us_low": "lower quartile over replays",
    "us_high": "upper quartile over replays",
    "replays": "graph replays timed",
    "launches": "steps in a replay",
    "working_set_mb": "1e6 bytes of state that a replay reads",
    "megabytes": "1e6 bytes that a step moves, by the policy's own count; empty for windows",
    "bandwidth_share": "megabytes over us, relative to copy_gb_per_s",
    "speedup": "T times the best conventional FP32 kernel's us of this run, over us",
    "error": "largest relative difference from the float64 recurrence that the check found",
    "launch": "launch parameters of the conventional kernel that was fastest",
    "status": "ok; wrong: the check failed, so it was not timed; failed: it did not run",
    "note": "why not ok",
}


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One measurement; `COLUMNS` says what the fields mean."""

    layer: str
    recurrence: str
    batch: int
    ring_len: int | None = None
    policy: str
    kernel: str
    source: str = "replayssm"
    tokens: int = 1
    us: float | None = None
    us_low: float | None = None
    us_high: float | None = None
    replays: int | None = None
    launches: int | None = None
    working_set_mb: float | None = None
    megabytes: float | None = None
    bandwidth_share: float | None = None
    speedup: float | None = None
    error: float | None = None
    launch: str = ""
    status: str = "unmeasured"
    note: str = ""

    def __post_init__(self):
        if (self.us is not None) != (self.status == "ok"):
            raise ValueError(f"a row that is {self.status!r} with a time of {self.us}")


@dataclass(frozen=True, kw_only=True)
class KernelRecord:
    """One run.

    Attributes:
        titles: layer name -> title, in the order of tables and figures.
        environment: `provenance.environment`.
        settings: what was asked for.
        copy_gb_per_s: bandwidth of a copy in device memory, read plus written, in this run.
        cache_mb: 1e6 bytes of second-level cache.
        clocks: what nvidia-smi said "before" and "after", or None.
        missing: public kernels that are not installed, one line each.
        rows: the measurements.
    """

    titles: dict[str, str]
    environment: dict
    settings: dict
    copy_gb_per_s: float
    cache_mb: float
    clocks: dict
    missing: list[str]
    rows: list[KernelRow]

    @property
    def device(self) -> str:
        return self.environment["device"]["name"]

    @property
    def bad(self) -> list[KernelRow]:
        """Rows without a time."""
        return [row for row in self.rows if row.status != "ok"]

    def best_conventional(self, layer: str, batch: int, policy: str = "fp32") -> KernelRow | None:
        """The fastest conventional kernel with a state in `policy`'s format, or None."""
        rows = [
            row
            for row in self.rows
            if (row.layer, row.batch, row.policy, row.kernel, row.status)
            == (layer, batch, policy, "conventional", "ok")
        ]
        return min(rows, key=lambda row: row.us, default=None)

    def ring_lens(self, layer: str) -> list[int]:
        """Ring lengths measured for a layer, ascending."""
        return sorted({row.ring_len for row in self.rows if row.layer == layer and row.ring_len})

    def select(self, layer: str, ring_len: int, kernel: str) -> dict[str, list[KernelRow]]:
        """Policy -> rows of one replay kernel, by batch."""
        found: dict[str, list[KernelRow]] = {}
        for row in self.rows:
            if (row.layer, row.ring_len, row.kernel) == (layer, ring_len, kernel):
                found.setdefault(row.policy, []).append(row)
        return {policy: sorted(rows, key=lambda row: row.batch) for policy, rows in found.items()}


# -- files -----------------------------------------------------------------------------------------
def write_record(record: KernelRecord, out: Path) -> None:
    """Writes `RECORD_FILE` under `out`, which is created."""
    write_document(out / RECORD_FILE, record, COLUMNS, version=FORMAT_VERSION)


def load_record(out: Path) -> KernelRecord:
    """The run stored under `out`; ValueError if it is missing, damaged or of another version."""
    return load_document(out / RECORD_FILE, KernelRecord, KernelRow, version=FORMAT_VERSION)


def write_report(record: KernelRecord, out: Path) -> list[Path]:
    """Writes the rows as CSV, the table and the figures under `out`; returns the paths."""
    from replayssm.study.bench_figures import kernel_figures

    files = {
        "kernels.csv": kernel_csv(record).encode(),
        "kernels.md": kernel_markdown(record).encode(),
        **kernel_figures(record),
    }
    return write_files(out, files)


def kernel_csv(record: KernelRecord) -> str:
    """All rows, every column."""
    return csv_text(list(COLUMNS), [[asdict(row)[name] for name in COLUMNS] for row in record.rows])


def row_line(row: KernelRow) -> str:
    """One measurement as one line."""
    ring = f" L {row.ring_len}" if row.ring_len else ""
    source = "" if row.source == "replayssm" else f" ({row.source})"
    kernel = row.kernel + (f" T {row.tokens}" if row.tokens > 1 else "") + source
    line = f"{row.layer:20} batch {row.batch:3}{ring}  {row.policy:15} {kernel:24} "
    if row.us is None:
        return line + f"{row.status}: {row.note}"
    line += f"{row.us:9.2f} us"
    if row.bandwidth_share is not None:
        line += f"  {row.megabytes:8.1f} MB  {100 * row.bandwidth_share:4.0f} % of copy"
    if row.speedup is not None:
        line += f"  {row.speedup:5.2f} x"
    return line + (f"  [{row.launch}]" if row.launch else "")


# -- table -----------------------------------------------------------------------------------------
_KERNEL_TITLES = {
    "cycle": "whole ring cycle, rows aligned",
    "step": "whole ring cycle, rows staggered",
    "window": "window of {tokens} tokens, against {tokens} conventional steps",
}


def kernel_markdown(record: KernelRecord) -> str:
    """Per layer: speed-ups by policy and batch, then every measurement."""
    parts = ["# Kernels: microseconds per step", "\n".join(f"- {line}" for line in _facts(record))]
    for layer, title in record.titles.items():
        if not any(row.layer == layer for row in record.rows):
            continue
        parts.append(f"## {title}")
        for ring_len in record.ring_lens(layer):
            for kernel, heading in _KERNEL_TITLES.items():
                rows = record.select(layer, ring_len, kernel)
                if rows:
                    tokens = next(iter(rows.values()))[0].tokens
                    parts.append(f"L = {ring_len}, {heading.format(tokens=tokens)}:")
                    parts.append(_speedups(record, layer, rows))
        parts.append("All measurements:")
        parts.append(_details([row for row in record.rows if row.layer == layer]))
    return "\n\n".join(parts) + "\n"


def _facts(record: KernelRecord) -> list[str]:
    lines = [
        f"{record.environment['summary']}. Copy bandwidth in this run: "
        f"{record.copy_gb_per_s:,.0f} GB/s, read plus written; second-level cache "
        f"{record.cache_mb:.0f} MB.",
        "Times are medians of CUDA-graph replays. Every kernel agreed with the float64 recurrence "
        "before it was timed. × is the speed-up over the fastest conventional FP32 kernel of this "
        "run at the same batch.",
    ]
    lines += [f"Not compared: {line}." for line in record.missing]
    lines += [
        f"**{row.layer}, batch {row.batch}, {row.policy}, {row.kernel}: {row.status}: {row.note}**"
        for row in record.bad
    ]
    return lines


def _speedups(record: KernelRecord, layer: str, rows: dict[str, list[KernelRow]]) -> str:
    batches = sorted({row.batch for group in rows.values() for row in group})
    tokens = next(iter(rows.values()))[0].tokens
    table = []
    best = [record.best_conventional(layer, batch) for batch in batches]
    cells = [f"{_us(row.us * tokens)} µs" if row else "–" for row in best]
    table.append([f"conventional fp32{f', {tokens} steps' if tokens > 1 else ''}", *cells])
    for policy, group in rows.items():
        at = {row.batch: row for row in group}
        table.append([policy, *(_speedup(at.get(batch)) for batch in batches)])
    return markdown_table(["policy", *(f"batch {batch}" for batch in batches)], table)


def _speedup(row: KernelRow | None) -> str:
    if row is None:
        return "–"
    if row.us is None:
        return row.status
    ratio = "" if row.speedup is None else f" ({row.speedup:.2f}×)"
    return f"{_us(row.us)} µs{ratio}"


def _us(us: float | None) -> str:
    return f"{us:,.0f}" if us is not None and us >= 1000 else number(us)


def _details(rows: Sequence[KernelRow]) -> str:
    table = [
        [
            str(row.batch),
            row.kernel if row.source == "replayssm" else f"{row.kernel}, {row.source}",
            row.policy + (f" @{row.ring_len}" if row.ring_len else ""),
            _us(row.us),
            number(row.megabytes, 4),
            "–" if row.bandwidth_share is None else f"{100 * row.bandwidth_share:.0f} %",
            "–" if row.speedup is None else f"{row.speedup:.2f}×",
            number(row.error, 2),
            row.launch if row.status == "ok" else f"{row.status}: {row.note}",
        ]
        for row in sorted(rows, key=lambda row: row.batch)
    ]
    header = ("batch", "kernel", "policy", "µs", "MB moved", "of copy", "speed-up", "error", "")
    return markdown_table(header, table)
