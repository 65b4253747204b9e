"""Rounding FP32 values to a number format, to the last bit and without library casts.

Owns the three rounding modes, overflow and the treatment of NaN and Inf. Knows no scales, no
packing
and draws no random numbers: random bits are an argument, so every result is a pure function of its
inputs. A kernel that follows the operations written here stores identical codes.

How a magnitude v in [2^E, 2^(E+1)), E at least min_exponent, meets its grid of spacing
ulp = 2^(E - mantissa_bits):

* nearest, ties to even: (v + c) - c with c = 2^23 ulp. One IEEE FP32 addition rounds v to a
  multiple of ulp, the subtraction is exact. c is built from the exponent bits of v.
* stochastic with n random bits r: t = floor(v / ulp * 2^n) is exact (a multiplication by a power of
  two, then truncation to an integer), and (t + r) >> n is the rounded multiple of ulp. This is the
  rule "away from zero iff floor(f * 2^n) + r >= 2^n" for the discarded fraction f of one ulp. With
  d discarded bits the probability of rounding away is exactly f when n >= d and floor(f * 2^n) /
  2^n (too small by less than 2^-n) when n < d. d counts the bits that are really
  discarded: it grows in the subnormal range.
* toward zero: the same with r = 0.

Formats with the exponent range of FP32 (BF16) discard a constant number of bits, so integer
addition on the FP32 bits does the same job, subnormals included.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.formats.number import FP32, NumberFormat

MODES = ("nearest_even", "stochastic", "toward_zero")
PHILOX_ROUNDS = (5, 7, 10)

_EXPONENT_MASK = 0x7F800000
_FP32_MIN_EXPONENT = -126


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """A rounding mode; the stochastic one carries how many random bits it takes and from where.

    Attributes:
        mode: "nearest_even", "stochastic" or "toward_zero".
        bits: random bits per element, 1 to 32; None for the deterministic modes.
        philox_rounds: rounds of the Philox-4x32 generator that supplies the bits (5, 7 or 10).
    """

    mode: str = "nearest_even"
    bits: int | None = None
    philox_rounds: int = 10

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"rounding mode {self.mode!r} is not one of {', '.join(MODES)}")
        if self.philox_rounds not in PHILOX_ROUNDS:
            raise ValueError(f"philox_rounds {self.philox_rounds!r} is not one of 5, 7, 10")
        if self.mode == "stochastic":
            if type(self.bits) is not int or not 1 <= self.bits <= 32:
                raise ValueError(f"stochastic rounding takes bits from 1 to 32, not {self.bits!r}")
        elif self.bits is not None or self.philox_rounds != 10:
            raise ValueError(f"{self.mode} rounding takes neither bits nor philox_rounds")


NEAREST_EVEN = Rounding()
TOWARD_ZERO = Rounding(mode="toward_zero")


def stochastic(bits: int = 16, philox_rounds: int = 10) -> Rounding:
    """Stochastic rounding with `bits` random bits per element."""
    return Rounding(mode="stochastic", bits=bits, philox_rounds=philox_rounds)


def round_to_format(
    x: Tensor,
    fmt: NumberFormat,
    rounding: Rounding = NEAREST_EVEN,
    random_bits: Tensor | None = None,
    saturate: bool = True,
) -> tuple[Tensor, Tensor]:
    """Round FP32 values to the grid of a format.

    A value *overflows* when, rounded as if the exponent range had no upper end, it exceeds
    `fmt.max_value`. NaN stays NaN (its sign is kept, its payload is not). Non-finite input never
    becomes finite: Inf stays Inf, or becomes NaN in a format without Inf (E4M3), whatever
    `saturate` says. The sign of a zero is kept.

    Args:
        x: [N, ...] float32, not modified.
        fmt: target format; E8M0 is not an element format and is refused.
        rounding: how to round.
        random_bits: integers in [0, 2^rounding.bits), shape of `x`; needed by the stochastic mode
            only.
        saturate: what finite overflow becomes: +-max_value if true; otherwise Inf, or NaN in a
            format without Inf. Formats with neither (INT8, E2M1) always saturate.

    Returns:
        values: [N, ...] float32, every one exactly representable in `fmt`.
        saturated: [N] int64, how many finite elements of each leading index overflowed.

    Raises:
        ValueError: wrong dtype, missing or superfluous random bits, saturate=False or non-finite
            input for a format that can express neither Inf nor NaN.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"rounding starts from float32, not {x.dtype}")
    if fmt.name == "e8m0":
        raise ValueError("e8m0 is a scale format; elements cannot be rounded to it")
    if (rounding.mode == "stochastic") != (random_bits is not None):
        given = "none" if random_bits is None else "some"
        raise ValueError(f"{rounding.mode} rounding was given {given} for random bits")
    if not saturate and not fmt.has_nan:
        raise ValueError(f"{fmt.name} has no code for overflow; it must saturate")

    saturated = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    if fmt is FP32 or x.numel() == 0:
        return x.clone(), saturated
    magnitude = x.abs()
    largest = magnitude.amax().item()
    if largest < _never_overflows_below(fmt, rounding):
        values = _round_magnitude(magnitude, fmt, rounding, random_bits)
        return torch.copysign(values, x, out=values), saturated

    all_finite = math.isfinite(largest)
    if not all_finite and not fmt.has_nan:
        raise ValueError(f"input holds Inf or NaN, which {fmt.name} cannot express")
    # One binade of room above max_value is enough to tell that a value overflowed.
    magnitude = magnitude.clamp_(max=min(2.0 ** (fmt.max_exponent + 1), FP32.max_value))
    values = _round_magnitude(magnitude, fmt, rounding, random_bits)
    over = values > fmt.max_value
    if not all_finite:
        over &= torch.isfinite(x)
    saturated = over.reshape(x.shape[0], -1).sum(1)
    beyond = math.inf if fmt.has_infinity else math.nan
    if saturate:
        values = values.clamp_(max=fmt.max_value)
    else:
        values = values.masked_fill_(over, beyond)
    if not all_finite:
        values = values.masked_fill_(x.isinf(), beyond).masked_fill_(x.isnan(), math.nan)
    return torch.copysign(values, x, out=values), saturated


def _never_overflows_below(fmt: NumberFormat, rounding: Rounding) -> float:
    """A bound under which no magnitude can round past `fmt.max_value`."""
    room = {"nearest_even": 0.5, "toward_zero": 1.0}.get(rounding.mode)
    if room is None:
        room = 2.0**-rounding.bits
    return fmt.max_value + fmt.top_spacing * room


def _round_magnitude(
    v: Tensor, fmt: NumberFormat, rounding: Rounding, random_bits: Tensor | None
) -> Tensor:
    """Round v >= 0, at most one binade above `fmt.max_value`; what NaN becomes is the caller's.

    `v` is overwritten: on a CPU, memory that is fresh costs several times an operation on it.
    """
    if fmt.min_exponent == _FP32_MIN_EXPONENT:
        return _drop_low_bits(v, 23 - fmt.mantissa_bits, rounding, random_bits)

    # FP32 bits of 2^E, E clamped from below: the exponent field with an empty significand.
    binade = v.view(torch.int32) & _EXPONENT_MASK
    binade.clamp_(min=(fmt.min_exponent + 127) << 23)
    if rounding.mode == "nearest_even":
        c = binade.add_((23 - fmt.mantissa_bits) << 23).view(torch.float32)
        return v.add_(c).sub_(c)

    n = rounding.bits or 0
    fixed_point = torch.int32 if fmt.mantissa_bits + 1 + n <= 30 else torch.int64
    to_fixed_point = (((2 * 127 + fmt.mantissa_bits + n) << 23) - binade).view(torch.float32)
    t = v.mul_(to_fixed_point).to(fixed_point)
    if random_bits is not None:
        t.add_(random_bits).bitwise_right_shift_(n)
    ulp = binade.sub_(fmt.mantissa_bits << 23).view(torch.float32)
    return v.copy_(t).mul_(ulp)


def _drop_low_bits(v: Tensor, d: int, rounding: Rounding, random_bits: Tensor | None) -> Tensor:
    """Clear the d low bits of the FP32 pattern of v >= 0 after adding the rounding increment."""
    bits = v.view(torch.int32)
    if rounding.mode == "nearest_even":
        odd = (bits >> d).bitwise_and_(1)
        bits = odd.add_(bits).add_((1 << (d - 1)) - 1)
    elif rounding.mode == "stochastic":
        n = rounding.bits
        aligned = random_bits << (d - n) if n <= d else random_bits >> (n - d)
        bits = bits + aligned.to(torch.int32)
    else:
        bits = bits.clone()
    return bits.bitwise_and_(-(1 << d)).view(torch.float32)
