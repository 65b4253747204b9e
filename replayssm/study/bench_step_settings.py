"""What `bench decode` and `bench speculate` measure: settings, and the passes that they name.

Owns the settings' defaults, what is said of wrong ones, and the order of a batch's rows. Measures
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replayssm.models.loading import DTYPES
from replayssm.ops.capability import check_backend
from replayssm.policy import parse_policy
from replayssm.study.bench_arms import STATES, Arm, conventional_arm, replay_arm
from replayssm.study.bench_step_records import DECODE, SPECULATE

DEFAULT_MODELS = ("random/qwen3.5-4b", "random/nemotron-3-nano-4b")
DEFAULT_POLICIES = ("fp32", "fp16-sr", "fp32+nvfp4", "fp16-sr+nvfp4")


@dataclass(frozen=True, kw_only=True)
class StepBench:
    """What to measure.

    Attributes:
        kind: "decode" or "speculate".
        models: names of random models, built-in ones, folders or hub ids.
        batches: sequences; contexts: tokens they hold.
        drafts: of a verification, each 1 to 16; only for "speculate".
        policies: labels, without a ring length. ring_len: L of all of them.
        states: formats of conventional states; speed-ups are against "fp32", which is required.
        dtype: of weights and activations.
        seconds: of cycles for a time.
        backend: of the replay arms.
    """

    kind: str
    models: Sequence[str] = DEFAULT_MODELS
    batches: Sequence[int] = (1, 32, 128, 256, 512)
    contexts: Sequence[int] = (512,)
    drafts: Sequence[int] = (1, 2, 4, 8, 16)
    policies: Sequence[str] = DEFAULT_POLICIES
    ring_len: int = 16
    states: Sequence[str] = ("fp32",)
    dtype: str = "bfloat16"
    seconds: float = 0.5
    backend: str = "auto"

    def __post_init__(self):
        if self.kind not in (DECODE, SPECULATE):
            raise ValueError(f"kind {self.kind!r} is not one of {DECODE}, {SPECULATE}")
        if not (self.models and self.batches and self.contexts and self.drafts):
            raise ValueError("nothing to measure: give a model, a batch, a context, drafts")
        for what, numbers, least, most in (
            ("batch", self.batches, 1, None),
            ("context", self.contexts, 1, None),
            ("drafts", self.drafts, 1, 16),
            ("ring length", (self.ring_len,), 1, None),
        ):
            for number in numbers:
                if type(number) is not int or number < least or (most and number > most):
                    limit = f"at least {least}" if most is None else f"{least} to {most}"
                    raise ValueError(f"{what} {number!r} is not an integer of {limit}")
        if "fp32" not in self.states:
            raise ValueError("states must include fp32, which speed-ups are against")
        for state in self.states:
            if state not in STATES:
                raise ValueError(f"state {state!r} is not one of {', '.join(STATES)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        check_backend(self.backend)
        if not self.seconds > 0:
            raise ValueError(f"seconds {self.seconds!r} is not positive")
        for label in self.policies:
            if "@" in label:
                raise ValueError(f"policy {label!r}: the ring length is given for all policies")
            parse_policy(label)

    @property
    def arms(self) -> list[Arm]:
        """Conventional FP32 first."""
        states = sorted(self.states, key=lambda state: state != "fp32")
        return [
            *map(conventional_arm, states),
            *(replay_arm(label, self.ring_len) for label in self.policies),
        ]

    @property
    def most_tokens(self) -> int:
        """Of a check: a ring, its flush and some; or the longest verification."""
        return max(self.ring_len + 2, max(self.drafts) + 1)


def cases(bench: StepBench) -> list[tuple[Arm, int]]:
    """(arm, tokens of a pass) in the order of a batch's rows; what is compared with comes first.

    Of the decode steps a verification is only compared with conventional FP32's.
    """
    if bench.kind == DECODE:
        return [(arm, 1) for arm in bench.arms]
    longer = [(arm, drafts + 1) for drafts in bench.drafts for arm in bench.arms]
    return [(bench.arms[0], 1), *longer]
