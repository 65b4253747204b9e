"""The stored form of a tensor: codes, scales and the operations that caches need on them.

Owns the container and its layout; `codec` fills and reads it. Knows no arithmetic and no cache.

    format               data                            scale                         tensor_scale
    plain                [..., R, C] of its dtype        -                             -
    row-scaled 8-bit     [..., R, C] of its dtype        [..., R, 1] float32           -
    NVFP4                [..., R, ceil(C/2)] uint8       [..., R, ceil(C/16)] E4M3     [..., 1, 1]
    MXFP4                [..., R, ceil(C/2)] uint8       [..., R, ceil(C/32)] uint8    -
    MXFP8                [..., R, C] E4M3                [..., R, ceil(C/32)] uint8    -

Two E2M1 codes share a byte, the even column in the low nibble. E8M0 scales are their bytes. A C
that is no multiple of the block size ends in a shorter block. With scale_axis "rows" a block
format
stores the transposed matrix: exchange R and C.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from replayssm.formats.block import BlockFormat
from replayssm.formats.number import NumberFormat
from replayssm.formats.scaling import DecodeScale, EncodeScale


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantized:
    """A tensor [B, ..., R, C] in a format; see the table above.

    Attributes:
        format: the format of `data`.
        shape: logical shape [..., R, C] without the leading (batch) axis.
        data: codes.
        scale: row or block scales, None for plain formats.
        tensor_scale: FP32 scale per matrix; its type says in which direction it multiplies.
        saturated: [B] int64, elements that overflowed when this was written.
    """

    format: NumberFormat | BlockFormat
    shape: tuple[int, ...]
    data: Tensor
    scale: Tensor | None = None
    tensor_scale: EncodeScale | DecodeScale | None = None
    saturated: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name (what occupies memory; not the counts)."""
        stored = {"data": self.data}
        if self.scale is not None:
            stored["scale"] = self.scale
        if self.tensor_scale is not None:
            stored["tensor_scale"] = self.tensor_scale.value
        return stored

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Quantized":
        """Apply a function that keeps all axes but the first to every tensor, counts included."""
        scale, per_matrix = self.scale, self.tensor_scale
        return replace(
            self,
            data=fn(self.data),
            scale=None if scale is None else fn(scale),
            tensor_scale=None if per_matrix is None else type(per_matrix)(fn(per_matrix.value)),
            saturated=fn(self.saturated),
        )

    def select(self, rows: Tensor | slice) -> "Quantized":
        """The given batch rows: a view for a slice, a copy for an index tensor or mask."""
        return self.map(lambda t: t[rows])

    def clone(self) -> "Quantized":
        """A copy that shares no memory."""
        return self.map(torch.clone)

    def put_(self, rows: Tensor | slice, other: "Quantized") -> None:
        """Overwrite the given batch rows in place with those of `other` (same format and shape)."""
        if (self.format, self.shape) != (other.format, other.shape):
            raise ValueError(
                f"cannot put {other.format.name} {other.shape} into {self.format.name} {self.shape}"
            )
        theirs = other.tensors()
        for name, mine in self.tensors().items():
            mine[rows] = theirs[name]
        self.saturated[rows] = other.saturated
