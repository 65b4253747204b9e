"""Codes of every format: all of them, there and back, and the nibble order of E2M1."""

import ml_dtypes
import numpy as np
import pytest
import torch

from replayssm.formats.number import BF16, E2M1, E4M3, E5M2, FP16, INT8
from replayssm.formats.packing import decode_elements, encode_elements


@pytest.mark.parametrize(
    ("fmt", "numpy_type"),
    [
        (FP16, np.float16),
        (BF16, ml_dtypes.bfloat16),
        (E4M3, ml_dtypes.float8_e4m3fn),
        (E5M2, ml_dtypes.float8_e5m2),
        (INT8, np.int8),
    ],
)
def test_every_code_decodes_and_encodes_to_itself(fmt, numpy_type):
    unsigned = np.arange(2**fmt.bits).astype({8: np.uint8, 16: np.uint16}[fmt.bits])
    codes = torch.from_numpy(unsigned.copy()).view(fmt.torch_dtype)
    values = decode_elements(codes, fmt, len(codes))
    expected = unsigned.view(numpy_type).astype(np.float32)
    np.testing.assert_array_equal(values.numpy(), expected)
    known = ~values.isnan()
    again = encode_elements(values, fmt)
    same_width = torch.uint8 if fmt.bits == 8 else torch.int16
    assert again.view(same_width)[known].equal(codes.view(same_width)[known])
    assert again[~known].to(torch.float32).isnan().all()


def test_every_byte_of_two_e2m1_codes():
    data = torch.arange(256, dtype=torch.uint8).view(16, 16)
    values = decode_elements(data, E2M1, 32)
    nibbles = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    low, high = np.arange(256) % 16, np.arange(256) // 16
    np.testing.assert_array_equal(values.view(256, 2)[:, 0].numpy(), nibbles[low])
    np.testing.assert_array_equal(values.view(256, 2)[:, 1].numpy(), nibbles[high])
    assert encode_elements(values, E2M1).equal(data)


def test_odd_number_of_e2m1_columns_ends_in_a_zero_nibble():
    values = torch.tensor([[1.0, -6.0, 0.5], [-0.0, 3.0, -2.0]])
    data = encode_elements(values, E2M1)
    assert data.tolist() == [[0xF2, 0x01], [0x58, 0x0C]]
    assert decode_elements(data, E2M1, 3).equal(values)
