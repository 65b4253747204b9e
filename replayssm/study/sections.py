"""The sections of a study's specification: controls, generation, free runs, limits.

Owns their fields, defaults and limits. Knows no file format and nothing of the study around them.
"""

import math
from dataclasses import dataclass

from replayssm.policy import PrecisionPolicy

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


@dataclass(frozen=True, kw_only=True)
class Controls:
    """The control arms every study has.

    other_ring_len: ring length of a second FP32 arm, mathematically the same run: the noise floor.
        None: twice the study's ring length.
    fault: relative error of the log decay in the arm that is wrong on purpose, and must be
    detected.
    refresh: for each number of tokens here and each policy in `refresh_policies` an arm whose state
        is replaced by the exact one, rounded once, every so many tokens: it cannot accumulate.
    """

    other_ring_len: int | None = None
    fault: float = 0.01
    refresh: tuple[int, ...] = ()
    refresh_policies: tuple[PrecisionPolicy, ...] = ()

    def __post_init__(self):
        if self.other_ring_len is not None:
            check_at_least("controls.other_ring_len", self.other_ring_len, 1)
        if not (math.isfinite(self.fault) and self.fault != 0.0):
            raise ValueError(
                f"controls.fault must be a finite number other than 0, is {self.fault}"
            )
        if bool(self.refresh) != bool(self.refresh_policies):
            raise ValueError("controls.refresh and controls.refresh_policies go together")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How the reference continues its prompt when `text` is "generate": temperature 0 is greedy."""

    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"generate.temperature must be 0 or more, is {self.temperature}")


@dataclass(frozen=True, kw_only=True)
class FreeRunning:
    """Every arm also writes a continuation of its own, and the texts are compared.

    tokens: at most so many per prompt. prefill: tokens of the text that are read first; None: as
    the study. temperature, seed: of sampling, the same draws for every arm; 0 is greedy.
    """

    tokens: int = 1024
    prefill: int | None = None
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self):
        check_at_least("free_running.tokens", self.tokens, 1)
        if self.prefill is not None:
            check_at_least("free_running.prefill", self.prefill, 1)
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"free_running.temperature must be 0 or more, is {self.temperature}")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the tables call safe. Applied when reading results; not part of a run's identity."""

    kl_mean: float = 1e-3
    top1_agreement_mean: float = 0.995


def check_name(name: str) -> None:
    """ValueError unless `name` can be part of a path."""
    if not name or not set(name) <= _NAME_CHARACTERS:
        raise ValueError(f"name {name!r} must be letters, digits, '-', '_' or '.'")


def check_at_least(key: str, value: int, least: int) -> None:
    """ValueError naming `key` if `value` is below `least`."""
    if value < least:
        raise ValueError(f"{key} must be at least {least}, is {value}")
