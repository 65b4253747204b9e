"""Running a study: one run per model, resumed where a killed one stopped, finished with a summary.

Owns the order of things (check everything, then create the folder; measure; merge; summarise) and
the rules of resuming. Knows the engine only through a `Subject`: something that has tokens, digests
and a lockstep (`subject.ModelSubject` in earnest, a fake in tests). Computes no statistics and no
divergence.

Resuming. Records are written in stretches of CHUNK_TOKENS positions; at the end of a stretch the
engine's state is saved, unless saving takes more than a twentieth of the time since the last save
(an attention cache at 131,072 tokens is gigabytes). A resumed run loads the newest state, deletes
records past it and recomputes them. The merged files depend neither on where the stretches were cut
nor on the interruption. positions.parquet is written last: where it is, everything else is whole.
"""

import time
import traceback
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from tqdm import tqdm

from replayssm.engine.sampling import Sampler
from replayssm.study.generations import generation_table
from replayssm.study.provenance import environment
from replayssm.study.recording import Stretch
from replayssm.study.records import load_positions, records_table
from replayssm.study.spec import Arm, StudySpec
from replayssm.study.state_metrics import state_tables
from replayssm.study.store import (
    METRIC_VERSION,
    RunFolder,
    atomic_path,
    digest,
    read_json,
    write_json,
    write_records,
)
from replayssm.study.summary import write_summary
from replayssm.study.texts import read_tokens

CHUNK_TOKENS = 2048
_LARGEST_SAVING_SHARE = 0.05


class Subject(Protocol):
    """What is measured: a model with its tokenizer, and a way to run it under many policies."""

    device: torch.device
    max_positions: int | None
    stop_tokens: Collection[int]

    def digests(self) -> dict[str, str]:
        """Digests of everything loaded that the numbers depend on."""

    def encode(self, text: str) -> list[int]:
        """Token ids, without special tokens."""

    def costs(self, arm: Arm) -> dict[str, float]:
        """`bytes_per_state_element` and `bytes_per_token` (all recurrent layers) of an arm's
        policy.
        """

    def backends(self, spec: StudySpec) -> str:
        """On which backend the arms run, in words. ValueError if that is not possible."""

    def lockstep(self, spec: StudySpec) -> Any:
        """A new lockstep engine: arm 0 is the reference, then `spec.arms()` in order."""

    def free_run(self, spec: StudySpec, prompts: torch.Tensor, prompt_ids: Any) -> torch.Tensor:
        """Token ids [1 + arms, P, N] that the reference and `spec.free_arms()` write."""

    def effective(self, engine: Any) -> dict:
        """What the engine really stores and runs, read back from its caches, for the provenance."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run: its folder, whether it was there before, and what is wrong with it (one line each).

    `nonfinite` names arms whose logits were not finite; `failures` are failed controls.
    """

    folder: RunFolder
    reused: bool
    nonfinite: list[str]
    failures: list[str]


def run_study(
    spec: StudySpec,
    *,
    out: Path,
    open_subject: Callable[[str], Subject],
    progress: bool = True,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Iterator[RunResult]:
    """Measure `spec` on each of its models, one after the other, as the iterator is advanced.

    Results lie in `out`/runs/<experiment>/<run id>. Complete runs are reused, unfinished ones
    continued. Raises ValueError for anything that cannot be run as asked, before a folder is
    created; a run that fails later keeps its traceback in status.json.
    """
    for model in spec.models:
        yield _run_model(
            spec, model, open_subject(model), out, progress=progress, chunk_tokens=chunk_tokens
        )


def _run_model(
    spec: StudySpec, model: str, subject: Subject, out: Path, *, progress: bool, chunk_tokens: int
) -> RunResult:
    length = spec.prefill + spec.tokens
    if subject.max_positions is not None and length > subject.max_positions:
        raise ValueError(
            f"tokens: {spec.prefill} prefill + {spec.tokens} tokens are beyond the "
            f"{subject.max_positions} positions of {model}"
        )
    given = spec.prefill if spec.text == "generate" else length + 1
    tokens = read_tokens(spec.text, encode=subject.encode, prompts=spec.prompts, length=given)
    inputs = subject.digests() | {"tokens": digest(tokens.tolist())}
    identity = spec.identity(model) | {"inputs": inputs}
    key = {"metric_version": METRIC_VERSION, "identity": identity}
    folder = RunFolder(out / "runs" / spec.name / digest(key)[:12])
    document = key | {"display": spec.display()}

    if folder.status()["status"] == "complete":
        folder.check(document)
        write_json(folder.spec_path, document)
        return _result(folder, reused=True)
    with folder.lock():
        folder.begin(document)
        try:
            if not folder.positions_path.exists():
                _measure(spec, model, subject, tokens, folder, progress, chunk_tokens)
                if spec.free_running and not folder.generations_path.exists():
                    _generate(spec, subject, tokens, folder)
                _conclude(spec, subject, folder)
            folder.clear_progress()
            folder.set_status("complete")
        except Exception as error:
            folder.fail(error, traceback.format_exc())
            raise
    return _result(folder, reused=False)


def _conclude(spec: StudySpec, subject: Subject, folder: RunFolder) -> None:
    """From the shards of a measured run to its finished records and summary."""
    arms = [arm.describe() | subject.costs(arm) for arm in spec.arms()]
    scored = {
        "prompts": spec.prompts,
        "positions": len(range(0, spec.tokens, spec.stride)),
        "arms": len(arms),
    }
    if spec.state_positions:
        folder.merge_states(prompts=spec.prompts, positions=spec.state_positions)
    positions = load_positions(
        folder.records(**scored), [arm["label"] for arm in arms], prompts=spec.prompts
    )
    thinned = spec.positions != "all"
    write_summary(
        folder,
        positions,
        arms,
        ring_len=spec.ring_len,
        tokens=spec.tokens,
        thinned=thinned,
        generated=spec.free_running and spec.free_running.tokens,
    )
    del positions  # tens of millions of rows: not twice in memory
    folder.merge(**scored, kept=spec.kept if thinned else None)


def _result(folder: RunFolder, *, reused: bool) -> RunResult:
    summary = read_json(folder.summary_path)
    return RunResult(
        folder=folder,
        reused=reused,
        nonfinite=[f"{folder.path}: {line}" for line in summary["nonfinite"]],
        failures=[
            f"{folder.path}: control failed: {line}" for line in summary["controls"]["failures"]
        ],
    )


# -- measuring -------------------------------------------------------------------------------------
def _measure(
    spec: StudySpec,
    model: str,
    subject: Subject,
    tokens: np.ndarray,
    folder: RunFolder,
    progress: bool,
    chunk_tokens: int,
) -> None:
    """Fill `folder.shards` for all prompts, batch after batch."""
    with tqdm(
        total=spec.prompts * spec.tokens,
        unit="tok",
        desc=model,
        disable=None if progress else True,
        smoothing=0.1,
    ) as bar:
        for batch, first in enumerate(range(0, spec.prompts, spec.batch_size)):
            prompts = range(first, min(first + spec.batch_size, spec.prompts))
            if all(_covered(folder.finished(p), spec.tokens) for p in prompts):
                bar.update(len(prompts) * spec.tokens)
                continue
            _measure_batch(spec, subject, tokens, folder, batch, prompts, bar, chunk_tokens)
            folder.state_path(batch).unlink(missing_ok=True)


def _covered(stretches: list[tuple[int, int]], stop: int) -> bool:
    """Whether sorted stretches [start, stop) follow each other without a gap from 0 to `stop`."""
    reached = 0
    for start, end in stretches:
        if start != reached:
            return False
        reached = end
    return reached == stop


def _measure_batch(spec, subject, tokens, folder, batch, prompts, bar, chunk_tokens) -> None:
    text = torch.from_numpy(tokens[prompts.start : prompts.stop])
    engine = subject.lockstep(spec)
    state_path = folder.state_path(batch)
    position = 0
    if state_path.exists():
        saved = torch.load(state_path, map_location=subject.device, weights_only=True)
        engine.load_engine_state(saved["engine"])
        position = saved["position"]
    else:
        engine.start(text[:, : spec.prefill], tokens=spec.tokens, prompt_ids=list(prompts))
    for prompt in prompts:
        folder.discard_from(prompt, position)
    bar.update(len(prompts) * position)
    _write_provenance(spec, subject, engine, folder)

    chunk = max(1, chunk_tokens // spec.window) * spec.window
    labels, measured_at = [arm.label for arm in spec.arms()], set(spec.state_positions)
    saving, saved_at = 0.0, time.monotonic()
    stretch = Stretch(spec, prompts, position)
    # Packing and writing a stretch takes as long as dozens of windows: done beside them.
    with ThreadPoolExecutor(max_workers=1) as writer:
        written = writer.submit(lambda: None)
        for logits, targets in _windows(spec, engine, text, position):
            stretch.add(logits, targets, engine.saturated()[1:])
            bar.update(stretch.stop - position)
            position = stretch.stop
            if position in measured_at:
                measured = engine.measure_states()
                tables = state_tables(measured, prompts=prompts, position=position, arms=labels)
                for prompt, table in zip(prompts, tables, strict=True):
                    folder.write_states(prompt, position, table)
            last = position == spec.tokens
            if not stretch.scored or (position - stretch.start < chunk and not last):
                continue
            columns = stretch.columns()
            written.result()
            written = writer.submit(
                _write_stretch, folder, prompts, (stretch.start, position), columns, labels
            )
            stretch = Stretch(spec, prompts, position)
            now = time.monotonic()
            if not last and saving <= _LARGEST_SAVING_SHARE * (now - saved_at):
                written.result()  # a state may not be ahead of the records
                with atomic_path(state_path) as temporary:
                    torch.save({"engine": engine.engine_state(), "position": position}, temporary)
                saving, saved_at = time.monotonic() - now, time.monotonic()
        written.result()
    assert position == spec.tokens, f"the engine stopped at {position} of {spec.tokens} tokens"
    _write_effective(subject, engine, folder)


def _write_stretch(
    folder: RunFolder, prompts: range, span: tuple[int, int], columns: list[dict], arms: list[str]
) -> None:
    for prompt, mine in zip(prompts, columns, strict=True):
        folder.write_shard(prompt, *span, records_table(mine, arms))


def _generate(spec: StudySpec, subject: Subject, tokens: np.ndarray, folder: RunFolder) -> None:
    """Have every arm write on by itself, batch after batch, and record what it wrote."""
    arms = [arm.label for arm in spec.free_arms()]
    length = spec.free_running.prefill or spec.prefill
    tables = []
    for first in range(0, spec.prompts, spec.batch_size):
        prompts = range(first, min(first + spec.batch_size, spec.prompts))
        text = torch.from_numpy(tokens[prompts.start : prompts.stop, :length])
        written = subject.free_run(spec, text, list(prompts)).cpu().numpy()
        tables.append(
            generation_table(written, stop_tokens=subject.stop_tokens, prompts=prompts, arms=arms)
        )
    write_records(folder.generations_path, pa.concat_tables(tables).unify_dictionaries())


def _windows(spec: StudySpec, engine: Any, text: torch.Tensor, position: int) -> Iterator[tuple]:
    """(logits [1 + A, P, T, V], targets [P, T]) of each window from `position` on."""
    if spec.text == "generate":
        sampler = Sampler(temperature=spec.generate.temperature, seed=spec.generate.seed)
        for window in engine.generate(spec.tokens - position, sampler):
            yield window.logits, window.targets
        return
    # The text has one token more than is read, so that the last token read has a target, too.
    rest = text[:, spec.prefill + position :]
    at = 0
    for window in engine.read(rest[:, :-1]):
        width = window.logits.shape[2]
        yield window.logits, rest[:, at + 1 : at + 1 + width]
        at += width


def _write_effective(subject: Subject, engine: Any, folder: RunFolder) -> None:
    """Note what was in effect at the end, too: a graph that cannot be captured shows on the way."""
    provenance = read_json(folder.provenance_path)
    effective = subject.effective(engine)
    if provenance["effective"] != effective:
        provenance["effective"] = effective
        write_json(folder.provenance_path, provenance)


def _write_provenance(spec: StudySpec, subject: Subject, engine: Any, folder: RunFolder) -> None:
    """Note what is in effect; a run continued in another environment lists both."""
    here = environment(subject.device, backend=subject.backends(spec))
    if folder.provenance_path.exists():
        provenance = read_json(folder.provenance_path)
        if here in provenance["environments"]:
            return
        provenance["environments"].append(here)
    else:
        provenance = {
            "environments": [here],
            "requested": {
                arm.label: {"policy": arm.policy.describe(), "seed": arm.seed, "fault": arm.fault}
                | ({} if arm.refresh is None else {"refresh": arm.refresh})
                for arm in spec.arms()
            },
            "effective": subject.effective(engine),
            "inputs": read_json(folder.spec_path)["identity"]["inputs"],
        }
    write_json(folder.provenance_path, provenance)
