"""What an evaluation asks: models, policies, tasks, samples, and the margin that decides.

Owns the fields of a task configuration with their defaults and limits, its arms, and reading it
from YAML. Loads no task and no model, runs nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from replayssm.ops.capability import check_backend
from replayssm.policy import PrecisionPolicy, parse_policy
from replayssm.study.config import (
    nearest,
    read_integer,
    read_number,
    read_policy,
    read_sequence,
    read_string,
    read_yaml,
)
from replayssm.study.spec import DTYPES, check_at_least, check_name

DEFAULT_CAP = 1024


@dataclass(frozen=True, kw_only=True)
class TaskRequest:
    """One task of an evaluation. None: what the evaluation says for all, or else the task itself.

    limit: the first so many questions. samples: answers a question gets. max_gen_toks: cap on new
    tokens. prefill: tokens of a prompt that are prefilled with an exact state (None: what the task
    says, or else all); on the others the policy acts as on generated ones.
    """

    name: str
    limit: int | None = None
    samples: int | None = None
    max_gen_toks: int | None = None
    prefill: int | None = None

    def __post_init__(self) -> None:
        for key in ("limit", "samples", "max_gen_toks", "prefill"):
            if getattr(self, key) is not None:
                check_at_least(f"tasks: {self.name}: {key}", getattr(self, key), 1)


@dataclass(frozen=True, kw_only=True)
class TaskArm:
    """One way to run the model: the FP32 "reference", a "policy", or the "control": FP32 with
    another ring length, whose flips show what rounding alone does.
    """

    label: str
    kind: str
    policy: PrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A validated evaluation. One run per model; see the fields' comments.

    Raises ValueError (one line) for anything that cannot be run as asked.
    """

    name: str
    models: tuple[str, ...]
    policies: tuple[PrecisionPolicy, ...]
    tasks: tuple[TaskRequest, ...]
    question: str = ""  # what the evaluation is to answer; shown, not part of a run's identity
    limit: int | None = None  # questions of each task; None: all
    samples: int = 1  # answers a question gets; more than one needs a temperature
    temperature: float = 0.0  # 0: greedy
    seed: int = 0  # of sampling and stochastic rounding
    max_gen_toks: int | None = None  # cap on new tokens; None: the task's, or else 1,024
    ring_len: int = 16  # of the reference, and of policies that do not say @L
    other_ring_len: int | None = None  # of the FP32 control; None: twice ring_len
    dtype: str = "float32"  # of weights and activations; states follow the policies
    backend: str = "auto"  # auto | triton | reference; not part of a run's identity
    batch_size: int = 64  # sequences decoded at once; not part of a run's identity
    chat_template: bool = False
    enable_thinking: bool | None = None  # passed to the chat template
    think_end_token: str | None = None  # ends the reasoning of a model that reasons
    margin: float = 0.01  # loss of accuracy that is accepted ("not worse"); not part of identity

    def __post_init__(self) -> None:
        check_name(self.name)
        for key in ("models", "policies", "tasks"):
            values = getattr(self, key)
            if not values:
                raise ValueError(f"{key} is empty: name at least one")
            names = [getattr(v, "name", getattr(v, "label", v)) for v in values]
            twice = next((n for i, n in enumerate(names) if n in names[:i]), None)
            if twice is not None:
                raise ValueError(f"{key} lists {twice} twice")
        for key in ("samples", "ring_len", "batch_size", "limit", "max_gen_toks", "other_ring_len"):
            if getattr(self, key) is not None:
                check_at_least(key, getattr(self, key), 1)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        check_backend(self.backend)
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or more, is {self.temperature}")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed must be in [0, 2^32), is {self.seed}")
        if not 0.0 < self.margin < 1.0:
            raise ValueError(f"margin must be between 0 and 1, is {self.margin}")
        if self.temperature == 0.0 and max(map(self.samples_of, self.tasks)) > 1:
            raise ValueError("samples above 1 need a temperature: greedy answers are all the same")
        if self.enable_thinking is not None and not self.chat_template:
            raise ValueError("enable_thinking acts through the chat template: set chat_template")
        if self.enable_thinking and self.think_end_token is None:
            raise ValueError("enable_thinking needs think_end_token, e.g. </think>")
        self.arms()

    def samples_of(self, task: TaskRequest) -> int:
        return self.samples if task.samples is None else task.samples

    def limit_of(self, task: TaskRequest) -> int | None:
        return self.limit if task.limit is None else task.limit

    def cap_of(self, task: TaskRequest) -> int | None:
        return self.max_gen_toks if task.max_gen_toks is None else task.max_gen_toks

    def arms(self) -> tuple[TaskArm, ...]:
        """The reference, the policies in the order of the file, and the FP32 control."""
        exact = parse_policy(f"fp32@{self.ring_len}")
        other = replace(exact, ring_len=self.other_ring_len or 2 * self.ring_len)
        if other == exact:
            raise ValueError(f"other_ring_len must differ from ring_len {self.ring_len}")
        policies = [policy for policy in self.policies if policy not in (exact, other)]
        arms = [
            TaskArm(label="fp32", kind="reference", policy=exact),
            *(TaskArm(label=policy.label, kind="policy", policy=policy) for policy in policies),
            TaskArm(label=f"fp32, L = {other.ring_len}", kind="control", policy=other),
        ]
        labels = [arm.label for arm in arms]
        twice = next((label for i, label in enumerate(labels) if label in labels[:i]), None)
        if twice is not None:
            raise ValueError(f"two different policies are both labelled {twice}")
        return tuple(arms)

    def identity(self, model: str) -> dict:
        """All that the answers of a run of `model` depend on, as far as a file says it."""
        return {
            "experiment": self.name,
            "model": model,
            "temperature": self.temperature,
            "seed": self.seed,
            "dtype": self.dtype,
            "chat_template": self.chat_template,
            "enable_thinking": self.enable_thinking,
            "think_end_token": self.think_end_token,
            "arms": [
                {"label": arm.label, "kind": arm.kind, "policy": arm.policy.to_dict()}
                for arm in self.arms()
            ],
        }

    def display(self) -> dict:
        """What a reader of the results wants, and no answer depends on."""
        return {"question": self.question, "margin": self.margin}


# -- from YAML -------------------------------------------------------------------------------------
def load_task_spec(name: str, overrides: Mapping | None = None) -> TaskSpec:
    """Read configuration `name` (a file, or a packaged experiment); `overrides` replace keys."""
    path, values = read_yaml(name)
    try:
        return _build({"name": path.stem, **values, **(overrides or {})})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _build(values: Mapping) -> TaskSpec:
    kinds = {field.name: field.type for field in fields(TaskSpec)}
    _refuse_unknown(values, kinds, "")
    for key in ("models", "policies", "tasks"):
        if key not in values:
            raise ValueError(f"missing key {key}")
    ring_len = read_integer("ring_len", values.get("ring_len", 16))
    read = {}
    for key, value in values.items():
        if key == "models":
            read[key] = tuple(read_string(key, item) for item in read_sequence(key, value))
        elif key == "policies":
            read[key] = tuple(read_policy(item, ring_len) for item in read_sequence(key, value))
        elif key == "tasks":
            read[key] = tuple(_task(item) for item in read_sequence(key, value))
        else:
            read[key] = _value(key, value, kinds[key])
    return TaskSpec(**read)


def _task(item: object) -> TaskRequest:
    if not isinstance(item, Mapping):
        return TaskRequest(name=read_string("tasks", item))
    kinds = {field.name: field.type for field in fields(TaskRequest)}
    _refuse_unknown(item, kinds, "tasks: ")
    if "name" not in item:
        raise ValueError("tasks: a mapping needs the key name")
    return TaskRequest(**{key: _value(key, value, kinds[key]) for key, value in item.items()})


def _value(key: str, value: object, kind: object) -> object:
    if value is None and "None" in str(kind):
        return None
    if "bool" in str(kind):
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, is {value!r}")
        return value
    if "str" in str(kind):
        return read_string(key, value)
    return read_number(key, value) if kind is float else read_integer(key, value)


def _refuse_unknown(values: Mapping, kinds: Mapping, prefix: str) -> None:
    for key in values:
        if key not in kinds:
            raise ValueError(f"unknown key {prefix}{key}; {nearest(str(key), list(kinds))}")
