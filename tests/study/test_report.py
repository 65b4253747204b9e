"""Tables and figures: from run folders alone, byte-identical, checked, drawn without torch."""

import csv
import io
import subprocess
import sys

import matplotlib
import pytest
from fake_lockstep import FakeSubject

from replayssm.study import figures, report, store, tables
from replayssm.study.attribution import decomposition_rows
from replayssm.study.config import from_mapping
from replayssm.study.runner import run_study

STUDY = {
    "models": ["fake/one", "fake/two"],
    "policies": ["fp32", "fp16-sr", "fp8", "nvfp4", "fp32+nvfp4", "fp16-sr+nvfp4"],
    "prompts": 2,
    "tokens": 320,
    "prefill": 4,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A results folder with two complete runs and their report."""
    out = tmp_path_factory.mktemp("results")
    spec = from_mapping(STUDY, name="short", where="test")
    list(run_study(spec, out=out, open_subject=FakeSubject, progress=False))
    report.write_report(report.load_records(out / "runs"), out)
    return out


@pytest.fixture
def copy(results, tmp_path):
    """A private copy of it, to be spoiled."""
    import shutil

    shutil.copytree(results, tmp_path / "results")
    return tmp_path / "results"


def records(out):
    return report.load_records(out / "runs")


def csv_rows(text):
    return list(csv.DictReader(io.StringIO(text)))


# -- tables ----------------------------------------------------------------------------------------


def test_policies_come_best_first_and_controls_apart(results):
    record = records(results)[0]
    labels = [arm["label"] for arm in tables.policies(record)]
    assert labels[:3] == ["fp32", "fp16-sr", "fp8"]
    text = tables.summary_markdown(record)
    assert "fault" not in text.split("Checkpoint and read copy")[0]
    assert "within these documents" in text and record.run_id in text


def test_broken_policies_come_last(results):
    arms = tables.policies(records(results)[0])
    arms[0]["last_quarter"] = arms[0]["last_quarter"] | {"nonfinite_count": 1}
    assert tables.by_quality(arms)[-1]["label"] == "fp32"


def test_verdict_names_what_is_over_the_limit():
    quarter = {"kl_mean": 2e-3, "top1_agreement_mean": 0.99}
    whole = {"nonfinite_count": 0, "kl_infinite_count": 0}
    arm = {"last_quarter": quarter, "whole": whole}
    limits = {"kl_mean": 1e-3, "top1_agreement_mean": 0.995}
    assert tables.verdict(arm, limits) == "unsafe: KL, top-1"
    assert tables.verdict(arm, limits | {"kl_mean": 1.0}) == "unsafe: top-1"
    assert tables.verdict(arm, {"kl_mean": 1.0, "top1_agreement_mean": 0.9}) == "safe"
    whole["nonfinite_count"] = 1
    assert tables.verdict(arm, limits) == "unsafe: not finite"


def test_failed_controls_and_lost_rows_are_in_the_footer(results):
    record = records(results)[0]
    record.summary["controls"]["failures"].append("hook not live: x")
    record.summary["arms"][1]["whole"]["nonfinite_count"] = 3
    text = tables.summary_markdown(record)
    assert "CONTROL FAILED: hook not live: x" in text
    assert "fp16-sr: 3 non-finite logit rows, left out of the means" in text


def test_missing_values_are_never_zero():
    assert tables.number(None) == "–"
    assert tables.number(0.0) == "0"
    assert tables.number(1.234e-7) == "1.23e-07"


def test_csv_has_a_row_per_run_and_arm_and_names_every_reducer(results):
    found = records(results)
    rows = csv_rows(tables.summary_csv(found))
    assert len(rows) == sum(len(record.summary["arms"]) for record in found)
    reducers = ("_mean", "_median", "_p90", "_p99", "_p999", "_max", "_min", "_count", "_tokens")
    for name in rows[0]:
        if name.startswith(("whole_", "last_quarter_")):
            assert name.removesuffix("_low").removesuffix("_high").endswith(reducers), name
    assert rows[0]["whole_kl_p999"] == "", "too few tokens: empty, not zero"
    positions = csv_rows(tables.position_csv(found))
    assert {row["model"] for row in positions} == set(STUDY["models"])
    assert len(csv_rows(tables.phase_csv(found))) == sum(
        len(arm["phase"]) for record in found for arm in record.summary["arms"]
    )


def test_decomposition_adds_up(results):
    (row,) = decomposition_rows(records(results)[0].summary)
    assert (row["checkpoint"], row["read_copy"]) == ("fp16-sr", "nvfp4")
    assert row["kl_interaction"] == pytest.approx(
        row["kl_both"] - row["kl_checkpoint"] - row["kl_read_copy"]
    )


def test_recommended_is_the_cheapest_safe_policy(results):
    record = records(results)[0]
    record.document["display"]["limits"] = {"kl_mean": 1e3, "top1_agreement_mean": 0.0}
    assert tables.recommended(record)["label"] == "nvfp4"
    record.document["display"]["limits"] = {"kl_mean": -1.0, "top1_agreement_mean": 0.0}
    assert tables.recommended(record) is None
    assert "No policy is safe" in tables.summary_markdown(record)


# -- figures and files -----------------------------------------------------------------------------


def test_every_run_has_every_figure_and_every_experiment_its_tables(results):
    names = {path.name for path in (results / "figures").iterdir()}
    expected = {
        f"short-{model}-{figure}.{kind}"
        for model in ("one", "two")
        for figure in figures.FIGURES
        for kind in ("svg", "png")
    }
    assert names == expected | {"manifest.json"}  # what was not measured is not drawn
    assert (results / "tables" / "short.md").read_text().startswith("# short")


def test_drawing_again_gives_the_same_bytes(results):
    for name, (_, content) in report.outputs(records(results)[:1]).items():
        if "figures" in name:
            assert (results / name).read_bytes() == content, name
            assert matplotlib.__version__.encode() not in content and b"date" not in content


def test_a_study_without_read_copies_draws_what_it_can(results):
    record = records(results)[0]
    record.summary["arms"] = [arm for arm in record.summary["arms"] if arm["read_copy"] is None]
    record.summary["attribution"] = []
    assert figures.checkpoint_by_read_copy(record) is None
    assert figures.kl_by_position(record)["svg"].startswith(b"<?xml")


def test_two_runs_of_one_model_get_the_run_id_in_their_names(copy):
    spec = from_mapping(STUDY | {"prompts": 1}, name="short", where="test")
    list(run_study(spec, out=copy, open_subject=FakeSubject, progress=False))
    names = set(report._names(records(copy)).values())
    assert len(names) == 4 and all(name.count("-") == 2 for name in names)


# -- checking --------------------------------------------------------------------------------------


def test_check_passes_on_a_fresh_report(results):
    assert report.check_report(records(results), results) == []


def test_changed_data_makes_everything_drawn_from_it_stale(copy):
    record = records(copy)[0]
    summary = store.read_json(record.path / "summary.json")
    summary["arms"][1]["whole"]["kl_mean"] *= 1.0001
    store.write_json(record.path / "summary.json", summary)
    problems = report.check_report(records(copy), copy)
    assert problems and all("is stale" in line for line in problems)
    assert len(problems) == 5 + 2 * len(figures.FIGURES)
    report.write_report(records(copy), copy)
    assert report.check_report(records(copy), copy) == []


def test_an_edited_and_a_missing_file_are_found(copy):
    table = copy / "tables" / "short.md"
    table.write_text(table.read_text().replace("fp16", "fp17"))
    (copy / "figures" / "short-one-kl-by-phase.png").unlink()
    problems = report.check_report(records(copy), copy)
    assert [line.split(" ", 1)[1] for line in problems] == [
        "was edited after it was drawn",
        "is missing",
    ]


def test_a_run_without_a_report_is_found(copy):
    spec = from_mapping(STUDY | {"models": ["fake/three"]}, name="other", where="test")
    list(run_study(spec, out=copy, open_subject=FakeSubject, progress=False))
    (line,) = report.check_report(records(copy), copy)
    assert "has no table or figure" in line


def test_a_table_whose_run_is_gone_is_found(copy):
    import shutil

    shutil.rmtree(records(copy)[0].path)
    problems = report.check_report(records(copy), copy)
    assert any("which is not there" in line for line in problems)


def test_reports_of_other_experiments_stay(copy):
    spec = from_mapping(STUDY | {"models": ["fake/three"]}, name="other", where="test")
    list(run_study(spec, out=copy, open_subject=FakeSubject, progress=False))
    report.write_report(report.load_records(copy / "runs" / "other"), copy)
    assert report.check_report(records(copy), copy) == []


def test_records_of_another_metric_version_are_refused(copy):
    record = records(copy)[0]
    store.write_json(record.path / "spec.json", record.document | {"metric_version": 0})
    with pytest.raises(ValueError, match="metric version 0"):
        records(copy)


def test_places_without_runs(tmp_path):
    with pytest.raises(ValueError, match="no results folder"):
        report.load_records(tmp_path / "absent")
    with pytest.raises(ValueError, match="no complete run"):
        report.load_records(tmp_path)
    with pytest.raises(ValueError, match="--out"):
        report.default_output(tmp_path)


def test_reports_need_neither_torch_nor_transformers(copy):
    code = (
        "import sys; from replayssm.cli import main; "
        f"runs = {str(copy / 'runs')!r}; code = main(['report', runs]) or main(['status', runs]);"
        "loaded = {'torch', 'transformers', 'pandas'} & set(sys.modules); "
        "sys.exit(f'loaded {loaded}' if loaded else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert report.check_report(records(copy), copy) == []
