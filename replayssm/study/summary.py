"""The summary of a run: statistics of all its records in one document.

Owns what summary.json is made of, beyond `stats.summarise`, and that derived record files are
written before it. Reads and writes a `store.RunFolder`; imports neither torch nor transformers.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from replayssm.study import stats
from replayssm.study.bootstrap import Bootstrap, interval
from replayssm.study.generations import summarise_generations
from replayssm.study.records import GENERATION_SCHEMA, STATE_SCHEMA, Positions, load_columns
from replayssm.study.segments import segment_table
from replayssm.study.state_summary import kl_theory, summarise_states
from replayssm.study.store import RunFolder, file_digest, write_json, write_records


def write_summary(
    folder: RunFolder,
    positions: Positions,
    arms: Sequence[Mapping],
    *,
    ring_len: int,
    tokens: int,
    thinned: bool,
    generated: int | None,
) -> None:
    """Write summary.json, and segments.parquet first where positions are thinned.

    arms: `spec.Arm.describe` with costs. generated: the cap of the free run, None without one.
    state and generation records are summarised if their files are there.
    """
    summary = stats.summarise(positions, arms, ring_len=ring_len, tokens=tokens)
    described = summary["arms"]
    if refreshed := refresh_rows(positions, described, summary["interval"]):
        summary["refresh"] = refreshed
    files = []
    if thinned:
        lengths = [arm["ring_len"] for arm in arms]
        table = segment_table(positions, lengths, ring_len=ring_len, tokens=tokens)
        write_records(folder.segments_path, table)
        files.append(folder.segments_path)
    if folder.states_path.exists():
        columns = load_columns(folder.states_path, STATE_SCHEMA)
        summary["states"] = summarise_states(columns, arms)
        for arm, line in zip(described, kl_theory(summary["states"], described), strict=True):
            if line is not None:
                arm["theory"] = line
        files.append(folder.states_path)
    if generated is not None:
        columns = load_columns(folder.generations_path, GENERATION_SCHEMA)
        summary["generations"] = summarise_generations(columns, tokens=generated)
        summary["controls"]["failures"] += _free_run_failures(summary["generations"], arms)
        files.append(folder.generations_path)
    if files:
        summary["files"] = {path.name: file_digest(path) for path in files}
    bad = [
        f"logits of {where['arm']} are not finite at prompt {where['prompt']}, "
        f"position {where['position']} ({where['count']} of {where['of']} rows)"
        for where in positions.first_nonfinite()
    ]
    write_json(folder.summary_path, summary | {"nonfinite": bad})


def refresh_rows(positions: Positions, arms: Sequence[Mapping], about: Mapping) -> list[dict]:
    """How much of each refreshed policy's KL is age: a row per refresh arm, see `records`.

    The policy's own arm is the one of the same policy and seed. arms: as `stats.summarise` returns
    them; about: its description of the intervals, whose resamples are drawn again.
    """
    refreshed = [(index, arm) for index, arm in enumerate(arms) if arm.get("refresh")]
    if not refreshed:
        return []
    quarter = arms[0]["last_quarter"]
    where = positions.position
    inside = (where >= quarter["start"]) & (where < quarter["stop"])
    bootstrap = Bootstrap(positions.kl.shape[1], block=about["block_positions"] or 1)

    def resampled(arm: int) -> np.ndarray:  # equal blocks for every arm: ratios are paired
        return bootstrap.means(positions.kl[arm : arm + 1, :, inside], quarter["start"])[:, 0]

    rows = []
    for index, arm in refreshed:
        policy = next(
            (
                at
                for at, other in enumerate(arms)
                if other["kind"] == "policy" and arm["identity"].startswith(other["identity"] + ",")
            ),
            None,
        )
        mine = arm["last_quarter"]["kl_mean"]
        row = dict(arm["refresh"]) | {"label": arm["label"], "kl_mean": mine}
        row |= {"kl_policy_mean": None, "ratio": None, "ratio_low": None, "ratio_high": None}
        if policy is not None:
            theirs = arms[policy]["last_quarter"]["kl_mean"]
            row["kl_policy_mean"] = theirs
            samples = resampled(index)
            if mine and theirs is not None and (samples > 0).all():
                low, high = interval(resampled(policy) / samples)
                row |= {"ratio": theirs / mine, "ratio_low": low, "ratio_high": high}
        rows.append(row)
    return rows


def _free_run_failures(generations: Mapping, arms: Sequence[Mapping]) -> list[str]:
    exact = {arm["label"] for arm in arms if arm["control"] == "second_fp32"}
    return [
        f"second FP32 row: {arm['label']} wrote another text than the reference: rows of one batch "
        "are not independent"
        for arm in generations["arms"]
        if arm["label"] in exact and arm["diverged_share"] > 0
    ]
