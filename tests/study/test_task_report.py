"""Tables and figures of task runs, and whether they are stale; the commands eval and rescore."""

import csv
import io
import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from tiny_tasks import save_checkpoint, write_data

from replayssm import cli
from replayssm.study import tasks
from replayssm.study.task_figures import accuracy_by_policy
from replayssm.study.task_report import check_task_report, task_outputs
from replayssm.study.task_results import find_task_runs
from replayssm.study.task_tables import load_task_record, task_csv, task_markdown


@cache
def folder() -> Path:
    made = Path(tempfile.mkdtemp())
    save_checkpoint(made / "tiny")
    write_data(made / "data")
    config = {
        "question": "What does it cost?",
        "models": [str(made / "tiny")],
        "policies": ["fp16-sr", "nvfp4"],
        "tasks": ["gpqa_diamond", {"name": "gsm8k", "limit": 4}],
        "max_gen_toks": 8,
        "margin": 0.05,
    }
    (made / "small.yaml").write_text(json.dumps(config))
    return made


def run(*argv) -> int:
    return cli.main([str(a) for a in argv])


def evaluate(out: Path, *more) -> int:
    options = ["--data-dir", folder() / "data", "--out", out, "--no-progress", "--device", "cpu"]
    return run("eval", folder() / "small.yaml", *options, *more)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    place = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "environment", lambda device, **more: {"summary": "here"})
        assert evaluate(place) == 0
    return place


@pytest.fixture(scope="module")
def record(out):
    (found,) = find_task_runs(out / "tasks")
    return load_task_record(found)


# -- tables and figures ----------------------------------------------------------------------------
def test_the_table_says_everything(record):
    text = task_markdown(record)
    assert "What does it cost?" in text
    assert "### gpqa_diamond: 12 questions, at most 8 new tokens" in text
    rows = [line for line in text.splitlines() if line.startswith("| nvfp4 ")]
    assert len(rows) == 4 and "undecided" in rows[0]
    reference = next(line for line in text.splitlines() if line.startswith("| fp32 "))
    assert reference.count("–") == 7
    assert "right letters: " in text and "loss of 5 points or more" in text
    assert "WARNING: the reference is at 0 %" in text
    assert "strict-match" in text and f"run {record.run_id}, here, 95 % intervals" in text


def test_the_csv_has_a_row_for_every_task_and_arm(record):
    rows = list(csv.DictReader(io.StringIO(task_csv([record]))))
    assert len(rows) == 2 * 4
    assert {row["kind"] for row in rows} == {"reference", "policy", "control"}
    assert rows[0]["difference"] == "" and rows[1]["difference"] != ""
    outcomes = ("right", "wrong", "invalid", "truncated", "unfinished_reasoning", "loop")
    for row in rows:
        assert sum(int(row[name]) for name in outcomes) == int(row["questions"])


def test_figures_are_the_same_bytes_again(record):
    task = record.summary["tasks"][0]
    first, second = accuracy_by_policy(record, task), accuracy_by_policy(record, task)
    assert first == second and set(first) == {"svg", "png"}
    svg = first["svg"].decode()
    assert len(svg) > 5000 and "<dc:date>" not in svg


def test_nothing_here_needs_torch_or_lm_eval():
    code = (
        "import sys\n"
        "import replayssm.study.task_report, replayssm.cli\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'lm_eval')))"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


# -- commands --------------------------------------------------------------------------------------
def test_eval_prints_and_writes(out, capsys, monkeypatch):
    monkeypatch.setattr(tasks, "environment", lambda device, **more: {"summary": "here"})
    assert evaluate(out) == 0
    printed = capsys.readouterr()
    assert "0 answers generated" in printed.out and "| nvfp4 " in printed.out
    assert "warning: gpqa_diamond: the reference is at 0 %" in printed.err
    files = {path.name for path in (out / "tables").iterdir()}
    assert files == {"tasks-small.md", "tasks-small.csv"}
    figures = {path.name for path in (out / "figures").iterdir()}
    names = ("tasks-small-tiny-gpqa_diamond", "tasks-small-tiny-gsm8k")
    assert figures == {f"{name}.{kind}" for name in names for kind in ("svg", "png")}


def test_rescore_and_its_check(out, capsys):
    runs = out / "tasks" / "small"
    assert run("rescore", runs, "--check") == 0
    assert "follow from their answers" in capsys.readouterr().out
    (found,) = find_task_runs(runs)
    (found.path / "outcomes.csv").write_text("edited")
    table = out / "tables" / "tasks-small.md"
    table.unlink()
    assert run("rescore", runs, "--check") == 1
    errors = capsys.readouterr().err
    assert "outcomes.csv does not follow" in errors and "tasks-small.md is missing" in errors
    assert run("rescore", runs) == 0 and table.exists()
    assert check_task_report([found]) == []
    assert all(path.read_bytes() == content for path, content in task_outputs([found]).items())


@pytest.mark.parametrize(
    "argv, message",
    [
        (["eval", "tsks"], "did you mean 'tasks'"),
        (["eval", "tasks", "--policies", "fp61"], "did you mean 'fp16'"),
        (["eval", "tasks", "--limit", "0"], "limit must be at least 1"),
        (["eval", "tasks", "--samples", "4"], "samples above 1 need a temperature"),
        (["eval", "tasks", "--models", "no/such/folder"], "no/such/folder"),
        (["rescore", "/no/such/place"], "no results folder at /no/such/place"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    assert run(*argv) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("replayssm: ")]
    assert len(lines) == 1 and message in lines[0] and captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_packaged_configurations_are_valid():
    from replayssm.study.task_spec import load_task_spec

    for name in ("tasks", "tasks_qwen3.5-4b", "tasks_nemotron-3-nano"):
        spec = load_task_spec(name)
        assert spec.question and len(spec.arms()) >= 7
    assert len(load_task_spec("tasks").arms()) == 10


# -- lm-eval's command line ------------------------------------------------------------------------
@pytest.fixture
def without_lm_evals_own_tasks(monkeypatch):
    """Reading lm-eval's thousands of task files takes a minute."""
    from lm_eval.tasks.manager import TaskIndex

    real = TaskIndex.build
    only_ours = staticmethod(lambda paths, **options: real(list(paths)[-1:], **options))
    monkeypatch.setattr(TaskIndex, "build", only_ours)


@pytest.mark.usefixtures("without_lm_evals_own_tasks")
def test_the_launcher_runs_lm_eval_with_our_model_and_tasks(monkeypatch, capsys):
    model = f"pretrained={folder() / 'tiny'},policy=fp16-sr+nvfp4,device=cpu"
    monkeypatch.setenv("REPLAYSSM_DATA_DIR", str(folder() / "data"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = ["--tasks", "gpqa_diamond", "--limit", "2", "--gen_kwargs", "max_gen_toks=8"]
    assert run("lm-eval", "run", "--model", "replayssm", "--model_args", model, *asked) == 0
    assert "gpqa_diamond" in capsys.readouterr().out


@pytest.mark.usefixtures("without_lm_evals_own_tasks")
def test_the_launcher_reports_bad_arguments_in_one_line(capsys):
    model = f"pretrained={folder() / 'tiny'},polcy=fp16"
    asked = ["--tasks", "gpqa_diamond"]
    assert run("lm-eval", "run", "--model", "replayssm", "--model_args", model, *asked) == 2
    assert "replayssm: unknown model argument 'polcy'" in capsys.readouterr().err
