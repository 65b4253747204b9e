"""Figures of `bench decode` and `bench speculate`: times of whole passes, and of recurrent layers.

Owns what is drawn; style and rendering are `figures`'. A pure function of a
`bench_step_records.StepRecord`: computes nothing, imports neither torch nor transformers.
"""

from __future__ import annotations

from replayssm.study.bench_figures import CONVENTIONAL_STYLES
from replayssm.study.bench_step_records import (
    CONVENTIONAL,
    DECODE,
    PUBLISHED,
    PUBLISHED_SOURCE,
    StepRecord,
    StepRow,
)
from replayssm.study.figures import (
    COLOURS,
    LINES,
    MARKERS,
    legend,
    plain_ticks,
    render,
    styled_figure,
)

_ONE = {"color": "#000000", "linewidth": 0.8, "linestyle": (0, (1, 1))}


def step_figures(record: StepRecord) -> dict[str, bytes]:
    """File name -> content: decode steps against batch for each model and context, or
    verifications against drafts for each batch, too.
    """
    files: dict[str, bytes] = {}
    for model in record.models:
        for context in record.contexts(model):
            name = f"{model.replace('/', '-')}-{context}"
            if record.kind == DECODE:
                _add(files, name, _steps_by_batch(record, model, context))
                continue
            batches = {
                row.batch for row in record.rows if (row.model, row.context) == (model, context)
            }
            for batch in sorted(batches):
                drawn = _rounds_by_drafts(record, model, context, batch)
                _add(files, f"{name}-batch-{batch}", drawn)
    return files


def _add(files: dict[str, bytes], name: str, drawn: dict[str, bytes] | None) -> None:
    files |= {f"{name}.{kind}": content for kind, content in (drawn or {}).items()}


def _steps_by_batch(record: StepRecord, model: str, context: int) -> dict[str, bytes] | None:
    """Left: ms per step against batch, log-log. Right: speed-up, and what is published."""
    groups = _measured(record, model=model, context=context, drafts=0)
    if not groups:
        return None
    ring_len = record.settings["ring_len"]
    caption = (
        f"{record.environment['summary']}; {context:,} tokens of context, random weights.\n"
        f"Mean over a whole ring cycle of L = {ring_len} steps, flushes included; bars: quartiles. "
        "Thin lines: recurrent layers alone. Conventional: reads and writes the state for every "
        f"token. Published: {PUBLISHED_SOURCE}."
    )
    title = f"{model}: one decode step"
    with styled_figure(title, caption, (9.6, 4.4), columns=2) as (figure, (left, right)):
        right.set_title("Speed-up over conventional FP32", loc="left")
        batches: set[int] = set()
        for name, rows, style in _styled(groups):
            at = [row.batch for row in rows]
            batches |= set(at)
            _times(left, at, rows, name, style)
            thin = style | {"linewidth": 0.7, "markersize": 2, "alpha": 0.8}
            left.plot(at, [row.recurrent_ms for row in rows], **thin)
            _ratios(right, [(row.batch, row.speedup) for row in rows], style)
        published = [(b, x) for b, x in PUBLISHED.get(model, {}).items() if b in batches]
        if published:
            mark = {"marker": "*", "markersize": 8, "linestyle": "none", "color": "#000000"}
            left.plot([], [], label="published", **mark)
            right.plot(*zip(*published, strict=True), **mark)
        right.axhline(1.0, **_ONE)
        left.set(yscale="log")
        left.set_ylabel("ms per step (lower is better)")
        right.set(ylim=(0, None))
        right.set_ylabel("times as fast (higher is better)")
        for axes in (left, right):
            axes.set(xscale="log")
            plain_ticks(axes.xaxis, sorted(batches))
            axes.set_xlabel("batch (sequences)")
        plain_ticks(left.yaxis)
        legend(figure, left)
        return render(figure)


def _rounds_by_drafts(
    record: StepRecord, model: str, context: int, batch: int
) -> dict[str, bytes] | None:
    """Time in conventional decode steps against drafts: the whole model, recurrent layers alone."""
    groups = _measured(record, model=model, context=context, batch=batch)
    if not groups:
        return None
    caption = (
        f"{record.environment['summary']}; batch {batch}, {context:,} tokens of context, random "
        "weights.\nMean over the rounds of a ring, flushes included, when every draft is kept. "
        "Conventional: the state is written after every draft, so that each can be rejected. "
        "Dotted: one conventional FP32 decode step."
    )
    title = f"{model}: verifying drafts"
    with styled_figure(title, caption, (9.6, 4.4), columns=2) as (figure, (left, right)):
        right.set_title("Recurrent layers alone", loc="left")
        drafts: set[int] = set()
        for name, rows, style in _styled(groups):
            drafts |= {row.drafts for row in rows}
            _ratios(left, [(row.drafts, row.steps) for row in rows], style, label=name)
            _ratios(right, [(row.drafts, row.recurrent_steps) for row in rows], style)
        for axes in (left, right):
            axes.axhline(1.0, **_ONE)
            axes.set(ylim=(0, None))
            axes.set_xlabel("drafts (0: a decode step)")
            axes.set_ylabel("conventional decode steps (lower is better)")
            plain_ticks(axes.xaxis, sorted(drafts))
        legend(figure, left)
        return render(figure)


def _measured(record: StepRecord, **wanted) -> dict[str, list[StepRow]]:
    groups = {
        name: [row for row in rows if row.ms is not None]
        for name, rows in record.select(**wanted).items()
    }
    return {name: rows for name, rows in groups.items() if rows}


def _styled(groups: dict[str, list[StepRow]]):
    """(name, rows, style): black for what is conventional."""
    replay = conventional = 0
    for name, rows in groups.items():
        if rows[0].arm == CONVENTIONAL:
            style = CONVENTIONAL_STYLES[conventional % len(CONVENTIONAL_STYLES)]
            conventional += 1
        else:
            style = {
                "color": COLOURS[replay % len(COLOURS)],
                "marker": MARKERS[replay % len(MARKERS)],
                "linestyle": LINES[replay % len(LINES)],
            }
            replay += 1
        yield name, rows, style


def _times(axes, at: list[int], rows: list[StepRow], label: str, style: dict) -> None:
    bars = [
        [max(0.0, row.ms - row.ms_low) for row in rows],
        [max(0.0, row.ms_high - row.ms) for row in rows],
    ]
    axes.errorbar(at, [row.ms for row in rows], yerr=bars, label=label, elinewidth=0.8, **style)


def _ratios(axes, points: list[tuple[int, float | None]], style: dict, **more) -> None:
    known = [(x, y) for x, y in points if y is not None]
    if known:
        axes.plot(*zip(*known, strict=True), **style, **more)
