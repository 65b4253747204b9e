"""The state update by Triton kernels: in place, without waiting for the GPU, capturable in graphs.

Owns how a cache reaches the operators of `ops/triton_operators.py`. Everything is decided by the
cursors on the device; `StateUpdate` does the checks that the host can do. Same interface as
`reference.Reference`.
"""

from __future__ import annotations

from torch import Tensor

from replayssm.cache.replay import ReplayCache
from replayssm.ops.capability import MAX_TOKENS
from replayssm.ops.triton_operators import OPERATORS, spelled
from replayssm.policy import PrecisionPolicy


class TritonKernels:
    """Windows, steps and flushes of one layer.

    A row without room for a window's tokens gets NaN outputs.
    """

    most_tokens: int | None = MAX_TOKENS

    def __init__(self, recurrence: str, policy: PrecisionPolicy, *, layer: int) -> None:
        self._operators = OPERATORS[recurrence]
        self._needs_window = recurrence == "mamba2"  # to have A
        self._policy, self._layer = spelled(policy), layer

    def window(self, cache: ReplayCache, inputs) -> tuple[Tensor, None]:
        """Outputs FP32 [B, T, heads, rows]. In place: the ring past the cursor."""
        tensors = cache.kernel_arguments
        read = tensors["read_copy"] or tensors["checkpoint"]
        kernel = self._operators.decode if inputs[0].shape[1] == 1 else self._operators.window
        return kernel(read, tensors["ring"], tensors["cursors"], list(inputs), self._policy), None

    def step(self, cache: ReplayCache, inputs) -> Tensor:
        """Outputs of one token, which is committed; rows whose ring it fills are flushed."""
        tensors = cache.kernel_arguments
        return self._operators.step(
            tensors["checkpoint"],
            tensors["read_copy"],
            tensors["ring"],
            tensors["cursors"],
            list(inputs),
            self._policy,
            self._layer,
        )

    def flush(self, cache: ReplayCache, rows: Tensor | None) -> None:
        """Flush of `rows` (bool [B]), those that have records; None: all of them."""
        filled = cache.pos > 0
        self._flush(cache, filled if rows is None else filled & rows.to(filled.device))
        cache.emptied(rows)

    def flush_full(self, cache: ReplayCache, rows: Tensor | None = None, read: None = None) -> None:
        """Flush of the rows whose rings are full; the device knows them."""
        self._flush(cache, None)
        if cache.known is not None:
            cache.learn(cache.known % cache.ring_len)

    def _flush(self, cache: ReplayCache, rows: Tensor | None) -> None:
        if self._needs_window and not cache.parameters:
            return  # there was no window: every ring is empty
        tensors = cache.kernel_arguments
        self._operators.flush(
            tensors["checkpoint"],
            tensors["read_copy"],
            tensors["ring"],
            tensors["cursors"],
            cache.parameters.get("A"),
            rows,
            self._policy,
            self._layer,
        )
