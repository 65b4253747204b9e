"""The conventional state of a layer: read and written for every token, by kernels, no ring in use.

Owns how a cache reaches the kernels that replay is compared with (`ops/*/triton_conventional.py`).
A cache whose policy keeps one copy in FP32, FP16 or BF16 and a ring of one slot holds the same
state; here it is updated in place and the ring is left alone. `ConventionalReader` is what a
session takes as its `reader`; nothing in it waits for the GPU, and it can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from replayssm.cache.replay import ReplayCache
from replayssm.formats.number import BF16, FP16, FP32
from replayssm.formats.rounding import NEAREST_EVEN
from replayssm.ops.capability import no_device
from replayssm.ops.triton_conventional import ConventionalLaunch
from replayssm.policy import PrecisionPolicy
from replayssm.state_update import Inputs, StateUpdate

_FORMATS = (FP32, FP16, BF16)


def check_conventional(policy: PrecisionPolicy) -> None:
    """Raises ValueError unless `policy` is what a conventional update computes."""
    stored = policy.checkpoint
    plain = stored.format in _FORMATS and stored.rounding == NEAREST_EVEN and stored.scale == "none"
    if not plain or policy.read_copy is not None or policy.ring_len != 1:
        raise ValueError(f"policy {policy.label}: a conventional state is fp32@1, fp16@1 or bf16@1")


# The fastest for layers of 4B models at large batches on an H200.
_USUAL = ConventionalLaunch(rows=8, num_warps=2)


class ConventionalReader:
    """Reads tokens as servers do without replay: one read and one write of the state for each.

    launch: see `ops.triton_conventional`; it decides speed only.
    snapshots: None, or called with (update, cache, tokens) for a tensor [B, T, heads, rows, cols]
        that takes the state after each of T tokens: the state itself is then left as it was, as
        when drafts are verified, any of which may be rejected.

    Infinities are kept as the arithmetic makes them and not counted.
    """

    def __init__(
        self,
        launch: ConventionalLaunch = _USUAL,
        *,
        snapshots: Callable[[StateUpdate, ReplayCache, int], Tensor] | None = None,
    ):
        self.launch, self._snapshots = launch, snapshots

    @torch.no_grad()
    def __call__(self, update: StateUpdate, cache: ReplayCache, inputs: Inputs) -> Tensor:
        """Outputs FP32 [B, T, heads, rows] of T tokens. In place: the checkpoint, or snapshots.

        Raises ValueError for another policy, and where kernels cannot run.
        """
        check_conventional(update.policy)
        reason = no_device(update.device)
        if reason is not None:
            raise ValueError(f"conventional updates are not possible: {reason}")
        slots, tokens = cache.kernel_arguments["cursors"][0], inputs[0].shape[1]
        with torch.cuda.device_of(cache.checkpoint.data):  # of several, the one of this layer
            return _kernel(update.recurrence)(
                cache.checkpoint.data,
                slots,
                inputs,
                launch=self.launch,
                snapshots=self._snapshots and self._snapshots(update, cache, tokens),
            )


def _kernel(recurrence: str) -> Callable[..., Tensor]:
    if recurrence == "mamba2":
        from replayssm.ops.mamba2.triton_conventional import conventional
    else:  # both delta rules
        from replayssm.ops.gated_delta.triton_conventional import conventional
    return conventional
