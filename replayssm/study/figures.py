"""Figures of KL, drawn from summaries alone: against position, phase and bytes; intervals; 2 x 2.

Owns the look (one style for all figures, colour-blind safe and readable in black and white), which
`state_figures` and `comparison_figures` use, too, and the only import of matplotlib. Pure functions
of a `store.RunRecord`: no records are read, nothing is computed beyond what a summary holds,
neither torch nor transformers is imported. Drawing unchanged data again gives the same bytes (fixed
hash salt, fonts and metadata, no dates).
"""

import io
import math
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: E402

from replayssm.study import tables  # noqa: E402
from replayssm.study.attribution import decomposition_rows  # noqa: E402
from replayssm.study.formatting import without_seed  # noqa: E402
from replayssm.study.store import RunRecord  # noqa: E402

# Okabe and Ito's palette: told apart under the common colour-vision deficiencies. Markers and line
# styles carry the same distinction without colour; a policy keeps its style in every figure of a
# run.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
LINES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (4, 1, 1, 1, 1, 1)))
FLOOR = {"color": "#444444", "linestyle": (0, (6, 3)), "linewidth": 1.2}
THEORY = {"linestyle": (0, (1, 1.2)), "linewidth": 1.0, "alpha": 0.9}
_FAULT = {"color": "#444444", "linestyle": (0, (1, 2.5)), "linewidth": 1.2}
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.markersize": 4,
    "lines.linewidth": 1.4,
    "svg.hashsalt": "replayssm",
    "svg.fonttype": "path",
    "savefig.dpi": 150,
    "figure.dpi": 100,
}
KL_LABEL = "KL(FP32 ‖ policy), nats per token (lower is better)"


# -- style -----------------------------------------------------------------------------------------
def line_styles(record: RunRecord) -> dict[str, dict]:
    """Label -> line style of every policy (of its first seed)."""
    arms = [arm["label"] for arm in record.summary["arms"] if arm["kind"] == "policy"]
    labels = {without_seed(label): label for label in reversed(arms)}
    labels = [label for label in arms if label in labels.values()]
    return {
        label: {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": LINES[i % len(LINES)],
        }
        for i, label in enumerate(labels)
    }


def drawable(record: RunRecord) -> list[dict]:
    """Policies with a positive KL, worst first, so that a legend reads like the lines lie.

    Of several seeds the first; all are in the tables.
    """
    shown = line_styles(record)
    return [
        arm
        for arm in reversed(tables.policies(record))
        if arm["label"] in shown and (arm["whole"]["kl_mean"] or 0) > 0
    ]


def control_arm(record: RunRecord, name: str) -> dict | None:
    return next((arm for arm in record.summary["arms"] if arm["control"] == name), None)


@contextmanager
def styled_figure(
    title: str, caption: str, size: tuple[float, float], columns: int = 1
) -> Iterator[tuple[Figure, object]]:
    """(figure, axes) in the look of all figures; axes is an array for more than one column."""
    with plt.rc_context({**matplotlib.rcParamsDefault, "backend": "Agg", **_STYLE}):
        figure, axes = plt.subplots(1, columns, figsize=size, layout="constrained")
        first = axes if columns == 1 else axes[0]
        first.set_title(title, loc="left")
        text = "\n".join(textwrap.fill(line, 125) for line in caption.split("\n"))
        figure.supxlabel(text, fontsize=7, color="#444444", x=0.01, ha="left")
        try:
            yield figure, axes
        finally:
            plt.close(figure)


def run_figure(
    record: RunRecord,
    title: str,
    note: str,
    size=(7.2, 4.4),
    columns: int = 1,
    seeds: str = "the first is drawn; the tables have all",
):
    """A styled figure whose caption names model, length, experiment and run, and says what was
    done about several seeds.
    """
    caption = (
        f"{record.model}, {record.summary['prompts']} prompts × {record.summary['tokens']:,} "
        f"tokens, experiment {record.experiment}, run {record.run_id}\n{note}"
    )
    if any(" seed " in arm["label"] for arm in record.summary["arms"]):
        caption += f" Of several seeds {seeds}."
    return styled_figure(title, caption, size, columns)


def band(record: RunRecord) -> str:
    about = record.summary["interval"]
    return f"{100 * about['confidence']:.0f} % interval {about['label']}"


def legend(figure: Figure, axes) -> None:
    """The lines of `axes`, beside the plot."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")


def plain_ticks(axis, values: list[int] | None = None) -> None:
    """Numbers instead of powers of ten on a logarithmic axis, below a million; ticks at `values`
    only.
    """

    def text(value: float, _: int) -> str:
        if value < 1:
            return f"{value:g}"
        return f"{value:,.0f}" if value < 1e6 else f"$10^{{{math.log10(value):.3g}}}$"

    axis.set_major_formatter(FuncFormatter(text))
    if values is not None:
        axis.set_major_locator(FixedLocator(values))
        axis.set_minor_locator(NullLocator())


def render(figure: Figure) -> dict[str, bytes]:
    """The figure as {"svg": bytes, "png": bytes}, free of dates and version strings."""
    figure.draw_without_rendering()  # lay out once, for both formats
    figure.set_layout_engine("none")
    out = {}
    for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, metadata=metadata)
        out[kind] = buffer.getvalue()
    return out


# -- figures ---------------------------------------------------------------------------------------
def kl_by_position(record: RunRecord) -> dict[str, bytes] | None:
    """Mean KL in windows of growing width against token position, log-log; band = interval."""
    note = (
        f"Mean KL in windows of whole rings; band: {band(record)}. "
        "Slope 0 is a plateau, 1 a random walk of the state error."
    )
    if any("theory" in arm for arm in record.summary["arms"]):
        note += (
            " Dotted, without markers: the theory's line from the gates seen, its height fitted."
        )
    with run_figure(record, "Drift from FP32 along the text", note) as (figure, axes):
        styles = line_styles(record)
        for arm in drawable(record):
            x, y, low, high = _curve(arm)
            axes.plot(x, y, label=arm["label"], **styles[arm["label"]])
            axes.fill_between(
                x, low, high, color=styles[arm["label"]]["color"], alpha=0.15, linewidth=0
            )
            _theory_line(axes, arm, styles[arm["label"]]["color"])
        for name, style in (("fault", _FAULT), ("other_ring_len", FLOOR)):
            arm = control_arm(record, name)
            if arm and (arm["whole"]["kl_mean"] or 0) > 0:
                x, y, _, _ = _curve(arm)
                axes.plot(x, y, label=_CONTROL_NAMES[name], **style)
        axes.set(xscale="log", yscale="log")
        axes.set_xlabel("tokens since the prompt (end of prefill)")
        axes.set_ylabel(KL_LABEL)
        plain_ticks(axes.xaxis)
        legend(figure, axes)
        return render(figure)


def _theory_line(axes, arm: dict, colour: str) -> None:
    """The line a scalar theory expects from the gates seen, where the run measured states."""
    if "theory" not in arm:
        return
    points = [
        (((window["start"] + 1) * window["stop"]) ** 0.5, kl)
        for window, kl in zip(arm["curve"], arm["theory"]["kl"], strict=True)
        if (kl or 0) > 0
    ]
    if points:
        axes.plot(*zip(*points, strict=True), color=colour, **THEORY)


_CONTROL_NAMES = {
    "fault": "fault (wrong on purpose)",
    "other_ring_len": "noise floor (FP32, other L)",
}


def _curve(arm: dict):
    rows = [row for row in arm["curve"] if row["kl_mean"] is not None and row["kl_mean"] > 0]
    x = [((row["start"] + 1) * row["stop"]) ** 0.5 for row in rows]
    y = [row["kl_mean"] for row in rows]
    # A missing or non-positive bound collapses onto the line: no interval is drawn there.
    low = [row["kl_mean_low"] if (row["kl_mean_low"] or 0) > 0 else row["kl_mean"] for row in rows]
    high = [row["kl_mean_high"] or row["kl_mean"] for row in rows]
    return x, y, low, high


def kl_by_phase(record: RunRecord) -> dict[str, bytes] | None:
    """Mean KL by ring phase t mod L: what a token's place in the ring does to its error."""
    note = "Phase 0 is the first token after a flush, phase L - 1 the last one before the next."
    with run_figure(record, "Drift by ring phase", note) as (figure, axes):
        styles = line_styles(record)
        for arm in drawable(record):
            rows = [row for row in arm["phase"] if (row["kl_mean"] or 0) > 0]
            axes.plot(
                [row["phase"] for row in rows],
                [row["kl_mean"] for row in rows],
                label=arm["label"],
                **styles[arm["label"]],
            )
        floor = control_arm(record, "other_ring_len")
        if floor and (floor["whole"]["kl_mean"] or 0) > 0:
            axes.axhline(floor["whole"]["kl_mean"], label=_CONTROL_NAMES["other_ring_len"], **FLOOR)
        axes.set(yscale="log")
        axes.set_xlabel("ring phase (token position mod ring length)")
        axes.set_ylabel(KL_LABEL)
        legend(figure, axes)
        return render(figure)


def bytes_against_kl(record: RunRecord) -> dict[str, bytes] | None:
    """State bytes moved per token against KL: the cost and the benefit of every policy."""
    best, limits = tables.recommended(record), record.document["display"]["limits"]
    exact = ", ".join(
        f"{arm['label']} at {arm['bytes_per_token'] / 1e3:.4g} kB"
        for arm in tables.policies(record)
        if arm["last_quarter"]["kl_mean"] == 0
    )
    note = (
        f'KL: mean over the last quarter, bars: {band(record)}. Dashed: limit for "safe", '
        f"{limits['kl_mean']:g}." + (f" Not drawn, KL 0: {exact}." if exact else "")
    )
    with run_figure(record, "What a policy costs and what it does", note) as (figure, axes):
        styles = line_styles(record)
        for arm in drawable(record):
            quarter, style = arm["last_quarter"], styles[arm["label"]]
            chosen = best and without_seed(arm["label"]) == without_seed(best["label"])
            label = arm["label"] + (" (recommended)" if chosen else "")
            axes.errorbar(
                [arm["bytes_per_token"] / 1e3],
                [quarter["kl_mean"]],
                yerr=error_bars(quarter),
                color=style["color"],
                marker=style["marker"],
                markersize=7,
                linestyle="none",
                linewidth=1.0,
                label=label,
            )
            if chosen:
                axes.plot(
                    [arm["bytes_per_token"] / 1e3],
                    [quarter["kl_mean"]],
                    marker="o",
                    markersize=15,
                    markerfacecolor="none",
                    markeredgecolor="#000000",
                    linestyle="none",
                )
        axes.axhline(limits["kl_mean"], **FLOOR)
        axes.set(yscale="log", xlim=(0, None))
        axes.set_xlabel(
            "state traffic, kB per token and sequence, read and written (lower is better)"
        )
        axes.set_ylabel(KL_LABEL)
        legend(figure, axes)
        return render(figure)


def error_bars(row: dict):
    if row["kl_mean_low"] is None:
        return None
    kl = row["kl_mean"]
    return [
        [max(0.0, min(kl - row["kl_mean_low"], kl * 0.999))],
        [max(0.0, row["kl_mean_high"] - kl)],
    ]


def kl_by_policy(record: RunRecord) -> dict[str, bytes] | None:
    """Policies best first: last-quarter mean with interval; median and p99 of the run."""
    arms = drawable(record)
    note = (
        f"Filled: mean over the last quarter, bars: {band(record)}. "
        "Open: median, | : p99 of the whole run."
    )
    size = (7.2, 1.6 + 0.34 * max(3, len(arms)))
    with run_figure(record, "Drift from FP32 by policy", note, size) as (figure, axes):
        styles = line_styles(record)
        for y, arm in enumerate(arms):
            style, quarter = styles[arm["label"]], arm["last_quarter"]
            mark = {"color": style["color"], "linestyle": "none"}
            if quarter["kl_mean"] is not None:
                bars = error_bars(quarter)
                axes.errorbar(
                    [quarter["kl_mean"]],
                    [y],
                    xerr=bars,
                    marker=style["marker"],
                    markersize=6,
                    **mark,
                )
            for name, marker in (("kl_median", style["marker"]), ("kl_p99", "|")):
                if (arm["whole"][name] or 0) > 0:
                    face = {"markerfacecolor": "none"} if name == "kl_median" else {"markersize": 9}
                    axes.plot([arm["whole"][name]], [y], marker=marker, **face, **mark)
        floor = control_arm(record, "other_ring_len")
        if floor and (floor["whole"]["kl_mean"] or 0) > 0:
            axes.axvline(floor["whole"]["kl_mean"], **FLOOR)
        axes.set(xscale="log")
        axes.set_yticks(range(len(arms)), [arm["label"] for arm in arms])
        axes.set_ylim(-0.6, len(arms) - 0.4)
        axes.set_xlabel(KL_LABEL + "; dashed: noise floor")
        return render(figure)


def checkpoint_by_read_copy(record: RunRecord) -> dict[str, bytes] | None:
    """The 2 x 2 of each policy A+B: what the checkpoint does, what the read copy does, both
    together.
    """
    rows = decomposition_rows(record.summary)
    if not rows:
        return None
    note = (
        'If the errors act independently, "sum" and "both" are equal. Mean over the last quarter.'
    )
    size = (7.2, 2.2 + 0.5 * len(rows))
    title = "Checkpoint and read copy, apart and together"
    with run_figure(record, title, note, size, seeds="the mean is drawn") as (figure, axes):
        marks = (
            ("kl_checkpoint", "checkpoint alone", "s", COLOURS[0]),
            ("kl_read_copy", "read copy alone", "^", COLOURS[1]),
            ("sum", "sum of the two", "|", "#000000"),
            ("kl_both", "both", "o", COLOURS[2]),
        )
        for key, label, marker, colour in marks:
            values = [
                row["kl_checkpoint"] + row["kl_read_copy"] if key == "sum" else row[key]
                for row in rows
            ]
            axes.plot(
                values,
                range(len(rows)),
                marker=marker,
                color=colour,
                linestyle="none",
                label=label,
                markersize=14 if key == "sum" else 7,
                markerfacecolor="none" if key == "kl_both" else colour,
            )
        axes.set(xscale="log")
        axes.set_yticks(
            range(len(rows)), [f"{row['checkpoint']} + {row['read_copy']}" for row in rows]
        )
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_xlabel(KL_LABEL)
        legend(figure, axes)
        return render(figure)


FIGURES: dict[str, Callable[[RunRecord], dict[str, bytes] | None]] = {
    "kl-by-position": kl_by_position,
    "kl-by-phase": kl_by_phase,
    "bytes-against-kl": bytes_against_kl,
    "kl-by-policy": kl_by_policy,
    "checkpoint-by-read-copy": checkpoint_by_read_copy,
}
