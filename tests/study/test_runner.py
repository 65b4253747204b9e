"""Running a study on the fake engine: records, reuse, resuming, failures; nothing half-written."""

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from fake_lockstep import FakeSubject

from replayssm.study import runner, store
from replayssm.study.config import from_mapping
from replayssm.study.records import load_positions
from replayssm.study.runner import run_study
from replayssm.study.store import RunFolder, read_json

STUDY = {
    "models": ["fake"],
    "policies": ["fp32", "fp16", "fp8-sr", "nvfp4", "fp16-sr+nvfp4@32"],
    "prompts": 3,
    "prompts_per_batch": 2,
    "tokens": 200,
    "prefill": 10,
}


def spec(**changes):
    return from_mapping(STUDY | changes, name="test", where="test")


def run(out, study=None, *, chunk=64, **subject):
    def open_subject(name):
        return FakeSubject(name, **subject)

    (result,) = run_study(
        study or spec(), out=out, open_subject=open_subject, progress=False, chunk_tokens=chunk
    )
    return result


def contents(folder):
    """Relative path -> bytes of every file under `folder`."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def positions(result, study=None):
    study = study or spec()
    labels = [arm.label for arm in study.arms()]
    return load_positions(result.folder.positions_path, labels, prompts=study.prompts)


# -- records ---------------------------------------------------------------------------------------


def test_a_run_folder_holds_exactly_the_finished_files(tmp_path):
    result = run(tmp_path)
    assert result.failures == [] and result.nonfinite == [] and not result.reused
    assert set(contents(result.folder.path)) == {
        "spec.json",
        "provenance.json",
        "status.json",
        "positions.parquet",
        "summary.json",
    }
    assert read_json(result.folder.path / "status.json") == {"status": "complete"}


def test_what_was_in_effect_at_the_end_is_recorded(tmp_path, monkeypatch):
    """Such as graphs that turned out to be impossible on the way."""
    told = iter(["graphs", *["eager (capture failed)"] * 9])
    monkeypatch.setattr(FakeSubject, "effective", lambda self, engine: {"graphs": next(told)})
    provenance = read_json(run(tmp_path).folder.provenance_path)
    assert provenance["effective"] == {"graphs": "eager (capture failed)"}


def test_records_have_a_row_for_each_prompt_position_and_arm(tmp_path):
    result = run(tmp_path)
    table = pq.read_table(result.folder.positions_path)
    arms = spec().arms()
    assert table.num_rows == 3 * 200 * len(arms)
    assert table.schema.names == store.SCHEMA.names
    assert table.schema.metadata is None, "nothing but data: equal data, equal bytes"
    phase = table.column("phase").to_numpy().reshape(3, 200, len(arms))
    for index, arm in enumerate(arms):
        assert (phase[..., index] == np.arange(200) % arm.policy.ring_len).all()
    found = positions(result)
    assert (found.kl[0] == 0).all(), "fp32"
    assert found.kl[3].mean() > found.kl[1].mean() > 0


def test_forced_tokens_are_the_text_shifted_by_one(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(random.Random(0).choices("abcdefgh ", k=2000)))
    study = spec(text=f"file:{text}")
    found = positions(run(tmp_path, study), study)
    ids = FakeSubject().encode(text.read_text())[: 3 * 211]
    expected = np.array(ids).reshape(3, 211)[:, 11:]
    assert (found.token == expected).all()


def test_the_reference_writes_its_own_text(tmp_path):
    study = spec(text="generate", generate={"temperature": 0.7, "seed": 3})
    result = run(tmp_path, study)
    assert result.failures == []
    found = positions(result, study)
    assert len(np.unique(found.token)) > 10
    resumed = run(tmp_path / "other", study, chunk=16)
    assert contents(resumed.folder.path) == contents(result.folder.path)


def test_a_stride_scores_every_nth_position_with_its_own_phase(tmp_path):
    study = spec(stride=7)
    found = positions(run(tmp_path, study), study)
    whole = positions(run(tmp_path))
    assert found.position.tolist() == list(range(0, 200, 7))
    np.testing.assert_array_equal(found.kl, whole.kl[..., ::7])


def test_results_do_not_depend_on_how_the_run_was_cut(tmp_path):
    whole = run(tmp_path / "a", chunk=10_000)
    cut = run(tmp_path / "b", chunk=16)
    assert contents(whole.folder.path) == contents(cut.folder.path)


# -- reuse and resuming ----------------------------------------------------------------------------


def test_a_complete_run_is_reused_without_running(tmp_path, monkeypatch):
    first = run(tmp_path)
    before = contents(first.folder.path)
    monkeypatch.setattr(FakeSubject, "lockstep", None)
    again = run(tmp_path)
    assert again.reused and again.folder.path == first.folder.path
    assert contents(first.folder.path) == before


def test_new_limits_reuse_the_numbers_and_are_kept(tmp_path):
    run(tmp_path)
    result = run(tmp_path, spec(limits={"kl_mean": 0.5}))
    assert result.reused
    assert read_json(result.folder.spec_path)["display"]["limits"]["kl_mean"] == 0.5


def test_other_weights_are_another_run(tmp_path, monkeypatch):
    first = run(tmp_path)
    monkeypatch.setattr(FakeSubject, "digests", lambda self: {"weights": "retrained"})
    second = run(tmp_path)
    assert not second.reused and second.folder.path != first.folder.path


def test_a_run_stopped_inside_a_prompt_goes_on_from_there(tmp_path, monkeypatch):
    from fake_lockstep import FakeLockstep

    monkeypatch.setattr(runner, "_LARGEST_SAVING_SHARE", float("inf"))
    whole = run(tmp_path / "whole")
    window, seen = FakeLockstep._window, []

    def stop_at_150(self, tokens, targets):
        if self.position >= 144:
            raise KeyboardInterrupt
        return window(self, tokens, targets)

    monkeypatch.setattr(FakeLockstep, "_window", stop_at_150)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut")

    def record(self, tokens, targets):
        seen.append(self.position)
        return window(self, tokens, targets)

    monkeypatch.setattr(FakeLockstep, "_window", record)
    result = run(tmp_path / "cut")
    assert seen[0] == 128, "the last saved state, not the beginning"
    assert contents(result.folder.path) == contents(whole.folder.path)


def test_kill_minus_nine_ten_times_then_finish_is_byte_identical(tmp_path):
    seed = random.randrange(1 << 30)
    script = Path(__file__).with_name("kill_and_resume.py")
    environment = os.environ | {
        "PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "out"), "10", str(seed)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    word, hit, state = done.stdout.split()[-3:]
    assert (word, state) == ("hit", "finished"), (seed, done.stdout, done.stderr[-2000:])
    assert int(hit) >= 5, f"only {hit} of 10 kills met a running run (seed {seed})"
    assert contents(tmp_path / "out") == contents(tmp_path / "out-whole"), f"seed {seed}"


def test_a_second_process_is_kept_out(tmp_path):
    result = run(tmp_path)
    with result.folder.lock(), pytest.raises(ValueError, match="in use"):
        with RunFolder(result.folder.path).lock():
            pass


# -- failures --------------------------------------------------------------------------------------


def test_tokens_beyond_the_models_positions(tmp_path):
    with pytest.raises(ValueError, match="10 prefill . 200 tokens are beyond the 128 positions"):
        run(tmp_path, max_positions=128)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "there is no file"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b"short", "has 5 tokens, 3 prompts of 211 tokens need 633"),
    ],
)
def test_unusable_text_files(tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", spec(text=f"file:{path}"))
    assert contents(tmp_path / "out") == {}


def test_a_spoiled_row_is_left_out_counted_and_named(tmp_path):
    result = run(tmp_path, poison=[(2, 1, 77, float("nan"))])
    (line,) = result.nonfinite
    assert "logits of fp16 are not finite at prompt 1, position 77 (1 of 600 rows)" in line
    summary = read_json(result.folder.summary_path)
    clean = read_json(run(tmp_path / "clean").folder.summary_path)
    assert summary["arms"][1]["whole"]["nonfinite_count"] == 1
    assert summary["arms"][1]["whole"]["kl_mean"] == pytest.approx(
        clean["arms"][1]["whole"]["kl_mean"], rel=0.05
    )
    rows = pq.read_table(result.folder.positions_path)
    assert rows.column("kl").null_count == 1


def test_a_spoiled_reference_ends_the_run_by_name(tmp_path):
    with pytest.raises(ValueError, match="reference are not finite at prompt 2, position 5"):
        run(tmp_path, poison=[(0, 2, 5, float("inf"))])
    (folder,) = store.find_runs(tmp_path)
    status = folder.status()
    assert status["status"] == "failed" and "Traceback" in status["traceback"]


@pytest.mark.parametrize("live, says", [(None, "KL 0 at every position"), (False, "fault")])
def test_policies_that_do_not_reach_the_model_are_noticed(tmp_path, live, says):
    result = run(tmp_path, live=live)
    assert any("hook not live" in line and says in line for line in result.failures)


@pytest.mark.parametrize("after", range(0, 40, 4))
def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch, after):
    whole = run(tmp_path / "whole")
    real, calls = os.fsync, []

    def full(handle):
        calls.append(1)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(store.os, "fsync", full)
    study = tmp_path / "full"
    try:
        run(study)
        assert len(calls) <= after
    except OSError as error:
        assert error.errno == errno.ENOSPC
    assert not [name for name in contents(study) if name.endswith(".tmp")]
    monkeypatch.setattr(store.os, "fsync", real)
    result = run(study)
    assert contents(result.folder.path) == contents(whole.folder.path)


def test_another_metric_version_is_refused(tmp_path, monkeypatch):
    result = run(tmp_path)
    document = read_json(result.folder.spec_path)
    store.write_json(result.folder.spec_path, document | {"metric_version": 0})
    with pytest.raises(ValueError, match="metric version 0, this is version 1"):
        run(tmp_path)


def test_missing_records_are_noticed_before_merging(tmp_path):
    folder = RunFolder(tmp_path / "x")
    folder.begin({"metric_version": store.METRIC_VERSION, "identity": {}})
    with pytest.raises(ValueError, match="prompt 0 has 0 rows, should have 40"):
        folder.merge(prompts=1, positions=20, arms=2)
    assert not folder.positions_path.exists()


def test_unequal_token_streams_are_refused(tmp_path):
    result = run(tmp_path)
    table = pq.read_table(result.folder.positions_path)
    tokens = table.column("token").to_numpy().copy()
    tokens[1] += 1
    index = table.schema.get_field_index("token")
    changed = table.set_column(index, table.schema.field("token"), [tokens.astype(np.int32)])
    pq.write_table(changed, tmp_path / "changed.parquet")
    labels = [arm.label for arm in spec().arms()]
    with pytest.raises(ValueError, match="different tokens"):
        load_positions(tmp_path / "changed.parquet", labels, prompts=3)
    with pytest.raises(ValueError, match="not 7 prompts"):
        load_positions(result.folder.positions_path, labels, prompts=7)
