"""What a study asks: models, text, policies, controls, seeds.

Owns the fields of a study with their defaults and limits, its expansion into arms (rows of the
lockstep batch), and the part of a specification that makes a run id. Knows no file format (that is
`config.py`), loads no model and runs nothing.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from replayssm.ops.capability import check_backend
from replayssm.policy import PrecisionPolicy, parse_policy
from replayssm.study.sections import (
    Controls,
    FreeRunning,
    Generation,
    Limits,
    check_at_least,
    check_name,
)

DTYPES = ("float32", "bfloat16")
TEXT_SOURCES = ("builtin/mixed", "generate", "file:PATH")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One row group of the lockstep batch beside the reference.

    control: None for a policy, else "second_fp32", "other_ring_len", "fault" or "refresh"; the
    policy `fp32` at the study's ring length does double duty as the second FP32 row.
    """

    label: str
    kind: str
    control: str | None
    policy: PrecisionPolicy
    seed: int
    fault: float | None = None
    refresh: int | None = None

    @property
    def identity(self) -> str:
        """Equal for two arms exactly when they ask for the same computation."""
        seed = self.seed if is_stochastic(self.policy) else "any"
        identity = f"policy {self.policy.digest}, seed {seed}, fault {self.fault}"
        return identity if self.refresh is None else f"{identity}, refresh {self.refresh}"

    def describe(self) -> dict:
        """JSON-able description: what tables and figures know about the arm, costs aside."""
        read_copy = self.policy.read_copy
        refreshed = {"policy": self.policy.label, "every": self.refresh}
        return {
            "label": self.label,
            "kind": self.kind,
            "control": self.control,
            "seed": self.seed,
            "fault": self.fault,
            "ring_len": self.policy.ring_len,
            "checkpoint": self.policy.checkpoint.label,
            "read_copy": None if read_copy is None else read_copy.label,
            "exact": is_exact(self.policy) and self.fault is None,
            "identity": self.identity,
            "policy": self.policy.to_dict(),
        } | ({} if self.refresh is None else {"refresh": refreshed})


@dataclass(frozen=True, kw_only=True)
class StudySpec:
    """A validated study. One run per model; see the fields' comments for units.

    Raises ValueError (one line) for anything that cannot be run as asked.
    """

    name: str
    models: tuple[str, ...]
    policies: tuple[PrecisionPolicy, ...]
    question: str = ""  # what the study is to answer; shown, not part of a run's identity
    text: str = "builtin/mixed"  # builtin/mixed | file:PATH | generate
    prompts: int = 4
    prefill: int = 64  # tokens of each prompt that are read before the first scored position
    tokens: int = 2048  # teacher-forced tokens after the prefill, per prompt
    ring_len: int = 16  # of the reference, and of policies that do not say @L
    seeds: tuple[int, ...] = (0,)  # one arm per seed for policies that round stochastically
    stride: int = 1  # score every stride-th position
    dtype: str = "float32"  # of the weights and activations; states follow the policies
    backend: str = "auto"  # auto | triton | reference; like the device, not part of the identity
    prompts_per_batch: int | None = None  # None: all that make at most 16,384 tokens, at least one
    # Kept in positions.parquet: all | every N | log (a ring at each power of two of rings). Every
    # statistic uses all scored positions, whatever is kept.
    positions: str = "all"
    # Where states are compared head by head: none | log | tokens read, in whole rings of every arm.
    states: str | tuple[int, ...] = "none"
    free_running: FreeRunning | None = None
    controls: Controls = field(default_factory=Controls)
    generate: Generation = field(default_factory=Generation)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self):
        check_name(self.name)
        for key in ("prompts", "prefill", "tokens", "ring_len", "stride"):
            check_at_least(key, getattr(self, key), 1)
        for key in ("models", "policies", "seeds"):
            values = getattr(self, key)
            if not values:
                raise ValueError(f"{key} is empty: name at least one")
            twice = next((v for i, v in enumerate(values) if v in values[:i]), None)
            if twice is not None:
                raise ValueError(f"{key} lists {getattr(twice, 'label', twice)} twice")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        check_backend(self.backend)
        if self.text not in TEXT_SOURCES[:2] and not self.text.startswith("file:"):
            raise ValueError(f"text {self.text!r} is not one of {', '.join(TEXT_SOURCES)}")
        if self.prompts_per_batch is not None:
            check_at_least("prompts_per_batch", self.prompts_per_batch, 1)
        longest = max(arm.policy.ring_len for arm in self.arms())
        self._check_records()
        if self.tokens < longest:
            raise ValueError(
                f"tokens: the text of {self.tokens} tokens is shorter than the ring of {longest}; "
                "no state would be written back"
            )
        if self.tokens < 4 * self.stride:
            raise ValueError(
                f"stride {self.stride} leaves less than 4 of {self.tokens} positions to score"
            )

    def _check_records(self) -> None:
        self.kept(np.zeros(1, dtype=np.int64))  # refuses an unknown rule
        step = self.common_ring_len
        listed = () if isinstance(self.states, str) else self.states
        wrong = next((at for at in listed if not 1 <= at <= self.tokens or at % step), None)
        named = self.states in ("none", "log")
        if wrong is not None or list(listed) != sorted(set(listed)) or not (listed or named):
            raise ValueError(
                f"states {self.states if wrong is None else wrong!r} is not one of none, log, or "
                f"an ascending list of multiples of {step} (whole rings of every arm) up to "
                f"{self.tokens}"
            )
        if self.states == "log" and not self.state_positions:
            raise ValueError(f"states: the text is shorter than {step} tokens, a ring of every arm")
        for every in self.controls.refresh:
            if every < 1 or every % step or every >= self.tokens:
                raise ValueError(
                    f"controls.refresh {every} is not a multiple of {step} (whole rings of every "
                    f"arm) below {self.tokens} tokens"
                )
        given = self.prefill + (0 if self.text == "generate" else self.tokens)
        if (free := self.free_running) and (free.prefill or 0) > given:
            raise ValueError(
                f"free_running.prefill {free.prefill} is longer than the text of {given} tokens"
            )

    # -- expansion ---------------------------------------------------------------------------------
    @property
    def reference(self) -> PrecisionPolicy:
        return parse_policy(f"fp32@{self.ring_len}")

    def arms(self) -> tuple[Arm, ...]:
        """Policies in the order of the file (one arm per seed where seeds matter), then the
        controls.
        """
        arms, exact = [], self.reference
        for policy in self.policies:
            stochastic = is_stochastic(policy)
            for seed in self.seeds if stochastic else self.seeds[:1]:
                several = stochastic and len(self.seeds) > 1
                arms.append(
                    Arm(
                        label=policy.label + (f" seed {seed}" if several else ""),
                        kind="policy",
                        control="second_fp32" if policy == exact else None,
                        policy=policy,
                        seed=seed,
                    )
                )
        other = replace(exact, ring_len=self.controls.other_ring_len or 2 * self.ring_len)
        if other == exact:
            raise ValueError(
                f"controls.other_ring_len must differ from ring_len {self.ring_len}: "
                "it is the noise floor"
            )
        control = {"kind": "control", "seed": self.seeds[0]}
        if not any(arm.control for arm in arms):
            arms.append(
                Arm(label="fp32, second row", control="second_fp32", policy=exact, **control)
            )
        arms.append(
            Arm(
                label=f"fp32, L = {other.ring_len}",
                control="other_ring_len",
                policy=other,
                **control,
            )
        )
        arms.append(
            Arm(
                label=f"fault, log decay {self.controls.fault:+.2%}",
                control="fault",
                policy=exact,
                fault=self.controls.fault,
                **control,
            )
        )
        for policy in self.controls.refresh_policies:
            for every in self.controls.refresh:
                arms.append(
                    Arm(
                        label=f"{policy.label}, refresh {every:,}",
                        control="refresh",
                        policy=policy,
                        refresh=every,
                        **control,
                    )
                )
        labels = [arm.label for arm in arms]
        twice = next((label for i, label in enumerate(labels) if label in labels[:i]), None)
        if twice is not None:
            raise ValueError(f"two different policies are both labelled {twice}")
        return tuple(arms)

    def free_arms(self) -> tuple[Arm, ...]:
        """Arms of the free run: all but the refreshed ones, which need the reference's tokens."""
        return tuple(arm for arm in self.arms() if arm.refresh is None)

    @property
    def window(self) -> int:
        """Tokens of one forward pass: whole rings, enough of them for 9 to 16 tokens."""
        return self.ring_len * max(1, 16 // self.ring_len)

    @property
    def common_ring_len(self) -> int:
        """Tokens after which every arm and every window stands at a whole ring."""
        return math.lcm(self.window, *(arm.policy.ring_len for arm in self.arms()))

    @property
    def state_positions(self) -> tuple[int, ...]:
        """Tokens read when states are compared: `log` is every fourth power of two, and the last.

        In whole rings of every arm: right after a flush there is nothing but the checkpoint.
        """
        if self.states == "none":
            return ()
        if self.states != "log":
            return tuple(self.states)
        step = self.common_ring_len
        at, last = step, self.tokens // step * step
        found = []
        while at < last:
            found.append(at)
            at *= 4
        return (*found, last) if last else ()

    def kept(self, positions: np.ndarray) -> np.ndarray:
        """Which of some positions [T] positions.parquet keeps, bool [T]."""
        rule = self.positions
        if rule == "all":
            return np.ones(positions.shape, dtype=bool)
        if rule == "log":
            ring = positions // self.ring_len
            return (ring & (ring - 1)) == 0  # 0, 1, 2, 4, ..
        if rule.startswith("every ") and rule[6:].isdigit() and int(rule[6:]) > 0:
            return positions // self.stride % int(rule[6:]) == 0
        raise ValueError(f"positions {rule!r} is not one of all, log, every N")

    @property
    def batch_size(self) -> int:
        """Prompts in a lockstep batch; part of the identity: it moves numbers at rounding level."""
        return min(self.prompts, self.prompts_per_batch or max(1, 16_384 // self.tokens))

    def identity(self, model: str) -> dict:
        """All that the numbers of a run of `model` depend on, as far as a file says it.

        What was added after the first runs is absent where it asks for nothing: their ids stay.
        """
        free = self.free_running
        added = {
            "positions": None if self.positions == "all" else self.positions,
            "states": list(self.state_positions) or None,
            "free_running": free and vars(free) | {"prefill": free.prefill or self.prefill},
        }
        return {
            "experiment": self.name,
            "model": model,
            "text": self.text,
            "generate": vars(self.generate) if self.text == "generate" else None,
            "prompts": self.prompts,
            "prompts_per_batch": self.batch_size,
            "prefill": self.prefill,
            "tokens": self.tokens,
            "ring_len": self.ring_len,
            "window": self.window,
            "stride": self.stride,
            "dtype": self.dtype,
            "arms": [
                {
                    "label": arm.label,
                    "policy": arm.policy.to_dict(),
                    "seed": arm.seed,
                    "fault": arm.fault,
                }
                | ({} if arm.refresh is None else {"refresh": arm.refresh})
                for arm in self.arms()
            ],
        } | {key: value for key, value in added.items() if value is not None}

    def display(self) -> dict:
        """What a reader of the results wants beside the numbers, and no number depends on."""
        return {"question": self.question, "limits": vars(self.limits)}

    def warnings(self) -> list[str]:
        """Legal requests that deserve a second thought, one line each."""
        lines = []
        for ring_len in sorted({self.ring_len, *(policy.ring_len for policy in self.policies)}):
            shared = math.gcd(self.stride, ring_len)
            if shared > 1:
                lines.append(
                    f"alias: stride {self.stride} shares the factor {shared} with ring length "
                    f"{ring_len}: only {ring_len // shared} of {ring_len} ring phases are scored; "
                    "use a stride coprime with it"
                )
            every = int(self.positions[6:]) * self.stride if "every" in self.positions else 1
            if every > 1 and math.gcd(every, ring_len) > shared:
                lines.append(
                    f"alias: positions {self.positions!r} keeps "
                    f"{ring_len // math.gcd(every, ring_len)} of {ring_len} ring phases of ring "
                    f"length {ring_len}; statistics use all, but use a number coprime with it"
                )
        return lines


def is_stochastic(policy: PrecisionPolicy) -> bool:
    """Whether any write of `policy` draws random bits, so that its seed matters."""
    stores = [policy.checkpoint] + ([policy.read_copy] if policy.read_copy else [])
    return any(store.needs_random_bits for store in stores)


def is_exact(policy: PrecisionPolicy) -> bool:
    """Whether `policy` keeps everything in FP32, so that a drift of exactly 0 is not suspicious."""
    return policy == parse_policy(f"fp32@{policy.ring_len}")
