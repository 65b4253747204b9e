"""Plain `lm_eval run --model replayssm`, in a process of its own."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def installed(folder: Path) -> Path:
    """A folder with what an installer leaves of the entry points in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name']}-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for group, e in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def python(folder: Path, *arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed(folder))]),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_lm_eval_finds_the_model_and_runs_a_task(tmp_path):
    said = python(
        tmp_path,
        *("-m", "lm_eval", "run", "--model", "replayssm", "--tasks", "gsm_symbolic"),
        *("--model_args", "pretrained=builtin/gdn,policy=fp16-sr+nvfp4,max_gen_toks=8"),
        *("--include_path", str(ROOT / "evals"), "--limit", "1"),
    )
    assert "runs on the CPU" in said and "|gsm_symbolic|" in said


def test_other_programs_import_torch_and_nothing_more(tmp_path):
    names = ("replayssm.study.lm_eval_plugin", "replayssm.study.lm_eval_model", "lm_eval")
    asked = f"import sys, torch; print([name in sys.modules for name in {names}])"
    assert python(tmp_path, "-c", asked).strip() == "[True, False, False]"
