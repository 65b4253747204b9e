"""scripts/reproduce.sh: every committed table and figure again, byte by byte, without torch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Found on PYTHONPATH at start: an interpreter that has none of the heavy packages.
BLOCK = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "triton", "lm_eval", "accelerate"):
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def results(tmp_path):
    """A copy of the committed results."""
    if not (ROOT / "results" / "runs").is_dir():
        pytest.skip("this is no clone with results")
    shutil.copytree(ROOT / "results", tmp_path / "results")
    return tmp_path / "results"


def reproduce(results, tmp_path):
    (tmp_path / "block").mkdir(exist_ok=True)
    (tmp_path / "block" / "sitecustomize.py").write_text(BLOCK)
    paths = os.pathsep.join([str(tmp_path / "block"), str(ROOT)])
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": paths}
    command = ["bash", str(ROOT / "scripts" / "reproduce.sh"), str(results)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def test_the_block_blocks(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    done = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "blocked" in done.stderr


def test_committed_results_come_out_byte_by_byte(results, tmp_path):
    """All but a table that was edited and a figure that was lost, which are named and mended."""
    table = results / "tables" / "quick.md"
    figure = next((results / "figures").glob("quick-*.png"))
    before = {path: path.read_bytes() for path in (table, figure)}
    table.write_text(table.read_text().replace("fp16", "fp17"))
    figure.unlink()
    done = reproduce(results, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    listed = done.stdout.split("These files came out differently:")[1].split()
    assert sorted(listed) == sorted([str(table), str(figure)])
    assert {path: path.read_bytes() for path in before} == before


def test_what_did_not_change_is_said_to_be_as_it_was(results, tmp_path):
    few = tmp_path / "few"
    shutil.copytree(results / "bench", few / "bench")
    done = reproduce(few, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "came out byte by byte as they were" in done.stdout


def test_a_folder_that_cannot_be_redrawn_is_an_error(results, tmp_path):
    few = tmp_path / "few"
    shutil.copytree(results / "bench" / "decode", few / "bench" / "decode")
    (few / "bench" / "decode" / "decode.json").write_text("{}")
    done = reproduce(few, tmp_path)
    assert done.returncode == 2 and "came out" not in done.stdout
