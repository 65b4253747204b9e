"""Launch parameters of the Kimi Delta Attention kernels; all else on the host is Gated DeltaNet's.

Owns the table. Knows no kernel body and no cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from replayssm.formats.storage import STORAGES
from replayssm.ops.gated_delta import triton_launch
from replayssm.ops.gated_delta.triton_launch import Launch
from replayssm.policy import PrecisionPolicy

# As `gated_delta.triton_launch.TABLE`, which has flushes, too.
TABLE = {
    "decode": {32: (32, 1), 16: (64, 2, 2, 128), 8: (64, 2), 4: (64, 1)},
    "window": {32: (64, 4, 3), 16: (64, 4, 3), 8: (64, 4, 1), 4: (64, 4, 1)},
}
# A `decode` of few rows is one kernel: two of its programs for every multiprocessor of an H200 at
# most, because they repeat each other's work. At 256 rows two kernels take half the time.
_FEW = Launch(block_v=32, num_warps=4, ahead=True)
_FEW_WORDS = Launch(block_v=32, num_warps=2, ahead=True)
_FEW_PROGRAMS = 256


def default_launch(
    kernel: str, policy: PrecisionPolicy, constants: Mapping[str, int], rows: int
) -> Launch:
    """Launch parameters of a kernel for a policy, a geometry and a number of rows."""
    if kernel.startswith("flush"):
        launch = triton_launch.default_launch(kernel, policy, constants, rows)
        if kernel == "flush" and policy.checkpoint == STORAGES["fp32"]:
            # FP32 keys are two terms of a product, and would be spilled: 369 µs, not 328.
            launch = replace(launch, maxnreg=None)
        return launch
    if kernel == "decode":
        few = _FEW_WORDS if policy.read_storage.code_bits == 4 else _FEW
        if triton_launch.programs_of(few, constants, rows) <= _FEW_PROGRAMS:
            return few
    return triton_launch.from_table(TABLE[kernel], policy, constants, rows)
