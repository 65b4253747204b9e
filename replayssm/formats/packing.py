"""Codes of values that are already on a format's grid, and the values of codes.

Owns the code layout of single elements: torch dtypes, and E2M1 packed two codes a byte. Rounds
nothing: library casts differ between versions and back ends on values off the grid, never on it.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.formats.number import E2M1, E4M3, E5M2, NumberFormat


def encode_elements(values: Tensor, fmt: NumberFormat) -> Tensor:
    """Codes of FP32 values [..., C] on the grid of `fmt`; may share memory if `fmt` is FP32.

    E2M1 gives [..., ceil(C / 2)] bytes, the even column in the low nibble, 0 after an odd end.
    """
    if fmt is not E2M1:
        return values.to(fmt.torch_dtype)
    if values.shape[-1] % 2:
        values = F.pad(values, (0, 1))
    # Scaled by 2^-14, E2M1's 1.0 is FP16's smallest normal number and its 0.5 the half of that: the
    # sign and the top bits of the FP16 pattern are the code. Two patterns make a 32-bit word, the
    # even column in its low half, so that one operation serves both codes of a byte.
    scaled = (values * 2.0**-14).to(torch.float16, memory_format=torch.contiguous_format)
    pairs = scaled.view(torch.int32)
    codes = ((pairs >> 9) & 0x0007_0007) | ((pairs >> 12) & 0x0008_0008)
    return (codes | (codes >> 12)).to(torch.uint8)


def decode_elements(data: Tensor, fmt: NumberFormat, columns: int) -> Tensor:
    """FP32 values [..., columns] of stored codes; may share memory if `fmt` is FP32."""
    if fmt is E2M1:
        # A byte's two values are one 64-bit word of the table: looking up words is the fast kind.
        table = _values_of_bytes(fmt, data.device).view(torch.int64).flatten()
        pairs = table.index_select(0, data.flatten().to(torch.int32)).view(torch.float32)
        return pairs.view(*data.shape[:-1], 2 * data.shape[-1])[..., :columns]
    if fmt in (E4M3, E5M2):  # torch converts them one by one
        codes = data.view(torch.uint8).flatten().to(torch.int32)
        return _values_of_bytes(fmt, data.device).index_select(0, codes).view(data.shape)
    return data.to(torch.float32)


@cache
def _values_of_bytes(fmt: NumberFormat, device: torch.device) -> Tensor:
    """[256] float32, the value of every byte; [256, 2] for E2M1, low nibble first."""
    byte = torch.arange(256, dtype=torch.uint8)
    if fmt is not E2M1:
        return byte.view(fmt.torch_dtype).to(device, torch.float32)
    magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    nibble = torch.tensor(magnitude + [-m for m in magnitude])
    return nibble[torch.stack([byte & 15, byte >> 4], dim=-1).long()].to(device)
