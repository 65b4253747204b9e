"""Scales: how an amax becomes a stored scale, and how values cross it in both directions.

Owns the FP32 operation order of every scaled format; a kernel must repeat these operations one for one
(IEEE FP32, round to nearest even, true division, no fused multiply-add, subnormals kept). Knows no storage layout.

    row scale      s = max(amax / max_value, 2^-149), 1 for a zero row    y = x / s            x' = y * s
    NVFP4 encode   S = min((scale_max * 6) / amax_head, FLT_MAX), 1 for a zero head
                   t = (amax_block * S) / 6      s = E4M3(t)              y = (x * S) / s      x' = (y * s) / S
    NVFP4 decode   D = amax_head / (scale_max * 6), 1 if that is 0
                   t = (amax_block / 6) / D      s = E4M3(max(t, floor))  y = x / (s * D)      x' = y * (s * D)
    MX             s = 2^k                                                y = x * 2^-k         x' = y * 2^k

y is then rounded to the element format. In the encode rule y * s is exact (5 significant bits), so x' is
one rounding away from the real number; a block whose s is 0 has y = 0. With four-over-six, s is
chosen between E4M3(t) and E4M3((amax_block * S) / 4), see `nvfp4_block_scale`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.formats.block import BlockFormat
from replayssm.formats.number import E2M1, E4M3, FP32, NumberFormat
from replayssm.formats.rounding import NEAREST_EVEN, round_to_format

_SMALLEST_FP32 = 2.0**-149
_E8M0_BIAS = 127


@dataclass(frozen=True)
class EncodeScale:
    """S: a value is multiplied by it on the way into the format. [..., 1, 1] float32, > 0."""

    value: Tensor


@dataclass(frozen=True)
class DecodeScale:
    """D: a value is multiplied by it on the way out of the format. [..., 1, 1] float32, > 0."""

    value: Tensor


def row_scale(amax: Tensor, element: NumberFormat) -> Tensor:
    """FP32 scale of a row with largest magnitude `amax` (finite); 1 for a zero row.

    The quotient is rounded to FP32 *before* use, so the row's maximum can land one ulp above max_value
    and is then rounded back. An amax below 2^-126 * max_value gives a subnormal scale of few
    significant bits k * 2^-149: the maximum may then exceed max_value by a factor up to 1 + 1/(2k),
    saturates and is counted.
    """
    scale = (amax / element.max_value).clamp_(min=_SMALLEST_FP32)
    return scale.masked_fill_(amax == 0, 1.0)


def tensor_scale(amax: Tensor, fmt: BlockFormat) -> EncodeScale | DecodeScale:
    """FP32 scale of a head with largest magnitude `amax` (finite), [..., 1, 1].

    The encode scale is capped at the largest FP32, which acts below amax = 7.9e-36 (448): block scales then
    shrink and blocks fade to zero, instead of becoming Inf.
    """
    full = float(fmt.scale_max) * fmt.element.max_value
    if fmt.tensor_scale_rule == "encode":
        return EncodeScale((full / amax).clamp_(max=FP32.max_value).masked_fill_(amax == 0, 1.0))
    decode = amax / full
    return DecodeScale(decode.masked_fill_(decode == 0, 1.0))


def nvfp4_block_scale(
    blocks: Tensor, amax: Tensor, scale: EncodeScale | DecodeScale, fmt: BlockFormat
) -> Tensor:
    """E4M3 block scales, as FP32 values, for blocks [..., nblocks, block] with `amax` [..., nblocks, 1].

    Four-over-six compares the candidates under nearest rounding, whatever rounding stores the codes later.
    A candidate's error is taken in the domain of the codes, e = x * S - code * s (x - code * s * D in the
    decode rule), squared or absolute, and summed over the block as a tree: element i with i + 8,
    then i + 4, i + 2, i + 1. Four wins only if strictly better.
    """
    top = fmt.element.max_value
    candidates = [_rounded_block_scale(amax, top, scale, fmt)]
    if not fmt.four_over_six:
        return candidates[0]
    candidates.append(_rounded_block_scale(amax, 4.0, scale, fmt))
    target = blocks * scale.value if isinstance(scale, EncodeScale) else blocks
    errors = []
    for s in candidates:
        codes = round_to_format(to_codes(blocks, s, scale), E2M1)[0]
        step = s if isinstance(scale, EncodeScale) else s * scale.value
        e = target - codes * step
        e = e * e if fmt.four_over_six_error == "mse" else e.abs()
        while e.shape[-1] > 1:
            half = e.shape[-1] // 2
            e = e[..., :half] + e[..., half:]
        errors.append(e)
    return torch.where(errors[1] < errors[0], candidates[1], candidates[0])


def _rounded_block_scale(
    amax: Tensor, top: float, scale: EncodeScale | DecodeScale, fmt: BlockFormat
) -> Tensor:
    if isinstance(scale, EncodeScale):
        t = (amax * scale.value) / top
    else:
        t = (amax / top) / scale.value
    t = t.masked_fill_(t == 0, fmt.zero_block_scale).clamp_(min=fmt.scale_floor)
    return round_to_format(t, E4M3, NEAREST_EVEN)[0]


def to_codes(blocks: Tensor, s: Tensor, scale: EncodeScale | DecodeScale) -> Tensor:
    """Values [..., nblocks, block] in units of the code grid, for block scales s [..., nblocks, 1]."""
    if isinstance(scale, DecodeScale):
        step = s * scale.value
        return blocks / step.masked_fill_(step == 0, torch.inf)
    return (blocks * scale.value).div_(s.masked_fill(s == 0, torch.inf))


def from_codes(codes: Tensor, s: Tensor, scale: EncodeScale | DecodeScale) -> Tensor:
    """Inverse of `to_codes` on code values; overwrites `codes`."""
    if isinstance(scale, DecodeScale):
        return codes.mul_(s * scale.value)
    return codes.mul_(s).div_(scale.value)


def mx_scale_exponent(amax: Tensor, fmt: BlockFormat) -> Tensor:
    """Exponent k of an MX block scale 2^k, int32 in [-127, 127], for finite `amax` >= 0.

    floor: floor(log2 amax) - e, e the element's largest exponent; ceil: the same with ceil; even: floor after
    rounding amax to the element's significand; rceil: ceil(log2(amax / max_value)), which never clips. A
    zero block gets the smallest scale.
    """
    bits = amax.view(torch.int32)
    if fmt.scale_rule == "rceil":
        bits = (amax / fmt.element.max_value).view(torch.int32)
    if fmt.scale_rule == "even":
        bits = bits + (1 << (22 - fmt.element.mantissa_bits))
    if fmt.scale_rule in ("ceil", "rceil"):
        bits = bits + 0x7FFFFF  # carries into the exponent unless the significand is zero
    k = (bits >> 23) - 127
    if fmt.scale_rule != "rceil":
        k = k - fmt.element.max_exponent
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
