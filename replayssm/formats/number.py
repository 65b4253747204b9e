"""Element number formats as data: every fact that rounding and storage need, and nothing else.

Owns the table of formats. Knows nothing of rounding modes, saturation, scales or packing: those are
separate choices (`rounding`, `block`, `codec`). Sources: IEEE 754-2019 (FP32, FP16), OCP 8-bit
floating point 1.0 (E4M3, E5M2), OCP microscaling 1.0 (E2M1, E8M0, INT8 as a plain integer here).
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """A grid of numbers and the codes that name them.

    Between two powers of two 2^E and 2^(E+1) neighbours are 2^(E - mantissa_bits) apart; below
    2^min_exponent the spacing stays what it is there (subnormals). INT8 fits this description with
    min_exponent = mantissa_bits = 7: it has only the evenly spaced range.

    Attributes:
        name: lowercase key in `NUMBER_FORMATS`.
        bits: storage bits of one code.
        mantissa_bits: explicit significand bits.
        min_exponent: E of the smallest normal number 2^E.
        max_value: largest finite magnitude.
        has_infinity: whether codes for +-Inf exist.
        has_nan: whether a code for NaN exists.
        torch_dtype: dtype of the stored data; uint8 for E2M1, which is packed two codes a byte.
    """

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    max_value: float
    has_infinity: bool
    has_nan: bool
    torch_dtype: torch.dtype

    @property
    def max_exponent(self) -> int:
        """E of the largest power of two 2^E that is representable."""
        return math.frexp(self.max_value)[1] - 1

    @property
    def smallest_subnormal(self) -> float:
        """Spacing of the numbers nearest to zero."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def top_spacing(self) -> float:
        """Distance between `max_value` and the number below it."""
        return 2.0 ** (max(self.max_exponent, self.min_exponent) - self.mantissa_bits)


def _format(name, bits, mantissa_bits, min_exponent, max_value, inf, nan, dtype) -> NumberFormat:
    return NumberFormat(
        name=name,
        bits=bits,
        mantissa_bits=mantissa_bits,
        min_exponent=min_exponent,
        max_value=max_value,
        has_infinity=inf,
        has_nan=nan,
        torch_dtype=dtype,
    )


_FP32_MAX = (2 - 2**-23) * 2.0**127
_BF16_MAX = (2 - 2**-7) * 2.0**127

#                name  bits mantissa min_exp      max    Inf    NaN
FP32 = _format("fp32", 32, 23, -126, _FP32_MAX, True, True, torch.float32)
FP16 = _format("fp16", 16, 10, -14, 65504.0, True, True, torch.float16)
BF16 = _format("bf16", 16, 7, -126, _BF16_MAX, True, True, torch.bfloat16)
E4M3 = _format("e4m3", 8, 3, -6, 448.0, False, True, torch.float8_e4m3fn)
E5M2 = _format("e5m2", 8, 2, -14, 57344.0, True, True, torch.float8_e5m2)
INT8 = _format("int8", 8, 7, 7, 127.0, False, False, torch.int8)
E2M1 = _format("e2m1", 4, 1, 0, 6.0, False, False, torch.uint8)
# Powers of two, no zero, no sign: a scale format, never an element (see `block`). Stored as plain
# bytes: torch's own E8M0 dtype cannot be indexed.
E8M0 = _format("e8m0", 8, 0, -127, 2.0**127, False, True, torch.uint8)

NUMBER_FORMATS = {f.name: f for f in (FP32, FP16, BF16, E4M3, E5M2, INT8, E2M1, E8M0)}
