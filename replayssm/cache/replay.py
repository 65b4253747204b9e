"""The cache of one recurrent layer: checkpoint, read copy, ring and cursors, one row a sequence.

Owns tensors and where they stand; launches no arithmetic and knows neither recurrence nor policy.
`state_update` is the only writer. Every tensor keeps its place in memory for the life of a cache:
all writes are in place, so that a captured graph, or an operator's argument, stays valid.

Cursors live where the state lives. The host knows them, too, as long as it moved them itself; after
a commit of numbers that only a GPU has, it must ask (`cursor`), which waits for the GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from replayssm.formats.codec import Quantized

_ARRIVALS = 1024  # counters of a slot, as `ops/triton_common.Cursors` has them
_PER_ROW = ("pos", "flushes", "sequence", "seed", "saturated", "not_finite")


@dataclass(kw_only=True)
class ReplayCache:
    """State of B sequences in one layer.

    Attributes:
        checkpoint: the stored state as of the last flush. What its writes saturated is summed up
            in `saturated`; its own count, and the read copy's, is not kept.
        read_copy: the copy that outputs are read from, or None where they read the checkpoint.
        ring: encoded records [B, heads, L, ...] by name; `name.scale` holds the scales of `name`.
            Slots at and past `pos` hold leftovers of any kind.
        parameters: layer constants that folding needs beside the ring (A of Mamba-2), by reference.
        pos: [B] int64, committed records.
        flushes: [B] int64, state writes so far, the hand-over included: the next one's flush index.
        sequence: [B] int64, which request a row is; with `seed` and `flushes` it keys random bits.
        seed: [B] int64.
        saturated: [B] int64, state elements saturated on writing, summed over writes and copies.
        not_finite: [B] int64, state elements that were Inf or NaN when a kernel wrote them. (The
            reference raises instead.)
        layer: index of the layer in the model.
        ring_len: L.
        uncommitted: tokens of the last window that may still be committed.
        may_be_full: whether some row may have a full ring, as it may after a commit.
        known: on a GPU, what the host knows of `pos`: one number for all rows, [B] on the CPU, or
            None. Not kept while a graph is captured: then nothing moves.
    """

    checkpoint: Quantized
    read_copy: Quantized | None
    ring: dict[str, Tensor]
    pos: Tensor
    flushes: Tensor
    sequence: Tensor
    seed: Tensor
    saturated: Tensor
    not_finite: Tensor
    layer: int
    ring_len: int
    parameters: dict[str, Tensor] = field(default_factory=dict)
    uncommitted: int = 0
    may_be_full: bool = False
    known: int | Tensor | None = None

    @property
    def batch(self) -> int:
        """B."""
        return self.pos.shape[0]

    @property
    def cursor(self) -> int | Tensor:
        """The slot every row stands at, or `pos` on the CPU where rows differ.

        Waits for the GPU where the host does not know.
        """
        if self.pos.device.type == "cpu":
            return _common(self.pos)
        if self.known is None:
            self.known = _common(self.pos.cpu())
        return self.known

    def advance(self, accepted: int | Tensor) -> None:
        """Moves every cursor, in place, by one number or by [B]; from the CPU, the host knows."""
        if not isinstance(accepted, Tensor):
            self.pos.add_(accepted)
            self.learn(None if self.known is None else self.known + accepted)
            return
        self.pos.add_(accepted.to(self.pos.device, non_blocking=True))
        on_host = accepted.device.type == "cpu" and self.known is not None
        self.learn(self.known + accepted if on_host else None)

    def learn(self, cursor: int | Tensor | None) -> None:
        """Notes where the rows stand after their cursors moved on a GPU; see `known`."""
        if self.pos.device.type != "cpu" and not torch.cuda.is_current_stream_capturing():
            self.known = _common(cursor) if isinstance(cursor, Tensor) else cursor

    def emptied(self, rows: Tensor | None) -> None:
        """Notes that the rings of `rows` (bool [B]; None: all) were emptied on a GPU."""
        if rows is None:
            self.learn(0)
        elif self.known is None or rows.device.type != "cpu":
            self.learn(None)
        else:
            known = torch.as_tensor(self.known).expand(self.batch)
            self.learn(known.where(~rows, 0))

    @cached_property
    def kernel_arguments(self) -> dict[str, list[Tensor]]:
        """Tensors in the order that operators take them, by reference: row i is slot i.

        "cursors": slots, pos, arrivals, flushes, sequence, seed, saturated, not_finite.
        """
        read_copy = [] if self.read_copy is None else list(self.read_copy.tensors().values())
        slots = torch.arange(self.batch, dtype=torch.int32, device=self.pos.device)
        cursors = [slots, self.pos, slots.new_zeros(self.batch, _ARRIVALS)]
        cursors += [self.flushes, self.sequence, self.seed, self.saturated, self.not_finite]
        return {
            "checkpoint": list(self.checkpoint.tensors().values()),
            "read_copy": read_copy,
            "ring": list(self.ring.values()),
            "cursors": cursors,
        }

    def clone(self) -> ReplayCache:
        """A copy that shares no tensor with this cache (layer constants excepted)."""
        return self._map(Tensor.clone)

    def select(self, rows: Tensor) -> ReplayCache:
        """A cache of copies of `rows` ([R] int64), in that order; a row may be named twice."""
        return self._map(lambda t: t.index_select(0, rows.to(t.device)))

    def assign(self, rows: Tensor, other: ReplayCache) -> None:
        """Overwrites `rows` ([R] int64, distinct) with the rows of `other`, in place."""
        theirs = other._row_tensors()
        for name, tensor in self._row_tensors().items():
            tensor[rows.to(tensor.device)] = theirs[name]
        self.parameters |= other.parameters
        self.may_be_full |= other.may_be_full
        if self.known is None or other.known is None:
            self.learn(None)
        else:
            known = torch.as_tensor(self.known).repeat(self.batch)[: self.batch]
            known[rows.cpu()] = torch.as_tensor(other.known)
            self.learn(known)

    def restart(self, *, sequences: Sequence[int], seeds: Sequence[int]) -> None:
        """Give every row to another sequence, with an empty ring and nothing counted, in place.

        The state is the caller's to write.
        """
        for name, values in (("sequence", sequences), ("seed", seeds)):
            getattr(self, name).copy_(torch.tensor(values, dtype=torch.int64))
        for name in ("pos", "flushes", "saturated", "not_finite"):
            getattr(self, name).zero_()
        self.uncommitted, self.may_be_full = 0, False
        self.emptied(None)

    def put_row(self, row: int, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites one row, in place, with tensors named as in `state_dict`, without row axis."""
        for name, tensor in self._row_tensors().items():
            tensor[row] = tensors[name]
        self.may_be_full = True
        self.learn(None)

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor by name, by reference: what a resumed run needs to go on byte for byte."""
        return (
            self._row_tensors()
            | {f"parameters.{name}": tensor for name, tensor in self.parameters.items()}
            | {"uncommitted": torch.tensor(self.uncommitted)}
        )

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies tensors saved by `state_dict` into this cache, in place.

        Raises ValueError when names, shapes or dtypes are not those of this cache.
        """
        mine = self._row_tensors()
        parameters = {n: t for n, t in tensors.items() if n.startswith("parameters.")}
        different = (mine.keys() | {"uncommitted"}) ^ (tensors.keys() - parameters.keys())
        if different:
            raise ValueError(f"saved cache differs in its tensors: {', '.join(sorted(different))}")
        for name, tensor in mine.items():
            new = tensors[name]
            if new.shape != tensor.shape or new.dtype != tensor.dtype:
                raise ValueError(
                    f"saved {name} is {new.dtype} {list(new.shape)}, "
                    f"this cache holds {tensor.dtype} {list(tensor.shape)}"
                )
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])
        self.uncommitted = int(tensors["uncommitted"])
        self.may_be_full = True
        self.learn(None)
        self.parameters = {
            name.removeprefix("parameters."): tensor.to(self.seed.device)
            for name, tensor in parameters.items()
        }

    def bytes(self) -> dict[str, int]:
        """Bytes held by each part, scales included; layer constants belong to the model."""
        return {
            "checkpoint": self.checkpoint.nbytes,
            "read_copy": 0 if self.read_copy is None else self.read_copy.nbytes,
            "ring": sum(map(_nbytes, self.ring.values())),
            "cursors": sum(_nbytes(getattr(self, name)) for name in _PER_ROW),
        }

    def _row_tensors(self) -> dict[str, Tensor]:
        """Every tensor that has one entry a row, by reference."""
        tensors = {name: getattr(self, name) for name in _PER_ROW}
        for part in ("checkpoint", "read_copy"):
            quantized = getattr(self, part)
            if quantized is not None:
                stored = quantized.tensors()
                tensors |= {f"{part}.{name}": tensor for name, tensor in stored.items()}
        return tensors | {f"ring.{name}": tensor for name, tensor in self.ring.items()}

    def _map(self, fn: Callable[[Tensor], Tensor]) -> ReplayCache:
        """A cache with `fn` applied to every tensor that has one entry a row."""
        return dataclasses.replace(
            self,
            checkpoint=self.checkpoint.map(fn),
            read_copy=None if self.read_copy is None else self.read_copy.map(fn),
            ring={name: fn(tensor) for name, tensor in self.ring.items()},
            parameters=dict(self.parameters),
            known=fn(self.known) if isinstance(self.known, Tensor) else self.known,
            **{name: fn(getattr(self, name)) for name in _PER_ROW},
        )


def _common(pos: Tensor) -> int | Tensor:
    """One number where all rows agree, else `pos` [B]; on the CPU."""
    slots = pos.tolist()
    return slots[0] if len(set(slots)) == 1 else pos


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
