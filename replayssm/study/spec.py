"""What a study asks: models, text, policies, controls, seeds; read strictly from YAML or arguments.

Owns the field names of `experiments/*.yaml`, their defaults and limits, the expansion of a study into arms
(rows of the lockstep batch), and the part of a specification that makes a run id. Loads no model and runs
nothing. Every mistake in a file is a ValueError of one line that names what was found and what is allowed.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import yaml

import replayssm
from replayssm.policy import PrecisionPolicy, parse_policy

DTYPES = ("float32", "bfloat16")
TEXT_SOURCES = ("builtin/mixed", "generate", "file:PATH")


@dataclass(frozen=True, kw_only=True)
class Controls:
    """The control arms every study has.

    other_ring_len: ring length of a second FP32 arm, mathematically the same run: the noise floor.
        None: twice the study's ring length.
    fault: relative error of the log decay in the arm that is wrong on purpose, and must be detected.
    """

    other_ring_len: int | None = None
    fault: float = 0.01

    def __post_init__(self):
        if self.other_ring_len is not None:
            _at_least("controls.other_ring_len", self.other_ring_len, 1)
        if not (math.isfinite(self.fault) and self.fault != 0.0):
            raise ValueError(f"controls.fault must be a finite number other than 0, is {self.fault}")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How the reference continues its prompt when `text` is "generate": temperature 0 is greedy."""

    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"generate.temperature must be 0 or more, is {self.temperature}")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the tables call safe. Applied when reading results; not part of a run's identity."""

    kl_mean: float = 1e-3
    top1_agreement_mean: float = 0.995


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One row group of the lockstep batch beside the reference.

    control: None for a policy, else "second_fp32", "other_ring_len" or "fault"; the policy `fp32` at the
    study's ring length does double duty as the second FP32 row.
    """

    label: str
    kind: str
    control: str | None
    policy: PrecisionPolicy
    seed: int
    fault: float | None = None

    @property
    def identity(self) -> str:
        """Equal for two arms exactly when they ask for the same computation."""
        seed = self.seed if is_stochastic(self.policy) else "any"
        return f"policy {self.policy.digest}, seed {seed}, fault {self.fault}"

    def describe(self) -> dict:
        """JSON-able description: what tables and figures know about the arm, costs aside."""
        read_copy = self.policy.read_copy
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
        }


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
    prompts_per_batch: int | None = None  # None: all that make at most 16,384 tokens, at least one
    controls: Controls = field(default_factory=Controls)
    generate: Generation = field(default_factory=Generation)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self):
        if not self.name or not set(self.name) <= _NAME_CHARACTERS:
            raise ValueError(f"name {self.name!r} must be letters, digits, '-', '_' or '.'")
        for key in ("prompts", "prefill", "tokens", "ring_len", "stride"):
            _at_least(key, getattr(self, key), 1)
        for key in ("models", "policies", "seeds"):
            values = getattr(self, key)
            if not values:
                raise ValueError(f"{key} is empty: name at least one")
            twice = next((v for i, v in enumerate(values) if v in values[:i]), None)
            if twice is not None:
                raise ValueError(f"{key} lists {getattr(twice, 'label', twice)} twice")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.text not in TEXT_SOURCES[:2] and not self.text.startswith("file:"):
            raise ValueError(f"text {self.text!r} is not one of {', '.join(TEXT_SOURCES)}")
        if self.prompts_per_batch is not None:
            _at_least("prompts_per_batch", self.prompts_per_batch, 1)
        longest = max(arm.policy.ring_len for arm in self.arms())
        if self.tokens < longest:
            raise ValueError(
                f"tokens: the text of {self.tokens} tokens is shorter than the ring of {longest}; "
                "no state would be written back"
            )
        if self.tokens < 4 * self.stride:
            raise ValueError(f"stride {self.stride} leaves less than 4 of {self.tokens} positions to score")

    # ------------------------------------------------------------------------------------- expansion
    @property
    def reference(self) -> PrecisionPolicy:
        return parse_policy(f"fp32@{self.ring_len}")

    def arms(self) -> tuple[Arm, ...]:
        """Policies in the order of the file (one arm per seed where seeds matter), then the controls."""
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
                f"controls.other_ring_len must differ from ring_len {self.ring_len}: it is the noise floor"
            )
        control = {"kind": "control", "seed": self.seeds[0]}
        if not any(arm.control for arm in arms):
            arms.append(Arm(label="fp32, second row", control="second_fp32", policy=exact, **control))
        arms.append(Arm(label=f"fp32, L = {other.ring_len}", control="other_ring_len", policy=other, **control))
        arms.append(
            Arm(
                label=f"fault, log decay {self.controls.fault:+.2%}",
                control="fault",
                policy=exact,
                fault=self.controls.fault,
                **control,
            )
        )
        labels = [arm.label for arm in arms]
        twice = next((label for i, label in enumerate(labels) if label in labels[:i]), None)
        if twice is not None:
            raise ValueError(f"two different policies are both labelled {twice}")
        return tuple(arms)

    @property
    def window(self) -> int:
        """Tokens of one forward pass: whole rings, at least enough of them to fill 9 .. 16 tokens."""
        return self.ring_len * max(1, 16 // self.ring_len)

    @property
    def batch_size(self) -> int:
        """Prompts in one lockstep batch. Part of the identity: it moves numbers at rounding level."""
        return min(self.prompts, self.prompts_per_batch or max(1, 16_384 // self.tokens))

    def identity(self, model: str) -> dict:
        """Everything about a run of `model` that its numbers depend on, as far as the file says it."""
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
                {"label": arm.label, "policy": arm.policy.to_dict(), "seed": arm.seed, "fault": arm.fault}
                for arm in self.arms()
            ],
        }

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
                    f"alias: stride {self.stride} shares the factor {shared} with ring length {ring_len}, so "
                    f"only {ring_len // shared} of {ring_len} ring phases are scored; use a stride coprime with it"
                )
        return lines


def is_stochastic(policy: PrecisionPolicy) -> bool:
    """Whether any write of `policy` draws random bits, so that its seed matters."""
    stores = [policy.checkpoint] + ([policy.read_copy] if policy.read_copy else [])
    return any(store.needs_random_bits for store in stores)


def is_exact(policy: PrecisionPolicy) -> bool:
    """Whether `policy` keeps everything in FP32, so that a drift of exactly 0 is not suspicious."""
    return policy == parse_policy(f"fp32@{policy.ring_len}")


# ------------------------------------------------------------------------------------------- reading
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
_SECTIONS = {"controls": Controls, "generate": Generation, "limits": Limits}


def _at_least(key: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{key} must be at least {least}, is {value}")


def nearest(found: str, allowed: list[str]) -> str:
    """" (did you mean X?)" if some allowed name is close, else the list of allowed names."""
    close = difflib.get_close_matches(str(found), allowed, n=1)
    return f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(allowed)}"


def from_mapping(values: Mapping, *, name: str, where: str) -> StudySpec:
    """A StudySpec from parsed YAML or command-line values; `where` names the source in errors."""
    try:
        spec = _build(StudySpec, {"name": name} | dict(values), "")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    assert isinstance(spec, StudySpec)
    return spec


def _build(kind: type, values: object, prefix: str):
    if not isinstance(values, Mapping):
        raise ValueError(f"{prefix.rstrip('.') or 'the file'} must be a mapping of keys to values")
    allowed = [f.name for f in fields(kind)]
    for key in values:
        if key not in allowed:
            raise ValueError(f"unknown key {prefix}{key}; {nearest(str(key), allowed)}")
    types = {f.name: f.type for f in fields(kind)}
    required = {"models", "policies"} if kind is StudySpec else set()
    missing = sorted(required - set(values))
    if missing:
        raise ValueError(f"missing key {missing[0]}")
    converted = {}
    ring_len = _integer("ring_len", values.get("ring_len", 16)) if kind is StudySpec else 16
    for key, value in values.items():
        at = prefix + key
        if key in _SECTIONS and kind is StudySpec:
            converted[key] = _build(_SECTIONS[key], value, f"{at}.")
        elif key == "policies":
            converted[key] = tuple(_policy(item, ring_len) for item in _sequence(at, value))
        elif key in ("models", "seeds"):
            one = _string if key == "models" else _integer
            converted[key] = tuple(one(at, item) for item in _sequence(at, value))
        elif types[key] is str:
            converted[key] = _string(at, value)
        elif types[key] is float:
            converted[key] = _number(at, value)
        elif value is None and types[key] == int | None:
            converted[key] = None
        else:
            converted[key] = _integer(at, value)
    return kind(**converted)


def _policy(item: object, ring_len: int) -> PrecisionPolicy:
    if isinstance(item, Mapping):
        return PrecisionPolicy.from_dict({"ring_len": ring_len} | dict(item))
    text = _string("policies", item)
    policy = parse_policy(text)
    return policy if "@" in text else replace(policy, ring_len=ring_len)


def _sequence(key: str, value: object) -> list:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} must be a list, is {value!r}")
    return list(value)


def _string(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key} must be text, is {value!r}")
    return value


def _integer(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} must be a whole number, is {value!r}")
    return value


def _number(key: str, value: object) -> float:
    # YAML 1.1 reads 1e-3 (without a dot) as text.
    try:
        return float(value) if not isinstance(value, bool) else _number(key, None)
    except (TypeError, ValueError):
        raise ValueError(f"{key} must be a number, is {value!r}") from None


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice instead of keeping the last."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
    if twice is not None:
        raise ValueError(f"key {twice} is given twice (line {node.start_mark.line + 1} and after)")
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def find_experiment(name: str) -> Path:
    """A configuration file by path, or by name among the experiments of the clone or the package."""
    path = Path(name)
    if path.is_file():
        return path
    package = Path(replayssm.__file__).parent
    folders = [package.parent / "experiments", package / "_packaged" / "experiments"]
    known = {file.stem: file for folder in reversed(folders) for file in sorted(folder.glob("*.yaml"))}
    if name.removesuffix(".yaml") in known:
        return known[name.removesuffix(".yaml")]
    raise ValueError(f"no configuration {name!r}: not a file, not an experiment; {nearest(name, sorted(known))}")


def load_spec(name: str, overrides: Mapping | None = None) -> StudySpec:
    """Read the configuration `name` (see `find_experiment`); `overrides` replace top-level keys."""
    path = find_experiment(name)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, Mapping):
        raise ValueError(f"{path}: must be a mapping of keys to values")
    return from_mapping({**values, **(overrides or {})}, name=path.stem, where=str(path))
