"""What the launchers of every recurrence ask of a policy and of the copies it describes.

Owns these questions, which are answered on the host before a launch. Knows no kernel and no
recurrence.
"""

from __future__ import annotations

import torch

from replayssm.formats.block import BlockFormat
from replayssm.formats.number import FP16, FP32
from replayssm.formats.quantized import Quantized
from replayssm.formats.storage import Storage
from replayssm.ops.triton_common import COUNTERS, interpreted
from replayssm.policy import PrecisionPolicy


def check_copies(
    policy: PrecisionPolicy, checkpoint: Quantized, read_copy: Quantized | None
) -> None:
    """ValueError if a copy that is to be written is not what the policy says."""
    for name, copy, storage in (
        ("checkpoint", checkpoint, policy.checkpoint),
        ("read_copy", read_copy, policy.read_copy),
    ):
        got = None if copy is None else copy.format
        expected = None if storage is None else storage.format
        if got != expected:
            raise ValueError(
                f"{name} is {got.name if got else None}, policy {policy.label} says "
                f"{expected.name if expected else None}"
            )


def scales_heads(policy: PrecisionPolicy) -> bool:
    """Whether a written copy has a scale per head, which depends on all of the head."""
    formats = (policy.checkpoint.format, policy.read_storage.format)
    return any(isinstance(fmt, BlockFormat) and fmt.tensor_scale for fmt in formats)


def shares_heads(policy: PrecisionPolicy, heads: int, tiles: int, cut: str) -> bool:
    """Whether the programs of a head, one for each of its tiles, wait for each other in a step of
    one kernel that writes both copies.

    Raises:
        ValueError: they cannot; `cut` says what made so many tiles.
    """
    shared = scales_heads(policy) and tiles > 1
    if shared and (interpreted() or heads * tiles >= COUNTERS):
        raise ValueError(
            f"single: {cut} cuts {heads} heads that have a scale into "
            f"{tiles} tiles, whose programs wait for each other; allowed are whole heads, and on a "
            f"GPU less than {COUNTERS} tiles"
        )
    return shared


def tries_two_scales(policy: PrecisionPolicy) -> bool:
    """Whether blocks of a written copy take the better of two scales, which takes registers."""
    formats = (policy.checkpoint.format, policy.read_storage.format)
    return any(isinstance(fmt, BlockFormat) and fmt.four_over_six for fmt in formats)


def unscaled_dtype(stored: Storage | Quantized) -> torch.dtype:
    """A dtype that holds every result of `quantize.tiles.load_unscaled`.

    Codes of up to eight bits, alone or times a block scale, have at most seven significant bits.
    """
    return stored.format.torch_dtype if stored.format in (FP32, FP16) else torch.bfloat16
