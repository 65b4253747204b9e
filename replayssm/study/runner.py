"""Running a study: one run per model, resumed where a killed one stopped, finished with a summary.

Owns the order of things (check everything, then create the folder; measure; merge; summarise) and
the rules of resuming. Knows the engine only through a `Subject`: something that has tokens, digests
and a lockstep (`subject.ModelSubject` in earnest, a fake in tests). Computes no statistics and no
divergence.

Resuming. Records are written in stretches of CHUNK_TOKENS positions; at the end of a stretch the
engine's state is saved, unless saving takes more than a twentieth of the time since the last save
(an attention cache at 131,072 tokens is gigabytes). A resumed run loads the newest state, deletes
records past it and recomputes them. The merged file depends neither on where the stretches were cut
nor on the interruption.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

from replayssm.engine.sampling import Sampler
from replayssm.study import stats
from replayssm.study.drift import window_drift
from replayssm.study.provenance import environment
from replayssm.study.records import load_positions, records_table
from replayssm.study.spec import Arm, StudySpec
from replayssm.study.store import (
    METRIC_VERSION,
    RunFolder,
    atomic_path,
    digest,
    read_json,
    write_json,
)
from replayssm.study.texts import read_tokens

CHUNK_TOKENS = 2048
_LARGEST_SAVING_SHARE = 0.05


class Subject(Protocol):
    """What is measured: a model with its tokenizer, and a way to run it under many policies."""

    device: torch.device
    max_positions: int | None

    def digests(self) -> dict[str, str]:
        """Digests of everything loaded that the numbers depend on."""

    def encode(self, text: str) -> list[int]:
        """Token ids, without special tokens."""

    def costs(self, arm: Arm) -> dict[str, float]:
        """`bytes_per_state_element` and `bytes_per_token` (all recurrent layers) of an arm's
        policy.
        """

    def lockstep(self, spec: StudySpec) -> Any:
        """A new lockstep engine: arm 0 is the reference, then `spec.arms()` in order."""

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
                scored = len(range(0, spec.tokens, spec.stride))
                folder.merge(prompts=spec.prompts, positions=scored, arms=len(spec.arms()))
            write_json(folder.summary_path, _summary(spec, subject, folder))
            folder.clear_progress()
            folder.set_status("complete")
        except Exception as error:
            folder.fail(error, traceback.format_exc())
            raise
    return _result(folder, reused=False)


def _summary(spec: StudySpec, subject: Subject, folder: RunFolder) -> dict:
    arms = [arm.describe() | subject.costs(arm) for arm in spec.arms()]
    positions = load_positions(
        folder.positions_path, [arm["label"] for arm in arms], prompts=spec.prompts
    )
    summary = stats.summarise(positions, arms, ring_len=spec.ring_len, tokens=spec.tokens)
    bad = [
        f"logits of {where['arm']} are not finite at prompt {where['prompt']}, "
        f"position {where['position']} ({where['count']} of {where['of']} rows)"
        for where in positions.first_nonfinite()
    ]
    return summary | {"nonfinite": bad}


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
    labels = [arm.label for arm in spec.arms()]
    saving, saved_at = 0.0, time.monotonic()
    start, parts = position, []
    for logits, targets in _windows(spec, engine, text, position):
        saturated = sum(engine.saturated(layer) for layer in engine.layers)[1:]
        if records := _records(spec, logits, targets, saturated, position, prompts):
            parts.append(records)
        width = logits.shape[2]
        position += width
        bar.update(len(prompts) * width)
        if position - start >= chunk or position == spec.tokens:
            for index, prompt in enumerate(prompts):
                columns = {
                    k: np.concatenate([part[index][k] for part in parts]) for k in parts[0][index]
                }
                folder.write_shard(prompt, start, position, records_table(columns, labels))
            start, parts = position, []
            now = time.monotonic()
            if position < spec.tokens and saving <= _LARGEST_SAVING_SHARE * (now - saved_at):
                with atomic_path(state_path) as temporary:
                    torch.save({"engine": engine.engine_state(), "position": position}, temporary)
                saving, saved_at = time.monotonic() - now, time.monotonic()
    assert position == spec.tokens, f"the engine stopped at {position} of {spec.tokens} tokens"


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


def _records(
    spec: StudySpec,
    logits: torch.Tensor,
    targets: torch.Tensor,
    saturated: torch.Tensor,
    position: int,
    prompts: range,
) -> list[dict]:
    """Columns of one window, a dict of flat arrays (position-major, arm-minor) for each prompt.

    `logits` [1 + A, P, T, V] with the reference first, `targets` [P, T], `saturated` [A, P] counts
    at the end of the window; `position` is the window's first.
    """
    width = logits.shape[2]
    scored = [i for i in range(width) if (position + i) % spec.stride == 0]
    if not scored:
        return []
    logits, targets = logits[:, :, scored], targets[:, scored]
    reference, candidates = logits[0].flatten(0, 1), logits[1:].flatten(1, 2)
    drift = window_drift(reference, candidates, targets.reshape(-1).to(reference.device))
    if not bool(drift.reference.finite.all()):
        row = int((~drift.reference.finite).nonzero()[0])
        prompt, index = divmod(row, len(scored))
        raise ValueError(
            f"logits of the FP32 reference are not finite at prompt {prompts[prompt]}, position "
            f"{position + scored[index]}: there is nothing to compare with"
        )
    arms = spec.arms()
    where = position + np.array(scored, dtype=np.int64)
    shape = (len(arms), len(prompts), len(scored))

    def per_arm(values: torch.Tensor) -> np.ndarray:  # [A, R] -> [P, S, A]
        return values.reshape(shape).permute(1, 2, 0).cpu().numpy()

    def per_row(values: torch.Tensor) -> np.ndarray:  # [R] -> [P, S, A]
        wide = values.reshape(shape[1:]).cpu().numpy()
        return np.repeat(wide[:, :, None], len(arms), axis=2)

    ring_lens = np.array([arm.policy.ring_len for arm in arms])
    cubes = {
        "token": per_row(targets),
        "kl": per_arm(drift.kl),
        "kl_reverse": per_arm(drift.kl_reverse),
        "delta_logp": per_arm(drift.delta_logp),
        "ref_entropy": per_row(drift.reference.entropy),
        "ref_top1_prob": per_row(drift.reference.top1_prob),
        "top1_match": per_arm(drift.top1_match),
        "top2_margin": per_row(drift.reference.top2_margin),
        "nonfinite": per_arm(drift.nonfinite),
        "saturated": per_arm(saturated[:, :, None].expand(shape)),
    }
    tables = []
    for index, prompt in enumerate(prompts):
        columns = {name: cube[index].reshape(-1) for name, cube in cubes.items()}
        columns["prompt"] = np.full(columns["kl"].shape, prompt)
        columns["position"] = np.repeat(where, len(arms))
        columns["phase"] = (where[:, None] % ring_lens).reshape(-1)
        columns["arm"] = np.tile(np.arange(len(arms)), len(where))
        tables.append(columns)
    return tables


def _write_provenance(spec: StudySpec, subject: Subject, engine: Any, folder: RunFolder) -> None:
    """Note what is in effect; a run continued in another environment lists both."""
    here = environment(subject.device)
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
                for arm in spec.arms()
            },
            "effective": subject.effective(engine),
            "inputs": read_json(folder.spec_path)["identity"]["inputs"],
        }
    write_json(folder.provenance_path, provenance)
