"""Reading a study from YAML or from command-line values, strictly.

Owns the spelling of `experiments/*.yaml` (the keys are the fields of `spec.StudySpec`) and where
experiments are found. Every mistake is a ValueError of one line that names what was found and what
is allowed; nothing is guessed and no key is ignored.
"""

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

import yaml

import replayssm
from replayssm.policy import PrecisionPolicy, parse_policy
from replayssm.study.sections import Controls, FreeRunning, Generation, Limits
from replayssm.study.spec import StudySpec

_SECTIONS = {
    "controls": Controls,
    "generate": Generation,
    "free_running": FreeRunning,
    "limits": Limits,
}


def nearest(found: str, allowed: list[str]) -> str:
    """ " (did you mean X?)" if some allowed name is close, else the list of allowed names."""
    close = difflib.get_close_matches(str(found), allowed, n=1)
    return f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(allowed)}"


def from_mapping(values: Mapping, *, name: str, where: str) -> StudySpec:
    """A StudySpec from parsed YAML or command-line values; `where` names the source in errors."""
    try:
        ring_len = read_integer("ring_len", values.get("ring_len", 16))
        spec = _build(StudySpec, {"name": name} | dict(values), "", ring_len)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    assert isinstance(spec, StudySpec)
    return spec


def _build(kind: type, values: object, prefix: str, ring_len: int):
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
    for key, value in values.items():
        at = prefix + key
        if key in _SECTIONS and kind is StudySpec:
            converted[key] = _build(_SECTIONS[key], value, f"{at}.", ring_len)
        elif key in ("policies", "refresh_policies"):
            converted[key] = tuple(read_policy(item, ring_len) for item in read_sequence(at, value))
        elif key in ("models", "seeds", "refresh") or (key == "states" and type(value) is not str):
            one = read_string if key == "models" else read_integer
            converted[key] = tuple(one(at, item) for item in read_sequence(at, value))
        elif types[key] is str or key == "states":
            converted[key] = read_string(at, value)
        elif types[key] is float:
            converted[key] = read_number(at, value)
        elif value is None and types[key] == int | None:
            converted[key] = None
        else:
            converted[key] = read_integer(at, value)
    return kind(**converted)


def read_policy(item: object, ring_len: int) -> PrecisionPolicy:
    if isinstance(item, Mapping):
        return PrecisionPolicy.from_dict({"ring_len": ring_len} | dict(item))
    text = read_string("policies", item)
    policy = parse_policy(text)
    return policy if "@" in text else replace(policy, ring_len=ring_len)


def read_sequence(key: str, value: object) -> list:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} must be a list, is {value!r}")
    return list(value)


def read_string(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key} must be text, is {value!r}")
    return value


def read_integer(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} must be a whole number, is {value!r}")
    return value


def read_number(key: str, value: object) -> float:
    # YAML 1.1 reads 1e-3 (without a dot) as text.
    try:
        return float(value) if not isinstance(value, bool) else read_number(key, None)
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
    """A configuration file by path, or by name among those of the clone or the package."""
    path = Path(name)
    if path.is_file():
        return path
    package = Path(replayssm.__file__).parent
    folders = [package / "_packaged" / "experiments"]
    if (package.parent / "pyproject.toml").exists():  # a clone: its own files come first
        folders.append(package.parent / "experiments")
    known = {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}
    if name.removesuffix(".yaml") in known:
        return known[name.removesuffix(".yaml")]
    raise ValueError(
        f"no configuration {name!r}: not a file, not an experiment; {nearest(name, sorted(known))}"
    )


def read_yaml(name: str) -> tuple[Path, Mapping]:
    """(path, keys and values) of the configuration `name` (see `find_experiment`)."""
    path = find_experiment(name)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, Mapping):
        raise ValueError(f"{path}: must be a mapping of keys to values")
    return path, values


def load_spec(name: str, overrides: Mapping | None = None) -> StudySpec:
    """Read the configuration `name` (see `find_experiment`); `overrides` replace top-level keys."""
    path, values = read_yaml(name)
    return from_mapping({**values, **(overrides or {})}, name=path.stem, where=str(path))
