"""Figures of `replayssm bench kernels`: time of a step, and speed-up, against batch by policy.

Owns what is drawn; style and rendering are `figures`'. A pure function of a
`bench_records.KernelRecord`: computes nothing, imports neither torch nor transformers.
"""

from __future__ import annotations

from replayssm.study.bench_records import KernelRecord
from replayssm.study.figures import (
    COLOURS,
    LINES,
    MARKERS,
    legend,
    plain_ticks,
    render,
    styled_figure,
)

_CONVENTIONAL = {"color": "#000000", "linewidth": 1.2, "markersize": 4}
CONVENTIONAL_STYLES = tuple(
    _CONVENTIONAL | {"linestyle": dashes, "marker": marker}
    for dashes, marker in (((0, (6, 3)), "x"), ((0, (1, 2)), "+"), ((0, (6, 2, 1, 2)), "1"))
)


def kernel_figures(record: KernelRecord) -> dict[str, bytes]:
    """File name -> content of one figure per layer and ring length with cycles at three batches or
    more: two are no curve."""
    files = {}
    for layer in record.titles:
        for ring_len in record.ring_lens(layer):
            for kind, content in (time_by_batch(record, layer, ring_len) or {}).items():
                files[f"{layer}-L{ring_len}.{kind}"] = content
    return files


def time_by_batch(record: KernelRecord, layer: str, ring_len: int) -> dict[str, bytes] | None:
    """Left: µs per step against batch, log-log. Right: speed-up over conventional FP32."""
    groups = {
        policy: [row for row in rows if row.us is not None]
        for policy, rows in record.select(layer, ring_len, "cycle").items()
    }
    if len({row.batch for rows in groups.values() for row in rows}) < 3:
        return None
    caption = (
        f"{record.device}, copy bandwidth {record.copy_gb_per_s:,.0f} GB/s, "
        f"{record.environment['summary']}\n"
        f"Mean over a whole ring cycle of L = {ring_len} steps, rows aligned, the flush included; "
        "medians of graph replays, bars: quartiles. Conventional: reads and writes the state for "
        "every token, fastest kernel at each batch."
    )
    title = f"{record.titles[layer]}: time of one step"
    with styled_figure(title, caption, (9.6, 4.4), columns=2) as (figure, (left, right)):
        right.set_title("Speed-up over conventional FP32", loc="left")
        batches: set[int] = set()
        for policy, style in _conventional(record, layer):
            rows = [
                row
                for batch in sorted({row.batch for row in record.rows if row.layer == layer})
                if (row := record.best_conventional(layer, batch, policy))
            ]
            batches |= {row.batch for row in rows}
            _times(left, rows, f"conventional {policy}", style)
        for i, (policy, rows) in enumerate(groups.items()):
            style = {
                "color": COLOURS[i % len(COLOURS)],
                "marker": MARKERS[i % len(MARKERS)],
                "linestyle": LINES[i % len(LINES)],
            }
            batches |= {row.batch for row in rows}
            _times(left, rows, policy, style)
            faster = [row for row in rows if row.speedup is not None]
            right.plot(
                [row.batch for row in faster],
                [row.speedup for row in faster],
                label=policy,
                **style,
            )
        right.axhline(1.0, **_CONVENTIONAL | {"linestyle": (0, (6, 3))})
        left.set(yscale="log")
        left.set_ylabel("µs per step (lower is better)")
        right.set(ylim=(0, None))
        right.set_ylabel("times as fast (higher is better)")
        for axes in (left, right):
            axes.set(xscale="log")
            plain_ticks(axes.xaxis, sorted(batches))
            axes.set_xlabel("batch (sequences)")
        plain_ticks(left.yaxis)
        legend(figure, left)
        return render(figure)


def _conventional(record: KernelRecord, layer: str):
    policies = dict.fromkeys(
        row.policy for row in record.rows if row.layer == layer and row.kernel == "conventional"
    )
    yield from zip(policies, CONVENTIONAL_STYLES, strict=False)


def _times(axes, rows, label: str, style: dict) -> None:
    axes.errorbar(
        [row.batch for row in rows],
        [row.us for row in rows],
        yerr=[
            [max(0.0, row.us - row.us_low) for row in rows],
            [max(0.0, row.us_high - row.us) for row in rows],
        ],
        label=label,
        elinewidth=0.8,
        **style,
    )
