"""Script for test_runner: kill -9 a run at random moments, finish it, print how often it was hit.

Forks children from one process that has imported everything, so that ten kills cost no ten imports.
Usage: kill_and_resume.py OUT KILLS SEED. The last line is "hit N finished".
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from fake_lockstep import FakeSubject

from replayssm.study import provenance, runner
from replayssm.study.config import from_mapping
from replayssm.study.runner import run_study

STUDY = {
    "models": ["fake"],
    "policies": ["fp32", "fp16-sr", "fp8", "nvfp4", "fp16-sr+nvfp4"],
    "prompts": 3,
    "prompts_per_batch": 2,
    "tokens": 1000,
    "prefill": 5,
}


def run(out):
    torch.set_num_threads(1)
    # The clone's commit may change while this runs, and is part of a run's provenance.
    provenance.code_version = lambda: ("0" * 40, False)
    runner._LARGEST_SAVING_SHARE = float("inf")  # save the engine's state after every stretch
    spec = from_mapping(STUDY, name="killed", where="test")
    results = run_study(
        spec, out=Path(out), open_subject=FakeSubject, progress=False, chunk_tokens=48
    )
    return list(results)


def fork_run(out):
    child = os.fork()
    if child == 0:
        run(out)
        os._exit(0)
    return child


def main():
    out, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    rng = random.Random(seed)
    began = time.monotonic()
    os.waitpid(fork_run(out + "-whole"), 0)
    whole = time.monotonic() - began
    hit = 0
    for _ in range(kills):
        child = fork_run(out)
        time.sleep(rng.random() * 0.25 * whole)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        hit += os.WIFSIGNALED(status)
    _, status = os.waitpid(fork_run(out), 0)
    print("hit", hit, "finished" if status == 0 else f"failed {status}")


if __name__ == "__main__":
    main()
