"""Block formats as data: small elements that share a scale, and the rules that pick it.

Owns the description and the named instances; the arithmetic is in `scaling`. Sources: OCP
microscaling 1.0 (MXFP4, MXFP8), the published NVFP4 recipe and its public implementations, which
disagree: the fields below are what they disagree about.
"""

from dataclasses import dataclass, fields, replace

from replayssm.formats.number import E2M1, E4M3, E5M2, E8M0, NumberFormat

_CHOICES = {
    "tensor_scale": (True, False),
    "tensor_scale_rule": ("encode", "decode"),
    "scale_rule": ("floor", "ceil", "even", "rceil"),
    "scale_axis": ("contracted", "rows"),
    "scale_max": (448, 256),
    "four_over_six": (True, False),
    "four_over_six_error": ("mse", "mae"),
    "zero_block_scale": (0.0, 1.0),
}
_ONLY_WITH_E4M3_SCALES = (
    "tensor_scale",
    "tensor_scale_rule",
    "scale_max",
    "scale_floor",
    "zero_block_scale",
    "four_over_six",
    "four_over_six_error",
)


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Elements in blocks with a shared scale, and an FP32 scale per matrix on top in NVFP4.

    Attributes:
        name: lowercase key, printed in labels and messages.
        element: format of the codes: E2M1, E4M3 or E5M2.
        block_size: elements per block, a power of two.
        scale_format: format of the block scale: E4M3 (NVFP4) or E8M0 (MX).
        scale_axis: "contracted" blocks along the last axis of a matrix [rows, cols], the one that
            readout sums over; "rows" along the other.
        scale_rule: how a block's amax becomes a power of two, E8M0 only: "floor", "ceil", "even" as
            in OCP, or "rceil", the smallest power that does not clip.
        tensor_scale: whether a matrix has an FP32 scale, from its amax, above the block scales.
            E4M3 block scales need one.
        tensor_scale_rule: which direction is computed and stored; the other is never formed.
            "encode": S = scale_max * 6 / amax. "decode": D = amax / (scale_max * 6).
        scale_max: block scale of the matrix's largest block. 256 leaves room above it in E4M3.
        scale_floor: smallest block scale, 0 for none.
        zero_block_scale: what a block scale of 0 is replaced by, before the floor.
        four_over_six: try a second scale per block, under which its amax becomes 4 instead of 6,
            and keep the better.
        four_over_six_error: what "better" means: the sum of squared ("mse") or absolute ("mae")
            errors of the block.
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
            self._require(
                getattr(self, field) in allowed, field, "one of " + ", ".join(map(str, allowed))
            )
        self._require(self.element in (E2M1, E4M3, E5M2), "element", "one of e2m1, e4m3, e5m2")
        self._require(self.scale_format in (E4M3, E8M0), "scale_format", "one of e4m3, e8m0")
        power_of_two = isinstance(self.block_size, int) and self.block_size.bit_count() == 1
        self._require(power_of_two and self.block_size > 1, "block_size", "a power of two above 1")
        self._require(0 <= self.scale_floor <= self.scale_max, "scale_floor", "in [0, scale_max]")
        # A field that has no effect must keep its default: no setting is silently ignored.
        if self.scale_format == E8M0:
            self._require_default(*_ONLY_WITH_E4M3_SCALES)
            return
        self._require_default("scale_rule")
        self._require(self.element == E2M1, "element", "e2m1 where block scales are e4m3")
        self._require(self.tensor_scale, "tensor_scale", "true where block scales are e4m3")
        if not self.four_over_six:
            self._require_default("four_over_six_error")

    def _require(self, holds: bool, field: str, allowed: str) -> None:
        if not holds:
            value = getattr(self, field)
            value = value.name if isinstance(value, NumberFormat) else value
            raise ValueError(f"block format {self.name!r}: {field} {value!r} is not {allowed}")

    def _require_default(self, *names: str) -> None:
        for field in fields(self):
            if field.name in names:
                is_default = getattr(self, field.name) == field.default
                self._require(is_default, field.name, f"{field.default!r}, the only value here")

    def to_dict(self) -> dict:
        """YAML mapping with every field, formats by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"element": self.element.name, "scale_format": self.scale_format.name}

    def describe(self) -> str:
        """One phrase: elements, blocks, scales."""
        rule = f", {self.scale_rule} rule" if self.scale_format == E8M0 else ""
        text = f"{self.element.name} in blocks of {self.block_size}, axis {self.scale_axis}"
        text += f", {self.scale_format.name} scale per block{rule}"
        text += ", fp32 scale per head" if self.tensor_scale else ""
        return text + (", four-over-six" if self.four_over_six else "")


NVFP4 = BlockFormat(name="nvfp4", element=E2M1, block_size=16, scale_format=E4M3, tensor_scale=True)
NVFP4_46 = replace(NVFP4, name="nvfp4-46", four_over_six=True, scale_max=256)
MXFP4 = BlockFormat(name="mxfp4", element=E2M1, block_size=32, scale_format=E8M0)
MXFP8 = BlockFormat(name="mxfp8", element=E4M3, block_size=32, scale_format=E8M0)

# How two public quantisers pick NVFP4 scales, for comparison. What they make of a non-finite amax
# or an all-zero matrix (NaN scales) is not reproduced: here the one is refused, the other reads as
# zero.
NVFP4_MODELOPT = replace(
    NVFP4,
    name="nvfp4-modelopt",
    tensor_scale_rule="decode",
    scale_floor=2.0**-9,
    zero_block_scale=1.0,
)
NVFP4_TORCHAO = replace(
    NVFP4, name="nvfp4-torchao", tensor_scale_rule="decode", scale_floor=2.0**-6
)

BLOCK_FORMATS = {f.name: f for f in (NVFP4, NVFP4_46, MXFP4, MXFP8, NVFP4_MODELOPT, NVFP4_TORCHAO)}
