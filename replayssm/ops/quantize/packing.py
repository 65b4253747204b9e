"""Codes of values on a grid and values of codes: `formats/packing.py` on the device.

Owns the code layout of single elements. No conversion instruction is used below 16 bits: Hopper has
none for E2M1, and Triton's interpreter gets the others wrong. 8-bit codes are read and written as
uint8 and BF16 as int16, whatever dtype the tensor has (`layout.stored` makes those views).

A code's exponent and significand, moved to where FP32 has them, stand for the value times a power
of two, subnormal codes included, because a subnormal code becomes a subnormal FP32.
"""

import triton
import triton.language as tl

from replayssm.ops.quantize.rounding import fact


@triton.jit
def decode_elements(code, FORMAT: tl.constexpr, FINITE: tl.constexpr):
    """FP32 values of codes, any shape. FINITE: no code is NaN or Inf (scaled storages)."""
    NAME: tl.constexpr = fact(FORMAT, "name")
    if NAME == "bf16":
        return (code.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif NAME == "int8":
        # Excess-128 codes in the low significand bits of 2^23.
        biased = (code.to(tl.int32) ^ 0x80) | 0x4B000000
        return biased.to(tl.float32, bitcast=True) - 8388736.0
    elif NAME == "e5m2":
        half = (code.to(tl.int16) << 8).to(tl.float16, bitcast=True)
        return half.to(tl.float32)
    elif NAME == "e4m3":
        code = code.to(tl.int32)
        moved = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        value = moved.to(tl.float32, bitcast=True) * 2.0**120
        if not FINITE:
            nan = (moved | 0x7FC00000).to(tl.float32, bitcast=True)
            value = tl.where((code & 0x7F) == 0x7F, nan, value)
        return value
    elif NAME == "e2m1":
        return e2m1_scaled(code.to(tl.int32), 0) * 2.0**126
    else:  # fp32, fp16
        return code.to(tl.float32)


@triton.jit
def e2m1_scaled(words, NIBBLE: tl.constexpr):
    """Values times 2^-126 of the codes in nibble NIBBLE (0: lowest bits) of int32 words."""
    # To the top, then down with copies of the sign: one mask leaves the sign and the magnitude.
    moved = (words << (28 - 4 * NIBBLE)) >> 6
    return (moved & -0x7E400000).to(tl.float32, bitcast=True)


@triton.jit
def encode_elements(value, FORMAT: tl.constexpr):
    """Codes of FP32 values that are on the grid, any shape; E2M1 not packed."""
    NAME: tl.constexpr = fact(FORMAT, "name")
    if NAME == "bf16":
        return (value.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    elif NAME == "int8":
        return value.to(tl.int32).to(tl.uint8)
    elif NAME == "e5m2":
        return (value.to(tl.float16).to(tl.int16, bitcast=True) >> 8).to(tl.uint8)
    elif NAME == "e4m3":
        bits = (value * 2.0**-120).to(tl.int32, bitcast=True)
        magnitude = tl.where(value == value, (bits >> 20) & 0x7F, 0x7F)
        return (((bits >> 24) & 0x80) | magnitude).to(tl.uint8)
    elif NAME == "e2m1":
        bits = (value * 2.0**-126).to(tl.int32, bitcast=True)
        return (((bits >> 28) & 8) | ((bits >> 22) & 7)).to(tl.uint8)
    elif NAME == "fp16":
        return value.to(tl.float16)
    else:
        return value


@triton.jit
def unpack_pairs(byte):
    """E2M1 codes [R, 2 * C] of bytes [R, C], the low nibble first."""
    R: tl.constexpr = byte.shape[0]
    C: tl.constexpr = byte.shape[1]
    return tl.reshape(tl.join(byte & 15, byte >> 4), [R, 2 * C])


@triton.jit
def pack_pairs(code):
    """The inverse of `unpack_pairs`."""
    R: tl.constexpr = code.shape[0]
    C: tl.constexpr = code.shape[1]
    low, high = tl.split(tl.reshape(code, [R, C // 2, 2]))
    return low | (high << 4)


@triton.jit
def round_to_e2m1_pairs(magnitude, signs):
    """Bytes [R, C] of the E2M1 codes of FP32 magnitudes [R, 2 * C] below 7, to nearest, ties to
    even, with the signs of the patterns `signs` (int32).

    A code counts steps: of 1/2 up to 2, of 1 from code 4 at 2, and of 2 from code 6 at 4. Counted
    with each step, the least is right, for steps too small count too many, and too large ones start
    too high. Adding 3 * 2^22 rounds to a whole number and leaves it in the lowest bits.
    """
    R: tl.constexpr = magnitude.shape[0]
    C: tl.constexpr = magnitude.shape[1] // 2
    code = tl.minimum(_whole(magnitude, 2.0, 0), _whole(magnitude, 1.0, 2))
    code = tl.minimum(code, _whole(magnitude, 0.5, 4))
    low, high = tl.split(tl.reshape(code, [R, C, 2]))
    sign_low, sign_high = tl.split(tl.reshape(signs, [R, C, 2]))
    pair = (sign_high & -0x80000000) | ((sign_low >> 4) & 0x08000000)
    return (low + (high << 4) + ((pair >> 24) & 0xFF)).to(tl.uint8)


@triton.jit
def _whole(magnitude, STEPS: tl.constexpr, FIRST: tl.constexpr):
    """Patterns of FP32 3 * 2^22 + FIRST + magnitude * STEPS, rounded to whole numbers; FIRST is
    even, and so ties go where they should."""
    steps = tl.full(magnitude.shape, STEPS, tl.float32)
    start = tl.full(magnitude.shape, 12582912.0 + FIRST, tl.float32)
    return tl.fma(magnitude, steps, start).to(tl.int32, bitcast=True)
