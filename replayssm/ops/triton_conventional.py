"""The conventional way to decode, which replay is compared with: what both recurrences share of it.

The kernels beside each reference (`*/triton_conventional.py`) update the whole state for every
token: they read it, compute in FP32, and write it back in its own dtype. To verify drafts they
write the state after each of them, and read it once. Owns their launch parameters, the choice that
a benchmark sweeps, and what their launchers check. Knows no policy, no ring and no recurrence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

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


def check_snapshots(snapshots: Tensor | None, state: Tensor, batch: int, tokens: int) -> None:
    """Raises ValueError unless `snapshots` are None, or [B, T, ...] that go with `state`."""
    if snapshots is None:
        return
    expected = [batch, tokens, *state.shape[1:]]
    if list(snapshots.shape) != expected or snapshots.dtype != state.dtype:
        raise ValueError(
            f"snapshots are {snapshots.dtype} {list(snapshots.shape)}, expected {state.dtype} "
            f"{expected}"
        )
    if not snapshots.is_contiguous():
        raise ValueError(f"snapshots have strides {snapshots.stride()}, must be dense")


def check_exact(inputs: NamedTuple, names: Iterable[str]) -> None:
    """Raises ValueError unless these inputs are FP32."""
    for name in names:
        dtype = getattr(inputs, name).dtype
        if dtype != torch.float32:
            raise ValueError(f"{name} is {dtype}, must be torch.float32")
