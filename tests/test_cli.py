"""The command line: output, exit codes, one-line errors; runs are on the fake engine."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replayssm import cli

sys.path.insert(0, str(Path(__file__).parent / "study"))
from fake_lockstep import FakeSubject  # noqa: E402


@pytest.fixture
def fake(monkeypatch):
    """Run commands on the fake engine; returns a dict of arguments for it."""
    from replayssm.study import figures, subject

    # One figure is enough here; test_report draws them all.
    monkeypatch.setattr(figures, "FIGURES", {"kl-by-phase": figures.kl_by_phase})
    arguments = {}

    def make(name, **options):
        del options
        return FakeSubject(name, **arguments)

    monkeypatch.setattr(subject, "ModelSubject", make)
    return arguments


DRIFT = ["drift", "--model", "fake", "--policies", "fp32,fp16-sr,nvfp4", "--tokens", "160"]


def run(*argv):
    return cli.main([str(a) for a in argv])


def drift(tmp_path, *more):
    return run(*DRIFT, "--prompts", "2", "--out", tmp_path, "--no-progress", *more)


# -- running ---------------------------------------------------------------------------------------


def test_drift_prints_the_summary_and_writes_the_report(tmp_path, fake, capsys):
    assert drift(tmp_path) == 0
    out = capsys.readouterr().out
    table = [line for line in out.splitlines() if line.startswith("| ")]
    order = [line.split("|")[1].strip() for line in table][2:5]
    assert order == ["fp32", "fp16-sr", "nvfp4"]
    assert "Measured:" in out and (tmp_path / "tables" / "drift.md").exists()
    assert drift(tmp_path) == 0
    assert "Reused:" in capsys.readouterr().out


def test_run_takes_a_packaged_experiment_and_overrides(tmp_path, fake, capsys):
    options = ["--models", "fake", "--tokens", "64", "--prompts", "1", "--policies", "fp16,nvfp4"]
    assert run("run", "quick", *options, "--out", tmp_path, "--no-progress") == 0
    (path,) = (tmp_path / "runs" / "quick").iterdir()
    identity = json.loads((path / "spec.json").read_text())["identity"]
    assert (identity["tokens"], identity["prompts"], identity["model"]) == (64, 1, "fake")
    labels = [arm["label"] for arm in identity["arms"]]
    assert labels[:2] == ["fp16", "nvfp4"] and len(labels) == 5


def test_a_yaml_file_and_drift_ask_for_the_same_run(tmp_path, fake, capsys):
    path = tmp_path / "drift.yaml"
    path.write_text("models: [fake]\npolicies: [fp32, fp16-sr, nvfp4]\ntokens: 160\nprompts: 2\n")
    assert drift(tmp_path) == 0
    assert run("run", path, "--out", tmp_path, "--no-progress") == 0
    assert "Reused:" in capsys.readouterr().out


def test_an_aliased_stride_is_a_warning(tmp_path, fake, capsys):
    assert drift(tmp_path, "--stride", 4) == 0
    assert "warning: alias: stride 4" in capsys.readouterr().err


def test_status_and_report(tmp_path, fake, capsys):
    drift(tmp_path)
    capsys.readouterr()
    assert run("status", tmp_path / "runs") == 0
    assert "complete | 100 % of 2 x 160" in capsys.readouterr().out
    assert run("report", tmp_path / "runs") == 0
    assert run("report", tmp_path / "runs" / "drift", "--check") == 0
    (tmp_path / "tables" / "drift.csv").write_text("edited")
    capsys.readouterr()
    assert run("report", tmp_path / "runs", "--check") == 1
    assert "drift.csv was edited" in capsys.readouterr().err


def test_status_of_unfinished_and_failed_runs(tmp_path, fake, capsys):
    fake["poison"] = [(0, 1, 3, float("nan"))]
    assert drift(tmp_path) == 2
    assert run("status", tmp_path / "runs") == 0
    out = capsys.readouterr().out
    assert "failed" in out and "reference are not finite at prompt 1, position 3" in out


# -- what cannot be trusted, and what cannot be run ------------------------------------------------


def test_failed_controls_exit_with_1(tmp_path, fake, capsys):
    fake["live"] = None
    assert drift(tmp_path) == 1
    captured = capsys.readouterr()
    assert "control failed: hook not live" in captured.err
    assert "CONTROL FAILED" in captured.out


def test_nonfinite_logits_exit_with_2_and_are_named(tmp_path, fake, capsys):
    fake["poison"] = [(3, 1, 50, float("nan"))]
    assert drift(tmp_path) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "logits of nvfp4 are not finite at prompt 1, position 50 (1 of 320 rows)" in line


@pytest.mark.parametrize(
    "argv, message",
    [
        (["drift", "--model", "m", "--policies", "fp61"], "did you mean 'fp16'"),
        (["drift", "--model", "m", "--policies", "fp16@0"], "ring length 0"),
        (["drift", "--model", "m", "--policies", "fp16", "--ring-len", "0"], "ring"),
        (["drift", "--model", "m", "--policies", "fp16", "--tokens", "8"], "shorter than the ring"),
        (["drift", "--model", "m", "--policies", "fp16", "--threads", "0"], "--threads"),
        (["drift", "--model", "./no/such/folder", "--policies", "fp16"], "no/such/folder"),
        (["run", "quik"], "did you mean 'quick'"),
        (["run", "quick", "--policies", "fp61"], "quick.yaml: "),
        (["report", "/no/such/place"], "no results folder at /no/such/place"),
        (["status", "/no/such/place"], "no results folder at /no/such/place"),
        (["policies", "nvpf4"], "did you mean 'nvfp4'"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    assert run(*argv) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("replayssm: ")]
    assert len(errors) == 1 and message in errors[0]
    assert "Traceback" not in captured.err and captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(fake):
    with pytest.raises(ValueError, match="nvfp4"):
        run("policies", "nvpf4", "--debug")


def test_tokens_beyond_the_models_positions(tmp_path, fake, capsys):
    fake["max_positions"] = 100
    assert drift(tmp_path) == 2
    assert "beyond the 100 positions" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line(tmp_path, fake, capsys, monkeypatch):
    from replayssm.study import store

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store.os, "fsync", full)
    assert drift(tmp_path) == 2
    assert "the disk is full" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.tmp"))


# -- lists -----------------------------------------------------------------------------------------


def test_policies_show_cost_and_rounding(capsys):
    assert run("policies", "--ring-len", 32) == 0
    out = capsys.readouterr().out
    assert "fp16-sr+nvfp4" in out and "every 32 tokens" in out
    assert run("policies", "fp16@8", "nvfp4") == 0
    out = capsys.readouterr().out
    assert "every 8 tokens" in out and "every 16 tokens" in out


def test_policies_show_the_backend_of_a_device(capsys):
    assert run("policies", "fp32@8", "fp16:operand=bf16") == 0
    with_kernels, without = capsys.readouterr().out.splitlines()[2:4]
    assert "triton" in with_kernels
    assert "reference (operand bf16: the kernels keep operands exact" in without
    assert run("policies", "fp32", "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "backend on cpu" in out and "| reference " in out
    assert run("policies", "--device", "tpu") == 2
    assert "device 'tpu' is not one of cuda, cpu" in capsys.readouterr().err


def test_triton_without_a_gpu_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("replayssm.ops.capability._interpreted", lambda: False)
    arguments = ("run", "quick", "--device", "cpu", "--out", tmp_path)
    assert run(*arguments, "--backend", "triton") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("replayssm: backend 'triton' is not possible: the device is 'cpu'")
    assert run(*arguments, "--backend", "cuda") == 2
    assert "backend 'cuda': allowed are auto, reference, triton" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing is created for a run that cannot start"


def test_models_lists_every_architecture(capsys):
    from replayssm.models.architectures import ARCHITECTURES

    assert run("models") == 0
    out = capsys.readouterr().out
    assert all(architecture.name in out for architecture in ARCHITECTURES)
    assert "builtin/gdn" in out


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from replayssm import cli\n"
        "try: cli.main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "cli.main(['models'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Exit codes" in done.stdout


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "replayssm", "models"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "qwen3_5" in done.stdout
