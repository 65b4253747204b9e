"""How numbers, labels and tables are written: short numbers, intervals, Markdown, CSV.

Owns spelling only; knows nothing of runs.
"""

import csv
import io
from collections.abc import Sequence


def without_seed(label: str) -> str:
    """The policy of an arm's label: arms of several seeds are one policy."""
    return label.split(" seed ")[0]


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


def share(value: float | None) -> str:
    """A share in whole percent; a missing one is a dash."""
    return "–" if value is None else f"{round(100 * value)} %"


def share_interval(row: dict, name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "–" if low is None else f"[{share(low)}, {share(high)}]"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table with aligned columns: reads well raw, in a terminal, and rendered."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells, fill=" "):
        padded = [cell.ljust(width, fill) for cell, width in zip(cells, widths, strict=True)]
        return "| " + " | ".join(padded) + " |"

    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, rows)])


def csv_text(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """CSV with a header; None is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([["" if cell is None else cell for cell in row] for row in rows])
    return out.getvalue()
