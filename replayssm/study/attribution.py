"""Which choice of a policy causes how much of its drift: one axis at a time, and all but one.

Owns the axes (what is changed in a policy to take one choice away), and their shares of a run's KL
with intervals. Policies are the mappings of `PrecisionPolicy.to_dict`, so that records can be read
without torch. Legend: A arms, P prompts, T positions, S bootstrap samples.

Two questions per axis, with different answers:

* alone: FP32 with only this choice of the policy; what the choice does by itself;
* removed: the policy with only this choice taken back to FP32; what giving it up would gain.

KL grows with the square of an error, so shares add up to 1 only if the errors are small and act
independently. What is left, KL - sum of alone, is the interaction and is stated beside them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from replayssm.study.bootstrap import Bootstrap, interval
from replayssm.study.formatting import without_seed
from replayssm.study.records import Positions

_NAMES = {
    "checkpoint": "checkpoint",
    "read_copy": "read copy",
    "ring": "ring",
    "operand": "operands",
    "update_source": "update source",
    "ring_len": "ring length",
}


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One choice of a policy.

    name: of the axis; alone: FP32 with this choice only, None where the choice means nothing by
    itself; without: the policy with the choice taken back.
    """

    name: str
    alone: dict | None
    without: dict


def axes(policy: Mapping, exact: Mapping) -> tuple[Axis, ...]:
    """The choices in which `policy` differs from `exact` (FP32 at the reference's ring length).

    In exact arithmetic the ring length changes nothing, so FP32 "alone" has the policy's own: with
    another length it is the noise floor. Update source, ring length and rounding only modify other
    choices and can only be taken back.
    """
    base = {**exact, "ring_len": policy["ring_len"]}
    found = []
    for key in ("checkpoint", "read_copy", "ring", "operand"):
        if policy[key] != exact[key]:
            without = {**policy, key: exact[key]}
            if key == "read_copy":
                without["update_source"] = exact["update_source"]
            found.append(Axis(name=_NAMES[key], alone=base | {key: policy[key]}, without=without))
    for key in ("update_source", "ring_len"):
        if policy[key] != exact[key]:
            found.append(Axis(name=_NAMES[key], alone=None, without={**policy, key: exact[key]}))
    drawn = [key for key in ("checkpoint", "read_copy") if _stochastic(policy[key])]
    if drawn:
        nearest = {"rounding": "nearest_even", "bits": None, "philox_rounds": 10}
        without = {**policy, **{key: policy[key] | nearest for key in drawn}}
        found.append(Axis(name="rounding", alone=None, without=without))
    return tuple(found)


def needed_policies(policy: Mapping, exact: Mapping, *, delta_rule: bool) -> list[dict]:
    """The policies a run must measure to attribute `policy`, itself and FP32 included, no repeats.

    delta_rule: whether the model's recurrence is one; elsewhere the update source has no effect,
    and an arm for it would be the same computation twice.
    """
    if not delta_rule:
        policy = {**policy, "update_source": exact["update_source"]}
    wanted = [dict(exact), dict(policy)]
    if policy["read_copy"] is not None:  # the 2 x 2 proper, without the other choices
        pair = {key: policy[key] for key in ("checkpoint", "read_copy", "ring_len")}
        wanted.append({**exact, **pair})
    for axis in axes(policy, exact):
        wanted += [entry for entry in (axis.alone, axis.without) if entry is not None]
    kept: list[dict] = []
    for entry in wanted:
        other_ring_len = entry != exact and entry | {"ring_len": exact["ring_len"]} == exact
        if entry not in kept and not other_ring_len:  # FP32 needs no second row
            kept.append(entry)
    return kept


def _stochastic(storage: Mapping | None) -> bool:
    return storage is not None and storage["rounding"] == "stochastic"


def _choice(axis: str, arm: Mapping, exact: Mapping) -> str:
    """What the policy of `arm` chose on an axis, in words."""
    policy = arm["policy"]
    if axis == "ring length":
        return f"{policy['ring_len']} instead of {exact['ring_len']}"
    if axis == "ring":
        fmt = policy["ring"]["format"]
        return fmt if isinstance(fmt, str) else fmt["name"]
    return {
        "checkpoint": arm["checkpoint"],
        "read copy": arm["read_copy"],
        "operands": policy["operand"],
        "update source": policy["update_source"],
        "rounding": "stochastic",
    }[axis]


# -- shares ----------------------------------------------------------------------------------------
def attribute(
    positions: Positions,
    arms: Sequence[Mapping],
    inside: np.ndarray,
    bootstrap: Bootstrap,
    *,
    ring_len: int,
) -> list[dict]:
    """A row for each policy of the run whose axes were measured, in the order of the arms.

    Mean KL over the positions `inside` [T] bool; several seeds of a policy are averaged; intervals
    are paired. A policy is left out unless every axis that can stand alone was measured alone and
    there are at least two of them. Keys: policy, ring_len, kl, sum_alone, interaction (kl -
    sum_alone), interaction_share, each with _low and _high; axes: a row per axis with axis, choice,
    alone_kl, alone_share, removed_kl (kl - KL without it), removed_share, intervals likewise, None
    where not measured.
    """
    exact = _exact(arms, ring_len)
    if exact is None:
        return []
    first, kinds, index = [], [], []
    for number, arm in enumerate(arms):
        if arm["kind"] != "policy":
            continue
        if arm["policy"] not in kinds:
            kinds.append(arm["policy"])
            first.append(arm)
            index.append([])
        index[kinds.index(arm["policy"])].append(number)
    if not kinds:
        return []
    with np.errstate(invalid="ignore"):
        kl = np.stack([positions.kl[numbers][..., inside].mean(0) for numbers in index])
    samples = bootstrap.means(kl, int(positions.position[inside][0]))
    finite = np.isfinite(kl)
    count = finite.sum((1, 2))
    means = np.where(finite, kl, 0.0).sum((1, 2), dtype=np.float64) / np.maximum(count, 1)
    observed = np.where(count > 0, means, np.nan)

    def measured(policy: Mapping | None) -> tuple[float, np.ndarray] | None:
        """(mean, samples [S]) of a policy; FP32 is 0 by definition."""
        if policy is None:
            return None
        if {**policy, "ring_len": ring_len} == exact:
            return 0.0, np.zeros(samples.shape[0])
        if policy not in kinds:
            return None
        at = kinds.index(policy)
        return float(observed[at]), samples[:, at]

    rows = []
    for arm in first:
        parts = axes(arm["policy"], exact)
        alone = [measured(axis.alone) for axis in parts if axis.alone is not None]
        if len(alone) >= 2 and None not in alone:
            rows.append(_row(arm, exact, parts, alone, measured))
    return rows


def _exact(arms: Sequence[Mapping], ring_len: int) -> dict | None:
    """FP32 at the reference's ring length, read off the noise floor."""
    floor = next((arm for arm in arms if arm["control"] == "other_ring_len"), None)
    return None if floor is None else {**floor["policy"], "ring_len": ring_len}


def _row(arm: Mapping, exact: Mapping, parts, alone: list, measured) -> dict:
    whole = measured(arm["policy"])
    total = sum(mean for mean, _ in alone), sum(drawn for _, drawn in alone)
    rest = whole[0] - total[0], whole[1] - total[1]
    row = {"policy": without_seed(arm["label"]), "ring_len": arm["ring_len"]}
    row |= _estimate("kl", whole) | _estimate("sum_alone", total) | _estimate("interaction", rest)
    row |= _estimate("interaction_share", _over(rest, whole))
    row["axes"] = []
    for axis in parts:
        by_itself, others = measured(axis.alone), measured(axis.without)
        gain = None if others is None else (whole[0] - others[0], whole[1] - others[1])
        row["axes"].append(
            {"axis": axis.name, "choice": _choice(axis.name, arm, exact)}
            | _estimate("alone_kl", by_itself)
            | _estimate("alone_share", _over(by_itself, whole))
            | _estimate("removed_kl", gain)
            | _estimate("removed_share", _over(gain, whole))
        )
    return row


def _over(part, whole):
    if part is None or not whole[0] > 0.0:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        return part[0] / whole[0], part[1] / whole[1]


def _estimate(name: str, value) -> dict:
    """{name, name_low, name_high} of a (mean, samples) pair; None where there is none."""
    if value is None or not np.isfinite(value[0]):
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    low, high = interval(value[1])
    return {name: float(value[0]), f"{name}_low": low, f"{name}_high": high}


# -- reading summaries ----------------------------------------------------------------------------
def decomposition_rows(summary: Mapping) -> list[dict]:
    """Checkpoint x read copy: for each policy A+B of the run that also has A and fp32+B (same L).

    KL adds up if the two errors act independently, so the interaction shows how much they do not.
    """
    rows = []
    for row in summary.get("attribution", []):
        parts = {axis["axis"]: axis for axis in row["axes"]}
        if set(parts) - {"rounding", "ring length"} != {"checkpoint", "read copy"}:
            continue
        checkpoint, read_copy = parts["checkpoint"], parts["read copy"]
        rows.append(
            {
                "policy": row["policy"],
                "checkpoint": checkpoint["choice"],
                "read_copy": read_copy["choice"],
                "ring_len": row["ring_len"],
                "kl_checkpoint": checkpoint["alone_kl"],
                "kl_read_copy": read_copy["alone_kl"],
                "kl_both": row["kl"],
                "kl_interaction": row["interaction"],
                "kl_interaction_low": row["interaction_low"],
                "kl_interaction_high": row["interaction_high"],
            }
        )
    return rows


def attribution_rows(summary: Mapping) -> list[tuple[dict, list[dict]]]:
    """(policy's row, its measured axes) where the run measured more than the 2 x 2 shows."""
    rows = []
    for row in summary.get("attribution", []):
        measured = [
            axis
            for axis in row["axes"]
            if axis["alone_kl"] is not None or axis["removed_kl"] is not None
        ]
        if len(measured) > 2:
            rows.append((row, measured))
    return rows
