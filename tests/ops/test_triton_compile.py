"""Every kernel assembles for the GPUs we claim, without a GPU; on sm_90 none spills registers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MORE = [(80, []), (100, []), (90, ["all"])]  # by continuous integration


@pytest.mark.parametrize(
    ("arch", "policies"),
    [(90, []), *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE)],
)
def test_kernels_compile_to_machine_code(arch, policies, tmp_path):
    # Triton decides at import whether it interprets, so this needs a process of its own.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, str(Path(__file__).parent / "compile_launches.py"), str(arch)]
    program += policies
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    kernels = re.findall(rf"^sm_{arch} (\w+ \w+)", done.stdout, re.MULTILINE)
    glue = {kernel for kernel in kernels if kernel.startswith("glue ")}
    kinds = ("norm", "gate", "convolution", "unit", "step", "squared", "rotated", "before")
    assert glue == {f"glue {kind}" for kind in kinds}
    assert set(kernels) - glue == {
        f"{recurrence} {kernel}"
        for recurrence in ("mamba2", "gated_delta", "kimi_delta")
        for kernel in ("decode", "step", "window", "flush", "conventional")
    }
