"""Parts of a run's report that only some studies have: attribution, refresh, states, free runs.

Owns their tables and the table of controls. Pure functions of a run's summary; computes nothing.
"""

from collections.abc import Mapping

from replayssm.study.attribution import attribution_rows, decomposition_rows
from replayssm.study.formatting import (
    interval_text,
    markdown_table,
    number,
    share,
    share_interval,
)


def sections(summary: Mapping) -> list[str]:
    """Markdown paragraphs and tables of everything the run measured, in order; controls last."""
    parts = []
    if rows := decomposition_rows(summary):
        parts += _decomposition(rows)
    if rows := attribution_rows(summary):
        parts += _attribution(rows)
    if rows := summary.get("refresh"):
        parts += _refresh(rows)
    if states := summary.get("states"):
        parts += _states(states)
    if generations := summary.get("generations"):
        parts += _generations(generations)
    return [*parts, "Controls:", _controls(summary)]


def _decomposition(rows: list[dict]) -> list[str]:
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
            number(row["kl_checkpoint"]),
            number(row["kl_read_copy"]),
            number(row["kl_both"]),
            number(row["kl_interaction"]),
            interval_text(row, "kl_interaction"),
        ]
        for row in rows
    ]
    return [
        "Checkpoint and read copy apart and together, mean KL over the last quarter "
        "(interaction = both - checkpoint alone - read copy alone):",
        markdown_table(header, cells),
    ]


def _attribution(rows: list[tuple[dict, list[dict]]]) -> list[str]:
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


def _refresh(rows: list[dict]) -> list[str]:
    cells = [
        [
            row["policy"],
            f"{row['every']:,}",
            number(row["kl_mean"]),
            number(row["kl_policy_mean"]),
            number(row["ratio"]),
            interval_text(row, "ratio"),
        ]
        for row in rows
    ]
    header = ("policy", "refreshed every", "KL mean", "never refreshed", "ratio", "95 % interval")
    return [
        "Refresh: the state replaced by the exact one (rounded once) every so many tokens, so that "
        "no error is older; mean KL over the last quarter. Ratio near 1: what is measured is hard "
        "text, not accumulation.",
        markdown_table(header, cells),
    ]


def _states(states: Mapping) -> list[str]:
    cells = []
    for arm in states["arms"]:
        last = arm["curve"][-1]
        if not last["checkpoint_median"] and not last["output_median"]:
            continue
        residuals = sorted(value for value in arm["residual"] or () if value is not None)
        middle = residuals[len(residuals) // 2] if residuals else None
        spread = (
            f"[{number(residuals[len(residuals) // 10])}, "
            f"{number(residuals[-1 - len(residuals) // 10])}]"
            if residuals
            else "–"
        )
        cells.append(
            [
                arm["label"],
                number(last["checkpoint_median"]),
                number(last["predicted_median"]),
                number(middle),
                spread,
                number(last["read_median"]),
                number(last["output_median"]),
                f"{len(arm['stagnating'])} of {len(states['heads'])}",
                share(last["underflowed_mean"]),
            ]
        )
    header = (
        *("arm", "checkpoint error", "theory", "measured / theory", "heads 10–90 %"),
        *("read copy error", "output error", "stagnating heads", "underflowed"),
    )
    return [
        f"States at token {states['positions'][-1]:,}, relative to the reference's, median over "
        f"{len(states['heads'])} heads. Theory: independent roundings under the gates seen; above "
        "1: stagnation, or errors that come back through the model's own inputs; below 1: the "
        "delta rule forgets more than its gate says.",
        markdown_table(header, cells),
    ]


def _generations(generations: Mapping) -> list[str]:
    cells = [
        [
            arm["label"],
            number(arm["length_mean"], 4),
            number(arm["length_ratio_mean"]),
            share(arm["diverged_share"]),
            number(arm["first_divergence_median"], 4),
            share(arm["repeated_share_mean"]),
            share(arm["loop_share"]),
        ]
        for arm in generations["arms"]
    ]
    header = (
        *("arm", "length", "x reference", "differ", "first difference (median token)"),
        *("repeated 8-grams", "loops"),
    )
    return [
        f"Free running, at most {generations['tokens']:,} tokens: what each arm writes by itself. "
        "Texts part at near-ties, so where they part ranks no policies.",
        markdown_table(header, cells),
    ]


def _controls(summary: Mapping) -> str:
    rows = [
        [
            arm["label"],
            number(arm["whole"]["kl_mean"]),
            number(arm["whole"]["kl_max"]),
            number(arm["ratio_to_floor"]),
            _MUST_SHOW[arm["control"]],
        ]
        for arm in summary["arms"]
        if arm["control"]
    ]
    return markdown_table(("control", "KL mean", "KL max", "x floor", "must show"), rows)


_MUST_SHOW = {
    "second_fp32": "exactly 0",
    "other_ring_len": "rounding level: the noise floor",
    "fault": "far above the floor",
    "refresh": "below its policy, if drift accumulates",
}
