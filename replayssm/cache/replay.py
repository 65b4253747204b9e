"""The cache of one recurrent layer: checkpoint, read copy, ring and cursors, one row a sequence.

Owns tensors and where they stand; launches no arithmetic and knows neither recurrence nor policy.
`state_update.py` is the only writer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replayssm.formats.codec import Quantized

_PER_ROW = ("pos", "flushes", "sequence", "seed", "saturated")


@dataclass(kw_only=True)
class ReplayCache:
    """State of B sequences in one layer.

    Attributes:
        checkpoint: the stored state as of the last flush.
        read_copy: the copy that outputs are read from, or None where they read the checkpoint.
        ring: encoded records [B, heads, L, ...] by name; `name.scale` holds the scales of `name`.
            Slots at and past `pos` hold leftovers of any kind.
        parameters: layer constants that folding needs beside the ring (A of Mamba-2), by reference.
        pos: [B] int64 on the CPU, committed records: control flow depends on it.
        flushes: [B] int64, state writes so far, the hand-over included: the next one's flush index.
        sequence: [B] int64, which request a row is; with `seed` and `flushes` it keys random bits.
        seed: [B] int64.
        saturated: [B] int64, state elements saturated on writing, summed over writes and copies.
        layer: index of the layer in the model.
        ring_len: L.
        uncommitted: tokens of the last window that may still be committed.
    """

    checkpoint: Quantized
    read_copy: Quantized | None
    ring: dict[str, Tensor]
    pos: Tensor
    flushes: Tensor
    sequence: Tensor
    seed: Tensor
    saturated: Tensor
    layer: int
    ring_len: int
    parameters: dict[str, Tensor] = field(default_factory=dict)
    uncommitted: int = 0

    @property
    def batch(self) -> int:
        """B."""
        return self.pos.shape[0]

    @property
    def cursor(self) -> int | Tensor:
        """The slot every row stands at, or `pos` itself where rows differ."""
        first = int(self.pos[0])
        return first if bool((self.pos == first).all()) else self.pos

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
                stored = quantized.tensors() | {"saturated": quantized.saturated}
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
            **{name: fn(getattr(self, name)) for name in _PER_ROW},
        )


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
