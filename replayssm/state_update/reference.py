"""The state update in torch: what is right, on any device, for every policy.

Owns the reference's order of reading, appending, folding and rounding. `StateUpdate` decides when;
arithmetic is in `ops`, tensors are in `cache`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from types import ModuleType

import torch
from torch import Tensor

from replayssm.cache.replay import ReplayCache
from replayssm.formats.codec import NonFiniteStateError, Quantized
from replayssm.ops.ring import Cursor, append
from replayssm.policy import CHECKPOINT_STREAM, READ_COPY_STREAM, PrecisionPolicy, Storage


class Reference:
    """Windows, folds and writes of one layer.

    Args:
        ops: the recurrence, a `reference` module of `ops`.
        geometry: its sizes.
        recompute: whether the ring keeps what a fold recomputes its corrections from.
    """

    most_tokens: int | None = None  # of a window: as many as fit the ring

    def __init__(
        self,
        ops: ModuleType,
        geometry,
        policy: PrecisionPolicy,
        *,
        layer: int,
        recompute: bool,
    ) -> None:
        self._ops, self._geometry, self._policy, self._layer = ops, geometry, policy, layer
        self._recompute = recompute
        self._ring_storage = None if policy.ring == "input" else policy.ring

    def prefill(self, state: Tensor | None, parts: Sequence) -> tuple[Tensor, Tensor]:
        """Outputs of the inputs `parts`, one after the other, and the state after them.

        From an FP32 state (None: zero); nothing is rounded, and nothing changes in place.
        """
        first = parts[0][0]
        check_precision(first.device)
        if state is None:
            state = torch.zeros((first.shape[0], *self._geometry.state_shape), device=first.device)
        outputs = []
        for part in parts:
            ring = self._ops.records(part)
            out, computed = self._ops.window(state, ring, 0, part)
            tokens = out.shape[1]
            state = self._ops.fold(state, ring | computed, tokens, self._ops.parameters(part))
            outputs.append(out)
        return torch.cat(outputs, dim=1), state

    def window(self, cache: ReplayCache, inputs) -> tuple[Tensor, Tensor]:
        """Outputs FP32 [B, T, heads, rows], and the FP32 values of the copy that was read.

        In place: the ring past the cursor.
        """
        check_precision(cache.seed.device)
        cursor = cache.cursor
        self.record(cache, cursor, self._ops.records(inputs, recompute=self._recompute))
        state = self.read(cache)
        outputs, computed = self._ops.window(
            state,
            self.decoded_ring(cache),
            cursor,
            inputs,
            operand=self._policy.operand,
        )
        append(cache.ring, cursor, computed)
        return outputs, state

    def read(self, cache: ReplayCache) -> Tensor:
        """The FP32 values that outputs read."""
        stored = cache.checkpoint if cache.read_copy is None else cache.read_copy
        return self._policy.read_storage.read(stored)

    def record(self, cache: ReplayCache, cursor: Cursor, records: Mapping[str, Tensor]) -> None:
        """Appends `records` [B, h, T, ...] past the cursor, in place, in the ring's format."""
        encoded = {}
        for name, record in records.items():
            if name in self._ops.STORED and self._ring_storage is not None:
                encoded |= ring_parts(name, self._ring_storage.write(record.float()))
            else:
                encoded[name] = record
        append(cache.ring, cursor, encoded)

    def flush(self, cache: ReplayCache, rows: Tensor | None) -> None:
        """Flush of `rows` (bool [B]), those that have records; None: all of them."""
        where = cache.cursor
        filled = torch.full((cache.batch,), where) if isinstance(where, int) else where
        self._flush(cache, filled > 0 if rows is None else (filled > 0) & rows.cpu(), None)

    def flush_full(self, cache: ReplayCache, rows: Tensor, read: Tensor | None = None) -> None:
        """Flush of `rows` (bool [B] on the CPU), whose rings are full.

        `read` are the values that their last window read.
        """
        # With one copy, what outputs read is the checkpoint: it need not be decoded twice.
        self._flush(cache, rows, read if self._policy.read_copy is None else None)

    def _flush(self, cache: ReplayCache, rows: Tensor, checkpoint: Tensor | None) -> None:
        """`checkpoint` are the checkpoint's FP32 values where they are at hand."""
        check_precision(cache.seed.device)
        if bool(rows.all()):
            self.write(cache, self.folded(cache, checkpoint))
        elif bool(rows.any()):
            index = rows.nonzero()[:, 0]
            part = cache.select(index)
            if checkpoint is not None:
                checkpoint = checkpoint.index_select(0, index.to(checkpoint.device))
            self.write(part, self.folded(part, checkpoint), rows=index)
            cache.assign(index, part)

    def folded(self, cache: ReplayCache, checkpoint: Tensor | None = None) -> Tensor:
        """The FP32 state: checkpoint plus committed records."""
        if checkpoint is None:
            checkpoint = self._policy.checkpoint.read(cache.checkpoint)
        cursor = cache.cursor
        if isinstance(cursor, int) and cursor == 0:
            return checkpoint
        return self._ops.fold(
            checkpoint,
            self.decoded_ring(cache),
            cursor,
            cache.parameters,
            operand=self._policy.operand,
        )

    def write(self, cache: ReplayCache, state: Tensor, rows: Tensor | None = None) -> None:
        """Rounds an FP32 state into checkpoint and read copy, empties the ring, counts the write.

        All in place. `rows` names the rows of the caller's cache that these are, for messages only.
        """
        if not surely_finite(state):
            self.refuse_non_finite(cache, state, rows)
        store([(self._policy, cache)], state)

    def decoded_ring(self, cache: ReplayCache) -> dict[str, Tensor]:
        """Records by name, decoded; may be the ring itself."""
        if self._ring_storage is None:
            return cache.ring
        fmt = self._ring_storage.format
        decoded = {}
        for name, tensor in cache.ring.items():
            if name in self._ops.STORED:
                heads, width = self._ops.ring_layout(self._geometry, recompute=True)[name]
                tensor = self._ring_storage.read(
                    Quantized(
                        format=fmt,
                        shape=(heads, cache.ring_len, width),
                        data=tensor,
                        scale=cache.ring.get(f"{name}.scale"),
                        saturated=cache.saturated,
                    )
                )
            decoded[name] = tensor
        return decoded

    def refuse_non_finite(
        self, cache: ReplayCache, state: Tensor, rows: Tensor | None = None
    ) -> None:
        """Raises NonFiniteStateError where `state` has Inf or NaN; `rows` as for `write`."""
        if bool(state.isfinite().all()):
            return
        row, head = (~state.isfinite()).flatten(2).any(-1).nonzero()[0].tolist()
        sequence, write = int(cache.sequence[row]), int(cache.flushes[row])
        row = row if rows is None else int(rows[row])
        error = NonFiniteStateError((row, head), self._policy.label)
        error.args = (
            f"state is not finite in layer {self._layer}, row {row} (sequence {sequence}), "
            f"head {head}, at state write {write} under policy {self._policy.label}",
        )
        error.layer, error.row, error.head, error.write = self._layer, row, head, write
        raise error


def surely_finite(state: Tensor) -> bool:
    """False where `state` has Inf or NaN, and where its sum overflows.

    One pass without a temporary.
    """
    return bool(state.sum().isfinite())


def store(held: Sequence[tuple[PrecisionPolicy, ReplayCache]], state: Tensor) -> None:
    """Rounds finite FP32 states into checkpoints and read copies, empties rings, counts the write.

    `state` has the rows of one cache after those of another. All in place; neighbours that are
    stored alike are written at once.
    """
    for copy, stream in (("checkpoint", CHECKPOINT_STREAM), ("read_copy", READ_COPY_STREAM)):
        first = 0
        for storage, run in groupby(held, key=lambda pair: getattr(pair[0], copy)):
            caches = [cache for _, cache in run]
            last = first + sum(cache.batch for cache in caches)
            if storage is not None:
                _write_copies(copy, storage, stream, caches, state[first:last])
            first = last
    for _, cache in held:
        cache.pos.zero_()
        cache.flushes.add_(1)
        cache.learn(0)


def _write_copies(
    copy: str, storage: Storage, stream: int, caches: Sequence[ReplayCache], state: Tensor
) -> None:
    """Writes the checkpoints, or the read copies, of `caches`, in place."""
    bits = None
    if storage.needs_random_bits:
        bits = storage.draw_bits(
            state.shape,
            seed=torch.cat([cache.seed for cache in caches]),
            layer=caches[0].layer,
            stream=stream,
            flush_index=torch.cat([cache.flushes for cache in caches]),
            sequence=torch.cat([cache.sequence for cache in caches]),
        )
    written = storage.write(state, bits)
    first = 0
    for cache in caches:
        rows = slice(first, first + cache.batch)
        mine = getattr(cache, copy).tensors()
        for name, tensor in written.tensors().items():
            mine[name].copy_(tensor[rows])
        cache.saturated.add_(written.saturated[rows])
        first = rows.stop


def ring_parts(name: str, quantized: Quantized) -> dict[str, Tensor]:
    """Ring tensors of an encoded record."""
    stored = quantized.tensors()
    data = {name: stored.pop("data")}
    return data | {f"{name}.{part}": tensor for part, tensor in stored.items()}


def check_precision(device: torch.device) -> None:
    """Raises RuntimeError where torch would silently narrow FP32 products on this device."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision = backend.matmul.fp32_precision
    if precision not in ("none", "ieee"):
        raise RuntimeError(
            f"float32 products are set to {precision!r} on {device.type}; the state update needs "
            'them exact: torch.set_float32_matmul_precision("highest")'
        )
    if torch.is_autocast_enabled(device.type):
        raise RuntimeError(f"the state update cannot run under torch.autocast({device.type!r})")
