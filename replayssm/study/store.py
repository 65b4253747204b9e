"""Run folders: where a study's records live, how they get there whole, and how they are read back.

Owns the file layout, the column list, the metric version and every byte that is written under
`results/runs`. Knows nothing of models, policies or statistics, and imports neither torch nor
transformers: a result can be read on a machine that has only numpy and pyarrow.

    results/runs/<experiment>/<run id>/ spec.json         what was asked, names resolved to content
                          (digests); the run id is its hash
      provenance.json     which code, packages and device answered
      status.json         started | complete | failed (a failure keeps its traceback)
      shards/             records of a run in progress, one file per prompt and stretch of positions
      engine_state-*.pt   where a prompt batch stands, so that a killed run continues inside a text
      summary.json        statistics of all positions
      segments.parquet, states.parquet, generations.parquet, where asked for: see `records`
      positions.parquet   one row per prompt, kept position and arm, merged from the shards; last

Every file is written under a temporary name and renamed when whole, and none holds a time of day: a
run that was killed and continued leaves the same bytes as one that was not.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from replayssm.study.records import SCHEMA, STATE_SCHEMA

# History of what the numbers mean. Raise it when a stored value would come out differently.
#   1: KL in float64 from FP32 logits, stored in float32; prompt or moving-block bootstrap
# intervals.
METRIC_VERSION = 1

ROW_GROUP_ROWS = 1 << 17

_SHARD_NAME = re.compile(r"p(\d{5})-t(\d{9})-(\d{9})\.parquet")
_STATES_NAME = re.compile(r"p(\d{5})-states-(\d{9})\.parquet")


# -- writing ---------------------------------------------------------------------------------------
@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it onto `path` when the block ends without
    error.

    The data are on disk before the rename, so a reader (or a resumed run) sees the old file or the
    new one, never a part. On any error, a full disk included, the temporary file is removed.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    """Write `value` as JSON with a stable layout; NaN and infinity are refused (use None)."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict:
    """Read a JSON object; ValueError naming the file if it is missing or not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} should hold a JSON object, holds {type(value).__name__}")
    return value


def digest(value: object) -> str:
    """SHA-256 (hex) of a JSON-able value, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_records(path: Path, records: pa.Table) -> None:
    """Write a table of records; floats are split by bytes, which packs shortened ones well."""
    split = [f.name for f in records.schema if pa.types.is_floating(f.type)]
    with atomic_path(path) as temporary:
        pq.write_table(
            records.combine_chunks(),
            temporary,
            compression="zstd",
            store_schema=False,
            use_dictionary=[f.name for f in records.schema if not pa.types.is_floating(f.type)],
            column_encoding={name: "BYTE_STREAM_SPLIT" for name in split},
        )


# -- run folder ------------------------------------------------------------------------------------
class RunFolder:
    """One run's folder. Creating the object touches nothing; `begin` creates the folder.

    `document` is what goes into spec.json: {"metric_version", "identity": {...}, "display": {...}}.
    Only `identity` and the metric version make the run id; `display` (limits, the question asked)
    may change without asking the models again.
    """

    def __init__(self, path: Path):
        self.path = Path(path)

    @property
    def spec_path(self) -> Path:
        return self.path / "spec.json"

    @property
    def positions_path(self) -> Path:
        return self.path / "positions.parquet"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def provenance_path(self) -> Path:
        return self.path / "provenance.json"

    @property
    def segments_path(self) -> Path:
        return self.path / "segments.parquet"

    @property
    def states_path(self) -> Path:
        return self.path / "states.parquet"

    @property
    def generations_path(self) -> Path:
        return self.path / "generations.parquet"

    @property
    def shards(self) -> Path:
        return self.path / "shards"

    def state_path(self, batch: int) -> Path:
        """Where prompt batch `batch` keeps the engine's state while it is in progress."""
        return self.path / f"engine_state-{batch:05d}.pt"

    def status(self) -> dict:
        """{"status": "started" | "complete" | "failed", ...}; "absent" when there is no such
        folder.
        """
        path = self.path / "status.json"
        return read_json(path) if path.exists() else {"status": "absent"}

    def set_status(self, status: str, **details: object) -> None:
        assert status in ("started", "complete", "failed"), status
        write_json(self.path / "status.json", {"status": status, **details})

    def in_use(self) -> bool:
        """Whether some process is running this run right now."""
        try:
            with self.lock():
                return False
        except ValueError:
            return True

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder against a second process; released by the system even after kill -9."""
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise ValueError(
                f"{self.path} is in use: another process is running this run"
            ) from None
        finally:
            os.close(handle)

    def check(self, document: Mapping) -> None:
        """ValueError if the folder was made for another document or by another metric version."""
        found = read_json(self.spec_path)
        check_metric_version(self.path, found)
        if found.get("identity") != json.loads(json.dumps(document["identity"])):
            raise ValueError(
                f"{self.path} holds another specification than its name says; move it away"
            )

    def fail(self, error: Exception, trace: str) -> None:
        """Keep the error with its traceback; a disk too full even for that leaves the run
        "started".
        """
        with contextlib.suppress(OSError):
            self.set_status("failed", error=f"{type(error).__name__}: {error}", traceback=trace)

    def begin(self, document: Mapping) -> None:
        """Create the folder for `document`, or check that the one that exists was made for it."""
        if self.spec_path.exists():
            self.check(document)
        self.shards.mkdir(parents=True, exist_ok=True)
        write_json(self.spec_path, document)
        for leftover in [*self.path.glob("*.tmp"), *self.shards.glob("*.tmp")]:
            leftover.unlink()
        self.set_status("started")

    # -- records -----------------------------------------------------------------------------------
    def finished(self, prompt: int) -> list[tuple[int, int]]:
        """Stretches [start, stop) of positions that are on disk for `prompt`, in order."""
        return sorted(
            (int(match[2]), int(match[3]))
            for match in map(_SHARD_NAME.fullmatch, _names(self.shards))
            if match and int(match[1]) == prompt
        )

    def discard_from(self, prompt: int, start: int) -> None:
        """Delete what was recorded of `prompt` past `start` tokens (it is recomputed)."""
        for begin, stop in self.finished(prompt):
            if begin >= start:
                self._shard(prompt, begin, stop).unlink()
        for position in self._measured(prompt):
            if position > start:
                self._states(prompt, position).unlink()

    def write_shard(self, prompt: int, start: int, stop: int, records: pa.Table) -> None:
        """Store the records of `prompt`, positions [start, stop), ordered by position, then arm."""
        with atomic_path(self._shard(prompt, start, stop)) as temporary:
            pq.write_table(records, temporary, compression="zstd", store_schema=False)

    def write_states(self, prompt: int, position: int, records: pa.Table) -> None:
        """Store the state records of `prompt` after `position` tokens."""
        write_records(self._states(prompt, position), records)

    def records(self, *, prompts: int, positions: int, arms: int) -> pa.Table:
        """All position records in the shards, ordered by prompt, position, arm.

        Raises ValueError if a prompt's shards do not hold exactly `positions` x `arms` rows.
        """
        tables = list(self._ordered_tables(prompts, positions * arms))
        return pa.concat_tables(tables).unify_dictionaries()

    def merge(
        self, *, prompts: int, positions: int, arms: int, kept: Callable | None = None
    ) -> None:
        """Join the shards into positions.parquet, ordered by prompt, position, arm.

        kept: which of some positions (array) stay, default all. Row groups have a fixed size, so
        the bytes do not depend on how the shards were cut. Raises ValueError as `records` does.
        """
        tables = self._ordered_tables(prompts, positions * arms)
        if kept is not None:
            tables = (t.filter(pa.array(kept(t.column("position").to_numpy()))) for t in tables)
        with atomic_path(self.positions_path) as temporary:
            with pq.ParquetWriter(
                temporary, SCHEMA, compression="zstd", store_schema=False, version="2.6"
            ) as writer:
                for group in _regroup(tables):
                    writer.write_table(group, row_group_size=ROW_GROUP_ROWS)

    def merge_states(self, *, prompts: int, positions: Sequence[int]) -> None:
        """Join state records into states.parquet, ordered by prompt, position, arm, layer, head."""
        tables = []
        for prompt in range(prompts):
            found = self._measured(prompt)
            if found != list(positions):
                raise ValueError(
                    f"{self.shards}: states of prompt {prompt} are there after {found} tokens, "
                    f"should be after {list(positions)}; delete {self.path} and run again"
                )
            tables += [
                pq.read_table(self._states(prompt, at)).cast(STATE_SCHEMA) for at in positions
            ]
        write_records(self.states_path, pa.concat_tables(tables).unify_dictionaries())

    def clear_progress(self) -> None:
        """Delete the shards and engine states of a run whose positions.parquet is whole."""
        assert self.positions_path.exists()
        shutil.rmtree(self.shards, ignore_errors=True)
        for state in self.path.glob("engine_state-*.pt"):
            state.unlink()

    def _shard(self, prompt: int, start: int, stop: int) -> Path:
        return self.shards / f"p{prompt:05d}-t{start:09d}-{stop:09d}.parquet"

    def _states(self, prompt: int, position: int) -> Path:
        return self.shards / f"p{prompt:05d}-states-{position:09d}.parquet"

    def _measured(self, prompt: int) -> list[int]:
        """Tokens after which states of `prompt` are on disk, in order."""
        matches = map(_STATES_NAME.fullmatch, _names(self.shards))
        return sorted(int(m[2]) for m in matches if m and int(m[1]) == prompt)

    def _ordered_tables(self, prompts: int, rows_per_prompt: int) -> Iterator[pa.Table]:
        for prompt in range(prompts):
            rows = 0
            for start, stop in self.finished(prompt):
                table = pq.read_table(self._shard(prompt, start, stop)).cast(SCHEMA)
                rows += table.num_rows
                yield table
            if rows != rows_per_prompt:
                raise ValueError(
                    f"{self.shards}: prompt {prompt} has {rows} rows, should have "
                    f"{rows_per_prompt}; delete {self.path} and run again"
                )


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _regroup(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Recut a stream of tables into tables of ROW_GROUP_ROWS rows (the last one shorter)."""
    pending: list[pa.Table] = []
    rows = 0
    for table in tables:
        pending.append(table)
        rows += table.num_rows
        while rows >= ROW_GROUP_ROWS:
            joined = pa.concat_tables(pending).unify_dictionaries()
            yield joined.slice(0, ROW_GROUP_ROWS).combine_chunks()
            pending = [joined.slice(ROW_GROUP_ROWS)]
            rows -= ROW_GROUP_ROWS
    if rows:
        yield pa.concat_tables(pending).unify_dictionaries().combine_chunks()


def check_metric_version(path: Path, document: Mapping) -> None:
    """ValueError if `document` (a spec.json) was written by a version whose numbers mean other
    things.
    """
    found = document.get("metric_version")
    if found != METRIC_VERSION:
        raise ValueError(
            f"{path} was written with metric version {found}, this is version {METRIC_VERSION}: "
            "its numbers cannot be put beside new ones; move it away or use another --out"
        )


# -- reading ---------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A complete run as the tables and figures read it: three JSON documents and where they lie."""

    path: Path
    run_id: str
    experiment: str
    model: str
    document: dict
    provenance: dict
    summary: dict


def find_runs(where: Path) -> list[RunFolder]:
    """All run folders at or under `where`, sorted by path; ValueError if there is no such place."""
    if not where.is_dir():
        raise ValueError(f"no results folder at {where}")
    found = (
        sorted(where.rglob("spec.json"))
        if not (where / "spec.json").exists()
        else [where / "spec.json"]
    )
    return [RunFolder(path.parent) for path in found]


def load_run(folder: RunFolder) -> RunRecord:
    """Read a complete run; ValueError if it is not complete or of another metric version."""
    document = read_json(folder.spec_path)
    check_metric_version(folder.path, document)
    status = folder.status()["status"]
    if status != "complete":
        raise ValueError(
            f"{folder.path} is not complete (status: {status}); run it again to finish it"
        )
    return RunRecord(
        path=folder.path,
        run_id=folder.path.name,
        experiment=document["identity"]["experiment"],
        model=document["identity"]["model"],
        document=document,
        provenance=read_json(folder.provenance_path),
        summary=read_json(folder.summary_path),
    )
