"""Block formats as data: small elements that share a scale, and the rules that pick it.

Owns the description and the named instances; the arithmetic is in `scaling`. Sources: OCP microscaling
1.0 (MXFP4, MXFP8), the published NVFP4 recipe and its public implementations, which disagree: the
fields below are what they disagree about.
"""

from dataclasses import dataclass, fields, replace

from replayssm.formats.number import E2M1, E4M3, E5M2, E8M0, NumberFormat

_CHOICES = {
    "tensor_scale_rule": ("encode", "decode"),
    "scale_rule": ("floor", "ceil", "even", "rceil"),
    "scale_axis": ("contracted", "rows"),
    "scale_max": (448, 256),
    "four_over_six_error": ("mse", "mae"),
    "zero_block_scale": (0.0, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Elements in blocks with a shared scale, and optionally an FP32 scale per head on top.

    Attributes:
        name: lowercase key, printed in labels and messages.
        element: format of the codes (E2M1, E4M3 or E5M2).
        block_size: elements per block.
        scale_format: E4M3 (NVFP4) or E8M0 (MX).
        scale_axis: "contracted" blocks along the last axis of [..., rows, cols], the one that readout sums
            over; "rows" along the axis before it.
        scale_rule: E8M0 only: how a block's amax becomes a power of two (OCP "floor", "ceil", "even",
            or "rceil": the smallest that does not clip).
        tensor_scale: whether an FP32 scale per head, from the head's amax, goes on top of the block scales.
        tensor_scale_rule: which of the two directions is computed and stored; the other is never formed.
            "encode": S = scale_max * 6 / amax, "decode": D = amax / (scale_max * 6).
        scale_max: the block scale that the head's largest block gets. 256 leaves E4M3 room above it.
        scale_floor: smallest block scale (0 for none).
        zero_block_scale: what an all-zero block stores, before the floor.
        four_over_six: try a second scale per block that maps its amax to 4 instead of 6, keep the better.
        four_over_six_error: what "better" means: sum of squared ("mse") or absolute ("mae") errors.
    """

    name: str
    element: NumberFormat
    block_size: int
    scale_format: NumberFormat
    scale_axis: str = "contracted"
    scale_rule: str = "floor"
    tensor_scale: bool = False
    tensor_scale_rule: str = "encode"
    scale_max: int = 448
    scale_floor: float = 0.0
    zero_block_scale: float = 0.0
    four_over_six: bool = False
    four_over_six_error: str = "mse"

    def __post_init__(self):
        for field, allowed in _CHOICES.items():
            if getattr(self, field) not in allowed:
                raise ValueError(
                    f"{self.name}: {field} {getattr(self, field)!r} is not one of "
                    + ", ".join(map(str, allowed))
                )
        if self.element not in (E2M1, E4M3, E5M2):
            raise ValueError(f"{self.name}: element {self.element.name} is not e2m1, e4m3 or e5m2")
        if self.scale_format not in (E4M3, E8M0):
            raise ValueError(f"{self.name}: scale_format {self.scale_format.name} is not e4m3 or e8m0")
        if self.block_size < 2 or self.block_size & (self.block_size - 1):
            raise ValueError(f"{self.name}: block_size {self.block_size} is not a power of two >= 2")
        if not 0 <= self.scale_floor <= self.scale_max:
            raise ValueError(f"{self.name}: scale_floor {self.scale_floor} is not in [0, scale_max]")
        # A field that the other kind of scale does not read must keep its default: no silent settings.
        unread = (
            ("tensor_scale", "tensor_scale_rule", "scale_max", "scale_floor", "zero_block_scale",
             "four_over_six", "four_over_six_error")
            if self.scale_format is E8M0
            else ("scale_rule",) + (() if self.tensor_scale else ("tensor_scale_rule",))
            + (() if self.four_over_six else ("four_over_six_error",))
        )  # fmt: skip
        for field in fields(self):
            if field.name in unread and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{self.name}: {field.name} has no meaning here (scale_format "
                    f"{self.scale_format.name}, tensor_scale {self.tensor_scale}, "
                    f"four_over_six {self.four_over_six})"
                )
        if self.scale_format is E4M3 and (self.element is not E2M1 or not self.tensor_scale):
            raise ValueError(f"{self.name}: e4m3 block scales need e2m1 elements and a tensor scale")


NVFP4 = BlockFormat(
    name="nvfp4", element=E2M1, block_size=16, scale_format=E4M3, tensor_scale=True
)
NVFP4_46 = replace(NVFP4, name="nvfp4-46", four_over_six=True, scale_max=256)
MXFP4 = BlockFormat(name="mxfp4", element=E2M1, block_size=32, scale_format=E8M0)
MXFP8 = BlockFormat(name="mxfp8", element=E4M3, block_size=32, scale_format=E8M0)

# How two public quantisers pick NVFP4 scales; for comparison, not for use. Their results for a non-finite
# amax or an all-zero head (NaN scales) are not reproduced: that input is refused or well-defined here.
NVFP4_MODELOPT = replace(
    NVFP4, name="nvfp4-modelopt", tensor_scale_rule="decode", scale_floor=2.0**-9, zero_block_scale=1.0
)
NVFP4_TORCHAO = replace(
    NVFP4, name="nvfp4-torchao", tensor_scale_rule="decode", scale_floor=2.0**-6
)

BLOCK_FORMATS = {f.name: f for f in (NVFP4, NVFP4_46, MXFP4, MXFP8, NVFP4_MODELOPT, NVFP4_TORCHAO)}
