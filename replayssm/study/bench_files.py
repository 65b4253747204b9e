"""How the record of a benchmark is stored: one JSON file with its columns explained, and what is
drawn from it.

Owns the layout of that file and what is said of a damaged one. Must not know what any benchmark
measures. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from replayssm.study.store import atomic_path, read_json, write_json


def write_document(path: Path, record: Any, columns: Mapping[str, str], *, version: int) -> None:
    """Writes a record, a dataclass with `rows`, to `path`, whose folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"version": version, "columns": columns} | asdict(record))


def load_document(path: Path, make_record: type, make_row: type, *, version: int) -> Any:
    """The record stored at `path`; ValueError if it is missing, damaged or of another version."""
    document = read_json(path)
    if document.get("version") != version:
        raise ValueError(f"{path} is of version {document.get('version')}, not {version}")
    names = {field.name for field in fields(make_record)}
    missing = names - document.keys()
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
    try:
        rows = [make_row(**row) for row in document["rows"]]
    except TypeError as error:
        raise ValueError(f"{path} holds a row that is none: {error}") from None
    return make_record(**{name: document[name] for name in names - {"rows"}}, rows=rows)


def write_files(out: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Writes files by name under `out`; returns their paths."""
    for name, content in files.items():
        with atomic_path(out / name) as temporary:
            temporary.write_bytes(content)
    return [out / name for name in files]
