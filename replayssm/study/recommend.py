"""The cheapest policy inside limits, and the table of what each policy costs and does.

Owns the choice behind `replayssm recommend` and the Pareto fronts (state bytes per token against
KL, top-1 agreement and accuracy). Works on what `gate` collected; imports neither torch nor
matplotlib.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from replayssm.study.formatting import markdown_table, number, percent
from replayssm.study.gate import Evidence, GateLimits, collect
from replayssm.study.task_tables import points

# Name of a quality -> how bad a policy is in it (None: not measured).
_BADNESS: dict[str, Callable[[Evidence], float | None]] = {
    "KL": lambda evidence: evidence.kl,
    "top-1": lambda evidence: None if evidence.top1 is None else -evidence.top1,
    "accuracy": lambda evidence: None if evidence.accuracy_low is None else -evidence.accuracy_low,
}


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The answer for one model.

    policies: all with a known cost, cheapest first; fronts: for each of them the qualities in which
    no cheaper or equal policy is better; best: the cheapest inside `limits`, if any is.
    """

    model: str
    limits: GateLimits
    policies: tuple[Evidence, ...]
    fronts: tuple[tuple[str, ...], ...]
    best: Evidence | None


def pareto_front(costs: Sequence[float], badness: Sequence[float | None]) -> list[bool]:
    """Which points no other point beats: costs no more, is no worse, and differs in one of them."""

    def beaten(i: int) -> bool:
        return any(
            badness[j] is not None
            and costs[j] <= costs[i]
            and badness[j] <= badness[i]
            and (costs[j] < costs[i] or badness[j] < badness[i])
            for j in range(len(costs))
        )

    return [badness[i] is not None and not beaten(i) for i in range(len(costs))]


def recommend(where: Path, limits: GateLimits) -> list[Recommendation]:
    """One recommendation for each model with drift runs at or under `where`.

    Without any limit, those that the model's runs were configured with (the strictest). Ties in
    bytes go to the lower KL. Raises ValueError if no run tells what policies cost.
    """
    collected = collect(where)
    costed = [e for e in collected.evidence if e.bytes_per_token is not None]
    if not costed:
        raise ValueError(f"{where} has task runs only; what a policy costs is in drift runs")
    answers = []
    for model in dict.fromkeys(evidence.model for evidence in costed):
        mine = [evidence for evidence in costed if evidence.model == model]
        mine.sort(key=lambda e: (e.bytes_per_token, e.kl is None, e.kl or 0.0, e.policy))
        costs = [evidence.bytes_per_token for evidence in mine]
        on = {
            name: pareto_front(costs, [None if e.broken else bad(e) for e in mine])
            for name, bad in _BADNESS.items()
        }
        asked = collected.own_limits[model] if limits.empty else limits
        inside = (evidence for evidence in mine if not evidence.failures(asked))
        answers.append(
            Recommendation(
                model=model,
                limits=asked,
                policies=tuple(mine),
                fronts=tuple(
                    tuple(name for name in on if on[name][index]) for index in range(len(mine))
                ),
                best=next(inside, None),
            )
        )
    return answers


def recommendation_text(answer: Recommendation) -> str:
    """The Pareto table of one model and the answer in one sentence, Markdown."""
    rows = []
    for evidence, fronts in zip(answer.policies, answer.fronts, strict=True):
        failures = evidence.failures(answer.limits)
        rows.append(
            [
                ("* " if evidence is answer.best else "") + evidence.policy,
                f"{evidence.bytes_per_element:.4g}",
                f"{evidence.bytes_per_token / 1e3:.4g}",
                number(evidence.kl),
                percent(evidence.top1),
                points(evidence.accuracy),
                points(evidence.accuracy_low),
                ", ".join(fronts) or "–",
                "; ".join(failures) or "inside",
            ]
        )
    header = ("policy", "B/element", "kB/token", "mean KL", "top-1", "accuracy", "lower bound",
              "Pareto", "limits")  # fmt: skip
    if answer.best is None:
        sentence = f"No policy is inside the limits ({answer.limits.describe()})."
    else:
        cost = answer.best.bytes_per_token
        share = 100 * cost / max(evidence.bytes_per_token for evidence in answer.policies)
        sentence = (
            f"Recommended: {answer.best.policy}, {cost / 1e3:.4g} kB per token, {share:.0f} % of "
            f"the dearest policy here, the fewest inside the limits ({answer.limits.describe()})."
        )
    return "\n\n".join(
        [
            f"## {answer.model}",
            markdown_table(header, rows),
            "- mean KL and top-1 of the last quarter, the worst run and seed; accuracy: difference "
            "to FP32 in points, the worst task, with the lower bound of its interval; Pareto: no "
            "policy that moves as few bytes is better in it.\n- " + sentence,
        ]
    )
