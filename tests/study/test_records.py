"""The records a study may ask for: states, segments, thinned positions, free runs, refresh."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from fake_lockstep import FakeLockstep, FakeSubject
from test_runner import STUDY, contents, run, spec

from replayssm.study import records, runner, theory
from replayssm.study.generations import cut, first_divergence, repeated_share
from replayssm.study.records import load_columns, load_positions
from replayssm.study.state_metrics import shortened
from replayssm.study.store import file_digest, read_json

EVERYTHING = {
    "positions": "log",
    "states": "log",
    "free_running": {"tokens": 60},
    "controls": {"refresh": [64, 96], "refresh_policies": ["nvfp4", "fp8-sr"]},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(study, folder, summary) of a run that asks for everything."""
    study = spec(**EVERYTHING)
    result = run(tmp_path_factory.mktemp("whole"), study)
    assert result.failures == []
    return study, result.folder, read_json(result.folder.summary_path)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Every position and the summary of the same study without thinning."""
    study = spec(**EVERYTHING | {"positions": "all"})
    folder = run(tmp_path_factory.mktemp("full"), study).folder
    labels = [arm.label for arm in study.arms()]
    positions = load_positions(folder.positions_path, labels, prompts=study.prompts)
    return positions, read_json(folder.summary_path)


# -- thinning --------------------------------------------------------------------------------------
def test_thinning_changes_no_statistic(whole, full):
    summary, (_, expected) = whole[2], full
    assert set(summary["files"]) - set(expected["files"]) == {"segments.parquet"}
    for name in set(summary) - {"files"}:
        assert summary[name] == expected[name], name


def test_kept_positions_are_those_of_the_whole_records(whole, full):
    study, folder, _ = whole
    labels = [arm.label for arm in study.arms()]
    found = load_positions(folder.positions_path, labels, prompts=study.prompts)
    keep = study.kept(full[0].position)
    assert found.position.tolist() == full[0].position[keep].tolist()
    assert 0 < len(found.position) < 200
    np.testing.assert_array_equal(found.kl, full[0].kl[..., keep])


def test_segments_hold_exact_sums(whole, full):
    study, folder, _ = whole
    positions, summary = full
    rows = load_columns(folder.segments_path, records.SEGMENT_SCHEMA)
    whole_phase = np.isnan(rows["phase"])
    for index, arm in enumerate(summary["arms"]):
        mine = rows["arm"] == arm["label"]
        for window in arm["curve"]:
            here = mine & whole_phase & (rows["start"] == window["start"])
            here &= rows["stop"] == window["stop"]
            assert here.sum() == study.prompts
            count = rows["count"][here].sum()
            assert count == window["tokens"] - window["nonfinite_count"]
            assert rows["kl_sum"][here].sum() / count == pytest.approx(window["kl_mean"], rel=1e-9)
            assert rows["excess_nll_sum"][here].sum() / count == pytest.approx(
                window["excess_nll_mean"], rel=1e-6, abs=1e-12
            )
            assert rows["top1_matches"][here].sum() / count == pytest.approx(
                window["top1_agreement_mean"]
            )
            assert rows["saturated"][here].sum() == window["saturated_count"]
            assert rows["kl_max"][here].max() == pytest.approx(window["kl_max"])
        for row in arm["phase"]:
            here = mine & (rows["phase"] == row["phase"])
            mean = rows["kl_sum"][here].sum() / rows["count"][here].sum()
            assert mean == pytest.approx(row["kl_mean"], rel=1e-9)
        for prompt in range(study.prompts):
            here = mine & whole_phase & (rows["prompt"] == prompt)
            kl = positions.kl[index, prompt].astype(np.float64)
            assert rows["kl_square_sum"][here].sum() == pytest.approx((kl * kl).sum())


def test_quantiles_and_missing_values_of_a_segment(tmp_path):
    study = spec(positions="every 7")
    folder = run(tmp_path, study, poison=[(2, 1, 77, float("nan"))]).folder
    rows = load_columns(folder.segments_path, records.SEGMENT_SCHEMA)
    here = (rows["arm"] == "fp16") & (rows["prompt"] == 1) & np.isnan(rows["phase"])
    bad = here & (rows["start"] <= 77) & (rows["stop"] > 77)
    assert rows["nonfinite"][bad].tolist() == [1]
    assert rows["count"][bad] == rows["stop"][bad] - rows["start"][bad] - 1
    short = here & (rows["count"] < 20)
    assert np.isnan(rows["kl_p50"][short]).all() and not np.isnan(rows["kl_max"][here]).any()
    assert np.isnan(rows["kl_p99"][here]).all()


# -- states ----------------------------------------------------------------------------------------
def test_state_records_and_their_summary(whole):
    study, folder, summary = whole
    rows = load_columns(folder.states_path, records.STATE_SCHEMA)
    arms = study.arms()
    assert study.state_positions == (32, 128, 192)
    assert len(rows["arm"]) == study.prompts * 3 * len(arms) * 2 * 2
    states = summary["states"]
    assert states["layers"] == [0, 0, 1, 1] and states["heads"] == [0, 1, 0, 1]
    assert states["positions"] == [32, 128, 192]
    assert states["memory"] == pytest.approx([10, 10_000] * 2, rel=1e-3)
    by_label = {arm["label"]: arm for arm in states["arms"]}
    nvfp4, mixed, fp32 = by_label["nvfp4"], by_label["fp16-sr+nvfp4@32"], by_label["fp32"]
    here = (rows["arm"] == "nvfp4") & (rows["position"] == 192) & (rows["layer"] == 1)
    here &= rows["head"] == 0
    rms = np.sqrt(np.mean(rows["checkpoint_error"][here].astype(float) ** 2))
    assert nvfp4["checkpoint"][2] == pytest.approx(rms, rel=1e-3)
    assert nvfp4["read"] is None and len(mixed["read"]) == 4
    assert nvfp4["read_write_error"] is None and mixed["read_write_error"] == pytest.approx(0.094)
    predicted = theory.predicted_error(theory.write_error(nvfp4_storage(study)), 1 + 192 / 16)
    assert nvfp4["predicted"] == pytest.approx([predicted] * 4, rel=1e-3)
    assert nvfp4["residual"][0] == pytest.approx(nvfp4["checkpoint"][0] / predicted, rel=3e-3)
    assert fp32["predicted"] is fp32["residual"] is fp32["write_error"] is None
    assert fp32["checkpoint"] == [0.0] * 4
    assert nvfp4["stagnating"] == [1, 3] and by_label["fp8-sr"]["stagnating"] == []
    point = mixed["curve"][0]
    assert point["position"] == 32 and point["read_low"] <= point["read_median"]


def nvfp4_storage(study):
    return next(p for p in study.policies if p.label == "nvfp4").to_dict()["checkpoint"]


def test_theory_lines_have_a_value_for_every_window(whole):
    arms = {arm["label"]: arm for arm in whole[2]["arms"]}
    line = arms["nvfp4"]["theory"]
    assert len(line["kl"]) == len(arms["nvfp4"]["curve"]) and line["read_copy_kl"] == 0.0
    assert (np.diff(line["kl"]) >= 0).all() and line["scale"] > 0
    assert "theory" not in arms["fp32"]
    assert "theory" not in arms["fp16-sr+nvfp4@32"], "the run has no fp32+nvfp4@32"


def test_shortened_values_keep_nine_bits():
    values = np.array([np.pi * 1e-7, -1 / 3, 0.0, np.nan, np.inf, 1e-45])
    found = shortened(values)
    np.testing.assert_allclose(found[:2], values[:2], rtol=2**-9)
    assert found[2] == 0 and np.isnan(found[3]) and np.isinf(found[4])
    assert (found[:2].view(np.int32) & 0x3FFF == 0).all()


# -- refresh ---------------------------------------------------------------------------------------
def test_refresh_rows_name_their_policy(whole):
    rows = whole[2]["refresh"]
    assert [(row["policy"], row["every"]) for row in rows] == [
        *(("nvfp4", 64), ("nvfp4", 96)),
        *(("fp8-sr", 64), ("fp8-sr", 96)),
    ]
    arms = {arm["label"]: arm for arm in whole[2]["arms"]}
    for row in rows:
        assert row["kl_policy_mean"] == arms[row["policy"]]["last_quarter"]["kl_mean"]
        assert row["ratio"] == pytest.approx(row["kl_policy_mean"] / row["kl_mean"])
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]


# -- free runs -------------------------------------------------------------------------------------
def test_generation_records_and_their_summary(whole):
    study, folder, summary = whole
    table = pq.read_table(folder.generations_path)
    labels = ["reference", *(arm.label for arm in study.free_arms())]
    assert table.column("arm").to_pylist() == labels * study.prompts
    assert not any("refresh" in label for label in labels)
    for row in table.to_pylist():
        assert len(row["tokens"]) == row["length"] and 7 not in row["tokens"]
    found = {arm["label"]: arm for arm in summary["generations"]["arms"]}
    assert found["fp32"]["diverged_share"] == found["reference"]["diverged_share"] == 0
    assert found["fp32"]["first_divergence_median"] == 60
    assert found["nvfp4"]["diverged_share"] > 0.5 and found["nvfp4"]["loop_share"] >= 0
    assert found["reference"]["length_ratio_mean"] == 1


def test_a_second_fp32_row_that_writes_another_text_is_a_failure(tmp_path, monkeypatch):
    write = FakeSubject.free_run

    def wrong(self, study, prompts, ids):
        text = write(self, study, prompts, ids)
        text[1, 0, 3] += 1
        return text

    monkeypatch.setattr(FakeSubject, "free_run", wrong)
    result = run(tmp_path, spec(**EVERYTHING))
    assert any("fp32 wrote another text" in line for line in result.failures)


@pytest.mark.parametrize(
    "reference, text, at", [("abc", "abc", None), ("abc", "abd", 2), ("abc", "ab", 2), ("", "a", 0)]
)
def test_first_divergence(reference, text, at):
    assert first_divergence(reference, text) == at


def test_repetition_and_ends():
    assert repeated_share(list(range(100))) == 0.0
    assert repeated_share([1, 2] * 50) == pytest.approx(1 - 2 / 93)
    assert repeated_share([1, 2]) is None
    assert cut(np.array([3, 4, 7, 5]), {7}) == ([3, 4], True)
    assert cut(np.array([3, 4]), {7}) == ([3, 4], False)


# -- resuming --------------------------------------------------------------------------------------
@pytest.mark.parametrize("stop", [48, 112, 144])
def test_a_run_that_asks_for_everything_resumes_to_equal_bytes(stop, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_LARGEST_SAVING_SHARE", float("inf"))
    study = spec(**EVERYTHING)
    expected = run(tmp_path / "whole", study)
    window = FakeLockstep._window

    def interrupted(self, tokens, targets):
        if self.position >= stop:
            raise KeyboardInterrupt
        return window(self, tokens, targets)

    monkeypatch.setattr(FakeLockstep, "_window", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", study)
    monkeypatch.setattr(FakeLockstep, "_window", window)
    result = run(tmp_path / "cut", study)
    assert contents(result.folder.path) == contents(expected.folder.path)
    assert set(contents(result.folder.path)) >= {
        *("segments.parquet", "states.parquet", "generations.parquet"),
    }


def test_files_are_tied_to_the_summary(whole):
    _, folder, summary = whole
    for name, expected in summary["files"].items():
        assert file_digest(folder.path / name) == expected
    assert len(summary["files"]) == 3 and STUDY["tokens"] == 200


def test_missing_state_records_are_noticed(tmp_path, monkeypatch):
    from replayssm.study.store import RunFolder

    monkeypatch.setattr(RunFolder, "write_states", lambda *args: None)
    with pytest.raises(ValueError, match=r"states of prompt 0 are there after \[\] tokens"):
        run(tmp_path, spec(states="log"))
