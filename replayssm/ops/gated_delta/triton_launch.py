"""What the launchers of this folder share on the host: kernel arguments, checks, launch parameters.

Owns which tensors the kernels accept. Knows no kernel body and no cache.

Legend: triton_tiles.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from replayssm.formats.block import BlockFormat
from replayssm.formats.storage import Storage
from replayssm.ops.gated_delta.reference import GatedDeltaInputs
from replayssm.ops.quantize import layout
from replayssm.policy import PrecisionPolicy

RING_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_TOKENS = 32


class Ring(NamedTuple):
    """Records of S slots, contiguous; v and beta are None where u is not recomputed."""

    k: Tensor  # [S, HK, L, K]
    g: Tensor  # [S, HV, L]
    u: Tensor  # [S, HV, L, V]
    v: Tensor | None  # [S, HV, L, V]
    beta: Tensor | None  # [S, HV, L]


class Tokens(NamedTuple):
    """Inputs of B rows, and the elements from one row and from one token to the next."""

    q: Tensor  # [B, T, HK, K]
    k: Tensor  # [B, T, HK, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV]
    beta: Tensor  # [B, T, HV]
    q_row: int
    k_row: int
    v_row: int
    g_row: int
    beta_row: int
    q_token: int
    k_token: int
    v_token: int
    g_token: int
    beta_token: int


class Slots(NamedTuple):
    """What is known of each of S slots, int64 [S] on the device; see `cache.ReplayCache`.

    `not_finite` counts state elements that were Inf or NaN when written: a kernel cannot raise, so
    whoever launches flushes looks at it when it synchronises anyway.
    """

    pos: Tensor
    flushes: Tensor
    sequence: Tensor
    seed: Tensor
    saturated: Tensor
    not_finite: Tensor


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Meta-parameters of one launch; they change speed, not where anything rounds.

    Attributes:
        block_v: value rows of a state tile, a power of two.
        heads: value heads per program, a divisor of HV/HK (decode only).
        num_warps, num_stages: Triton's.
    """

    block_v: int
    heads: int = 1
    num_warps: int = 4
    num_stages: int = 2


def ring_argument(ring: Mapping[str, Tensor]) -> Ring:
    """Kernel argument of a ring as `reference.ring_layout` lays it out."""
    for name, tensor in ring.items():
        allowed = RING_DTYPES if name in ("k", "v") else RING_DTYPES[:1]
        if tensor.dtype not in allowed:
            raise ValueError(
                f"ring {name} is {tensor.dtype}; the Triton kernels take "
                + ", ".join(map(str, allowed))
            )
        if not tensor.is_contiguous():
            raise ValueError(f"ring {name} {list(tensor.shape)} is not contiguous")
    return Ring(*(ring.get(name) for name in Ring._fields))


def token_argument(inputs: GatedDeltaInputs) -> Tokens:
    """Kernel argument of inputs; copied only where a token's heads are not dense in memory."""
    dense = [_dense_heads(tensor) for tensor in inputs]
    return Tokens(*dense, *(t.stride(0) for t in dense), *(t.stride(1) for t in dense))


def _dense_heads(tensor: Tensor) -> Tensor:
    heads = tensor[:1, :1]
    return tensor if heads.is_contiguous() else tensor.contiguous()


def sizes(ring: Ring, policy: PrecisionPolicy) -> dict[str, int]:
    """Constants that every kernel is specialised on.

    Raises ValueError for a policy that the kernels do not compute.
    """
    if policy.operand != "fp32":
        raise ValueError(
            f"operand {policy.operand!r}: the Triton kernels keep operands exact (fp32); "
            "the reference backend rounds them"
        )
    storages = [policy.checkpoint, policy.read_storage]
    for storage in storages:
        layout.refuse_unsupported(storage)
    (k_heads, ring_len, k_dim), (v_heads, _, v_dim) = ring.k.shape[1:], ring.u.shape[1:]
    return {
        "HK": k_heads,
        "HV": v_heads,
        "K": k_dim,
        "V": v_dim,
        "L": ring_len,
        "BK": max(layout.tile_width(k_dim, storage) for storage in storages),
        "BL": power_of_two(ring_len),
    }


def whole_matrices(*written: Storage) -> bool:
    """Whether a program must hold a head's whole state: a scale per head needs all of its amax."""
    return any(isinstance(s.format, BlockFormat) and s.format.tensor_scale for s in written)


def keeps_fusion(*written: Storage) -> bool:
    """Whether a kernel that writes these may contract products and sums: see `ops/quantize`."""
    return not any(isinstance(s.format, BlockFormat) for s in written)


def power_of_two(size: int, least: int = 16) -> int:
    """The side of a tile that covers `size`."""
    return max(least, triton.next_power_of_2(size))


def precision(*dtypes: torch.dtype) -> str:
    """How a product of FP32 tiles is taken so that it keeps FP32 accuracy.

    Args:
        dtypes: for each operand a dtype that holds its values exactly.

    Returns:
        "bf16" or "tf32" where one tensor-core term is exact for such operands, "tf32x3" (three
        terms, 2^-22 relative per product) where it is not, "ieee" in the interpreter.
    """
    if triton.knobs.runtime.interpret:
        return "ieee"
    if all(dtype == torch.bfloat16 for dtype in dtypes):
        return "bf16"
    return "tf32x3" if torch.float32 in dtypes else "tf32"


def unscaled_dtype(storage: Storage) -> torch.dtype:
    """A dtype that holds every result of `tiles.load_unscaled`.

    Codes of up to eight bits, alone or times a block scale, have at most seven significant bits.
    """
    wide = storage.format.name in ("fp32", "fp16")
    return storage.format.torch_dtype if wide else torch.bfloat16


def value_dtype(storage: Storage) -> torch.dtype:
    """A dtype that holds every result of `tiles.load_tile`."""
    plain = storage.format.name in ("fp16", "bf16") and storage.scale == "none"
    return storage.format.torch_dtype if plain else torch.float32
