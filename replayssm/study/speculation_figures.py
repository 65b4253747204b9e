"""Figures of the speculation study: tokens a round, and drift, against the number of drafts.

Owns what is drawn; style and rendering are `figures`'. A pure function of a record.
"""

from replayssm.study.figures import (
    COLOURS,
    KL_LABEL,
    LINES,
    MARKERS,
    plain_ticks,
    render,
    styled_figure,
)
from replayssm.study.speculation_summary import Row, SpeculationRecord, summarise


def acceptance_figures(record: SpeculationRecord) -> dict[str, bytes]:
    """File name -> content, one figure for each drafter."""
    files = {}
    for drafter in record.settings["drafters"]:
        name = drafter.replace("/", "-")
        for kind, content in _acceptance(record, drafter).items():
            files[f"{record.name}-{name}.{kind}"] = content
    return files


def _acceptance(record: SpeculationRecord, drafter: str) -> dict[str, bytes]:
    """Left: tokens a round against drafts. Right: KL from FP32; drafts 0 is plain decoding."""
    settings = record.settings
    caption = (
        f"{record.model}, drafter {drafter}, {settings['prompts']} prompts × {settings['tokens']} "
        "tokens, "
        + ("greedy" if settings["temperature"] == 0 else f"T = {settings['temperature']:g}")
        + "; bars: 95 % intervals over prompts. A round reads the drafts in one window; 1 is "
        "decoding token by token.\nKL of the logits that chose the tokens; FP32's own is rounding "
        "and not drawn."
    )
    with styled_figure("Tokens a round", caption, (9.6, 4.2), columns=2) as (figure, axes):
        left, right = axes
        right.set_title("Drift from FP32", loc="left")
        policies = settings["policies"]
        rows = [row for row in summarise(record) if row.drafter in (drafter, None)]
        for i, policy in enumerate(policies):
            style = {
                "color": COLOURS[i % len(COLOURS)],
                "marker": MARKERS[i % len(MARKERS)],
                "linestyle": LINES[i % len(LINES)],
                "linewidth": 1.2,
                "capsize": 2,
            }
            # Beside each other, so that bars can be told apart.
            shift = 0.12 * (i - (len(policies) - 1) / 2)
            mine = [row for row in rows if row.policy == policy]
            _line(left, mine, "tokens_per_round", shift, label=policy, **style)
            if policy != policies[0]:
                _line(right, [row for row in mine if row.kl > 0], "kl", shift, **style)
        right.set(yscale="log")
        left.set_ylabel("tokens a round (higher is better)")
        right.set_ylabel(KL_LABEL)
        for panel in axes:
            panel.set_xlabel("drafts a round")
            plain_ticks(panel.xaxis, sorted({row.drafts for row in rows}))
        figure.legend(*left.get_legend_handles_labels(), loc="outside right upper")
        return render(figure)


def _line(axes, rows: list[Row], name: str, shift: float, **style) -> None:
    values = [getattr(row, name) for row in rows]
    bars = None
    if rows and all(getattr(row, f"{name}_low") is not None for row in rows):
        bars = [
            [
                max(0.0, v - getattr(row, f"{name}_low"))
                for v, row in zip(values, rows, strict=True)
            ],
            [
                max(0.0, getattr(row, f"{name}_high") - v)
                for v, row in zip(values, rows, strict=True)
            ],
        ]
    axes.errorbar([row.drafts + shift for row in rows], values, yerr=bars, **style)
