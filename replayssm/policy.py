"""Precision policies: which number format each stored tensor of a layer has, and what that costs.

Owns `Storage` (how one tensor is written and read), `PrecisionPolicy` (checkpoint, read copy, ring and what
the update reads), the policy grammar, the named presets and the byte model. Knows no recurrence
arithmetic, no cache and no model. Imports torch through `formats`.

Grammar (no spaces):

    policy  = storage [ "+" storage ] [ "@" ring length ] { ":" key "=" value }
    key     = "update" (checkpoint, read) | "operand" (fp32, bf16, tf32) | "ring" (input, or a storage)

`A+B` keeps the checkpoint in A and a separate read copy, from which outputs are read, in B. `A` alone keeps one
copy for both jobs. Example: `fp16-sr+nvfp4@32:update=read`.
"""

import difflib
import hashlib
import json
from dataclasses import dataclass, fields, replace

from torch import Tensor

from replayssm.formats.block import BLOCK_FORMATS, MXFP4, MXFP8, NVFP4, NVFP4_46, BlockFormat
from replayssm.formats.codec import Quantized, dequantize, quantize
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
from replayssm.formats.rounding import NEAREST_EVEN, Rounding, stochastic

# Philox streams of the storages that round at the same flush of the same layer.
CHECKPOINT_STREAM = 0
READ_COPY_STREAM = 1

DEFAULT_RING_LEN = 16


@dataclass(frozen=True, kw_only=True)
class Storage:
    """All that is needed to write and read one tensor.

    Attributes:
        format: number format, or block format.
        rounding: how elements round on write.
        saturate: finite overflow becomes +-max (True) or Inf/NaN; scaled formats saturate.
        scale: "none", or "row" for an FP32 scale per (head, row), amax / max_value (8-bit formats).
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
            raise ValueError(f"{name} stores no state by itself; use a block format that contains it")
        if self.scale == "row" and self.format not in (E4M3, E5M2, INT8):
            raise ValueError(f"row scales go with e4m3, e5m2 and int8, not {name}")
        if not self.saturate and (self.scale == "row" or not self.format.has_nan):
            raise ValueError(f"{name} with scale {self.scale} saturates; saturate must be true")
        if self.format is FP32 and self.rounding != NEAREST_EVEN:
            raise ValueError(f"fp32 does not round; rounding must be nearest_even, not {self.rounding.mode}")

    @property
    def needs_random_bits(self) -> bool:
        """Whether `write` must be given random bits."""
        return self.rounding.mode == "stochastic"

    def draw_bits(
        self,
        shape: tuple[int, int, int, int],
        *,
        seed: Tensor,
        layer: int,
        stream: int,
        flush_index: Tensor,
        sequence: Tensor,
    ) -> Tensor | None:
        """Random bits for a write of this storage, or None if it needs none; see `philox.random_bits`."""
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
        """Round and pack [B, ..., R, C] float32 values; see `codec.quantize`."""
        return quantize(
            x,
            self.format,
            rounding=self.rounding,
            random_bits=random_bits,
            saturate=self.saturate,
            scale=self.scale,
        )

    def read(self, q: Quantized) -> Tensor:
        """The FP32 values that `q` stands for."""
        return dequantize(q)

    def bytes_per_element(self, rows: int, cols: int) -> float:
        """Stored bytes per element of a head's [rows, cols] matrix, scales included."""
        return self.bytes_per_matrix(rows, cols) / (rows * cols)

    def bytes_per_matrix(self, rows: int, cols: int) -> int:
        """Stored bytes of one head's [rows, cols] matrix, scales included."""
        if isinstance(self.format, NumberFormat):
            return rows * cols * self.format.bits // 8 + (4 * rows if self.scale == "row" else 0)
        if self.format.scale_axis == "rows":
            rows, cols = cols, rows
        per_row = -(-cols * self.format.element.bits // 8) + -(-cols // self.format.block_size)
        return rows * per_row + (4 if self.format.tensor_scale else 0)

    @property
    def label(self) -> str:
        """Short name: the grammar's if there is one, else the format's with a digest after "~"."""
        for name, storage in STORAGES.items():
            if storage == self:
                return name
        return f"{self.format.name}~{_digest(self.to_dict())[:6]}"

    def to_dict(self) -> dict:
        """YAML mapping with every field; the inverse of `storage_from`."""
        fmt = self.format.name
        if BLOCK_FORMATS.get(fmt) != self.format and NUMBER_FORMATS.get(fmt) != self.format:
            fmt = {
                f.name: getattr(value, "name", value) if isinstance(value, NumberFormat) else value
                for f in fields(self.format)
                for value in (getattr(self.format, f.name),)
            }
        return {
            "format": fmt,
            "rounding": self.rounding.mode,
            "bits": self.rounding.bits,
            "philox_rounds": self.rounding.philox_rounds,
            "saturate": self.saturate,
            "scale": self.scale,
        }

    def describe(self) -> str:
        """One phrase: format, scales, rounding."""
        fmt = self.format
        if isinstance(fmt, BlockFormat):
            what = f"{fmt.name}: {fmt.element.name} in blocks of {fmt.block_size} along the "
            what += f"{fmt.scale_axis} axis, {fmt.scale_format.name} block scale"
            what += ", fp32 scale per head" if fmt.tensor_scale else ""
            what += ", four-over-six" if fmt.four_over_six else ""
        else:
            what = fmt.name + (", fp32 scale per (head, row)" if self.scale == "row" else "")
        if fmt is FP32:
            return what + ", exact"
        how = self.rounding.mode.replace("_", "-")
        if self.needs_random_bits:
            how += f" ({self.rounding.bits} bits, Philox {self.rounding.philox_rounds})"
        return f"{what}, {how}" + ("" if self.saturate else ", overflow to Inf/NaN")


def _named_storages() -> dict[str, Storage]:
    sr = stochastic()
    return {
        "fp32": Storage(format=FP32),
        "fp16": Storage(format=FP16),
        "fp16-sr": Storage(format=FP16, rounding=sr),
        "bf16": Storage(format=BF16),
        "bf16-sr": Storage(format=BF16, rounding=sr),
        "fp8": Storage(format=E4M3, scale="row"),
        "fp8-sr": Storage(format=E4M3, scale="row", rounding=sr),
        "fp8-e5m2": Storage(format=E5M2, scale="row"),
        "fp8-e5m2-sr": Storage(format=E5M2, scale="row", rounding=sr),
        "int8": Storage(format=INT8, scale="row"),
        "int8-sr": Storage(format=INT8, scale="row", rounding=sr),
        "nvfp4": Storage(format=NVFP4),
        "nvfp4-sr": Storage(format=NVFP4, rounding=sr),
        "nvfp4-46": Storage(format=NVFP4_46),
        "mxfp4": Storage(format=MXFP4),
        "mxfp8": Storage(format=MXFP8),
    }


STORAGES = _named_storages()


def storage_from(value: "str | dict | Storage") -> Storage:
    """A storage from its short name or its YAML mapping; unknown keys and names are refused.

    A mapping has `format` (a name, or a mapping with the fields of `BlockFormat`) and optionally `rounding`,
    `bits`, `philox_rounds`, `saturate`, `scale`.
    """
    if isinstance(value, Storage):
        return value
    if isinstance(value, str):
        return STORAGES[_known(value, STORAGES, "storage")]
    _refuse_unknown_keys(
        value, ("format", "rounding", "bits", "philox_rounds", "saturate", "scale"), "storage"
    )
    if "format" not in value:
        raise ValueError("storage needs a format")
    fmt = value["format"]
    if isinstance(fmt, dict):
        fmt = _block_format_from(fmt)
    else:
        formats = NUMBER_FORMATS | BLOCK_FORMATS
        fmt = formats[_known(fmt, formats, "format")]
    mode = value.get("rounding", "nearest_even")
    bits = value.get("bits", 16 if mode == "stochastic" else None)
    rounding = Rounding(mode=mode, bits=bits, philox_rounds=value.get("philox_rounds", 10))
    return Storage(
        format=fmt,
        rounding=rounding,
        saturate=_boolean(value.get("saturate", True), "saturate"),
        scale=value.get("scale", "none"),
    )


def _block_format_from(mapping: dict) -> BlockFormat:
    """A block format from its fields; fields left out are taken from the named format `name`, if there is one."""
    names = [f.name for f in fields(BlockFormat)]
    _refuse_unknown_keys(mapping, names, "block format")
    mapping = dict(mapping)
    for key in ("element", "scale_format"):
        if key in mapping:
            mapping[key] = NUMBER_FORMATS[_known(mapping[key], NUMBER_FORMATS, key)]
    base = BLOCK_FORMATS.get(mapping.get("name"))
    if base is not None:
        return replace(base, **mapping)
    missing = [key for key in ("name", "element", "block_size", "scale_format") if key not in mapping]
    if missing:
        raise ValueError(f"block format {mapping.get('name')!r} needs {', '.join(missing)}")
    return BlockFormat(**mapping)


@dataclass(frozen=True, kw_only=True)
class StateGeometry:
    """Sizes of one recurrent layer, as far as bytes depend on them.

    Attributes:
        recurrence: "mamba2" or "gated_delta".
        heads: state matrices per layer (H; HV for the delta rule).
        rows, cols: one state matrix, value axis first ([P, N]; [V, K]).
        key_groups: groups that share B and C (G), or key heads (HK).
        input_bytes: bytes of one activation element, 2 for bf16.
    """

    recurrence: str
    heads: int
    rows: int
    cols: int
    key_groups: int
    input_bytes: int = 2

    def __post_init__(self):
        if self.recurrence not in ("mamba2", "gated_delta"):
            raise ValueError(f"recurrence {self.recurrence!r} is not one of mamba2, gated_delta")


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """What is stored in which format, and which copy the update reads.

    Attributes:
        checkpoint: the state as of the last flush, written once per flush.
        read_copy: a second copy of the same FP32 state that outputs read; None: they read the checkpoint.
        ring: storage of the raw inputs in the ring, or "input": as they arrive.
        update_source: what the folded correction of a delta rule is computed from: the "checkpoint", or what
            outputs "read". Needs a read copy to be a choice; without effect in Mamba-2.
        operand: precision of the operands of replay products; accumulation is FP32.
        ring_len: ring capacity L in tokens; a flush every L tokens.
    """

    checkpoint: Storage
    read_copy: Storage | None = None
    ring: "Storage | str" = "input"
    update_source: str = "checkpoint"
    operand: str = "fp32"
    ring_len: int = DEFAULT_RING_LEN

    def __post_init__(self):
        if self.update_source not in ("checkpoint", "read"):
            raise ValueError(f"update_source {self.update_source!r} is not one of checkpoint, read")
        if self.update_source == "read" and self.read_copy is None:
            raise ValueError("update_source 'read' needs a read copy (A+B); without one both are the same")
        if self.operand not in ("fp32", "bf16", "tf32"):
            raise ValueError(f"operand {self.operand!r} is not one of fp32, bf16, tf32")
        if type(self.ring_len) is not int or self.ring_len < 1:
            raise ValueError(f"ring length {self.ring_len!r} is not an integer of at least 1")
        if isinstance(self.ring, Storage):
            if isinstance(self.ring.format, BlockFormat) or self.ring.needs_random_bits:
                raise ValueError(
                    f"ring {self.ring.label} is not possible: ring entries are number formats rounded "
                    "deterministically"
                )
        elif self.ring != "input":
            raise ValueError(f"ring {self.ring!r} is neither 'input' nor a storage")

    @property
    def read_storage(self) -> Storage:
        """What outputs are read from."""
        return self.read_copy or self.checkpoint

    @property
    def label(self) -> str:
        """The grammar's spelling, defaults left out. Parses back unless a storage in it has no name ("~")."""
        label = self.checkpoint.label
        if self.read_copy is not None:
            label += f"+{self.read_copy.label}"
        if self.ring_len != DEFAULT_RING_LEN:
            label += f"@{self.ring_len}"
        if self.update_source != "checkpoint":
            label += f":update={self.update_source}"
        if self.operand != "fp32":
            label += f":operand={self.operand}"
        if self.ring != "input":
            label += f":ring={self.ring.label}"
        return label

    @property
    def digest(self) -> str:
        """12 hex digits that differ whenever any field of the policy does."""
        return _digest(self.to_dict())[:12]

    def to_dict(self) -> dict:
        """YAML mapping with every field."""
        return {
            "checkpoint": self.checkpoint.to_dict(),
            "read_copy": None if self.read_copy is None else self.read_copy.to_dict(),
            "ring": self.ring if isinstance(self.ring, str) else self.ring.to_dict(),
            "update_source": self.update_source,
            "operand": self.operand,
            "ring_len": self.ring_len,
        }

    @classmethod
    def from_dict(cls, mapping: dict) -> "PrecisionPolicy":
        """Inverse of `to_dict`; only `checkpoint` is required, storages may be given by name."""
        _refuse_unknown_keys(mapping, [f.name for f in fields(cls)], "policy")
        if "checkpoint" not in mapping:
            raise ValueError("policy needs a checkpoint")
        mapping = dict(mapping)
        for key in ("checkpoint", "read_copy", "ring"):
            value = mapping.get(key)
            if value is not None and not (key == "ring" and value == "input"):
                mapping[key] = storage_from(value)
        return cls(**mapping)

    def bytes_per_state_element(self, geometry: StateGeometry) -> float:
        """Memory per state element: checkpoint plus read copy, scales included."""
        stored = [self.checkpoint] + ([self.read_copy] if self.read_copy else [])
        return sum(s.bytes_per_element(geometry.rows, geometry.cols) for s in stored)

    def bytes_per_token(self, geometry: StateGeometry, ring_len: int | None = None) -> float:
        """Bytes one layer moves per decoded token of one sequence, averaged over a ring cycle.

            read + (L - 1)/2 * replayed + written + fold_only + flush/L

        read: the state that outputs read, every token; replayed: the ring record fields that every token of the
        cycle reads back, on average (L - 1)/2 records; written: one whole record; fold_only: fields that
        only a flush reads (v and beta of a delta rule with a separate read copy and update_source
        "checkpoint"), L records once per cycle; flush: checkpoint write, plus read-copy write and
        checkpoint read if there is a read copy (without one, the flush step's output has read the checkpoint).
        Inputs, outputs, gates and weights are not counted: they are the same for every policy.
        """
        L = self.ring_len if ring_len is None else ring_len
        g = geometry
        state = {s: g.heads * s.bytes_per_matrix(g.rows, g.cols) for s in (self.checkpoint, self.read_storage)}
        flush = state[self.checkpoint]
        if self.read_copy is not None:
            flush += state[self.checkpoint] + state[self.read_copy]
        replayed, fold_only = self._record_bytes(g)
        written = replayed + fold_only
        return (
            state[self.read_storage] + (L - 1) / 2 * replayed + written + fold_only + flush / L
        )

    def _record_bytes(self, g: StateGeometry) -> tuple[int, int]:
        """Bytes of one ring record: fields read at every token, fields read at a flush only."""

        def raw(heads: int, width: int) -> int:
            if self.ring == "input":
                return heads * width * g.input_bytes
            return heads * self.ring.bytes_per_matrix(1, width)

        if g.recurrence == "mamba2":
            return raw(g.heads, g.rows) + raw(g.key_groups, g.cols) + 4 * g.heads, 0
        replayed = raw(g.key_groups, g.cols) + 4 * g.heads + 4 * g.heads * g.rows
        separate = self.read_copy is not None and self.update_source == "checkpoint"
        return replayed, raw(g.heads, g.rows) + 4 * g.heads if separate else 0

    def describe(self) -> list[str]:
        """What rounds where, one line per stored tensor and choice."""
        ring = "as the inputs arrive" if self.ring == "input" else self.ring.describe()
        lines = [f"checkpoint: {self.checkpoint.describe()}; once every {self.ring_len} tokens"]
        if self.read_copy is None:
            lines.append("outputs read: the checkpoint")
        else:
            lines.append(
                f"outputs read: a copy, {self.read_copy.describe()}; "
                "from the same FP32 state at the same flush"
            )
            lines.append(f"folded correction (delta rule): from the {_SOURCE[self.update_source]}")
        lines.append(f"ring: {ring}")
        lines.append(f"replay products: {self.operand} operands, FP32 accumulation")
        return lines


_SOURCE = {
    "checkpoint": "checkpoint and raw inputs; a read copy's error never enters the state",
    "read": "state that was read; a read copy's error enters the checkpoint",
}


def parse_policy(text: str) -> PrecisionPolicy:
    """A policy from its label; see the module docstring for the grammar.

    Raises:
        ValueError: naming what was not understood and the nearest or the allowed values.
    """
    head, *options = text.split(":")
    settings = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in _OPTIONS:
            raise ValueError(f"policy {text!r}: option {key!r} is not one of {', '.join(_OPTIONS)}")
        if _OPTIONS[key] in settings:
            raise ValueError(f"policy {text!r}: option {key!r} is given twice")
        settings[_OPTIONS[key]] = value
    if settings.get("ring", "input") != "input":
        settings["ring"] = _named_storage(settings["ring"], text)
    storages, at, length = head.partition("@")
    if at:
        if not length.isascii() or not length.isdigit():
            raise ValueError(f"policy {text!r}: ring length {length!r} is not an integer of at least 1")
        settings["ring_len"] = int(length)
    parts = storages.split("+")
    if len(parts) > 2:
        raise ValueError(f"policy {text!r}: more than one '+'; it is CHECKPOINT+READ_COPY")
    copies = [_named_storage(part, text) for part in parts]
    read_copy = copies[1] if len(copies) == 2 else None
    try:
        return PrecisionPolicy(checkpoint=copies[0], read_copy=read_copy, **settings)
    except ValueError as error:
        raise ValueError(f"policy {text!r}: {error}") from None


_OPTIONS = {"update": "update_source", "operand": "operand", "ring": "ring"}


def _named_storage(name: str, text: str) -> Storage:
    if "~" in name:
        raise ValueError(
            f"policy {text!r}: {name!r} names a storage by digest; spell it out as a YAML mapping"
        )
    try:
        return STORAGES[_known(name, STORAGES, "storage")]
    except ValueError as error:
        raise ValueError(f"policy {text!r}: {error}") from None


def _known(name, table: dict, what: str) -> str:
    """`name` if it is a key of `table`; otherwise an error with the nearest one."""
    if isinstance(name, str) and name in table:
        return name
    near = difflib.get_close_matches(str(name).lower(), table, n=1, cutoff=0.0)
    raise ValueError(
        f"unknown {what} {name!r}; did you mean {near[0]!r}? Known: {', '.join(table)}"
    )


def _boolean(value, key: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key} {value!r} is not one of true, false")
    return value


def _refuse_unknown_keys(mapping, allowed, what: str) -> None:
    if not isinstance(mapping, dict):
        raise ValueError(f"{what} {mapping!r} is not a mapping")
    for key in mapping:
        if key not in allowed:
            raise ValueError(f"unknown {what} key {key!r}; allowed: {', '.join(allowed)}")


def _digest(mapping: dict) -> str:
    text = json.dumps(mapping, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


PRESETS = {
    name: parse_policy(name)
    for name in (
        *STORAGES,
        "fp32+fp8",
        "fp32+nvfp4",
        "fp32+nvfp4-46",
        "fp16+nvfp4",
        "fp16-sr+nvfp4",
        "fp8-sr+nvfp4",
        "fp32+nvfp4:update=read",
        "fp16-sr+nvfp4:update=read",
    )
}
