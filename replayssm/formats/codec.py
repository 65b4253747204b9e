"""Tensors into a format and back: `quantize`, `dequantize` and the stored form between them.

Owns the storage layout (dtypes, packing, where scales live), the refusal of non-finite state and the count
of saturated elements. The arithmetic is in `rounding` and `scaling`. Knows no recurrence and no cache.

    format                  data                                  scale                        tensor_scale
    plain                   [..., R, C] of its dtype              -                            -
    row-scaled FP8, INT8    [..., R, C] of its dtype              [..., R, 1] float32          -
    NVFP4                   [..., R, ceil(C / 2)] uint8           [..., R, ceil(C / 16)] E4M3  [..., 1, 1]
    MXFP4                   [..., R, ceil(C / 2)] uint8           [..., R, ceil(C / 32)] E8M0  -
    MXFP8                   [..., R, C] E4M3                      [..., R, ceil(C / 32)] E8M0  -

Two E2M1 codes share a byte, the even column in the low nibble. A C that is no multiple of the block size ends
in a shorter block. With scale_axis "rows" a block format stores the transposed state: exchange R and C.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.formats import scaling
from replayssm.formats.block import BlockFormat
from replayssm.formats.number import E2M1, E8M0, NumberFormat
from replayssm.formats.rounding import NEAREST_EVEN, Rounding, round_to_format
from replayssm.formats.scaling import DecodeScale, EncodeScale


class NonFiniteStateError(ValueError):
    """A state with Inf or NaN met a format whose scale it would destroy.

    Attributes:
        index: leading index of the first offending matrix, (batch, head) for a state [B, H, R, C].
    """

    def __init__(self, index: tuple[int, ...], format_name: str):
        self.index = index
        names = ("batch", "head") if len(index) == 2 else tuple(f"axis {i}" for i in range(len(index)))
        where = ", ".join(f"{name} {i}" for name, i in zip(names, index, strict=True))
        super().__init__(f"state is not finite at {where}; {format_name} cannot store it")


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantized:
    """A stored tensor: codes and scales, in the layout of the table above.

    Attributes:
        format: the format of `data`.
        shape: logical shape [..., R, C] without the leading (batch) axis.
        data: codes.
        scale: row or block scales, None for plain formats.
        tensor_scale: FP32 scale per head; its type says in which direction it multiplies.
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
        return replace(
            self,
            data=fn(self.data),
            scale=None if self.scale is None else fn(self.scale),
            tensor_scale=None
            if self.tensor_scale is None
            else type(self.tensor_scale)(fn(self.tensor_scale.value)),
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


def quantize(
    x: Tensor,
    fmt: NumberFormat | BlockFormat,
    *,
    rounding: Rounding = NEAREST_EVEN,
    random_bits: Tensor | None = None,
    saturate: bool = True,
    scale: str = "none",
) -> Quantized:
    """Store a tensor in a format.

    Args:
        x: [B, ..., R, C] float32 (or float16/bfloat16, widened exactly), at least two axes; not modified.
        fmt: number format, or block format (which brings its own scales).
        rounding: how elements round; scales always round to nearest.
        random_bits: integers in [0, 2^rounding.bits) of x's shape, for stochastic rounding.
        saturate: see `round_to_format`; scaled and block formats always saturate.
        scale: "row" gives a number format an FP32 scale per row (last axis), amax / max_value.

    Returns:
        The stored form; shares no memory with `x`.

    Raises:
        NonFiniteStateError: Inf or NaN met a scaled or block format.
        ValueError: a combination that does not exist, wrong dtype, missing or superfluous random bits.
    """
    if x.dim() < 2:
        raise ValueError(f"quantize takes [..., rows, cols], not shape {list(x.shape)}")
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"quantize starts from float32 (or narrower) values, not {x.dtype}")
    x = x.to(torch.float32)
    shape = tuple(x.shape[1:])
    if isinstance(fmt, BlockFormat):
        if scale != "none" or not saturate:
            raise ValueError(f"{fmt.name} has its own scales and saturates: scale, saturate are fixed")
        return _quantize_blocks(x, fmt, rounding, random_bits, shape)
    if scale == "none":
        values, saturated = round_to_format(x, fmt, rounding, random_bits, saturate)
        return Quantized(
            format=fmt, shape=shape, data=encode_elements(values, fmt), saturated=saturated
        )
    if scale != "row":
        raise ValueError(f"scale {scale!r} is not one of none, row")
    if fmt.bits != 8 or fmt is E8M0 or not saturate:
        raise ValueError(f"row scales go with e4m3, e5m2 or int8 and saturation, not {fmt.name}")
    amax = x.abs().amax(-1, keepdim=True)
    _refuse_non_finite(amax.amax(-2, keepdim=True), fmt.name)
    s = scaling.row_scale(amax, fmt)
    values, saturated = round_to_format(x / s, fmt, rounding, random_bits)
    return Quantized(
        format=fmt, shape=shape, data=encode_elements(values, fmt), scale=s, saturated=saturated
    )


def dequantize(q: Quantized) -> Tensor:
    """The FP32 values [B, ..., R, C] that a stored tensor stands for."""
    if isinstance(q.format, BlockFormat):
        return _dequantize_blocks(q)
    values = decode_elements(q.data, q.format, q.shape[-1])
    return values if q.scale is None else values.mul_(q.scale)


def encode_elements(values: Tensor, fmt: NumberFormat) -> Tensor:
    """Codes of FP32 values that are on the format's grid; E2M1 packed two a byte along the last axis."""
    if fmt is not E2M1:
        return values.to(fmt.torch_dtype, copy=True)
    if values.shape[-1] % 2:
        values = F.pad(values, (0, 1))
    # Scaled by 2^-14, E2M1's 1.0 is FP16's smallest normal number and 0.5 its half: the sign and the
    # top bits of the FP16 pattern are the code.
    half = (values * 2.0**-14).to(torch.float16).view(torch.int16)
    code = ((half >> 9) & 7) | ((half >> 12) & 8)
    return (code[..., 0::2] | (code[..., 1::2] << 4)).to(torch.uint8)


def decode_elements(data: Tensor, fmt: NumberFormat, columns: int) -> Tensor:
    """FP32 values [..., columns] of stored codes; a fresh tensor."""
    if fmt is not E2M1:
        return data.to(torch.float32, copy=True)
    pairs = _byte_values(data.device).index_select(0, data.flatten().to(torch.int32))
    return pairs.view(*data.shape[:-1], 2 * data.shape[-1])[..., :columns].contiguous()


def _byte_values(device: torch.device) -> Tensor:
    """[256, 2] float32: the values of the low and the high nibble of every byte."""
    magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    nibble = torch.tensor(magnitude + [-m for m in magnitude], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([nibble[byte & 15], nibble[byte >> 4]], dim=-1)


def _refuse_non_finite(head_amax: Tensor, name: str) -> None:
    """Raise for the first leading index whose amax [..., 1, 1] is Inf or NaN."""
    finite = torch.isfinite(head_amax[..., 0, 0])
    if not bool(finite.all()):
        raise NonFiniteStateError(tuple((~finite).nonzero()[0].tolist()), name)


def _blocks(x: Tensor, size: int) -> Tensor:
    """[..., R, C] as [..., R, ceil(C / size), size], the last block filled up with zeros."""
    short = -x.shape[-1] % size
    if short:
        x = F.pad(x, (0, short))
    return x.unflatten(-1, (-1, size))


def _quantize_blocks(
    x: Tensor,
    fmt: BlockFormat,
    rounding: Rounding,
    random_bits: Tensor | None,
    shape: tuple[int, ...],
) -> Quantized:
    if fmt.scale_axis == "rows":
        x = x.transpose(-1, -2)
        random_bits = None if random_bits is None else random_bits.transpose(-1, -2)
    columns = x.shape[-1]
    blocks = _blocks(x, fmt.block_size)
    if random_bits is not None:
        random_bits = _blocks(random_bits, fmt.block_size)
    amax = _block_amax(blocks)
    head_amax = amax.amax((-2, -3))[..., None]
    _refuse_non_finite(head_amax, fmt.name)
    if fmt.scale_format is E8M0:
        k = scaling.mx_scale_exponent(amax, fmt)
        in_codes = blocks * scaling.power_of_two(-k)
        stored, per_head = scaling.e8m0_code(k), None
    else:
        per_head = scaling.tensor_scale(head_amax, fmt)
        over_blocks = type(per_head)(per_head.value[..., None])
        s = scaling.nvfp4_block_scale(blocks, amax, over_blocks, fmt)
        in_codes = scaling.to_codes(blocks, s, over_blocks)
        stored = s.to(fmt.scale_format.torch_dtype)
    values, saturated = round_to_format(in_codes, fmt.element, rounding, random_bits)
    if per_head is not None:
        # Signs of a block that vanished: one byte pattern for zero.
        values = values.masked_fill_(s == 0, 0.0)
    return Quantized(
        format=fmt,
        shape=shape,
        data=encode_elements(values.flatten(-2)[..., :columns], fmt.element),
        scale=stored.squeeze(-1),
        tensor_scale=per_head,
        saturated=saturated,
    )


def _dequantize_blocks(q: Quantized) -> Tensor:
    fmt = q.format
    rows_blocked = fmt.scale_axis == "rows"
    columns = q.shape[-2 if rows_blocked else -1]
    blocks = _blocks(decode_elements(q.data, fmt.element, columns), fmt.block_size)
    stored = q.scale[..., None]
    if fmt.scale_format is E8M0:
        blocks = blocks.mul_(scaling.power_of_two(scaling.e8m0_exponent(stored)))
    else:
        over_blocks = type(q.tensor_scale)(q.tensor_scale.value[..., None])
        blocks = scaling.from_codes(blocks, stored.to(torch.float32), over_blocks)
    values = blocks.flatten(-2)[..., :columns]
    return values.transpose(-1, -2).contiguous() if rows_blocked else values.contiguous()


def _block_amax(blocks: Tensor) -> Tensor:
    """Largest magnitude of each block, [..., nblocks, 1]; halving is faster than a short reduction."""
    m = blocks.abs()
    while m.shape[-1] > 1:
        half = m.shape[-1] // 2
        m = torch.maximum(m[..., :half], m[..., half:])
    return m
