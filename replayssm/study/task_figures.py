"""The figure of a task run: accuracy by policy, and the paired difference to FP32.

Owns what is drawn for tasks; style and rendering are `figures`'. A pure function of a
`task_tables.TaskRecord`: computes nothing, imports neither torch nor transformers.
"""

from replayssm.study.figures import COLOURS, MARKERS, render, styled_figure
from replayssm.study.task_tables import TaskRecord


def accuracy_by_policy(record: TaskRecord, task: dict) -> dict[str, bytes]:
    """Left: accuracy with its interval. Right: difference to FP32 over the same questions, with its
    interval, the accepted margin dashed.
    """
    arms = list(reversed(task["arms"]))
    confidence = f"{100 * record.summary['confidence']:.0f} %"
    margin = 100 * task["margin"]
    note = (
        f"Bars: {confidence} intervals; right: paired by question. Dashed: accepted loss of "
        f"{margin:g} points; {_control(task)} flips what rounding alone flips."
    )
    first = task["arms"][0]
    times = "" if first["samples"] == 1 else f" × {first['samples']} samples"
    caption = (
        f"{record.model}, {task['task']}, {first['questions']:,} questions{times}, experiment "
        f"{record.experiment}, run {record.run_id}\n{note}"
    )
    size = (7.2, 1.6 + 0.34 * max(3, len(arms)))
    with styled_figure("Accuracy by policy", caption, size, columns=2) as (figure, (left, right)):
        for y, arm in enumerate(arms):
            place = len(arms) - 1 - y
            style = {
                "color": COLOURS[place % len(COLOURS)],
                "marker": MARKERS[place % len(MARKERS)],
                "markersize": 6,
                "linestyle": "none",
            }
            _bar(left, y, arm, "accuracy", style)
            if arm["kind"] != "reference":
                _bar(right, y, arm, "difference", style)
        left.set_yticks(range(len(arms)), [arm["label"] for arm in arms])
        right.set_yticks(range(len(arms)), [""] * len(arms))
        for axes in (left, right):
            axes.set_ylim(-0.6, len(arms) - 0.4)
        right.axvline(0.0, color="#444444", linewidth=1.0)
        right.axvline(-margin, color="#444444", linewidth=1.2, linestyle=(0, (6, 3)))
        left.set_xlabel("accuracy, % (higher is better)")
        right.set_xlabel("difference to FP32, points")
        return render(figure)


def _control(task: dict) -> str:
    return next(arm["label"] for arm in task["arms"] if arm["kind"] == "control")


def _bar(axes, y: int, arm: dict, name: str, style: dict) -> None:
    value, low, high = (100 * arm[key] for key in (name, f"{name}_low", f"{name}_high"))
    # The interval of a difference is centred on a value shrunk towards 0: never a negative length.
    error = [[max(0.0, value - low)], [max(0.0, high - value)]]
    axes.errorbar([value], [y], xerr=error, linewidth=1.0, **style)
