"""Storage: everything that is needed to write and read one tensor, with its name and its size.

Owns the pairing of a format with rounding, saturation and scales, the short names of the pairs in
use, their YAML mapping and their bytes. Knows not what the tensor is (`policy` does).
"""

import difflib
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from torch import Tensor

from replayssm.formats.block import BLOCK_FORMATS, MXFP4, MXFP8, NVFP4, NVFP4_46, BlockFormat
from replayssm.formats.codec import dequantize, quantize
from replayssm.formats.number import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    FP16,
    FP32,
    INT8,
    NUMBER_FORMATS,
    NumberFormat,
)
from replayssm.formats.philox import random_bits
from replayssm.formats.quantized import Quantized
from replayssm.formats.rounding import NEAREST_EVEN, Rounding, stochastic

FORMATS: dict[str, NumberFormat | BlockFormat] = NUMBER_FORMATS | BLOCK_FORMATS


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How one tensor is written and read.

    Attributes:
        format: number format, or block format.
        rounding: how elements round on write.
        saturate: finite overflow becomes +-max (True) or Inf/NaN; scaled formats saturate.
        scale: "none", or "row" for an FP32 scale per (head, row), amax / max_value: 8-bit formats.
    """

    format: NumberFormat | BlockFormat
    rounding: Rounding = NEAREST_EVEN
    saturate: bool = True
    scale: str = "none"

    def __post_init__(self):
        if self.scale not in ("none", "row"):
            raise ValueError(f"scale {self.scale!r} is not one of none, row")
        name = self.format.name
        if isinstance(self.format, BlockFormat):
            if self.scale != "none":
                raise ValueError(f"{name} brings its own scales; scale must be none")
            if not self.saturate:
                raise ValueError(f"{name} saturates; saturate must be true")
            return
        if self.format in (E2M1, E8M0):
            raise ValueError(f"{name} stores no state by itself; use a block format made of it")
        if self.scale == "row" and self.format not in (E4M3, E5M2, INT8):
            raise ValueError(f"row scales go with e4m3, e5m2 and int8, not {name}")
        if not self.saturate and (self.scale == "row" or not self.format.has_nan):
            raise ValueError(f"{name} with scale {self.scale} saturates; saturate must be true")
        if self.format == FP32 and self.rounding != NEAREST_EVEN:
            raise ValueError(f"fp32 never rounds; {self.rounding.mode} rounding has no meaning")

    @property
    def code_bits(self) -> int:
        """Bits of one element's code; those of scales come on top."""
        fmt = self.format
        return (fmt.element if isinstance(fmt, BlockFormat) else fmt).bits

    @property
    def needs_random_bits(self) -> bool:
        """Whether `write` must be given random bits."""
        return self.rounding.mode == "stochastic"

    def draw_bits(
        self,
        shape: Sequence[int],
        *,
        seed: Tensor,
        layer: int,
        stream: int,
        flush_index: Tensor,
        sequence: Tensor,
    ) -> Tensor | None:
        """Random bits for a write, or None if it needs none; arguments of `philox.random_bits`."""
        if not self.needs_random_bits:
            return None
        return random_bits(
            shape,
            seed=seed,
            layer=layer,
            stream=stream,
            flush_index=flush_index,
            sequence=sequence,
            bits=self.rounding.bits,
            rounds=self.rounding.philox_rounds,
        )

    def write(self, x: Tensor, random_bits: Tensor | None = None) -> Quantized:
        """Round and pack [B, ..., R, C] values; see `codec.quantize`."""
        return quantize(
            x,
            self.format,
            rounding=self.rounding,
            random_bits=random_bits,
            saturate=self.saturate,
            scale=self.scale,
        )

    def read(self, q: Quantized) -> Tensor:
        """The FP32 values that `q` stands for; a fresh tensor."""
        return dequantize(q)

    def bytes_per_matrix(self, rows: int, cols: int) -> int:
        """Stored bytes of one [rows, cols] matrix, scales included."""
        if isinstance(self.format, NumberFormat):
            return rows * cols * self.format.bits // 8 + (4 * rows if self.scale == "row" else 0)
        if self.format.scale_axis == "rows":
            rows, cols = cols, rows
        codes = -(-cols * self.format.element.bits // 8)
        scales = -(-cols // self.format.block_size)
        return rows * (codes + scales) + (4 if self.format.tensor_scale else 0)

    def bytes_per_element(self, rows: int, cols: int) -> float:
        """Stored bytes per element of a [rows, cols] matrix, scales included.

        FP16 2, row-scaled 8-bit 1 + 4/cols, NVFP4 1/2 + 1/16 + 4/(rows * cols), MXFP4 1/2 + 1/32.
        """
        return self.bytes_per_matrix(rows, cols) / (rows * cols)

    @property
    def label(self) -> str:
        """Short name if there is one (`STORAGES`), else the format's name, "~" and a digest."""
        for name, storage in STORAGES.items():
            if storage == self:
                return name
        return f"{self.format.name}~{digest(self.to_dict())[:6]}"

    def describe(self) -> str:
        """One phrase: format, scales, rounding, overflow."""
        fmt = self.format
        if isinstance(fmt, BlockFormat):
            what = f"{fmt.name} ({fmt.describe()})"
        else:
            what = fmt.name + (" with an fp32 scale per row" if self.scale == "row" else "")
        if fmt == FP32:
            return f"{what}, exact"
        how = self.rounding.mode.replace("_", " ")
        if self.needs_random_bits:
            how += f" ({self.rounding.bits} bits, Philox {self.rounding.philox_rounds})"
        return f"{what}, {how}, {'saturating' if self.saturate else 'overflowing'}"

    def to_dict(self) -> dict:
        """YAML mapping with every field; `storage_from` is the inverse."""
        fmt = self.format.name
        if FORMATS.get(fmt) != self.format:
            if isinstance(self.format, NumberFormat):
                raise ValueError(f"{fmt} is not a known number format and has no YAML form")
            fmt = self.format.to_dict()
        return {
            "format": fmt,
            "rounding": self.rounding.mode,
            "bits": self.rounding.bits,
            "philox_rounds": self.rounding.philox_rounds,
            "saturate": self.saturate,
            "scale": self.scale,
        }


_SR = stochastic()
STORAGES = {
    "fp32": Storage(format=FP32),
    "fp16": Storage(format=FP16),
    "fp16-sr": Storage(format=FP16, rounding=_SR),
    "bf16": Storage(format=BF16),
    "bf16-sr": Storage(format=BF16, rounding=_SR),
    "fp8": Storage(format=E4M3, scale="row"),
    "fp8-sr": Storage(format=E4M3, scale="row", rounding=_SR),
    "fp8-e5m2": Storage(format=E5M2, scale="row"),
    "fp8-e5m2-sr": Storage(format=E5M2, scale="row", rounding=_SR),
    "int8": Storage(format=INT8, scale="row"),
    "int8-sr": Storage(format=INT8, scale="row", rounding=_SR),
    "nvfp4": Storage(format=NVFP4),
    "nvfp4-sr": Storage(format=NVFP4, rounding=_SR),
    "nvfp4-46": Storage(format=NVFP4_46),
    "mxfp4": Storage(format=MXFP4),
    "mxfp8": Storage(format=MXFP8),
}


def storage_from(value: str | dict | Storage) -> Storage:
    """A storage from its short name or its YAML mapping.

    A mapping has `format` (a name, or a mapping with the fields of `BlockFormat`) and optionally
    `rounding`, `bits` (16 if rounding is stochastic), `philox_rounds`, `saturate`, `scale`.

    Raises:
        ValueError: unknown name (with the nearest known one), unknown key, impossible combination.
    """
    if isinstance(value, Storage):
        return value
    if isinstance(value, str):
        return STORAGES[known(value, STORAGES, "storage")]
    refuse_unknown_keys(value, (*(f.name for f in fields(Storage)), *_ROUNDING_KEYS), "storage")
    if "format" not in value:
        raise ValueError("storage needs a format")
    mode = value.get("rounding", "nearest_even")
    rounding = Rounding(
        mode=mode,
        bits=value.get("bits", 16 if mode == "stochastic" else None),
        philox_rounds=value.get("philox_rounds", 10),
    )
    saturate = value.get("saturate", True)
    if not isinstance(saturate, bool):
        raise ValueError(f"saturate {saturate!r} is not one of true, false")
    return Storage(
        format=_format_from(value["format"]),
        rounding=rounding,
        saturate=saturate,
        scale=value.get("scale", "none"),
    )


_ROUNDING_KEYS = ("bits", "philox_rounds")


def _format_from(value: str | dict) -> NumberFormat | BlockFormat:
    """A format from its name, or a block format from its fields.

    Fields left out come from the named format `name`, if there is one.
    """
    if not isinstance(value, dict):
        return FORMATS[known(value, FORMATS, "format")]
    refuse_unknown_keys(value, [f.name for f in fields(BlockFormat)], "block format")
    value = dict(value)
    for key in ("element", "scale_format"):
        if key in value:
            value[key] = NUMBER_FORMATS[known(value[key], NUMBER_FORMATS, key)]
    if value.get("name") in BLOCK_FORMATS:
        return replace(BLOCK_FORMATS[value["name"]], **value)
    missing = [key for key in ("name", "element", "block_size", "scale_format") if key not in value]
    if missing:
        raise ValueError(f"block format {value.get('name')!r} needs {', '.join(missing)}")
    return BlockFormat(**value)


def known(name: object, table: Iterable[str], what: str) -> str:
    """`name` if `table` has it, otherwise a ValueError with the nearest and all known names."""
    names = list(table)
    if name in names:
        return str(name)
    near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    raise ValueError(f"unknown {what} {name!r}{hint} known: {', '.join(names)}")


def refuse_unknown_keys(mapping: object, allowed: Iterable[str], what: str) -> None:
    """ValueError unless `mapping` is a dict whose keys are all in `allowed`."""
    allowed = list(allowed)
    if not isinstance(mapping, dict):
        raise ValueError(f"{what} {mapping!r} is neither a name nor a mapping")
    for key in mapping:
        if key not in allowed:
            raise ValueError(f"unknown {what} key {key!r}; allowed: {', '.join(allowed)}")


def digest(mapping: dict) -> str:
    """SHA-256 (hex) of a mapping in canonical JSON."""
    text = json.dumps(mapping, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
