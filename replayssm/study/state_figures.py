"""Figures of the state level: error by layer and head, against decay, along the text.

Owns what is drawn of a summary's `states`; the look is `figures`'. Pure functions of a
`store.RunRecord`: nothing is computed beyond order and choice of what is shown.
"""

from collections.abc import Callable, Mapping

from replayssm.study.figures import THEORY, legend, line_styles, plain_ticks, render, run_figure
from replayssm.study.store import RunRecord

# Luminance grows with the value, also in grey; told apart under colour-vision deficiencies.
COLOUR_MAP = "cividis"
LARGEST_PANELS = 4
LARGEST_TICKS = 6

_ERROR = "relative error of the checkpoint, against the reference's state"


def _rounded(record: RunRecord) -> list[Mapping]:
    """State rows of policies whose checkpoint rounds, largest error first."""
    shown = line_styles(record)
    rows = [
        arm
        for arm in record.summary["states"]["arms"]
        if arm["label"] in shown and arm["predicted"] is not None
    ]
    return sorted(rows, key=lambda arm: -(arm["curve"][-1]["checkpoint_median"] or 0.0))


def error_by_head(record: RunRecord) -> dict[str, bytes] | None:
    """Heat maps over layers and heads, heads in the order of their memory: memory, then the
    checkpoint's error of the policies with the largest.
    """
    states = record.summary.get("states")
    arms = _rounded(record)[:LARGEST_PANELS] if states else []
    if not arms:
        return None
    order = _by_layer_and_memory(states)
    note = (
        f"At token {states['positions'][-1]:,}. Left: memory of each head in tokens (1 / mean log "
        "decay). Then the relative error of the checkpoint, one colour scale, policies with the "
        "largest."
    )
    size = (2.0 + 1.9 * (len(arms) + 1), 3.4 + 0.09 * len(order))
    with run_figure(record, "memory of heads", note, size, len(arms) + 1) as (figure, panels):
        memory = [[states["memory"][i] or float("nan") for i in row] for row in order.values()]
        errors = [
            [[arm["checkpoint"][i] or float("nan") for i in row] for row in order.values()]
            for arm in arms
        ]
        seen = [v for table in errors for row in table for v in row if v == v]
        limits = {"vmin": min(seen), "vmax": max(seen)} if seen else {}
        first = _heat(panels[0], memory, {})
        for axes, arm, table in zip(panels[1:], arms, errors, strict=True):
            last = _heat(axes, table, limits)
            axes.set_title(arm["label"], loc="left", fontsize=8)
        panels[0].set_title("memory of heads", loc="left", fontsize=8)
        for axes in panels:
            axes.set_yticks([])
            axes.set_xlabel("head, short to\nlong memory", fontsize=8)
        ticks = [i for i in range(len(order)) if i % max(1, len(order) // 12) == 0]
        layers = list(order)
        panels[0].set_yticks([i + 0.5 for i in ticks], [str(layers[i]) for i in ticks])
        panels[0].set_ylabel("layer of the model")
        figure.colorbar(first, ax=panels[0], location="bottom", label="memory, tokens")
        figure.colorbar(last, ax=list(panels[1:]), location="bottom", label=_ERROR, aspect=40)
        return render(figure)


def _heat(axes, table: list[list[float]], limits: Mapping):
    axes.grid(False)
    mesh = axes.pcolormesh(table, norm="log", cmap=COLOUR_MAP, **_limits(table, limits))
    axes.invert_yaxis()
    axes.set_xticks([])
    return mesh


def _limits(table: list[list[float]], limits: Mapping) -> dict:
    """Colours from `limits` or from the table, never from a single value: a scale needs a width."""
    seen = [value for row in table for value in row if value == value and value > 0]
    low = limits.get("vmin", min(seen, default=1.0))
    high = limits.get("vmax", max(seen, default=1.0))
    return {"clim": (low, high if high > low else 10 * low)}


def _by_layer_and_memory(states: Mapping) -> dict[int, list[int]]:
    """Layer -> indices of its heads, short memory first (no decay: last)."""
    rows: dict[int, list[int]] = {}
    for index, layer in enumerate(states["layers"]):
        rows.setdefault(layer, []).append(index)
    memory = states["memory"]
    for row in rows.values():
        row.sort(key=lambda i: (memory[i] is None, memory[i] or 0.0))
    return dict(sorted(rows.items()))


def error_against_decay(record: RunRecord) -> dict[str, bytes] | None:
    """Error of every head's checkpoint against its memory, beside the theory's."""
    states = record.summary.get("states")
    arms = _rounded(record) if states else []
    if not arms:
        return None
    note = (
        f"One mark a head and policy, at token {states['positions'][-1]:,}; dotted: theory for "
        "independent roundings under the gates seen; ringed: the head meets the criterion for "
        "stagnation. Above the line: stagnation, or errors that come back through the model's own "
        "inputs. Below: a contraction that gates do not show, such as the delta rule's."
    )
    with run_figure(record, "Error of the stored state by memory", note) as (figure, axes):
        styles = line_styles(record)
        for arm in arms:
            style = styles[arm["label"]]
            heads = sorted(
                (memory, error, line, index in arm["stagnating"])
                for index, (memory, error, line) in enumerate(
                    zip(states["memory"], arm["checkpoint"], arm["predicted"], strict=True)
                )
                if None not in (memory, error, line) and error > 0
            )
            if not heads:
                continue
            memory, error, line, stagnates = zip(*heads, strict=True)
            axes.plot(
                memory,
                error,
                color=style["color"],
                marker=style["marker"],
                markersize=4,
                linestyle="none",
                label=arm["label"],
            )
            axes.plot(memory, line, color=style["color"], **THEORY)
            marked = [point[:2] for point in heads if point[3]]
            if marked:
                axes.plot(
                    *zip(*marked, strict=True),
                    markeredgecolor="#000000",
                    markerfacecolor="none",
                    marker="o",
                    markersize=8,
                    linestyle="none",
                )
        axes.set(xscale="log", yscale="log")
        axes.set_xlabel("memory of the head, tokens (1 / mean log decay)")
        axes.set_ylabel("relative error of the checkpoint (lower is better)")
        plain_ticks(axes.xaxis)
        legend(figure, axes)
        return render(figure)


def state_error_by_position(record: RunRecord) -> dict[str, bytes] | None:
    """Median error of the checkpoint over heads along the text, beside the theory's."""
    states = record.summary.get("states")
    arms = _rounded(record) if states else []
    if not arms or len(states["positions"]) < 2:
        return None
    note = (
        "Median over heads, band: 10th to 90th percentile of heads. Dotted, without markers: "
        "theory for independent roundings under the gates seen, no free number."
    )
    with run_figure(record, "Error of the stored state along the text", note) as (figure, axes):
        styles = line_styles(record)
        for arm in arms:
            style = styles[arm["label"]]
            rows = [row for row in arm["curve"] if (row["checkpoint_median"] or 0) > 0]
            x = [row["position"] for row in rows]
            axes.plot(x, [row["checkpoint_median"] for row in rows], label=arm["label"], **style)
            low = [row["checkpoint_low"] or row["checkpoint_median"] for row in rows]
            high = [row["checkpoint_high"] for row in rows]
            axes.fill_between(x, low, high, color=style["color"], alpha=0.12, linewidth=0)
            line = [row["predicted_median"] for row in rows]
            axes.plot(x, line, color=style["color"], **THEORY)
        axes.set(xscale="log", yscale="log")
        axes.set_xlabel("tokens since the prompt (end of prefill)")
        axes.set_ylabel("relative error of the checkpoint (lower is better)")
        measured = states["positions"]
        plain_ticks(axes.xaxis, measured[:: -(-len(measured) // LARGEST_TICKS)])
        legend(figure, axes)
        return render(figure)


FIGURES: dict[str, Callable[[RunRecord], dict[str, bytes] | None]] = {
    "state-error-by-head": error_by_head,
    "state-error-against-decay": error_against_decay,
    "state-error-by-position": state_error_by_position,
}
