"""Tables of a study: the summary a person reads, and the CSV files a program reads.

Owns wording, rounding and order of the tables. A pure function of `store.RunRecord`s; computes no
statistics, reads no records and imports neither torch nor transformers.
"""

import csv
import io
from collections.abc import Sequence

from replayssm.study.store import RunRecord

COLUMNS = (
    "policy",
    "B/element",
    "kB/token",
    "KL mean",
    "KL mean, last 1/4",
    "95 % interval",
    "KL p99",
    "top-1 mean",
    "x floor",
    "growth",
    "verdict",
)


def by_quality(arms: Sequence[dict]) -> list[dict]:
    """Arms, best first: by mean KL over the last quarter, arms that broke down at the end."""

    def key(arm: dict):
        quarter = arm["last_quarter"]
        broken = quarter["nonfinite_count"] + quarter["kl_infinite_count"]
        kl = quarter["kl_mean"]
        return (broken > 0, kl is None, kl or 0.0, arm["label"])

    return sorted(arms, key=key)


def policies(record: RunRecord) -> list[dict]:
    """The policy arms of a run, best first."""
    return by_quality([arm for arm in record.summary["arms"] if arm["kind"] == "policy"])


def verdict(arm: dict, limits: dict) -> str:
    """ "safe" if KL and top-1 agreement of the last quarter keep the limits, else what does not."""
    quarter = arm["last_quarter"]
    if arm["whole"]["nonfinite_count"] or arm["whole"]["kl_infinite_count"]:
        return "unsafe: not finite"
    reasons = []
    if quarter["kl_mean"] is None or quarter["kl_mean"] > limits["kl_mean"]:
        reasons.append("KL")
    if quarter["top1_agreement_mean"] < limits["top1_agreement_mean"]:
        reasons.append("top-1")
    return "unsafe: " + ", ".join(reasons) if reasons else "safe"


def recommended(record: RunRecord) -> dict | None:
    """The safe policy that moves the fewest state bytes per token (ties: the lower KL), if any."""
    limits = record.document["display"]["limits"]
    safe = [arm for arm in policies(record) if verdict(arm, limits) == "safe"]
    return min(safe, key=lambda arm: arm["bytes_per_token"], default=None)


# -- formatting ------------------------------------------------------------------------------------
def number(value: float | None, digits: int = 3) -> str:
    """Short text for a statistic; missing values are a dash, never a zero."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits}g}"
    return f"{value:.{digits - 1}e}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def interval_text(row: dict, name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "–" if low is None else f"[{number(low)}, {number(high)}]"


def _cells(arm: dict, verdict_text: str) -> list[str]:
    whole, quarter = arm["whole"], arm["last_quarter"]
    return [
        arm["label"],
        f"{arm['bytes_per_state_element']:.4g}",
        f"{arm['bytes_per_token'] / 1e3:.4g}",
        number(whole["kl_mean"]),
        number(quarter["kl_mean"]),
        interval_text(quarter, "kl_mean"),
        number(whole["kl_p99"]),
        percent(quarter["top1_agreement_mean"]),
        number(arm["ratio_to_floor"]),
        arm["growth"] or "–",
        verdict_text,
    ]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table with aligned columns: reads well raw, in a terminal, and rendered."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells, fill=" "):
        padded = [cell.ljust(width, fill) for cell, width in zip(cells, widths, strict=True)]
        return "| " + " | ".join(padded) + " |"

    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, rows)])


def summary_markdown(record: RunRecord) -> str:
    """One run: the policies best first, the controls, the 2 x 2, and what to know when reading
    them.
    """
    summary, limits = record.summary, record.document["display"]["limits"]
    parts = [
        f"## {record.model}, {summary['prompts']} prompts x {summary['tokens']:,} tokens",
        markdown_table(COLUMNS, [_cells(arm, verdict(arm, limits)) for arm in policies(record)]),
    ]
    if decomposition := decomposition_rows(record):
        parts += _decomposition_markdown(decomposition)
    if attribution := attribution_rows(record):
        parts += _attribution_markdown(attribution)
    parts.append("Controls:")
    parts.append(_controls_table(record))
    parts.append("\n".join(_footer(record)))
    return "\n\n".join(parts) + "\n"


def _controls_table(record: RunRecord) -> str:
    rows = [
        [
            arm["label"],
            number(arm["whole"]["kl_mean"]),
            number(arm["whole"]["kl_max"]),
            number(arm["ratio_to_floor"]),
            _MUST_SHOW[arm["control"]],
        ]
        for arm in record.summary["arms"]
        if arm["control"]
    ]
    return markdown_table(("control", "KL mean", "KL max", "x floor", "must show"), rows)


_MUST_SHOW = {
    "second_fp32": "exactly 0",
    "other_ring_len": "rounding level: the noise floor",
    "fault": "far above the floor",
    "refresh": "as much as its policy, unless errors accumulate",
}


def _footer(record: RunRecord) -> list[str]:
    summary, limits = record.summary, record.document["display"]["limits"]
    about = summary["interval"]
    best = recommended(record)
    lines = [f"- CONTROL FAILED: {failure}" for failure in summary["controls"]["failures"]]
    lines.append(
        "- KL(FP32 reference || policy) in nats, lower is better; "
        f"{100 * about['confidence']:.0f} % intervals {about['label']} "
        f"({about['kind'].replace('_', ' ')}, {about['samples']} samples)."
    )
    lines.append(
        "- B/element: bytes kept per state element; kB/token: state and ring bytes moved per "
        "token of one sequence, all layers; top-1 mean: share of positions of the last quarter "
        "with FP32's best token; x floor: KL mean, last 1/4, over that of the noise floor; "
        "growth: of KL along the text."
    )
    lines.append(
        f"- safe: last quarter has mean KL <= {limits['kl_mean']:g} and top-1 agreement >= "
        f"{percent(limits['top1_agreement_mean'])}. "
        + (f"Fewest bytes among the safe: {best['label']}." if best else "No policy is safe.")
    )
    for arm in summary["arms"]:
        whole = arm["whole"]
        for key, what in (
            ("nonfinite_count", "non-finite logit rows, left out of the means"),
            ("kl_infinite_count", "infinite divergences, left out of the means"),
            (
                "saturated_count",
                "state elements were beyond the format's range when written and saturated",
            ),
            ("kl_negative_count", "divergences below -1e-5: more than rounding"),
        ):
            if whole[key]:
                lines.append(f"- {arm['label']}: {whole[key]:,} {what}.")
    lines.append(f"- run {record.run_id}, {record.provenance['environments'][-1]['summary']}")
    return lines


# -- attribution -----------------------------------------------------------------------------------
def decomposition_rows(record: RunRecord) -> list[dict]:
    """Checkpoint x read copy: for each policy A+B of the run that also has A and fp32+B (same L).

    KL adds up if the two errors act independently, so the interaction shows how much they do not.
    """
    rows = []
    for row in record.summary.get("attribution", []):
        parts = {axis["axis"]: axis for axis in row["axes"]}
        if set(parts) - {"rounding", "ring length"} != {"checkpoint", "read copy"}:
            continue
        checkpoint, read_copy = parts["checkpoint"], parts["read copy"]
        rows.append(
            {
                "policy": row["policy"],
                "checkpoint": checkpoint["choice"],
                "read_copy": read_copy["choice"],
                "ring_len": row["ring_len"],
                "kl_checkpoint": checkpoint["alone_kl"],
                "kl_read_copy": read_copy["alone_kl"],
                "kl_both": row["kl"],
                "kl_interaction": row["interaction"],
                "kl_interaction_low": row["interaction_low"],
                "kl_interaction_high": row["interaction_high"],
            }
        )
    return rows


def attribution_rows(record: RunRecord) -> list[tuple[dict, list[dict]]]:
    """(policy's row, its measured axes) where the run measured more than the 2 x 2 shows."""
    rows = []
    for row in record.summary.get("attribution", []):
        measured = [
            axis
            for axis in row["axes"]
            if axis["alone_kl"] is not None or axis["removed_kl"] is not None
        ]
        if len(measured) > 2:
            rows.append((row, measured))
    return rows


def _decomposition_markdown(rows: list[dict]) -> list[str]:
    header = (
        "checkpoint",
        "read copy",
        "checkpoint alone",
        "read copy alone",
        "both",
        "interaction",
        "95 % interval",
    )
    cells = [
        [
            row["checkpoint"],
            row["read_copy"] + ("" if row["ring_len"] == 16 else f"@{row['ring_len']}"),
            *(number(row[name]) for name in _DECOMPOSED),
            interval_text(row, "kl_interaction"),
        ]
        for row in rows
    ]
    return [
        "Checkpoint and read copy apart and together, mean KL over the last quarter "
        "(interaction = both - checkpoint alone - read copy alone):",
        markdown_table(header, cells),
    ]


_DECOMPOSED = ("kl_checkpoint", "kl_read_copy", "kl_both", "kl_interaction")


def _attribution_markdown(rows: list[tuple[dict, list[dict]]]) -> list[str]:
    header = (
        *("policy", "axis", "choice", "alone", "share", "95 % interval"),
        *("removed", "share", "95 % interval"),
    )
    cells = []
    for row, measured in rows:
        for axis in measured:
            line = [row["policy"], axis["axis"], axis["choice"]]
            for name in ("alone", "removed"):
                line += [number(axis[f"{name}_kl"]), share(axis[f"{name}_share"])]
                line.append(share_interval(axis, f"{name}_share"))
            cells.append(line)
        rest = ["", "left over", "interaction", number(row["interaction"])]
        rest += [share(row["interaction_share"]), share_interval(row, "interaction_share")]
        cells.append([*rest, "", "", ""])
    return [
        "Which choice causes how much, mean KL over the last quarter. Alone: FP32 with this choice "
        "only. Removed: what the policy's KL falls by when this choice alone is taken back to "
        "FP32. Shares are of the policy's KL; they add up only if the errors act independently: "
        "left over = KL - sum of alone.",
        markdown_table(header, cells),
    ]


def share(value: float | None) -> str:
    """A share in whole percent; a missing one is a dash."""
    return "–" if value is None else f"{100 * value:.0f} %"


def share_interval(row: dict, name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "–" if low is None else f"[{share(low)}, {share(high)}]"


# -- csv -------------------------------------------------------------------------------------------
_ARM_COLUMNS = (
    "label", "kind", "control", "seed", "ring_len", "checkpoint", "read_copy",
    "bytes_per_state_element", "bytes_per_token", "ratio_to_floor", "ratio_to_floor_low",
    "ratio_to_floor_high", "slope", "slope_low", "slope_high", "growth", "effective_sample_size",
)  # fmt: skip


def csv_text(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """CSV with a header; None is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([["" if cell is None else cell for cell in row] for row in rows])
    return out.getvalue()


def summary_csv(records: Sequence[RunRecord]) -> str:
    """One row per run and arm, every statistic of the whole run and of its last quarter."""
    names = list(records[0].summary["arms"][0]["whole"])
    header = ["model", "run_id", *_ARM_COLUMNS, "verdict"]
    header += [f"{window}_{name}" for window in ("whole", "last_quarter") for name in names]
    rows = []
    for record in records:
        limits = record.document["display"]["limits"]
        for arm in record.summary["arms"]:
            row = [record.model, record.run_id, *(arm[name] for name in _ARM_COLUMNS)]
            row.append(verdict(arm, limits))
            row += [arm[window][name] for window in ("whole", "last_quarter") for name in names]
            rows.append(row)
    return csv_text(header, rows)


def position_csv(records: Sequence[RunRecord]) -> str:
    """One row per run, arm and window of positions [start, stop)."""
    names = list(records[0].summary["arms"][0]["curve"][0])
    rows = [
        [record.model, record.run_id, arm["label"], *(window[name] for name in names)]
        for record in records
        for arm in record.summary["arms"]
        for window in arm["curve"]
    ]
    return csv_text(["model", "run_id", "label", *names], rows)


def phase_csv(records: Sequence[RunRecord]) -> str:
    """One row per run, arm and ring phase."""
    names = ("phase", "kl_mean", "tokens")
    rows = [
        [record.model, record.run_id, arm["label"], arm["ring_len"], *(row[name] for name in names)]
        for record in records
        for arm in record.summary["arms"]
        for row in arm["phase"]
    ]
    return csv_text(["model", "run_id", "label", "ring_len", *names], rows)


def attribution_csv(records: Sequence[RunRecord]) -> str:
    """One row per run, policy and axis of what the runs attribute; only a header if nothing."""
    of_policy, of_axis = ("kl", "sum_alone", "interaction", "interaction_share"), ("axis", "choice")
    estimates = ("alone_kl", "alone_share", "removed_kl", "removed_share")
    bounded = [f"{name}{end}" for name in estimates for end in ("", "_low", "_high")]
    whole = [f"{name}{end}" for name in of_policy for end in ("", "_low", "_high")]
    rows = [
        [record.model, record.run_id, row["policy"], row["ring_len"], *(row[n] for n in whole)]
        + [axis[name] for name in (*of_axis, *bounded)]
        for record in records
        for row in record.summary.get("attribution", [])
        for axis in row["axes"]
    ]
    return csv_text(["model", "run_id", "policy", "ring_len", *whole, *of_axis, *bounded], rows)
