"""Scales on the device: `formats/scaling.py`, operation for operation.

Owns the arithmetic between values and codes of the scaled formats. A non-finite amax, which the
reference refuses, becomes a NaN scale here (E8M0: its NaN code), so that nothing read from it looks
like a number. Amaxes are FP32 patterns (int32): they order like the magnitudes, NaN on top.
"""

import triton
import triton.language as tl

from replayssm.formats.block import BlockFormat
from replayssm.formats.rounding import NEAREST_EVEN
from replayssm.ops.quantize.rounding import fact, round_to_format

_NEAREST_EVEN = tl.constexpr(NEAREST_EVEN)


@triton.constexpr_function
def is_encode(fmt: BlockFormat) -> bool:
    """Whether the tensor scale is stored in the direction that values take into the format."""
    return fmt.tensor_scale_rule == "encode"


@triton.constexpr_function
def full_scale(fmt: BlockFormat) -> float:
    """What the amax of a matrix becomes under its tensor scale."""
    return fmt.scale_max * fmt.element.max_value


@triton.constexpr_function
def halvings(fmt: BlockFormat) -> int:
    """How often a block can be halved."""
    return fmt.block_size.bit_length() - 1


@triton.constexpr_function
def without_fma() -> bool:
    """Whether `tl.fma` rounds twice: Triton's interpreter has no fused one before 3.9."""
    return triton.knobs.runtime.interpret


@triton.jit
def magnitude_bits(x):
    """Patterns of |x|."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _or_nan(scale, amax):
    return tl.where(amax >= 0x7F800000, float("nan"), scale)


@triton.jit
def row_scale(amax, FORMAT: tl.constexpr):
    """FP32 scale per amax, 1 for a zero row."""
    scale = tl.div_rn(amax.to(tl.float32, bitcast=True), fact(FORMAT, "max_value"))
    scale = tl.maximum(scale.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    return _or_nan(tl.where(amax == 0, 1.0, scale), amax)


@triton.jit
def tensor_scale(amax, FORMAT: tl.constexpr):
    """FP32 scale per matrix, in the direction that FORMAT stores; 1 for a zero matrix."""
    FULL: tl.constexpr = full_scale(FORMAT)
    value = amax.to(tl.float32, bitcast=True)
    if is_encode(FORMAT):
        scale = tl.div_rn(FULL, value).to(tl.int32, bitcast=True)
        scale = tl.minimum(scale, 0x7F7FFFFF).to(tl.float32, bitcast=True)
        return _or_nan(tl.where(amax == 0, 1.0, scale), amax)
    else:
        scale = tl.div_rn(value, FULL)
        return _or_nan(tl.where(scale == 0.0, 1.0, scale), amax)


@triton.jit
def block_scale(blocks, amax, scale, FORMAT: tl.constexpr):
    """E4M3 block scales as FP32 values [R, NB], for blocks [R, NB, size], their amaxes [R, NB] and
    tensor scales [R, 1]."""
    six = _rounded_block_scale(amax, scale, 6.0, FORMAT)
    if not fact(FORMAT, "four_over_six"):
        return six
    else:
        four = _rounded_block_scale(amax, scale, 4.0, FORMAT)
        better = _error(blocks, four, scale, FORMAT) < _error(blocks, six, scale, FORMAT)
        return tl.where(better, four, six)


@triton.jit
def _rounded_block_scale(amax, scale, TOP: tl.constexpr, FORMAT: tl.constexpr):
    """The E4M3 block scale under which the amax becomes TOP."""
    value = amax.to(tl.float32, bitcast=True)
    if is_encode(FORMAT):
        s = minus_quotient(value * -scale, tl.full([1, 1], TOP, tl.float32))
    else:
        s = tl.div_rn(tl.div_rn(value, TOP), scale)
    if fact(FORMAT, "zero_block_scale") > 0:
        s = tl.where(s == 0.0, fact(FORMAT, "zero_block_scale"), s)
    if fact(FORMAT, "scale_floor") > 0:
        s = tl.where(s < fact(FORMAT, "scale_floor"), fact(FORMAT, "scale_floor"), s)
    return round_to_format(s, None, fact(FORMAT, "scale_format"), _NEAREST_EVEN, True)[0]


@triton.jit
def _error(blocks, s, scale, FORMAT: tl.constexpr):
    """Error [R, NB] of blocks stored with block scales s, summed as a tree over halves."""
    codes = to_codes(blocks, s, scale, FORMAT)
    codes = round_to_format(codes, None, fact(FORMAT, "element"), _NEAREST_EVEN, True)[0]
    if is_encode(FORMAT):
        error = blocks * scale[:, :, None] - codes * s[:, :, None]
    else:
        error = blocks - codes * (s * scale)[:, :, None]
    if fact(FORMAT, "four_over_six_error") == "mse":
        error = error * error
    else:
        error = tl.abs(error)
    R: tl.constexpr = blocks.shape[0]
    NB: tl.constexpr = blocks.shape[1]
    for i in tl.static_range(halvings(FORMAT)):
        halves = tl.reshape(error, [R, NB, 2, fact(FORMAT, "block_size") >> (i + 1)])
        first, second = tl.split(tl.permute(halves, [0, 1, 3, 2]))
        error = first + second
    return tl.reshape(error, [R, NB])


@triton.jit
def to_codes(blocks, s, scale, FORMAT: tl.constexpr):
    """Values [R, NB, size] in units of the code grid; below its smallest step in a block whose
    scale is 0."""
    if is_encode(FORMAT):
        step = tl.where(s == 0.0, 1.0, s)[:, :, None]
        return minus_quotient(blocks * -scale[:, :, None], step)
    else:
        step = s * scale
        vanished = (step == 0.0)[:, :, None]
        quotient = tl.div_rn(blocks, tl.where(vanished, 1.0, step[:, :, None]))
        return tl.where(vanished, 0.0, quotient)


@triton.jit
def minus_quotient(x, d):
    """-(x / d) as IEEE rounds x / d, for d in [2^-9, 448] on the grid of E4M3 or 6.

    The first quotient, by the correctly rounded reciprocal, is off by at most one unit in the last
    place; its excess is exact and corrects it (Markstein's theorem). Where x is so small that the
    excess is not exact, the quotient is below 2^-80. Zeros come out with the sign of -x.
    """
    if without_fma():
        return tl.div_rn(x, -d)
    else:
        inverse = -_reciprocal(d)
        quotient = x * inverse
        excess = tl.fma(quotient, d, x)
        return tl.fma(excess, inverse, quotient)


@triton.jit
def _reciprocal(d):
    """1 / d to nearest, for d as in `minus_quotient`, from an approximation of a few ulp."""
    if without_fma():
        guess = 1.0 / d
    else:  # what a division of any two numbers does beside this takes ten instructions
        guess = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.fma(tl.fma(-d, guess, 1.0), guess, guess)


@triton.jit
def from_codes(codes, s, scale, FORMAT: tl.constexpr):
    """What code values [R, NB, size] stand for, to the last bit."""
    if is_encode(FORMAT):
        return tl.div_rn(codes * s[:, :, None], scale[:, :, None])
    else:
        return codes * (s * scale)[:, :, None]


@triton.jit
def mx_scale_code(amax, FORMAT: tl.constexpr):
    """E8M0 codes (int32) of block scales, k + 127 for 2^k."""
    RULE: tl.constexpr = fact(FORMAT, "scale_rule")
    ELEMENT: tl.constexpr = fact(FORMAT, "element")
    bits = amax
    if RULE == "rceil":
        bits = tl.div_rn(amax.to(tl.float32, bitcast=True), fact(ELEMENT, "max_value"))
        bits = bits.to(tl.int32, bitcast=True)
    if RULE == "even":
        bits = bits + (1 << (22 - fact(ELEMENT, "mantissa_bits")))
    if RULE == "ceil" or RULE == "rceil":
        bits = bits + 0x7FFFFF
    code = bits >> 23
    if RULE != "rceil":
        code = code - fact(ELEMENT, "max_exponent")
    return tl.where(amax >= 0x7F800000, 255, tl.minimum(tl.maximum(code, 0), 254))


@triton.jit
def power_of_two(code):
    """2^(code - 127) as FP32 for E8M0 codes (int32); not finite for the NaN code."""
    return tl.where(code == 0, 0x400000, code << 23).to(tl.float32, bitcast=True)
