"""What the Mamba-2 launchers share on the host: checks, kernel arguments, launch parameters.

Owns which tensors and policies the kernels accept, and the table of launch parameters. Knows no
kernel body and no cache. Legend: triton_tiles.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from replayssm.formats.block import BlockFormat
from replayssm.formats.number import BF16, FP16, FP32
from replayssm.formats.quantized import Quantized
from replayssm.formats.storage import Storage
from replayssm.ops.mamba2.reference import Mamba2Inputs
from replayssm.ops.mamba2.triton_tiles import Ring, Tokens, pieces_of
from replayssm.ops.quantize.layout import as_codes, refuse_unsupported, tile_width
from replayssm.ops.quantize.words import blocks_of
from replayssm.ops.triton_common import COUNTERS, Cursors, interpreted, precision_of
from replayssm.ops.triton_inputs import dense_heads, strides
from replayssm.ops.triton_policy import scales_heads, tries_two_scales
from replayssm.policy import PrecisionPolicy

Sizes = dict[str, int]  # H, P, G, N, L

RING_FORMATS = {fmt.torch_dtype: Storage(format=fmt) for fmt in (FP32, FP16, BF16)}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Meta-parameters of a launch: they change speed, and of what is rounded no more than the last
    bits of FP32 sums.

    Attributes:
        heads: runs of rows in a program's tile, of one group and next to each other, a power of
            two; of a window, heads that a program works on in turn.
        block_p: rows of a run, a power of two >= 16: it covers P (runs are heads) or divides it; a
            window takes any.
        loop: tiles a program works on in turn, where all rows flush (flush, and step): programs
            that find nothing to do then are as many times fewer.
        num_warps, num_stages: Triton's.
        maxnreg: registers a thread may use, so that more programs share a multiprocessor.
        eager: whether a decode is the kernel for few rows, which asks for the whole ring before it
            knows how much of it is used; a step in one kernel always is. Its tiles are of one head.
    """

    heads: int = 1
    block_p: int
    loop: int = 1
    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None
    eager: bool = False

    def tile(self, sizes: Sizes) -> dict[str, int]:
        """The tile as kernel constants.

        Raises:
            ValueError: `block_p` neither covers nor divides P, or is no power of two >= 16.
        """
        p, block = sizes["P"], self.block_p
        if block < 16 or block & (block - 1) or (block < p and p % block):
            raise ValueError(
                f"block_p {block} is not a power of two >= 16 that covers or divides {p}"
            )
        return {"HEADS": self.heads, "BP": block}

    def options(self) -> dict[str, int | bool | None]:
        """Compiler options. Fused multiply-adds would change bits, see `ops/quantize`."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.maxnreg,
            "enable_fp_fusion": False,
        }


# Rows of a tile, warps, register limit, by kernel and bits of a stored element of what is read.
# Chosen on an H200 at H = 128, P = 64, N = 128, for 256 rows, and at H = 96, P = 80; those of 8
# bits by likeness and by compiled code: a decode of 64 rows by one warp spills
# there.
_TABLE = {
    "decode": {32: (64, 2, None), 16: (64, 1, None), 8: (64, 2, None), 4: (128, 1, 128)},
    "step": {32: (64, 4, 168), 16: (64, 4, 168), 8: (32, 4, None), 4: (64, 4, None)},
    "flush": {32: (64, 4, None), 16: (16, 1, 160), 8: (32, 4, None), 4: (64, 4, 168)},
    "window": {32: (16, 1, None), 16: (16, 1, 168), 8: (16, 1, 168), 4: (16, 1, None)},
}

# Rows of state up to which one kernel does all of a step, as many as a large GPU holds at once, and
# up to which its tiles have 16 rows and not 32: two programs a multiprocessor.
_FEW = 1 << 15
_FEW_SMALL = 264 * 16


def default_launch(
    kernel: str, policy: PrecisionPolicy, sizes: Sizes, batch: int, *, any_row: bool = False
) -> Launch:
    """Launch parameters of a kernel for a policy, a geometry and a number of rows.

    `any_row`: a flush that is launched at every step, for whatever rows are due then: few programs
    should find out that there is nothing to do. "step": of the rows whose ring is folded; of all
    rows, if they are few.
    """
    bits = policy.read_storage.code_bits
    if is_few(sizes, batch) and kernel in ("decode", "step"):
        return _few_launch(kernel, policy, sizes, batch)
    rows, num_warps, maxnreg = _TABLE[kernel][bits]
    if kernel == "window":
        block_p = max(16, min(rows, triton.next_power_of_2(sizes["P"])))
        heads = 4 if batch * sizes["H"] >= 4096 else 1
        return Launch(block_p=block_p, heads=heads, num_warps=num_warps, maxnreg=maxnreg)
    writes_head_scales = kernel in ("step", "flush") and scales_heads(policy)
    block_p = max(16, triton.next_power_of_2(sizes["P"]))
    if sizes["P"] % rows == 0 and not writes_head_scales:
        block_p = rows
    pieces = pieces_of(sizes["P"], block_p)
    heads = max(1, min(rows // pieces[0], triton.next_power_of_2(sizes["H"] // sizes["G"])))
    if len(pieces) > 1:
        maxnreg = None
        if kernel != "decode":
            heads = 1
        elif bits > 4:  # of 4 bits, one warp multiplies on tensor cores
            num_warps *= 2
    if kernel != "decode" and heads * pieces[0] != rows:
        # Chained products keep one layout if every warp has 16 rows of the tile.
        num_warps, maxnreg = max(1, heads * pieces[0] // 16), None
    if len(pieces) > 1 and kernel != "decode" and tries_two_scales(policy):
        num_warps *= 2  # it spills in four warps
    if kernel == "flush" and any_row:
        maxnreg = None  # a loop spills
    return Launch(
        heads=heads,
        block_p=block_p,
        loop=8 if any_row else 1,
        num_warps=num_warps,
        maxnreg=maxnreg,
    )


def _few_launch(kernel: str, policy: PrecisionPolicy, sizes: Sizes, batch: int) -> Launch:
    """The launch of few rows: many warps share a small tile of one head."""
    whole = max(16, triton.next_power_of_2(sizes["P"]))
    block_p = 16 if batch * sizes["H"] * sizes["P"] <= _FEW_SMALL else 32
    while sizes["P"] % block_p and block_p > 16:
        block_p //= 2
    alone = kernel == "step" and scales_heads(policy) and interpreted()
    if alone or sizes["P"] % block_p:  # in the interpreter programs of a head cannot wait
        block_p = whole
    # Registers for four programs a multiprocessor, or some would wait until others are done.
    many = batch * sizes["H"] * triton.cdiv(sizes["P"], block_p) > _FEW_SMALL // 16
    return Launch(block_p=block_p, num_warps=4, maxnreg=128 if many else None, eager=True)


def is_few(sizes: Sizes, batch: int) -> bool:
    """Whether a launch of so many rows waits for memory, not for bandwidth."""
    return batch * sizes["H"] * sizes["P"] <= _FEW


def tiles(sizes: Sizes, launch: Launch) -> int:
    """Tiles of one row's state."""
    runs = sizes["H"] // sizes["G"] * triton.cdiv(sizes["P"], launch.block_p)
    return sizes["G"] * triton.cdiv(runs, launch.heads)


def programs(tiles: int, launch: Launch, cursors: Cursors) -> int:
    """Programs that share the tiles of the rows that are due."""
    return triton.cdiv(cursors.slots.shape[0] * tiles, launch.loop)


def slots(sizes: Sizes) -> int:
    """Ring slots as tiles have them, in all kernels alike; products need at least 16."""
    return max(16, triton.next_power_of_2(sizes["L"]))


def width(sizes: Sizes, *copies: Quantized | None) -> int:
    """Columns of a state tile that suits all copies."""
    return max(tile_width(sizes["N"], reading(copy)) for copy in copies if copy is not None)


def reading(quantized: Quantized) -> Storage:
    """A storage that reads `quantized`; how it was rounded does not matter for that.

    Raises:
        ValueError: it has no kernels.
    """
    is_row_scaled = quantized.scale is not None and not isinstance(quantized.format, BlockFormat)
    storage = Storage(format=quantized.format, scale="row" if is_row_scaled else "none")
    refuse_unsupported(storage)
    return storage


def ring_storage(policy: PrecisionPolicy, ring: Mapping[str, Tensor]) -> Storage:
    """How x and B are kept in the ring.

    Raises:
        ValueError: it has scales, or is not what the policy says.
    """
    dtype = ring["x"].dtype
    storage = RING_FORMATS.get(dtype) if policy.ring == "input" else policy.ring
    if storage is None or storage.format.torch_dtype != dtype or ring["B"].dtype != dtype:
        raise ValueError(
            f"ring x, B are {dtype}, {ring['B'].dtype}; policy {policy.label} says {policy.ring}"
        )
    if storage.scale != "none":
        raise ValueError(f"ring {storage.label} has scales; there is no kernel for that")
    return storage


def precision(policy: PrecisionPolicy, a: torch.dtype, b: torch.dtype) -> str:
    """How a product is taken whose operands' values the dtypes a and b hold exactly.

    Raises:
        ValueError: the policy rounds operands.
    """
    check_operand(policy)
    return precision_of(a, b)


def dots(
    read: Quantized, ring: Mapping[str, Tensor], inputs: Mamba2Inputs, sizes: Sizes, launch: Launch
) -> str | None:
    """How a token's products with records and E2M1 codes are taken on tensor cores; None: they are
    not, as where codes have more bits.

    For BF16 records and tokens, whose products are exact, and programs of one warp.
    """
    is_exact = inputs.C.dtype == ring["B"].dtype == torch.bfloat16
    if not is_exact or launch.eager or launch.num_warps > 1:
        return None
    if blocks_of(reading(read), sizes["N"]) is None:
        return None
    return precision_of(torch.bfloat16, torch.bfloat16)


def check_operand(policy: PrecisionPolicy) -> None:
    """ValueError if the policy rounds the operands of products."""
    if policy.operand != "fp32":
        raise ValueError(f"operand {policy.operand!r} has no kernel, only 'fp32'")


def ring(tensors: Mapping[str, Tensor]) -> Ring:
    """Kernel argument for a ring whose slots are dense in themselves."""
    for name in ("x", "B", "dt"):
        if not tensors[name][0].is_contiguous():
            raise ValueError(f"ring {name} has strides {tensors[name].stride()} in a slot")
    if tensors["dt"].dtype != torch.float32:
        raise ValueError(f"ring dt is {tensors['dt'].dtype}, expected torch.float32")
    fields = [tensors[name] for name in ("x", "B", "dt")]
    return Ring(*map(as_codes, fields), *(tensor.stride(0) for tensor in fields))


def has_d_per_channel(inputs: Mamba2Inputs) -> bool:
    """Whether D is [H, P], not [H] or missing."""
    return inputs.D is not None and inputs.D.dim() == 2


def tokens(inputs: Mamba2Inputs) -> Tokens:
    """Kernel argument for inputs; a tensor whose heads are not dense is copied."""
    dense = [dense_heads(tensor) for tensor in (inputs.x, inputs.B_, inputs.C, inputs.dt)]
    D = None if inputs.D is None else inputs.D.contiguous()
    return Tokens(*dense, D, *strides(dense))


def sizes(
    state: Quantized,
    ring: Mapping[str, Tensor],
    cursors: Cursors,
    inputs: Mamba2Inputs | None = None,
    *,
    tokens: int = 0,
) -> Sizes:
    """H, P, G, N, L as kernel constants.

    Raises:
        ValueError: shapes or dtypes that disagree; names the tensor.
    """
    H, P, N = state.shape
    G, L = ring["B"].shape[1:3]
    slot_count, rows = state.data.shape[0], cursors.slots.shape[0]
    shapes = {
        "ring x": (ring["x"], (slot_count, H, L, P)),
        "ring B": (ring["B"], (slot_count, G, L, N)),
        "ring dt": (ring["dt"], (slot_count, H, L)),
    }
    shapes |= {name: (getattr(cursors, name), (slot_count,)) for name in Cursors._fields[1:]}
    shapes["arrivals"] = (cursors.arrivals, (slot_count, COUNTERS))
    if inputs is not None:
        shapes |= {
            "x": (inputs.x, (rows, tokens, H, P)),
            "dt": (inputs.dt, (rows, tokens, H)),
            "A": (inputs.A, (H,)),
            "B_": (inputs.B_, (rows, tokens, G, N)),
            "C": (inputs.C, (rows, tokens, G, N)),
        }
        if tuple(inputs.D.shape if inputs.D is not None else (H,)) not in ((H,), (H, P)):
            raise ValueError(f"D is {list(inputs.D.shape)}, expected [{H}] or [{H}, {P}]")
        if inputs.dt.dtype != torch.float32:
            raise ValueError(f"dt is {inputs.dt.dtype}, expected torch.float32")
    for name, (tensor, expected) in shapes.items():
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name} is {list(tensor.shape)}, expected {list(expected)}")
    return {"H": H, "P": P, "G": G, "N": N, "L": L}
