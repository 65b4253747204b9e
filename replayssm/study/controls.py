"""What the control arms of a run must show, and every reason not to trust the run.

Owns the checks that a study's policies really reached the state update. Pure numpy on the arrays of
`records.Positions` and the arms as `stats.summarise` describes them.
"""

import numpy as np

from replayssm.study.records import Positions

# A fault that moves KL by less than this factor over the noise floor counts as undetected. A dead
# hook gives a factor of 0 or 1; a live one gives 1e6 or more with FP32 activations, but only 10 or
# so with bfloat16 ones, whose own rounding is the noise there.
FAULT_DETECTION_FACTOR = 3.0


def check_controls(positions: Positions, arms: list[dict]) -> dict:
    """What the control arms showed, and every reason not to trust the run (`failures`, empty if
    none).
    """
    failures: list[str] = []
    by_control = {arm["control"]: index for index, arm in enumerate(arms) if arm["control"]}
    result: dict = {"second_fp32_kl_max": None, "floor_kl_mean": None, "fault_kl_mean": None}

    second = by_control.get("second_fp32")
    if second is not None:
        differs = ~(positions.kl[second] == 0.0)  # true for NaN, too
        finite = np.abs(positions.kl[second][np.isfinite(positions.kl[second])])
        result["second_fp32_kl_max"] = float(finite.max()) if finite.size else None
        if differs.any():
            failures.append(
                f"second FP32 row: KL must be exactly 0, is not at {int(differs.sum())} positions "
                f"(largest {result['second_fp32_kl_max']}): rows of one batch are not independent"
            )
    floor, fault = by_control.get("other_ring_len"), by_control.get("fault")
    if floor is not None:
        result["floor_kl_mean"] = arms[floor]["whole"]["kl_mean"]
    if fault is not None:
        found = arms[fault]["whole"]["kl_mean"]
        result["fault_kl_mean"] = found
        needed = FAULT_DETECTION_FACTOR * (result["floor_kl_mean"] or 0.0)
        if found is not None and not found > needed:
            failures.append(
                f"hook not live: the fault arm's mean KL is {found:.3g}, not above {needed:.3g} "
                f"({FAULT_DETECTION_FACTOR:g} x the noise floor)"
            )
    failures.extend(_identical_arms(positions, arms))
    return result | {"failures": failures}


def _identical_arms(positions: Positions, arms: list[dict]) -> list[str]:
    """Arms that must differ and do not: the policy never reached the state update."""
    failures, seen = [], {}
    for index, arm in enumerate(arms):
        if arm["control"] == "second_fp32":
            continue
        if not positions.kl[index].any():
            if not arm["exact"]:
                failures.append(f"hook not live: {arm['label']} has KL 0 at every position")
            continue
        twin = seen.setdefault(positions.kl[index].tobytes(), arm)
        if twin["identity"] != arm["identity"]:
            failures.append(
                f"hook not live: {twin['label']} and {arm['label']} gave identical results"
            )
    return failures
