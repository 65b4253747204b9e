"""The conventional way to decode, which replay is compared with: what both recurrences share of it.

The kernels beside each reference (`*/triton_conventional.py`) update the whole state for every
token: they read it, compute in FP32, and write it back in its own dtype. Owns their launch
parameters, the choice that a benchmark sweeps, and what their launchers check. Knows no policy, no
ring and no recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class ConventionalLaunch:
    """Meta-parameters of a launch: they change speed, never a result.

    Attributes:
        rows: rows of one head's state that a program updates, a power of two.
        num_warps: Triton's.
    """

    rows: int
    num_warps: int

    @property
    def label(self) -> str:
        """Short text for records."""
        return f"{self.rows} rows, {self.num_warps} warps"


# From 16 to 128 state elements a thread at 128 columns, the range in which loads of a whole tile
# are in flight at a time without spilling; small tiles for small batches, large for large ones.
SWEEP = tuple(
    ConventionalLaunch(rows=rows, num_warps=num_warps)
    for rows, num_warps in (
        (4, 1), (8, 1), (8, 2), (16, 1), (16, 2), (16, 4), (32, 2), (32, 4), (64, 4), (64, 8),
    )
)  # fmt: skip


def check_state(state: Tensor, heads: int, rows: int, cols: int) -> None:
    """Raises ValueError unless `state` is [S, heads, rows, cols], dense, of a floating dtype that
    the kernels take."""
    if state.dtype not in STATE_DTYPES:
        allowed = ", ".join(map(str, STATE_DTYPES))
        raise ValueError(f"state is {state.dtype}, allowed are {allowed}")
    if tuple(state.shape[1:]) != (heads, rows, cols):
        raise ValueError(f"state is {list(state.shape)}, expected [S, {heads}, {rows}, {cols}]")
    if not state.is_contiguous():
        raise ValueError(f"state {list(state.shape)} has strides {state.stride()}, must be dense")
