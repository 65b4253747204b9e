"""Figures that set one thing against another: refresh, attribution, and published numbers.

Owns what is drawn for them and the published numbers; the look is `figures`'. Pure functions of
`store.RunRecord`s.
"""

from collections.abc import Callable, Sequence

from replayssm.study import tables
from replayssm.study.attribution import attribution_rows
from replayssm.study.figures import (
    COLOURS,
    KL_LABEL,
    MARKERS,
    band,
    error_bars,
    legend,
    line_styles,
    plain_ticks,
    render,
    run_figure,
    styled_figure,
)
from replayssm.study.formatting import number, without_seed
from replayssm.study.store import RunRecord

# Published with ReplaySSM (Dao AI Lab and NVIDIA, 2026) for Qwen3.5-4B at 128k tokens: mean KL of a
# shared NVFP4 state, and of an NVFP4 read copy over a recurrence kept in higher precision. Another
# model, other text, not measured here.
PUBLISHED = (("shared NVFP4", 0.136), ("NVFP4 read copy", 0.0038))
PUBLISHED_TOKENS = 131_072
COMPARED = ("nvfp4", "fp32+nvfp4", "fp16-sr+nvfp4", "fp16-sr")


def refresh(record: RunRecord) -> dict[str, bytes] | None:
    """KL against the age that errors can reach: the state refreshed every so many tokens."""
    rows = [row for row in record.summary.get("refresh", []) if (row["kl_mean"] or 0) > 0]
    if not rows:
        return None
    tokens = record.summary["tokens"]
    note = (
        "The state is replaced by the exact one, rounded once, every so many tokens; right end: "
        f"never, {tokens:,} tokens. Mean over the last quarter. A flat line: what is measured is "
        "hard text; a rising one: drift accumulates."
    )
    with run_figure(record, "Refresh: does drift accumulate?", note) as (figure, axes):
        styles = line_styles(record)
        for policy in dict.fromkeys(row["policy"] for row in rows):
            mine = sorted((r["every"], r["kl_mean"]) for r in rows if r["policy"] == policy)
            never = next(r["kl_policy_mean"] for r in rows if r["policy"] == policy)
            if never:
                mine.append((tokens, never))
            label = next((name for name in styles if without_seed(name) == policy), None)
            style = styles[label] if label else {"color": "#000000", "marker": "o"}
            axes.plot(*zip(*mine, strict=True), label=policy, **style)
        axes.set(xscale="log", yscale="log")
        ages = sorted({row["every"] for row in rows} | {tokens})
        plain_ticks(axes.xaxis, ages)
        axes.set_xlabel("tokens between refreshes")
        axes.set_ylabel(KL_LABEL)
        legend(figure, axes)
        return render(figure)


def attribution(record: RunRecord) -> dict[str, bytes] | None:
    """Shares of the policy with the most axes: each choice alone, each taken back."""
    rows = attribution_rows(record.summary)
    if not rows:
        return None
    row, measured = max(rows, key=lambda entry: len(entry[1]))
    note = (
        f"{row['policy']}: mean KL over the last quarter {number(row['kl'])} nats. Bars: "
        f"{band(record)}, paired. Alone: FP32 with this choice only. Removed: what KL falls by "
        "when this choice alone is taken back. Left over: KL minus the sum of alone; shares add "
        "up only if errors act independently."
    )
    size = (7.2, 1.9 + 0.42 * (len(measured) + 1))
    title = "Which choice causes the drift"
    with run_figure(record, title, note, size, seeds="the mean is drawn") as (figure, axes):
        lines = list(reversed([*measured, None]))
        for name, label, offset, colour, marker, face in (
            ("alone", "alone", 0.14, COLOURS[0], "o", COLOURS[0]),
            ("removed", "removed", -0.14, COLOURS[1], "s", "none"),
        ):
            points = [
                (y + offset, axis[f"{name}_share"], *_bounds(axis, f"{name}_share"))
                for y, axis in enumerate(lines)
                if axis is not None and axis[f"{name}_share"] is not None
            ]
            _shares(axes, points, label, colour, marker, face)
        share = row["interaction_share"]
        if share is not None:
            points = [(0.0, share, *_bounds(row, "interaction_share"))]
            _shares(axes, points, "left over", "#000000", "D", "none")
        axes.axvline(0.0, color="#444444", linewidth=1.0)
        axes.axvline(100.0, color="#444444", linewidth=0.8, linestyle=(0, (6, 3)))
        axes.set_yticks(
            range(len(lines)),
            ["interaction" if a is None else f"{a['axis']}: {a['choice']}" for a in lines],
        )
        axes.set_ylim(-0.6, len(lines) - 0.4)
        axes.set_xlabel("share of the policy's KL, %")
        legend(figure, axes)
        return render(figure)


def _bounds(row: dict, name: str) -> tuple[float, float]:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return (row[name], row[name]) if low is None else (low, high)


def _shares(axes, points, label, colour, marker, face) -> None:
    if not points:
        return
    y, value, low, high = zip(*points, strict=True)
    # A percentile interval need not hold the estimate: never a negative length.
    left = [100 * max(0.0, v - bound) for v, bound in zip(value, low, strict=True)]
    right = [100 * max(0.0, bound - v) for v, bound in zip(value, high, strict=True)]
    axes.errorbar(
        [100 * v for v in value],
        y,
        xerr=[left, right],
        color=colour,
        marker=marker,
        markerfacecolor=face,
        markersize=6,
        linestyle="none",
        linewidth=1.0,
        label=label,
    )


def published_comparison(records: Sequence[RunRecord]) -> dict[str, bytes] | None:
    """The published pair of numbers beside the same policies measured here, on other models."""
    long = [r for r in records if r.summary["tokens"] >= PUBLISHED_TOKENS]
    found = [
        (record, arm)
        for label in COMPARED
        for record in long
        for arm in tables.policies(record)
        if without_seed(arm["label"]) == label
        and arm["label"] in line_styles(record)
        and (arm["last_quarter"]["kl_mean"] or 0) > 0
    ]
    if not found:
        return None
    caption = (
        f"Experiment {long[0].experiment}, runs "
        + ", ".join(f"{r.run_id} ({r.model}, {r.summary['prompts']} prompts)" for r in long)
        + f", mean over the last quarter of {long[0].summary['tokens']:,} tokens, bars: "
        f"{band(long[0])}.\nStars: published with ReplaySSM for Qwen3.5-4B at 128k tokens; another "
        "model, another text, not measured here: compare the distance between the two, not their "
        "places."
    )
    lines = [f"published, {name} (Qwen3.5-4B)" for name, _ in PUBLISHED]
    lines += [f"{arm['label']} ({record.model})" for record, arm in found]
    models = list(dict.fromkeys(record.model for record in long))
    size = (7.2, 1.9 + 0.3 * len(lines))
    with styled_figure("Beside the published comparison", caption, size) as (figure, axes):
        for y, (_, value) in enumerate(PUBLISHED):
            axes.plot([value], [-y], marker="*", markersize=11, color="#000000", linestyle="none")
        for y, (record, arm) in enumerate(found, start=len(PUBLISHED)):
            place = models.index(record.model)
            quarter = arm["last_quarter"]
            axes.errorbar(
                [quarter["kl_mean"]],
                [-y],
                xerr=error_bars(quarter),
                color=COLOURS[place % len(COLOURS)],
                marker=MARKERS[place % len(MARKERS)],
                markersize=6,
                linestyle="none",
                linewidth=1.0,
            )
        axes.axhline(0.5 - len(PUBLISHED), color="#444444", linewidth=0.8)
        axes.set(xscale="log")
        axes.set_yticks([-y for y in range(len(lines))], lines)
        axes.set_ylim(0.6 - len(lines), 0.6)
        axes.set_xlabel(KL_LABEL)
        return render(figure)


FIGURES: dict[str, Callable[[RunRecord], dict[str, bytes] | None]] = {
    "refresh": refresh,
    "attribution": attribution,
}
