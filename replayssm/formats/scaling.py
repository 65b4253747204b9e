"""Scales: how an amax becomes a stored scale, and how values cross it in both directions.

Owns the FP32 operation order of every scaled format. A kernel must repeat these operations one for
one: IEEE FP32, nearest even, true division, no fused multiply-add, subnormals kept. Knows no
storage layout. With y what is rounded to the element format, and q the result:

    row scale      s = max(amax / max_value, 2^-149); 1 for a zero row
                   y = x / s                    value = q * s
    NVFP4, encode  S = min((scale_max * 6) / amax_matrix, FLT_MAX); 1 for a zero matrix
                   s = E4M3((amax_block * S) / 6)
                   y = (x * S) / s              value = (q * s) / S
    NVFP4, decode  D = amax_matrix / (scale_max * 6); 1 if that is 0
                   s = E4M3(max((amax_block / 6) / D, scale_floor))
                   y = x / (s * D)              value = q * (s * D)
    MX             s = 2^k, see `mx_scale_exponent`
                   y = x * 2^-k                 value = q * 2^k

q * s is exact in FP32 (6 significant bits), so an encode value is one rounding away from its real
number. A block whose scale is 0 (its amax is below 2^-10 / 448 of the matrix's, in the encode rule)
has y = +0. With four-over-six s is E4M3((amax_block * S) / 6) or E4M3((amax_block * S) / 4).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.formats.block import BlockFormat
from replayssm.formats.number import FP32, NumberFormat
from replayssm.formats.rounding import round_to_format

_SMALLEST_FP32 = 2.0**-149
_E8M0_BIAS = 127


@dataclass(frozen=True, eq=False)
class EncodeScale:
    """S > 0: a value is multiplied by it on the way into the format. float32, one per matrix."""

    value: Tensor


@dataclass(frozen=True, eq=False)
class DecodeScale:
    """D > 0: a value is multiplied by it on the way out of the format. float32, one per matrix."""

    value: Tensor


TensorScale = EncodeScale | DecodeScale


def scale_type(fmt: NumberFormat | BlockFormat) -> type[TensorScale] | None:
    """Which direction of tensor scale a format stores, None if it has no tensor scale."""
    if not (isinstance(fmt, BlockFormat) and fmt.tensor_scale):
        return None
    return EncodeScale if fmt.tensor_scale_rule == "encode" else DecodeScale


def row_scale(amax: Tensor, element: NumberFormat) -> Tensor:
    """FP32 scale of a row with largest magnitude `amax` (finite); 1 for a zero row.

    The quotient is rounded to FP32 *before* use, so the row's maximum can land an ulp above
    max_value and is then rounded back. An amax below 2^-126 * max_value gives a subnormal scale
    k * 2^-149 of few significant bits: the maximum may then exceed max_value by a factor of up to
    1 + 1/(2k), in which case it saturates and is counted.
    """
    scale = (amax / _like(amax, element.max_value)).clamp_(min=_SMALLEST_FP32)
    return scale.masked_fill_(amax == 0, 1.0)


def tensor_scale(amax: Tensor, fmt: BlockFormat) -> TensorScale:
    """FP32 scale of a matrix with largest magnitude `amax` (finite), same shape.

    The cap of the encode scale acts for an amax below 7.9e-36 (scale_max 448): instead of becoming
    Inf the scale stays behind, block scales shrink, and below about 1.7e-41 all blocks read as 0.
    """
    full = fmt.scale_max * fmt.element.max_value
    if fmt.tensor_scale_rule == "encode":
        encode = (_like(amax, full) / amax).clamp_(max=FP32.max_value)
        return EncodeScale(encode.masked_fill_(amax == 0, 1.0))
    decode = amax / _like(amax, full)
    return DecodeScale(decode.masked_fill_(decode == 0, 1.0))


def block_amax(blocks: Tensor) -> Tensor:
    """Largest magnitude of each block, [..., nblocks, 1]; NaN if the block holds one."""
    # Patterns of non-negative floats order like integers, NaN above Inf; integer maxima are faster.
    return blocks.abs().view(torch.int32).amax(-1, keepdim=True).view(torch.float32)


def nvfp4_block_scale(blocks: Tensor, amax: Tensor, scale: TensorScale, fmt: BlockFormat) -> Tensor:
    """E4M3 block scales, as FP32 values, for blocks [..., nblocks, size] with `amax` [..., 1].

    Four-over-six compares its two candidates under nearest rounding, whatever rounding stores the
    codes later. A candidate's error is e = x * S - q * s (decode rule: x - q * (s * D)), squared or
    absolute, summed over the block as a tree: element i with i + size/2, then i + size/4, ...
    Four wins only if strictly better.
    """
    six = _rounded_block_scale(amax, fmt.element.max_value, scale, fmt)
    if not fmt.four_over_six:
        return six
    four = _rounded_block_scale(amax, 4.0, scale, fmt)
    target = blocks * scale.value if isinstance(scale, EncodeScale) else blocks
    errors = []
    for s in (six, four):
        q, _ = round_to_format(to_codes(blocks, s, scale), fmt.element)
        e = target - q * (s if isinstance(scale, EncodeScale) else s * scale.value)
        e = e * e if fmt.four_over_six_error == "mse" else e.abs()
        while e.shape[-1] > 1:
            half = e.shape[-1] // 2
            e = e[..., :half] + e[..., half:]
        errors.append(e)
    return torch.where(errors[1] < errors[0], four, six)


def _rounded_block_scale(amax: Tensor, top: float, scale: TensorScale, fmt: BlockFormat) -> Tensor:
    """The E4M3 block scale under which `amax` becomes `top`."""
    if isinstance(scale, EncodeScale):
        s = (amax * scale.value) / _like(amax, top)
    else:
        s = (amax / _like(amax, top)) / scale.value
    if fmt.zero_block_scale:
        s.masked_fill_(s == 0, fmt.zero_block_scale)
    if fmt.scale_floor:
        s.clamp_(min=fmt.scale_floor)
    return round_to_format(s, fmt.scale_format)[0]


def to_codes(blocks: Tensor, s: Tensor, scale: TensorScale) -> Tensor:
    """Values [..., nblocks, size] in units of the code grid, for block scales [..., nblocks, 1]."""
    if isinstance(scale, EncodeScale):
        codes, step = blocks * scale.value, s
    else:
        codes, step = blocks.clone(), s * scale.value
    if step.numel() == 0 or step.amin().item() > 0:
        return codes.div_(step)
    vanished = step == 0
    return codes.div_(step.masked_fill(vanished, torch.inf)).masked_fill_(vanished, 0.0)


def from_codes(q: Tensor, s: Tensor, scale: TensorScale) -> Tensor:
    """What code values [..., nblocks, size] stand for: the way back from `to_codes`, in place."""
    if isinstance(scale, EncodeScale):
        return q.mul_(s).div_(scale.value)
    return q.mul_(s * scale.value)


def _like(x: Tensor, value: float) -> Tensor:
    """`value` as an FP32 scalar beside `x`, for division.

    torch turns `number / tensor`, and on CUDA `tensor / number`, into a product with a reciprocal,
    which rounds twice.
    """
    return torch.full((), value, dtype=torch.float32, device=x.device)


def mx_scale_exponent(amax: Tensor, fmt: BlockFormat) -> Tensor:
    """Exponent k of an MX block scale 2^k, int32 in [-127, 127], for finite `amax` >= 0.

    With e the element's largest exponent: "floor" is floor(log2 amax) - e; "ceil" the same with
    ceil; "even" floor after rounding amax to the element's significand; "rceil"
    ceil(log2(amax / max_value)), which never clips. A zero block gets k = -127.
    """
    if fmt.scale_rule == "rceil":
        amax = amax / _like(amax, fmt.element.max_value)
    bits = amax.view(torch.int32)
    if fmt.scale_rule == "even":
        bits = bits + (1 << (22 - fmt.element.mantissa_bits))
    if fmt.scale_rule in ("ceil", "rceil"):
        bits = bits + 0x7FFFFF  # carries into the exponent unless the significand is empty
    k = (bits >> 23) - 127
    if fmt.scale_rule != "rceil":
        k -= fmt.element.max_exponent
    return k.clamp_(-127, 127)


def power_of_two(k: Tensor) -> Tensor:
    """2^k as FP32 for int32 k in [-127, 127]; 2^-127 is subnormal."""
    normal = (k.clamp(min=-126) + 127) << 23
    return torch.where(k == -127, 0x400000, normal).view(torch.float32)


def e8m0_code(k: Tensor) -> Tensor:
    """E8M0 byte of 2^k."""
    return (k + _E8M0_BIAS).to(torch.uint8)


def e8m0_exponent(code: Tensor) -> Tensor:
    """Inverse of `e8m0_code`, int32."""
    return code.to(torch.int32) - _E8M0_BIAS
