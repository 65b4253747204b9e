"""Codes of values that are already on a format's grid, and the values of codes.

Owns the code layout of single elements: torch dtypes, and E2M1 packed two codes a byte. Rounds
nothing: library casts differ between versions and back ends on values off the grid, never on it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.formats.number import E2M1, NumberFormat


def encode_elements(values: Tensor, fmt: NumberFormat) -> Tensor:
    """Codes of FP32 values [..., C] on the grid of `fmt`; may share memory if `fmt` is FP32.

    E2M1 gives [..., ceil(C / 2)] bytes, the even column in the low nibble, 0 after an odd end.
    """
    if fmt is not E2M1:
        return values.to(fmt.torch_dtype)
    if values.shape[-1] % 2:
        values = F.pad(values, (0, 1))
    # Scaled by 2^-14, E2M1's 1.0 is FP16's smallest normal number and its 0.5 the half of that: the
    # sign and the top bits of the FP16 pattern are the code.
    half = (values * 2.0**-14).to(torch.float16).view(torch.int16)
    code = ((half >> 9) & 7) | ((half >> 12) & 8)
    return (code[..., 0::2] | (code[..., 1::2] << 4)).to(torch.uint8)


def decode_elements(data: Tensor, fmt: NumberFormat, columns: int) -> Tensor:
    """FP32 values [..., columns] of stored codes; may share memory if `fmt` is FP32."""
    if fmt is not E2M1:
        return data.to(torch.float32)
    pairs = _byte_values(data.device).index_select(0, data.flatten().to(torch.int32))
    return pairs.view(*data.shape[:-1], 2 * data.shape[-1])[..., :columns]


def _byte_values(device: torch.device) -> Tensor:
    """[256, 2] float32: the values of the low and the high nibble of every byte."""
    magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    nibble = torch.tensor(magnitude + [-m for m in magnitude], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([nibble[byte & 15], nibble[byte >> 4]], dim=-1)
