"""What every recurrence needs of a ring: append, masked read, decay factors, products.

Owns the rules both recurrences share: which slots are valid, how invalid ones are selected away,
how decay exponents are formed, and how a product is computed so that a row's bits do not depend on
its neighbours. Knows neither recurrence.

Legend: B rows (sequences), h heads or groups, L ring slots, n slots as read (L rounded up to 16),
T new tokens, W width of a record. A ring is a dict of tensors [B, h, L] or [B, h, L, W]; slot 0 is
the oldest record, slots at and past the cursor hold leftovers of any kind, NaN included.

Cursors are `int` when every row stands at the same slot (the common case, which needs no masks) and
an int64 tensor [B] on the CPU otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.formats.number import BF16
from replayssm.formats.rounding import round_to_format

Cursor = int | Tensor

# TF32 exists only as what a tensor core makes of an FP32 operand, so it is no storage format.
TF32 = replace(
    BF16, name="tf32", bits=19, mantissa_bits=10, max_value=(2 - 2**-10) * 2.0**127,
    torch_dtype=torch.float32,
)  # fmt: skip
OPERANDS = {"fp32": None, "bf16": BF16, "tf32": TF32}

# Rows of every product start on a 64-byte boundary when the slot axis is a multiple of 16 floats.
# BLAS kernels pick their inner loop by alignment, so this is what keeps a row's bits independent of
# its place in the batch.
SLOT_MULTIPLE = 16


def padded_slots(slots: int) -> int:
    """Slots as read: `slots` rounded up to a multiple of `SLOT_MULTIPLE`."""
    return -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE


def token_slots(pos: Tensor, tokens: int) -> Tensor:
    """Slot of each new token, [B, T], for cursors [B]."""
    return pos[:, None] + torch.arange(tokens, device=pos.device)


def append(ring: Mapping[str, Tensor], pos: Cursor, records: Mapping[str, Tensor]) -> None:
    """Writes `records` [B, h, T, ...] into `ring` at slots pos .. pos+T-1 of each row, in place."""
    for name, record in records.items():
        target, tokens = ring[name], record.shape[2]
        if isinstance(pos, int):
            target[:, :, pos : pos + tokens] = record
        else:
            slots = token_slots(pos, tokens).to(target.device)
            rows = torch.arange(target.shape[0], device=target.device)[:, None]
            target[rows, :, slots] = record.transpose(1, 2).to(target.dtype)


def read_slots(record: Tensor, end: Cursor, dtype: torch.dtype) -> Tensor:
    """The valid part of a ring tensor: slots below `end`, else zero; [B, h, n, ...] in `dtype`.

    Zeros are *selected*, so a NaN or Inf left in an unused slot cannot reach any product.
    """
    slots = record.shape[2]
    missing = padded_slots(slots) - slots
    if isinstance(end, int):
        missing += slots - end
        record = record[:, :, :end].to(dtype)
    else:
        valid = torch.arange(slots) < end[:, None]
        valid = valid.to(record.device).view(-1, 1, slots, *(1,) * (record.dim() - 3))
        record = record.to(dtype).where(valid, 0.0)
    if missing:
        record = F.pad(record, (0,) * (2 * (record.dim() - 3)) + (0, missing))
    return record.contiguous()


def at_tokens(values: Tensor, pos: Cursor, tokens: int) -> Tensor:
    """The entries of the T new tokens, [B, h, T, ...], out of values over slots [B, h, n, ...]."""
    if isinstance(pos, int):
        return values[:, :, pos : pos + tokens]
    index = token_slots(pos, tokens).to(values.device)
    return values.take_along_dim(index.view(-1, 1, tokens, *(1,) * (values.dim() - 3)), dim=2)


def causal_mask(
    pos: Cursor, tokens: int, slots: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Masks (slot <= token, slot < token), each [T, n] or, for per-row cursors, [B, 1, T, n]."""
    slot = torch.arange(slots, device=device)
    if isinstance(pos, int):
        token = torch.arange(pos, pos + tokens, device=device)[:, None]
    else:
        token = token_slots(pos, tokens).to(device)[:, None, :, None]
    return slot <= token, slot < token


def decay_between(later: Tensor, earlier: Tensor) -> Tensor:
    """exp(later - earlier) of cumulative log decays [.., T] and [.., n] -> [.., T, n], in (0, 1].

    Differences of cumulative logs, never a quotient of exponentials, which would overflow; clamped
    to <= 0 because a cumulative sum rounds and may be off by an ULP in the wrong direction.
    """
    return (later[..., :, None] - earlier[..., None, :]).clamp_(max=0.0).exp_()


def round_operand(x: Tensor, operand: str) -> Tensor:
    """Rounds one operand of a replay product to what a tensor core would read, in FP32."""
    if operand not in OPERANDS:
        raise ValueError(f"operand {operand!r}: allowed are {', '.join(OPERANDS)}")
    fmt = OPERANDS[operand]
    return x if fmt is None else round_to_format(x, fmt)[0]


def product(a: Tensor, b: Tensor, operand: str = "fp32") -> Tensor:
    """a @ b for [.., m, k] and [.., k, n] with equal leading axes, accumulated in their dtype.

    Each operand should be contiguous or the transpose of a contiguous tensor: other strides reach
    BLAS as they are for some batch sizes and copied for others, and the bits depend on that.
    """
    a, b = round_operand(a, operand), round_operand(b, operand)
    if a.shape[:-2].numel() == 1:
        # A batch of one goes down another BLAS path and rounds differently: compute it as two.
        return torch.matmul(a.expand(2, *a.shape[1:]), b.expand(2, *b.shape[1:]))[:1]
    return torch.matmul(a, b)
