"""Freed memory is kept, where the C library is one that can be told so by what is freed."""

import platform
import subprocess
import sys

import pytest

# In a process of its own: what was freed before decides.
_SCRIPT = """
import resource
import torch
from replayssm.engine.memory import keep_freed_memory

def faults(blocks):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        held = [torch.zeros(1 << 20, dtype=torch.uint8).fill_(1) for _ in range(blocks)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
faults(8)
without = faults(8)
keep_freed_memory()
faults(8)
print(without, faults(8))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_blocks_are_used_again_without_new_pages():
    found = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True)
    without, kept = map(int, found.stdout.split())
    assert kept <= 0.1 * without
