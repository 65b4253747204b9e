"""What the launchers of this folder share on the host: kernel arguments, checks, launch parameters.

Owns which tensors the kernels accept. Knows no kernel body and no cache.

Legend: triton_tiles.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from replayssm.formats.block import BlockFormat
from replayssm.formats.quantized import Quantized
from replayssm.formats.storage import Storage
from replayssm.ops.gated_delta.reference import GatedDeltaInputs
from replayssm.ops.quantize import layout
from replayssm.ops.triton_common import interpreted, precision_of
from replayssm.ops.triton_inputs import dense_heads, strides
from replayssm.ops.triton_policy import check_copies, scales_heads, tries_two_scales
from replayssm.ops.triton_rows import part_columns
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


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Meta-parameters of a launch: they change speed, and of what is rounded no more than the last
    bits of FP32 sums.

    Attributes:
        block_v: value rows of a state tile, a power of two >= 16.
        num_warps, num_stages: Triton's. Of warps at most one for 16 rows in `window` and, of more
            than four, in `flush` and `step`: their products feed each other, and Triton 3.6 then
            reads past an operand in shared memory.
        maxnreg: registers a thread may use, so that more programs share a multiprocessor.
        rounded_v: value rows that are rounded at a time where a copy has a scale per head.
        programs: of a `flush`, for each multiprocessor; None: as many as have room for registers.
        ahead: `decode` is the kernel for few rows, which asks for all of a ring while the cursor is
            still on its way; a `step` in one kernel always is.
    """

    block_v: int
    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None
    rounded_v: int = 32
    programs: int | None = None
    ahead: bool = False

    @property
    def resident(self) -> int:
        """Programs that share a multiprocessor: its four parts have 16,384 registers each. One more
        would wait until others have done all of their share."""
        registers = triton.cdiv(self.maxnreg or 255, 8) * 8
        warps = 16384 // (32 * registers) * 4
        return self.programs or max(1, warps // self.num_warps)

    def tiles(self, constants: Mapping[str, int]) -> int:
        """Tiles of one head's state."""
        return triton.cdiv(constants["V"], self.block_v)

    def options(self, *written: Storage | None) -> dict[str, int | bool | None]:
        """Compiler options for a kernel that writes these storages.

        Fused multiply-adds would change the bits of block scales, see `ops/quantize`.
        """
        blocks = any(s is not None and isinstance(s.format, BlockFormat) for s in written)
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.maxnreg,
            "enable_fp_fusion": not blocks,
        }


# Value rows of a tile, warps, and where they are not Triton's own, stages and registers a thread;
# by kernel and bits of an element of what is read. "decode_bf16": tokens and ring are BF16, and one
# warp multiplies them on tensor cores. "flush_solving": u is solved for.
TABLE = {
    "decode": {32: (32, 1), 16: (32, 1, 2, 128), 8: (64, 2), 4: (128, 2)},
    "decode_bf16": {32: (32, 1), 16: (64, 1), 8: (64, 2), 4: (64, 1, 2, 128)},
    "flush": {32: (16, 1, 1, 168), 16: (16, 1, 1, 168), 8: (64, 4, 1), 4: (64, 4, 1)},
    "flush_solving": {32: (64, 4, 1, 128), 16: (64, 4, 1), 8: (64, 4, 1), 4: (64, 4, 1)},
    "window": {32: (16, 1, 3), 16: (16, 1, 3), 8: (16, 1), 4: (16, 1)},
}
_FEWEST_PROGRAMS = 256
# A flush whose programs take all tiles of a head in turn, which has a scale: four of them share a
# multiprocessor, so that one round does a sixteenth of 256 rows of 32 heads; three where both block
# scales are tried, which would spill. More of smaller tiles would gain nothing.
_IN_TURN = Launch(block_v=64, num_warps=4, num_stages=1, maxnreg=128)
# With few rows `decode` and `step` wait for memory and for each other, not for issue slots: many
# warps share a small tile. Larger tiles where an H200 would hold more than two small ones a
# multiprocessor, and as many of those as it holds at a time.
_FEW = Launch(block_v=16, num_warps=4, ahead=True)
_FEW_SMALL = 264
_FEW_PROGRAMS = 1024


def default_launch(
    kernel: str, policy: PrecisionPolicy, constants: Mapping[str, int], rows: int
) -> Launch:
    """Launch parameters of a kernel for a policy, a geometry and a number of rows."""
    if kernel.startswith("decode") and (few := _few(constants, rows)):
        return few
    if kernel.startswith("flush") and scales_heads(policy):
        rows = min(_IN_TURN.block_v, power_of_two(constants["V"]))
        maxnreg = 168 if tries_two_scales(policy) else _IN_TURN.maxnreg
        return replace(_IN_TURN, block_v=rows, maxnreg=maxnreg)
    launch = from_table(TABLE[kernel], policy, constants, rows)
    if not kernel.startswith("decode"):  # a chained product gives every warp 16 rows
        least = 1 if kernel == "window" else 4
        most = max(least, launch.block_v // 16)
        launch = replace(launch, num_warps=min(launch.num_warps, most))
    return launch


def from_table(
    table: Mapping[int, tuple[int, ...]],
    policy: PrecisionPolicy,
    constants: Mapping[str, int],
    rows: int,
) -> Launch:
    """The entry of a kernel's table, with smaller tiles for few rows, so that every multiprocessor
    has one."""
    block_v, num_warps, *more = table[policy.read_storage.code_bits]
    whole = power_of_two(constants["V"])
    block_v = min(block_v, whole)
    programs = rows * constants["HV"] * (whole // block_v)
    while block_v > 16 and programs < _FEWEST_PROGRAMS:
        programs, block_v = programs * 2, block_v // 2
    options = dict(zip(("num_stages", "maxnreg"), more, strict=False))
    return Launch(block_v=block_v, num_warps=num_warps, **options)


def single_launch(
    policy: PrecisionPolicy, constants: Mapping[str, int], rows: int
) -> Launch | None:
    """How one kernel does all of a step, or None where there are so many rows that several do it
    faster."""
    few = _few(constants, rows)
    if few and interpreted() and scales_heads(policy):  # programs of a head wait for each other
        return replace(few, block_v=power_of_two(constants["V"]))
    return few


def _few(constants: Mapping[str, int], rows: int) -> Launch | None:
    """The launch of few rows; None: there are more."""
    programs = programs_of(_FEW, constants, rows)
    if programs > _FEW_PROGRAMS:
        return None
    return _FEW if programs <= _FEW_SMALL else replace(_FEW, block_v=2 * _FEW.block_v)


def programs_of(launch: Launch, constants: Mapping[str, int], rows: int) -> int:
    """Tiles of so many rows."""
    return rows * constants["HV"] * launch.tiles(constants)


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
    dense = [dense_heads(tensor) for tensor in inputs]
    return Tokens(*dense, *strides(dense))


def sizes(ring: Ring, policy: PrecisionPolicy) -> dict[str, int]:
    """Constants that every kernel is specialised on.

    Raises ValueError for a policy that the kernels do not compute.
    """
    if policy.operand != "fp32":
        raise ValueError(
            f"operand {policy.operand!r}: the Triton kernels keep operands exact (fp32); "
            "the reference backend rounds them"
        )
    for storage in (policy.checkpoint, policy.read_storage):
        layout.refuse_unsupported(storage)
    (k_heads, ring_len, k_dim), (v_heads, _, v_dim) = ring.k.shape[1:], ring.u.shape[1:]
    return {
        "HK": k_heads,
        "HV": v_heads,
        "K": k_dim,
        "V": v_dim,
        "L": ring_len,
        "BL": power_of_two(ring_len),
    }


def folding(
    policy: PrecisionPolicy, ring: Ring, constants: Mapping[str, int], launch: Launch
) -> dict[str, bool | int | str]:
    """Constants of `triton_fold.fold_and_write`, except the storages.

    Raises ValueError for a launch that has too many warps for its tiles.
    """
    if launch.num_warps > max(4, launch.block_v // 16):
        raise ValueError(
            f"{launch.num_warps} warps for {launch.block_v} rows: at most one for 16 rows, or four"
        )
    return {
        "BV": launch.block_v,
        "FOLDED": _folded(policy.checkpoint, state_width(policy, constants), constants["K"]),
        "ROUNDED": launch.rounded_v,
        "BK": state_width(policy, constants),
        **pieces(policy.checkpoint, constants, 64 if scales_heads(policy) else 32),
        "WHOLE": scales_heads(policy),
        "FULL": precision_of(ring.u.dtype, ring.k.dtype),
        "EXACT": "ieee" if interpreted() else "tf32_terms",
    }


def _folded(storage: Storage, width: int, cols: int) -> int:
    """Columns of a state tile that are folded at a time: fewer take fewer registers."""
    whole_blocks = 64 % layout.columns_of_scale(storage) == 0
    apart = cols == width > 64 and storage.scale != "row" and whole_blocks
    return 64 if apart else width


def writes(
    policy: PrecisionPolicy, checkpoint: Quantized, read_copy: Quantized | None
) -> dict[str, Storage | None]:
    """The storages a flush writes, as kernel constants.

    Raises:
        ValueError: a copy is not what the policy says.
    """
    check_copies(policy, checkpoint, read_copy)
    return {"CHECKPOINT": policy.checkpoint, "READ_COPY": policy.read_copy}


def power_of_two(size: int, least: int = 16) -> int:
    """The side of a tile that covers `size`."""
    return max(least, triton.next_power_of_2(size))


def state_width(policy: PrecisionPolicy, constants: Mapping[str, int]) -> int:
    """Columns of a state tile that suits both copies."""
    storages = (policy.checkpoint, policy.read_storage)
    return max(layout.tile_width(constants["K"], storage) for storage in storages)


def pieces(storage: Storage, constants: Mapping[str, int], widest: int = 32) -> dict[str, int]:
    """How kernels cut products of a stored state over K: into parts of `widest` (at most 64), 32 or
    16 columns and whole blocks, or, where K has no such parts, not at all."""
    block = layout.columns_of_scale(storage)
    for piece in (64, 32, 16):
        whole = piece <= widest and constants["K"] % piece == 0 and piece % block == 0
        if whole and piece >= layout.tile_width(1, storage):
            return {"PIECES": constants["K"] // piece, "PIECE": piece}
    return {"PIECES": 1, "PIECE": layout.tile_width(constants["K"], storage)}


def state_columns(policy: PrecisionPolicy, constants: Mapping[str, int]) -> int:
    """Columns of the state that the decode kernel reads at a time: 128 bytes, or all where K is no
    multiple of that or rows have scales."""
    return part_columns(policy.read_storage, constants["K"], state_width(policy, constants))
