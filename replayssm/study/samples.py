"""Generated answers on disk: one file for each model, policy, seed and task, one line a sample.

Owns the file format, what makes two files different, and resuming by sample. Knows no model and no
task; imports neither torch nor transformers.

    <folder>/<task>-<model>-<policy>-<key>.jsonl
      first line   {"identity": {...}}: all that an answer depends on, and the key is its digest
      other lines  one sample each, found by (question digest, sample number)

While samples arrive, lines are appended in the order they end; `finish` sorts the file. A process
that is killed loses the line it was writing and nothing else, and the sorted file does not show
that it was. Files of a finished run may be packed (`gzip -n`, name.jsonl.gz), to be kept: they are
read as they are, and unpacked when a run continues them. A question is stored as the digest of its
prompt: no text of a task gets into a file, except what a model says itself.
"""

import contextlib
import fcntl
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

from replayssm.study.store import atomic_path, digest

# Raise it when the same request would be answered or stored otherwise.
#   1: greedy or temperature sampling, random bits by (seed, question digest, sample, position).
SAMPLES_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One generated answer, as it came; what it is worth is computed from it (`task_results`).

    question: digest of task and prompt; sample: 0, 1, .. of the samples a question gets.
    prompt_tokens, new_tokens: counts, reasoning included; reasoning_tokens: of the new ones.
    finish: "stop_token", "stop" (a stop string) or "length" (the cap).
    reasoning_ended: false if the mark that ends reasoning never came.
    loop: the tokens end going round in circles.
    reasoning, raw_answer: the two parts as generated, special tokens included.
    answer: the second without special tokens and stop strings; what is scored.
    filters: lm-eval's own score (0 or 1) of the answer by the name of its filter.
    """

    question: str
    sample: int
    prompt_tokens: int
    new_tokens: int
    reasoning_tokens: int
    finish: str
    reasoning_ended: bool
    loop: bool
    reasoning: str
    raw_answer: str
    answer: str
    filters: dict[str, float]


_FIELDS = {field.name for field in fields(Sample)}


def question_digest(task: str, prompt: str) -> str:
    """What a question is called: 16 hexadecimal digits of SHA-256 over task and whole prompt."""
    return hashlib.sha256(f"{task}\0{prompt}".encode()).hexdigest()[:16]


def sequence_number(question: str, sample: int) -> int:
    """The number of a sample in random bits, in [0, 2^32): a pure function of both."""
    return int.from_bytes(hashlib.sha256(f"{question}/{sample}".encode()).digest()[:4], "big")


class SampleStore:
    """The samples of one identity. Opening creates the file; use as a context manager.

    Raises ValueError if the file is of another identity, damaged, or in use by another process.
    """

    def __init__(self, folder: Path, identity: dict, *, name: str):
        """`name`: readable part of the file name, e.g. task, model and policy."""
        self.identity = {"samples_version": SAMPLES_VERSION} | json.loads(json.dumps(identity))
        kept = "".join(c if c.isalnum() or c in ".-" else "-" for c in name)
        self.path = Path(folder) / f"{kept}-{digest(self.identity)[:12]}.jsonl"
        self._samples: dict[tuple[str, int], Sample] = {}
        self._handle = None

    def __enter__(self) -> "SampleStore":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = _locked(self.path)
        try:
            self._load()
        except BaseException:
            self._handle.close()
            raise
        return self

    def __exit__(self, *exc) -> None:
        self._handle.close()

    def _load(self) -> None:
        self._handle.seek(0)
        content = self._handle.read()
        if not content and _packed(self.path).exists():
            content = self._unpack()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            self._handle.truncate(len(whole))  # the line a killed process was writing
        if not whole:
            self._append({"identity": self.identity})
            return
        lines = whole.decode().splitlines()
        _check_identity(self.path, lines[0], self.identity)
        for number, line in enumerate(lines[1:], start=2):
            sample = _parse(self.path, number, line)
            self._samples[sample.question, sample.sample] = sample

    def _unpack(self) -> bytes:
        """Put what is packed in the place of the empty file, all of it or nothing; the content."""
        content = _content(self.path)
        with atomic_path(self.path) as temporary:
            temporary.write_bytes(content)
            unpacked = _locked(temporary)  # before anybody finds it
        self._handle.close()
        self._handle = unpacked
        return content

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._samples

    def __getitem__(self, key: tuple[str, int]) -> Sample:
        return self._samples[key]

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: Sample) -> None:
        """Append a sample; it survives the end of this process from here on."""
        key = (sample.question, sample.sample)
        assert key not in self._samples, f"sample {key} is there already"
        self._append(asdict(sample))
        self._samples[key] = sample

    def _append(self, value: dict) -> None:
        self._handle.write(_line(value))
        self._handle.flush()

    def finish(self) -> None:
        """Sort the file by question and sample. Nothing can be added afterwards."""
        ordered = [self._samples[key] for key in sorted(self._samples)]
        content = b"".join(map(_line, [{"identity": self.identity}, *map(asdict, ordered)]))
        if self.path.read_bytes() != content:
            with atomic_path(self.path) as temporary:
                temporary.write_bytes(content)


def read_samples(path: Path) -> tuple[dict, list[Sample]]:
    """(identity, samples) of a finished file; ValueError if it is missing or damaged."""
    lines = _content(Path(path)).decode().splitlines()
    identity = _header(path, lines[0] if lines else "")
    return identity, [_parse(path, number, line) for number, line in enumerate(lines[1:], start=2)]


def _locked(path: Path) -> BinaryIO:
    """The file, created if need be, locked against other processes until it is closed.

    Raises ValueError if another process holds it.
    """
    while True:
        handle = open(path, "a+b")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who held it may have put another file in its place since it was opened here.
            if path.exists() and os.path.samestat(os.fstat(handle.fileno()), os.stat(path)):
                return handle
        except BlockingIOError:
            handle.close()
            raise ValueError(f"{path} is in use by another process") from None
        handle.close()


def _packed(path: Path) -> Path:
    return path.with_name(path.name + ".gz")


def _content(path: Path) -> bytes:
    """Of the file, or, if it is missing or empty, of the packed one."""
    with contextlib.suppress(FileNotFoundError):
        if content := path.read_bytes():
            return content
    try:
        return gzip.decompress(_packed(path).read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: the samples of this run are not here") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{_packed(path)}: {error}") from None


def _line(value: dict) -> bytes:
    # Escaped: a text may hold characters that some readers take for line ends.
    return (json.dumps(value, ensure_ascii=True, allow_nan=False) + "\n").encode()


def _header(path: Path, line: str) -> dict:
    with contextlib.suppress(json.JSONDecodeError, TypeError, KeyError):
        return json.loads(line)["identity"]
    raise ValueError(f"{path}, line 1: this is not a file of samples")


def _check_identity(path: Path, line: str, wanted: dict) -> None:
    found = _header(path, line)
    if found != wanted:
        names = sorted(_different(found, wanted))
        raise ValueError(
            f"{path} holds answers of another run: {', '.join(names)} differ; move it away"
        )


def _different(found: dict, wanted: dict, prefix: str = "") -> Iterator[str]:
    for key in found.keys() | wanted.keys():
        mine, theirs = found.get(key), wanted.get(key)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            yield from _different(mine, theirs, f"{prefix}{key}.")
        elif mine != theirs:
            yield prefix + key


def _parse(path: Path, number: int, line: str) -> Sample:
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        raise ValueError(f"{path}, line {number}: damaged; delete the line and run again") from None
    if not isinstance(values, dict) or set(values) != _FIELDS:
        raise ValueError(f"{path}, line {number}: this is not a sample of this version")
    return Sample(**values)
