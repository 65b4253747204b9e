"""A scalar oracle for rounding in exact rational arithmetic, and hard values for every format.

Shares no code and no idea with `replayssm.formats.rounding`: it enumerates a format's magnitudes
and looks the neighbours up.
"""

import math
from bisect import bisect_right
from fractions import Fraction
from functools import cache

import numpy as np
import torch

from replayssm.formats.number import NumberFormat


@cache
def magnitudes(fmt: NumberFormat) -> list[float]:
    """All finite magnitudes of a format in order, plus one.

    The extra one is what would come next if the exponent range went on.
    """
    values, spacing = [0.0], 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
    while values[-1] <= fmt.max_value:
        if values[-1] >= 2.0 ** (fmt.min_exponent + 1):
            spacing = 2.0 ** (math.frexp(values[-1])[1] - 1 - fmt.mantissa_bits)
        values.append(values[-1] + spacing)
    return values


def neighbours(value: float, fmt: NumberFormat) -> tuple[int, float, float, Fraction]:
    """(index of the one below, below, above, fraction of the gap) of a magnitude in range."""
    grid = magnitudes(fmt)
    i = bisect_right(grid, value) - 1
    below, above = grid[i], grid[i + 1]
    gap = Fraction(above) - Fraction(below)
    return i, below, above, (Fraction(value) - Fraction(below)) / gap


def stochastic(value: float, fmt: NumberFormat, n: int, r: int) -> float:
    """The documented rule, for any finite value of magnitude up to the format's maximum."""
    _, below, above, f = neighbours(abs(value), fmt)
    up = (f * 2**n).__floor__() + r >= 2**n
    return float(np.copysign(above if up else below, value))


@cache
def hard_values(fmt: NumberFormat) -> torch.Tensor:
    """Every magnitude, every midpoint and the FP32 neighbours of both, with both signs."""
    grid = np.array(magnitudes(fmt)[:-1])
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
    assert (points.astype(np.float64) == np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])).all()
    up = np.nextafter(points, np.float32(np.inf))
    down = np.nextafter(points, np.float32(-np.inf))
    points = np.unique(np.concatenate([points, up, down]))
    points = points[(points >= 0) & (points <= np.float32(fmt.max_value))]
    return torch.from_numpy(np.concatenate([points, -points]))
