"""The arms of a lockstep: one way each to run the same model on the same text.

Owns what an arm is and which arms go together. Must not know how they are run (`lockstep`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replayssm.models.session import RowGroup
from replayssm.policy import PrecisionPolicy

KINDS = ("reference", "floor", "policy", "control", "fault")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run the model, compared with arm 0 (the reference).

    seed: of stochastic rounding.
    kind: what the arm is for, one of KINDS; the engine treats all alike.
    fault: factor on every log decay, for kind "fault" only (1.01 is the study's control).
    refresh: tokens after which the arm's state is replaced by the reference's, or None: never.
        A multiple of the lockstep's window and of the arm's and the reference's ring length.
    """

    label: str
    policy: PrecisionPolicy
    seed: int = 0
    kind: str = "policy"
    fault: float | None = None
    refresh: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"arm {self.label!r}: kind {self.kind!r} is not one of {KINDS}")
        if (self.fault is not None) != (self.kind == "fault"):
            raise ValueError(f"arm {self.label!r}: a fault factor and kind 'fault' go together")

    def rows(self, sequences: Sequence[int]) -> RowGroup:
        """Rows of a session that run this arm, one for each sequence number."""
        return RowGroup(
            policy=self.policy,
            sequences=tuple(sequences),
            seeds=(self.seed,) * len(sequences),
            log_decay_factor=1.0 if self.fault is None else self.fault,
        )


def check_arms(arms: Sequence[Arm], window: int) -> None:
    """ValueError unless `arms` can be read together in windows of `window` tokens."""
    labels = [arm.label for arm in arms]
    if not arms or arms[0].kind != "reference":
        raise ValueError("the first arm must be of kind 'reference'")
    if len(set(labels)) != len(labels):
        raise ValueError(f"arm labels must differ, got {labels}")
    if window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    for arm in arms:
        lengths = (window, arms[0].policy.ring_len, arm.policy.ring_len)
        if arm.refresh is not None and (
            arm.refresh < 1 or any(arm.refresh % length for length in lengths)
        ):
            raise ValueError(
                f"arm {arm.label!r}: refresh every {arm.refresh} tokens must be a multiple of "
                f"window and ring lengths {lengths}"
            )
