"""What a run says, in sentences: whether drift accumulates, through which copy, how fast.

Owns the thresholds that turn intervals into words, and the words. Pure functions of a run's
summary: no number is computed here that the summary does not hold. A sentence is made only where
the run measured what it is about, and says "undecided" where the interval does.
"""

from collections.abc import Iterator, Mapping

from replayssm.study.attribution import decomposition_rows
from replayssm.study.formatting import (
    interval_text,
    number,
    share,
    share_interval,
    without_seed,
)

# A ratio of KL without and with refresh beyond this, interval included, is accumulation; an
# interval that stays below is none.
ACCUMULATES = 1.25
# A copy that alone gives this share of the KL, interval included, is named as the one.
MOST = 0.75


def findings(summary: Mapping) -> list[str]:
    """Sentences for refresh, decomposition, slope and theory, in this order."""
    return [
        *_refresh(summary.get("refresh", [])),
        *_decomposition(summary),
        *_slopes(summary["arms"]),
        *_theory(summary.get("states"), summary["arms"]),
    ]


def _refresh(rows: list[Mapping]) -> Iterator[str]:
    for row in rows:
        if row["ratio"] is None:
            continue
        low, high = row["ratio_low"], row["ratio_high"]
        if low > ACCUMULATES:
            says = f"drift accumulates beyond {row['every']:,} tokens"
        elif high < ACCUMULATES:
            says = f"nothing accumulates beyond {row['every']:,} tokens: what is left is the text"
        else:
            says = f"whether drift accumulates beyond {row['every']:,} tokens is undecided"
        yield (
            f"Refresh: the KL of {row['policy']} is {number(row['ratio'])} times "
            f"{interval_text(row, 'ratio')} that with a state refreshed every {row['every']:,} "
            f"tokens; {says}."
        )


def _decomposition(summary: Mapping) -> Iterator[str]:
    shares = {row["policy"]: row for row in summary.get("attribution", [])}
    for row in decomposition_rows(summary):
        whole = shares[row["policy"]]
        parts = {axis["axis"]: axis for axis in whole["axes"]}
        checkpoint, read_copy = parts["checkpoint"], parts["read copy"]
        if None in (checkpoint["alone_share_low"], read_copy["alone_share_low"]):
            continue
        if read_copy["alone_share_low"] > MOST:
            through = "through its read copy"
        elif checkpoint["alone_share_low"] > MOST:
            through = "through its checkpoint"
        else:
            through = "through both copies, or undecided which"
        yield (
            f"Decomposition: {row['policy']} drifts {through}: alone, the {row['read_copy']} read "
            f"copy gives {share(read_copy['alone_share'])} "
            f"{share_interval(read_copy, 'alone_share')} of its KL, the {row['checkpoint']} "
            f"checkpoint {share(checkpoint['alone_share'])} "
            f"{share_interval(checkpoint, 'alone_share')}, their interaction "
            f"{share(whole['interaction_share'])} {share_interval(whole, 'interaction_share')}."
        )


def _slopes(arms: list[Mapping]) -> Iterator[str]:
    measured = [arm for arm in arms if arm["kind"] == "policy" and arm["growth"]]
    groups = []
    for growth, words in (
        ("grows", "grows for"),
        ("flat", "is flat for"),
        ("falls", "falls for"),
        ("undecided", "is undecided for"),
    ):
        named = [
            f"{arm['label']} ({arm['slope']:.2f} [{arm['slope_low']:.2f}, {arm['slope_high']:.2f}])"
            for arm in measured
            if arm["growth"] == growth
        ]
        if named:
            groups.append(f"{words} {', '.join(named)}")
    if groups:
        yield (
            "Slope of log KL against log position (0: plateau, 1: random walk, 2: bias; past the "
            f"first window, text and accumulation together): KL {'; '.join(groups)}."
        )


def _theory(states: Mapping | None, arms: list[Mapping]) -> Iterator[str]:
    policies = {arm["label"] for arm in arms if arm["kind"] == "policy"}
    told = {}
    for arm in states["arms"] if states else ():
        residuals = sorted(value for value in arm["residual"] or () if value is not None)
        if not residuals or arm["label"] not in policies or without_seed(arm["label"]) in told:
            continue
        inside = sum(0.85 <= value <= 1.15 for value in residuals)
        stagnating = len(arm["stagnating"])
        told[without_seed(arm["label"])] = (
            f"{number(residuals[len(residuals) // 2])} ({inside} of {len(residuals)} heads within "
            f"15 %{f', {stagnating} stagnating' if stagnating else ''})"
        )
    if told:
        yield (
            "Theory: measured over predicted error of the stored state, median head, of several "
            f"seeds the first: {'; '.join(f'{label} {words}' for label, words in told.items())}."
        )
