"""The table of element formats against ml_dtypes' and torch's."""

import ml_dtypes
import numpy as np
import pytest
import torch
from format_oracle import magnitudes

from replayssm.formats.number import BF16, E2M1, E4M3, E5M2, FP16, FP32, INT8, NUMBER_FORMATS

NUMPY_TYPES = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize("name", NUMPY_TYPES)
def test_facts_agree_with_ml_dtypes(name):
    fmt, info = NUMBER_FORMATS[name], ml_dtypes.finfo(NUMPY_TYPES[name])
    assert fmt.bits == info.bits
    assert fmt.max_value == float(info.max)
    assert 2.0**fmt.min_exponent == float(info.smallest_normal)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert fmt.mantissa_bits == info.nmant


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3", "e5m2"])
def test_magnitudes_are_exactly_the_finite_codes(name):
    fmt = NUMBER_FORMATS[name]
    codes = torch.arange(2 ** (fmt.bits - 1), dtype=torch.int32)
    width = {8: torch.uint8, 16: torch.int16}[fmt.bits]
    values = codes.to(width).view(fmt.torch_dtype).to(torch.float32)
    finite = values[values.isfinite()]
    assert finite.tolist() == magnitudes(fmt)[:-1]
    assert bool(values.isnan().any()) == fmt.has_nan
    assert bool(values.isinf().any()) == fmt.has_infinity


def test_small_formats_spelled_out():
    assert magnitudes(E2M1) == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 8]
    assert magnitudes(INT8) == list(range(129))
    assert [f.top_spacing for f in (FP16, E4M3, E5M2, INT8, E2M1)] == [32, 32, 8192, 1, 2]
    assert [f.max_exponent for f in (FP32, FP16, BF16, E4M3, E5M2, INT8, E2M1)] == [
        127, 15, 127, 8, 15, 6, 2,
    ]  # fmt: skip
