"""scripts/random_checkpoint.py: a folder that loads as a user's own would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replayssm import models
from replayssm.study.subject import ModelSubject

ROOT = Path(__file__).parents[2]


def test_what_it_writes_loads(tmp_path):
    command = [sys.executable, "scripts/random_checkpoint.py", "random/qwen3.5-tiny", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert models.load(str(tmp_path)).adapter.vocab_size == 512
    subject = ModelSubject(str(tmp_path), dtype="float32", device="cpu")
    assert subject.encode("e")
    with pytest.raises(ValueError, match="the model's vocabulary has 512"):
        subject.encode("Some words of a tokenizer with thousands of them.")
