"""FP32 tiles onto the grid of a number format: `formats/rounding.py` as a device function.

Owns rounding, overflow and what NaN and Inf become. Draws no random bits and knows no scales.
"""

import numpy
import triton
import triton.language as tl

from replayssm.formats.number import FP16, FP32, NumberFormat
from replayssm.formats.rounding import Rounding


@triton.constexpr_function
def fact(owner, name: str):
    """Attribute `name` of a format, rounding or storage that a kernel is specialised on."""
    return getattr(owner, name)


@triton.constexpr_function
def float_bits(value: float) -> int:
    """FP32 pattern of `value`."""
    return int(numpy.float32(value).view(numpy.int32))


@triton.constexpr_function
def ceiling_bits(fmt: NumberFormat) -> int:
    """Pattern of one binade above max_value: enough to tell that a value overflowed."""
    return float_bits(min(2.0 ** (fmt.max_exponent + 1), FP32.max_value))


@triton.constexpr_function
def beyond_bits(fmt: NumberFormat) -> int:
    """Pattern of what lies past max_value: Inf, or NaN in a format without Inf."""
    return 0x7F800000 if fmt.has_infinity else 0x7FC00000


@triton.constexpr_function
def largest_that_fits(fmt: NumberFormat, rounding: Rounding) -> int:
    """Pattern up to which no magnitude overflows: below the midpoint past max_value, if rounded to
    nearest."""
    if rounding.mode != "nearest_even" or fmt == FP32:
        return float_bits(fmt.max_value)
    return float_bits(fmt.max_value + fmt.top_spacing / 2) - 1


@triton.constexpr_function
def random_bit_count(rounding: Rounding) -> int:
    """Random bits an element takes, 0 for the deterministic modes."""
    return rounding.bits or 0


@triton.constexpr_function
def is_stochastic_half(fmt: NumberFormat, rounding: Rounding, saturate: bool) -> bool:
    """Whether `stochastic_half` may be used: compiled code that rounds to FP16 with 16 bits."""
    chosen = fmt == FP16 and rounding.mode == "stochastic" and rounding.bits == 16
    return chosen and saturate and not triton.knobs.runtime.interpret


@triton.jit
def stochastic_half(x, random):
    """FP16 codes that `round_to_format` gives for FP32 x, saturated, and 16 random bits (uint32),
    in a third of its instructions.

    The result is the sum |x| + r 2^-16 ulp cut to the grid. Both FP32's sum and the conversion cut
    off what they cannot hold, on nested grids, so nothing is rounded twice; the conversion stops at
    65504. ulp is 2^-10 of the binade, from 2^-14 up, and of 2^127 for Inf, for 0 times Inf is no
    number; r 2^-26 is a difference of two numbers that have r in their last bits. Two elements at a
    time: their conversion is one instruction.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a0, a1, r0, r1;
        and.b32 a0, $1, 0x7f800000;
        and.b32 a1, $2, 0x7f800000;
        min.s32 a0, a0, 0x7f000000;
        min.s32 a1, a1, 0x7f000000;
        max.s32 a0, a0, 0x38800000;
        max.s32 a1, a1, 0x38800000;
        lop3.b32 a0, a0, $1, 0x80000000, 0xf8;
        lop3.b32 a1, a1, $2, 0x80000000, 0xf8;
        prmt.b32 r0, $3, 0x3e000000, 0x7610;
        prmt.b32 r1, $3, 0x3e000000, 0x7632;
        add.f32 r0, r0, 0fBE000000;
        add.f32 r1, r1, 0fBE000000;
        fma.rz.f32 a0, r0, a0, $1;
        fma.rz.f32 a1, r1, a1, $2;
        cvt.rz.f16x2.f32 $0, a1, a0;
        }
        """,
        "=r,r,r,r",
        [x, random.to(tl.uint16)],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def stochastic_half_overflows(x, random):
    """Which finite x pass 65504 there: int1."""
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    binade = tl.maximum(magnitude & 0x7F800000, 0x38800000).to(tl.float32, bitcast=True)
    added = random.to(tl.float32) * 2.0**-26 * binade
    # Near 2^16 the difference is exact, and a rounded sum has the sign of the exact one.
    passes = (magnitude.to(tl.float32, bitcast=True) - 65536.0) + added >= 0.0
    return passes & (magnitude < 0x7F800000)


@triton.jit
def saturate_magnitude(x, FORMAT: tl.constexpr, LIMIT: tl.constexpr):
    """x with magnitudes up to FORMAT's max_value, and where their patterns exceeded LIMIT. For a
    format without Inf and NaN, whose magnitudes count as too large here."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    saturated = tl.minimum(magnitude, float_bits(fact(FORMAT, "max_value"))) | (bits & -0x80000000)
    return saturated.to(tl.float32, bitcast=True), magnitude > LIMIT


@triton.jit
def round_to_format(
    x, random, FORMAT: tl.constexpr, ROUNDING: tl.constexpr, SATURATE: tl.constexpr
):
    """FP32 tile on the grid of FORMAT, and where finite elements overflowed (int1 tile).

    `random` holds `ROUNDING.bits` random bits per element (uint32), and is ignored by the
    deterministic modes. Inf and NaN in a format without NaN become max_value: callers count them.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if fact(FORMAT, "mantissa_bits") == 23:
        return x, magnitude < 0
    else:
        v = tl.minimum(magnitude, ceiling_bits(FORMAT))
        MAX: tl.constexpr = float_bits(fact(FORMAT, "max_value"))
        if fact(FORMAT, "min_exponent") == -126:
            v = _drop_low_bits(v, random, 23 - fact(FORMAT, "mantissa_bits"), ROUNDING)
        else:
            v = _round_magnitude(v, random, FORMAT, ROUNDING)
        over = v > MAX
        if not SATURATE:
            v = tl.where(over, beyond_bits(FORMAT), v)
        else:
            v = tl.minimum(v, MAX)
        if fact(FORMAT, "has_nan"):
            over = over & (magnitude < 0x7F800000)
            v = tl.where(magnitude == 0x7F800000, beyond_bits(FORMAT), v)
            v = tl.where(magnitude > 0x7F800000, 0x7FC00000, v)
        return (v | (bits & -0x80000000)).to(tl.float32, bitcast=True), over


@triton.jit
def _round_magnitude(v, random, FORMAT: tl.constexpr, ROUNDING: tl.constexpr):
    """Patterns v of magnitudes to patterns on the grid, which has no upper end."""
    M: tl.constexpr = fact(FORMAT, "mantissa_bits")
    # 2^E, E clamped from below: the exponent field with an empty significand.
    binade = tl.maximum(v & 0x7F800000, (fact(FORMAT, "min_exponent") + 127) << 23)
    value = v.to(tl.float32, bitcast=True)
    if fact(ROUNDING, "mode") == "nearest_even":
        c = (binade + ((23 - M) << 23)).to(tl.float32, bitcast=True)
        return ((value + c) - c).to(tl.int32, bitcast=True)
    BITS: tl.constexpr = random_bit_count(ROUNDING)
    UP: tl.constexpr = M + BITS - 23  # bits from a significand's last one to the last random one
    if UP <= 6:
        # Whole numbers all the way: conversions run at a fraction of the rate of shifts.
        below = tl.minimum((binade >> 23) - (v >> 23), 31 + min(UP, 0))
        t = (v & 0x7FFFFF) | 0x800000
        t = (t << UP) >> below if UP >= 0 else t >> (below - UP)
        if BITS > 0:
            t = (t + random.to(tl.int32)) >> BITS
        whole = (t | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    else:
        to_fixed_point = (((254 + M + BITS) - (binade >> 23)) << 23).to(tl.float32, bitcast=True)
        t = ((value * to_fixed_point).to(tl.int64) + random.to(tl.int64)) >> BITS
        whole = t.to(tl.float32)
    ulp = (binade - (M << 23)).to(tl.float32, bitcast=True)
    return (whole * ulp).to(tl.int32, bitcast=True)


@triton.jit
def _drop_low_bits(v, random, DROP: tl.constexpr, ROUNDING: tl.constexpr):
    """Clear the DROP low bits of patterns v after adding the rounding increment."""
    BITS: tl.constexpr = random_bit_count(ROUNDING)
    if fact(ROUNDING, "mode") == "nearest_even":
        v = v + ((1 << (DROP - 1)) - 1) + ((v >> DROP) & 1)
    elif BITS > DROP:
        v = v + (random >> (BITS - DROP)).to(tl.int32)
    elif BITS > 0:
        v = v + (random << (DROP - BITS)).to(tl.int32)
    return v & -(1 << DROP)
