"""Launch parameters of the Kimi Delta Attention kernels; all else on the host is Gated DeltaNet's.

Owns the table. Knows no kernel body and no cache.
"""

from __future__ import annotations

from collections.abc import Mapping

from replayssm.ops.gated_delta import triton_launch
from replayssm.ops.gated_delta.triton_launch import Launch
from replayssm.ops.triton_policy import scales_heads
from replayssm.policy import PrecisionPolicy

# As `gated_delta.triton_launch.TABLE`.
TABLE = {
    "decode": {32: (32, 1), 16: (64, 2, 2, 128), 8: (64, 2), 4: (64, 1)},
    "flush": {32: (64, 4), 16: (64, 4), 8: (64, 4), 4: (64, 4)},
    "window": {32: (64, 4, 3), 16: (64, 4, 3), 8: (64, 4, 1), 4: (64, 4, 1)},
}


def default_launch(
    kernel: str, policy: PrecisionPolicy, constants: Mapping[str, int], rows: int
) -> Launch:
    """Launch parameters of a kernel for a policy, a geometry and a number of rows.

    A program that writes a copy with a scale per head holds the head, with 16 rows for every warp:
    more warps than that make Triton 3.6 read past operands of products that feed each other.
    """
    if kernel == "flush" and scales_heads(policy):
        whole = triton_launch.power_of_two(constants["V"])
        return Launch(block_v=whole, num_warps=min(8, whole // 16))
    return triton_launch.from_table(TABLE[kernel], policy, constants, rows)
