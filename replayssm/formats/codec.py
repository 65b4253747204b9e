"""Tensors into a format and back: `quantize` and `dequantize`.

Owns the order of the steps (amax, scale, round, pack), the refusal of non-finite state and the
count of saturated elements. Arithmetic is in `rounding` and `scaling`, layout in `quantized` and
`packing`. Knows no recurrence and no cache.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.formats import scaling
from replayssm.formats.block import BlockFormat
from replayssm.formats.number import E8M0, FP32, NumberFormat
from replayssm.formats.packing import decode_elements, encode_elements
from replayssm.formats.quantized import Quantized
from replayssm.formats.rounding import NEAREST_EVEN, Rounding, round_to_format

# On a CPU, matrices go through in pieces of about this many elements: temporaries stay in cache and
# are recycled by the allocator, which is several times faster. The results are the same.
_PIECE = 1 << 18


class NonFiniteStateError(ValueError):
    """A state with Inf or NaN met a format whose scale it would destroy.

    Attributes:
        index: leading index of the first offending matrix, (batch, head) for a state [B, H, R, C].
    """

    def __init__(self, index: tuple[int, ...], format_name: str):
        self.index = index
        axes = "[batch, head]" if len(index) == 2 else "leading index"
        super().__init__(f"state at {axes} {list(index)} is not finite: {format_name} has no scale")


class _Codes(NamedTuple):
    """A piece of M matrices in stored form; `saturated` is [M], None on the way back."""

    data: Tensor
    scale: Tensor | None
    tensor_scale: Tensor | None
    saturated: Tensor | None


_AmaxCheck = Callable[[Tensor], None]


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
        x: [B, ..., R, C] float32 (or float16, bfloat16: widened exactly), three axes or more; not
            modified. A matrix is [R, C]; tensor scales and errors are per matrix.
        fmt: number format, or block format (which brings its own scales).
        rounding: how elements round; scales always round to nearest.
        random_bits: integers in [0, 2^rounding.bits) of x's shape, for stochastic rounding.
        saturate: see `round_to_format`; scaled and block formats always saturate.
        scale: "row" gives an 8-bit number format an FP32 scale per row, amax / max_value.

    Returns:
        The stored form; shares no memory with `x`.

    Raises:
        NonFiniteStateError: Inf or NaN met a scaled or block format.
        ValueError: a combination that does not exist, wrong dtype or number of axes, missing or
            superfluous random bits, Inf or NaN for plain INT8.
    """
    if x.dim() < 3:
        raise ValueError(f"quantize takes [batch, ..., rows, cols], not shape {list(x.shape)}")
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"quantize starts from float32, float16 or bfloat16, not {x.dtype}")
    if random_bits is not None and random_bits.shape != x.shape:
        raise ValueError(f"random_bits {list(random_bits.shape)} for values {list(x.shape)}")
    if isinstance(fmt, BlockFormat):
        if scale != "none" or not saturate:
            raise ValueError(f"{fmt.name} has its own scales and saturates; leave both at default")
        encode = partial(_encode_blocks, fmt=fmt, rounding=rounding)
    elif scale == "row":
        if fmt.bits != 8 or fmt is E8M0 or not saturate:
            raise ValueError(f"row scales go with e4m3, e5m2, int8 and saturation, not {fmt.name}")
        encode = partial(_encode_rows, fmt=fmt, rounding=rounding)
    elif scale == "none":
        encode = partial(_encode_plain, fmt=fmt, rounding=rounding, saturate=saturate)
    else:
        raise ValueError(f"scale {scale!r} is not one of none, row")

    leading = x.shape[:-2]
    matrices = x.flatten(0, -3)
    bits = None if random_bits is None else random_bits.flatten(0, -3)
    parts = []
    whole = [slice(0, matrices.shape[0])]
    for piece in whole if fmt is FP32 else _pieces(matrices.shape, x.device):
        check = partial(_refuse_non_finite, first=piece.start, leading=leading, name=fmt.name)
        values = matrices[piece].to(torch.float32)
        parts.append(encode(values, None if bits is None else bits[piece], check))
    codes = _Codes(*(_joined(c) for c in zip(*parts, strict=True)))
    direction = scaling.scale_type(fmt)
    return Quantized(
        format=fmt,
        shape=tuple(x.shape[1:]),
        data=codes.data.unflatten(0, leading),
        scale=codes.scale if codes.scale is None else codes.scale.unflatten(0, leading),
        tensor_scale=direction and direction(codes.tensor_scale.unflatten(0, leading)),
        saturated=codes.saturated.view(x.shape[0], math.prod(leading[1:])).sum(1),
    )


def dequantize(q: Quantized) -> Tensor:
    """The FP32 values [B, ..., R, C] that a stored tensor stands for; a fresh tensor."""
    if q.format is FP32:
        return q.data.clone()
    leading = q.data.shape[:-2]
    stored = {name: t.flatten(0, -3) for name, t in q.tensors().items()}
    parts = []
    for piece in _pieces((math.prod(leading), *q.shape[-2:]), q.data.device):
        codes = _Codes(
            data=stored["data"][piece],
            scale=stored["scale"][piece] if "scale" in stored else None,
            tensor_scale=stored["tensor_scale"][piece] if "tensor_scale" in stored else None,
            saturated=None,
        )
        decode = _decode_blocks if isinstance(q.format, BlockFormat) else _decode_plain
        parts.append(decode(codes, q.format, q.shape))
    return _joined(parts).unflatten(0, leading)


def _joined(pieces: Sequence[Tensor | None]) -> Tensor | None:
    if pieces[0] is None:
        return None
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


def _pieces(shape: Sequence[int], device: torch.device) -> list[slice]:
    """Slices of the first axis of [M, R, C] that cover it; at least one, even if M is 0."""
    count, rows, cols = shape
    step = max(1, _PIECE // max(1, rows * cols)) if device.type == "cpu" else max(1, count)
    return [slice(i, min(i + step, count)) for i in range(0, max(1, count), step)]


def _refuse_non_finite(amax: Tensor, *, first: int, leading: torch.Size, name: str) -> None:
    """Raise if any of the matrices' magnitudes `amax` [M, ...] is not finite.

    `first` is the number of the first matrix, counted over the leading axes.
    """
    if amax.numel() == 0 or math.isfinite(amax.amax().item()):
        return
    matrix = first + int((~torch.isfinite(amax)).flatten(1).any(1).nonzero()[0])
    index = torch.unravel_index(torch.tensor(matrix), leading)
    raise NonFiniteStateError(tuple(int(i) for i in index), name)


def _encode_plain(
    x: Tensor,
    random_bits: Tensor | None,
    _: _AmaxCheck,
    *,
    fmt: NumberFormat,
    rounding: Rounding,
    saturate: bool,
) -> _Codes:
    values, saturated = round_to_format(x, fmt, rounding, random_bits, saturate)
    return _Codes(encode_elements(values, fmt), None, None, saturated)


def _encode_rows(
    x: Tensor,
    random_bits: Tensor | None,
    check: _AmaxCheck,
    *,
    fmt: NumberFormat,
    rounding: Rounding,
) -> _Codes:
    amax = x.abs().amax(-1, keepdim=True)
    check(amax)
    scale = scaling.row_scale(amax, fmt)
    values, saturated = round_to_format(x / scale, fmt, rounding, random_bits)
    return _Codes(encode_elements(values, fmt), scale, None, saturated)


def _encode_blocks(
    x: Tensor,
    random_bits: Tensor | None,
    check: _AmaxCheck,
    *,
    fmt: BlockFormat,
    rounding: Rounding,
) -> _Codes:
    if fmt.scale_axis == "rows":
        x = x.transpose(-1, -2)
        random_bits = None if random_bits is None else random_bits.transpose(-1, -2)
    columns = x.shape[-1]
    blocks = _blocks(x, fmt.block_size)
    if random_bits is not None:
        random_bits = _blocks(random_bits, fmt.block_size)
    amax = scaling.block_amax(blocks)
    check(amax)
    if fmt.scale_format is E8M0:
        k = scaling.mx_scale_exponent(amax, fmt)
        in_codes = blocks * scaling.power_of_two(-k)
        scale, per_matrix = scaling.e8m0_code(k), None
    else:
        direction = scaling.tensor_scale(amax.amax((-3, -2), keepdim=True), fmt)
        s = scaling.nvfp4_block_scale(blocks, amax, direction, fmt)
        in_codes = scaling.to_codes(blocks, s, direction)
        scale, per_matrix = encode_elements(s, fmt.scale_format), direction.value.squeeze(-1)
    values, saturated = round_to_format(in_codes, fmt.element, rounding, random_bits)
    data = encode_elements(values.flatten(-2)[..., :columns], fmt.element)
    return _Codes(data, scale.squeeze(-1), per_matrix, saturated)


def _decode_plain(codes: _Codes, fmt: NumberFormat, shape: tuple[int, ...]) -> Tensor:
    values = decode_elements(codes.data, fmt, shape[-1])
    return values if codes.scale is None else values.mul_(codes.scale)


def _decode_blocks(codes: _Codes, fmt: BlockFormat, shape: tuple[int, ...]) -> Tensor:
    columns = shape[-2 if fmt.scale_axis == "rows" else -1]
    blocks = _blocks(decode_elements(codes.data, fmt.element, columns), fmt.block_size)
    scale = codes.scale[..., None]
    if fmt.scale_format is E8M0:
        values = blocks * scaling.power_of_two(scaling.e8m0_exponent(scale))
    else:
        direction = scaling.scale_type(fmt)(codes.tensor_scale[..., None])
        values = scaling.from_codes(blocks, decode_elements(scale, fmt.scale_format, 1), direction)
    values = values.flatten(-2)[..., :columns]
    return values.transpose(-1, -2) if fmt.scale_axis == "rows" else values


def _blocks(x: Tensor, size: int) -> Tensor:
    """[..., R, C] as [..., R, ceil(C / size), size], the last block filled up with zeros."""
    short = -x.shape[-1] % size
    if short:
        x = F.pad(x, (0, short))
    return x.unflatten(-1, (-1, size))
