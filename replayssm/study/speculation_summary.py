"""Numbers of the speculation study: acceptance and drift with intervals, and what is unhealthy.

Owns the record of a study, its files, its statistics, the table, and the flags. Computes from
per-prompt counts alone: imports neither torch nor transformers.

The unit of independence is the prompt. Intervals come from resampling prompts, the same ones for
every policy, so differences from FP32 are paired; with fewer than ten prompts there are none.

A policy that is easier to foresee than FP32 is not better for it: a text that goes round in circles
is the easiest of all. So a gain over FP32, in tokens a round or in what speculation makes of the
policy's own speed, is flagged where KL or repetition rises with it. (That a narrow state is faster
to read is no fault, so speeds are not compared across policies.)
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from replayssm.study.bootstrap import PROMPTS_FOR_CLUSTER_BOOTSTRAP, Bootstrap, interval
from replayssm.study.formatting import csv_text, interval_text, markdown_table, number, percent
from replayssm.study.store import atomic_path, read_json, write_json

FORMAT_VERSION = 1
SPEED_GAIN = 1.2  # times what FP32 gains: less is not told apart from noise


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One policy with one drafter and number of drafts; lists have an entry a prompt.

    drafter: None for token-by-token decoding (drafts 0). drafted, accepted: drafts, without the one
    token that every round adds by itself. kl: mean KL(FP32 ‖ policy) on the answer, nats a token.
    repeated: share of tokens that end a run of eight tokens seen before in the answer.
    tokens_per_second: of all prompts together, or None where speed was not measured.
    """

    policy: str
    drafter: str | None
    drafts: int
    rounds: list[int]
    drafted: list[int]
    accepted: list[int]
    kl: list[float]
    repeated: list[float]
    tokens_per_second: float | None
    backend: str


@dataclass(frozen=True, kw_only=True)
class SpeculationRecord:
    """One study of one model. settings: of `speculation.SpeculationStudy`; weights: digest."""

    environment: dict
    settings: dict
    weights: str
    cells: list[Cell]

    @property
    def model(self) -> str:
        return self.settings["model"]

    @property
    def name(self) -> str:
        """For files: the last part of the model's name."""
        return self.model.rstrip("/").rsplit("/", 1)[-1]

    def cell(self, policy: str, drafter: str | None, drafts: int) -> Cell | None:
        key = (policy, drafter, drafts)
        return next((c for c in self.cells if (c.policy, c.drafter, c.drafts) == key), None)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a cell says. `*_low`, `*_high`: 95 % interval over prompts, or None.

    gain: tokens a round less FP32's, with the same drafter and drafts; repeated_rise: the same of
    the repeated share. speedup: times the policy's own tokens per second without drafts, or None
    where that was not measured. flags: why a gain is none; empty for a healthy row.
    """

    policy: str
    drafter: str | None
    drafts: int
    tokens_per_round: float
    tokens_per_round_low: float | None
    tokens_per_round_high: float | None
    rate: float | None
    gain: float
    gain_low: float | None
    gain_high: float | None
    kl: float
    kl_low: float | None
    kl_high: float | None
    repeated: float
    repeated_rise: float
    repeated_rise_low: float | None
    repeated_rise_high: float | None
    speedup: float | None
    tokens_per_second: float | None
    flags: tuple[str, ...]


# -- statistics ------------------------------------------------------------------------------------
def summarise(record: SpeculationRecord) -> list[Row]:
    """A row for every cell, in the record's order."""
    baseline = record.settings["policies"][0]
    rows = []
    for cell in record.cells:
        reference = record.cell(baseline, cell.drafter, cell.drafts)
        assert reference is not None, "every cell has its FP32 counterpart"
        speedups = [_speedup(record, c) for c in (cell, reference)]
        rows.append(_row(cell, reference, *speedups))
    return rows


def _speedup(record: SpeculationRecord, cell: Cell) -> float | None:
    plain = record.cell(cell.policy, None, 0)
    if plain is None or plain.tokens_per_second is None or cell.tokens_per_second is None:
        return None
    return cell.tokens_per_second / plain.tokens_per_second


def _row(cell: Cell, reference: Cell, speedup: float | None, usual: float | None) -> Row:
    """usual: what FP32 gains."""
    mine, theirs = _resampled(cell), _resampled(reference)

    def with_interval(name: str, value: float, samples: np.ndarray) -> dict:
        low, high = interval(samples)
        return {name: value, f"{name}_low": low, f"{name}_high": high}

    def difference(key: str) -> np.ndarray:
        return mine[key] - theirs[key]

    length, other = _tokens_per_round(cell), _tokens_per_round(reference)
    numbers = {
        **with_interval("tokens_per_round", length, mine["length"]),
        **with_interval("gain", length - other, difference("length")),
        **with_interval("kl", float(np.mean(cell.kl)), mine["kl"]),
        **with_interval(
            "repeated_rise",
            float(np.mean(cell.repeated) - np.mean(reference.repeated)),
            difference("repeated"),
        ),
    }
    drafted = sum(cell.drafted)
    faster = speedup is not None and usual is not None and speedup > SPEED_GAIN * usual
    kl_low, _ = interval(difference("kl"))
    return Row(
        policy=cell.policy,
        drafter=cell.drafter,
        drafts=cell.drafts,
        rate=sum(cell.accepted) / drafted if drafted else None,
        repeated=float(np.mean(cell.repeated)),
        speedup=speedup,
        tokens_per_second=cell.tokens_per_second,
        flags=_flags(numbers, faster, kl_low),
        **numbers,
    )


def _flags(numbers: dict, faster: bool, kl_rise_low: float | None) -> tuple[str, ...]:
    gains = []
    if (numbers["gain_low"] or 0) > 0:
        gains.append("acceptance")
    if faster:
        gains.append("speed")
    losses = []
    if (kl_rise_low or 0) > 0:
        losses.append("KL")
    if (numbers["repeated_rise_low"] or 0) > 0:
        losses.append("repetition")
    return tuple(f"{gain} rises with {loss}" for gain in gains for loss in losses)


def _tokens_per_round(cell: Cell) -> float:
    return 1 + sum(cell.accepted) / sum(cell.rounds)


def _resampled(cell: Cell) -> dict[str, np.ndarray]:
    """Bootstrap samples of a cell's numbers; empty with too few prompts."""
    prompts = len(cell.rounds)
    if prompts < PROMPTS_FOR_CLUSTER_BOOTSTRAP:
        return dict.fromkeys(("length", "kl", "repeated"), np.empty(0))
    weights = Bootstrap(prompts, block=1).weights
    accepted, rounds = weights @ np.array(cell.accepted), weights @ np.array(cell.rounds)
    return {
        "length": 1 + accepted / rounds,
        "kl": weights @ np.array(cell.kl) / prompts,
        "repeated": weights @ np.array(cell.repeated) / prompts,
    }


def unhealthy(rows: Sequence[Row]) -> list[str]:
    """One line for every flagged row."""
    return [
        f"{row.policy}, {row.drafter or 'no drafter'}, {row.drafts} drafts: {flag}"
        for row in rows
        for flag in row.flags
    ]


# -- files -----------------------------------------------------------------------------------------
def write_record(record: SpeculationRecord, out: Path) -> Path:
    """Writes NAME.json under `out`, which is created."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{record.name}.json"
    write_json(path, {"version": FORMAT_VERSION} | asdict(record))
    return path


def load_records(out: Path) -> list[SpeculationRecord]:
    """The records under `out`, by name; ValueError if there is none, or one is damaged."""
    records = []
    for path in sorted(out.glob("*.json")):
        document = read_json(path)
        if document.get("version") != FORMAT_VERSION:
            raise ValueError(
                f"{path} is of version {document.get('version')}, not {FORMAT_VERSION}"
            )
        try:
            cells = [Cell(**cell) for cell in document["cells"]]
            named = {f.name: document[f.name] for f in fields(SpeculationRecord)} | {"cells": cells}
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is no record of a speculation study: {error}") from None
        records.append(SpeculationRecord(**named))
    if not records:
        raise ValueError(f"{out} holds no record of a speculation study")
    return records


def write_report(records: Sequence[SpeculationRecord], out: Path) -> list[Path]:
    """Writes tables and figures of `records` under `out`; returns the paths."""
    from replayssm.study.speculation_figures import acceptance_figures

    files = {
        "speculation.md": speculation_markdown(records).encode(),
        "speculation.csv": speculation_csv(records).encode(),
    }
    for record in records:
        files |= acceptance_figures(record)
    for name, content in files.items():
        with atomic_path(out / name) as temporary:
            temporary.write_bytes(content)
    return [out / name for name in files]


_HEADER = (
    *("drafter", "drafts", "policy", "tokens/round", "95 %", "less FP32's", "95 %", "accepted"),
    *("KL", "95 %", "repeated", "speed", "flags"),
)


def speculation_markdown(records: Sequence[SpeculationRecord]) -> str:
    """The tables of several models, with what their columns mean."""
    parts = [
        "# Speculation under a policy\n",
        "tokens/round: accepted drafts and the one token beside them. accepted: share of drafts. "
        "KL: mean KL(FP32 ‖ policy) of the logits that chose the tokens, nats per token. repeated: "
        "share of tokens that end a run of eight seen before in the same answer. Intervals are "
        "over prompts, differences paired. speed: times the policy's own without drafts (taken on "
        "a GPU only). Flags: a gain over FP32 that comes with a higher KL or more repetition is no "
        "gain.\n",
    ]
    for record in records:
        s = record.settings
        parts.append(
            f"## {record.model}\n\n{s['prompts']} prompts × {s['tokens']} tokens, "
            + ("greedy" if s["temperature"] == 0 else f"temperature {s['temperature']:g}")
            + f"; {record.environment['summary']}\n"
        )
        rows = summarise(record)
        parts.append(markdown_table(_HEADER, [_cells_of(row) for row in rows]) + "\n")
        flagged = unhealthy(rows)
        parts.append(
            "Flagged: " + "; ".join(flagged) + ".\n" if flagged else "Nothing is flagged.\n"
        )
    return "\n".join(parts)


def _cells_of(row: Row) -> list[str]:
    document = asdict(row)
    return [
        row.drafter or "none",
        str(row.drafts),
        row.policy,
        number(row.tokens_per_round),
        interval_text(document, "tokens_per_round"),
        number(row.gain),
        interval_text(document, "gain"),
        percent(row.rate),
        number(row.kl),
        interval_text(document, "kl"),
        percent(row.repeated),
        number(row.speedup),
        "; ".join(row.flags) or "–",
    ]


def speculation_csv(records: Sequence[SpeculationRecord]) -> str:
    """Every row and column."""
    names = [field.name for field in fields(Row)]
    lines = []
    for record in records:
        for row in summarise(record):
            document = asdict(row) | {"flags": "; ".join(row.flags)}
            lines.append([record.model, *(document[name] for name in names)])
    return csv_text(["model", *names], lines)
