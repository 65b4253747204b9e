"""Tables of a study: the summary a person reads, and the CSV files a program reads.

Owns the main table, verdicts, footers and CSV columns; parts that only some studies have are in
`table_sections`, sentences in `findings`. A pure function of `store.RunRecord`s; computes no
statistics, reads no records and imports neither torch nor transformers.
"""

from collections.abc import Sequence

from replayssm.study.findings import findings
from replayssm.study.formatting import (
    csv_text,
    interval_text,
    markdown_table,
    number,
    percent,
    without_seed,
)
from replayssm.study.store import RunRecord
from replayssm.study.table_sections import sections

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
    """The safe policy that moves the fewest state bytes per token (ties: the lower KL), if any.

    Of a policy with several seeds all must be safe; the arm of the best one is returned.
    """
    limits = record.document["display"]["limits"]
    arms = policies(record)
    unsafe = {without_seed(arm["label"]) for arm in arms if verdict(arm, limits) != "safe"}
    safe = [arm for arm in arms if without_seed(arm["label"]) not in unsafe]
    return min(safe, key=lambda arm: arm["bytes_per_token"], default=None)


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


def summary_markdown(record: RunRecord) -> str:
    """One run: the policies best first, what explains them, the controls, what the run says, and
    what to know when reading it.
    """
    summary, limits = record.summary, record.document["display"]["limits"]
    parts = [
        f"## {record.model}, {summary['prompts']} prompts x {summary['tokens']:,} tokens",
        markdown_table(COLUMNS, [_cells(arm, verdict(arm, limits)) for arm in policies(record)]),
    ]
    parts += sections(record.summary)
    if said := findings(record.summary):
        parts.append("What this run says:")
        parts.append("\n".join(f"- {sentence}" for sentence in said))
    parts.append("\n".join(_footer(record)))
    return "\n\n".join(parts) + "\n"


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
        + (
            f"Fewest bytes among the safe: {without_seed(best['label'])}."
            if best
            else "No policy is safe."
        )
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


# -- csv -------------------------------------------------------------------------------------------
_ARM_COLUMNS = (
    "label", "kind", "control", "seed", "ring_len", "checkpoint", "read_copy",
    "bytes_per_state_element", "bytes_per_token", "ratio_to_floor", "ratio_to_floor_low",
    "ratio_to_floor_high", "slope", "slope_low", "slope_high", "growth", "effective_sample_size",
)  # fmt: skip


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
