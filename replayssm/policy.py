"""Precision policies: which format each stored tensor of a layer has, and what that costs.

Owns `PrecisionPolicy` (checkpoint, read copy, ring, what the update reads), the policy grammar, the
named presets and the byte model. Knows no recurrence arithmetic, no cache and no model; needs torch
because the formats do. Grammar, without spaces:

    policy = storage [ "+" storage ] [ "@" ring length ] { ":" option "=" value }
    option = "update" (checkpoint, read) | "operand" (fp32, bf16, tf32) | "ring" (input, a storage)

`A+B` keeps the checkpoint in A and a separate read copy, from which outputs are read, in B; `A`
keeps one copy for both jobs. Example: `fp16-sr+nvfp4@32:update=read`. Names of serving engines
(`presets`) may stand in the place of the storages: `vllm-gdn@32`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from replayssm.formats.block import BlockFormat
from replayssm.formats.storage import (
    STORAGES,
    Storage,
    digest,
    known,
    refuse_unknown_keys,
    storage_from,
)
from replayssm.presets import spelled

# Philox streams of the storages that round at the same flush of the same layer.
CHECKPOINT_STREAM = 0
READ_COPY_STREAM = 1

DEFAULT_RING_LEN = 16

RECURRENCES = ("mamba2", "gated_delta", "kimi_delta")
UPDATE_SOURCES = ("checkpoint", "read")
OPERANDS = ("fp32", "bf16", "tf32")


@dataclass(frozen=True, kw_only=True)
class StateGeometry:
    """Sizes of one recurrent layer, as far as bytes depend on them.

    Attributes:
        recurrence: "mamba2", "gated_delta" or "kimi_delta".
        heads: state matrices per layer, H (HV of the delta rule).
        rows, cols: one state matrix, value axis first: [P, N] or [V, K].
        key_groups: groups that share B and C, G, or key heads, HK.
        input_bytes: bytes of one activation element, 2 for bf16.
    """

    recurrence: str
    heads: int
    rows: int
    cols: int
    key_groups: int
    input_bytes: int = 2

    def __post_init__(self):
        if self.recurrence not in RECURRENCES:
            raise ValueError(_not_one_of("recurrence", self.recurrence, RECURRENCES))


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """What is stored in which format, and which copy the update reads.

    Attributes:
        checkpoint: the state as of the last flush, written once per flush.
        read_copy: a second copy of the same FP32 state, from which outputs are read; None: outputs
            read the checkpoint.
        ring: storage of the raw inputs in the ring, or "input": as they arrive.
        update_source: from what a delta rule computes the correction that is folded: "checkpoint",
            or "read", what outputs read. A choice only where there is a read copy; no effect in
            Mamba-2.
        operand: precision of the operands of replay products; accumulation is FP32.
        ring_len: ring capacity L in tokens; a flush every L tokens.
    """

    checkpoint: Storage
    read_copy: Storage | None = None
    ring: Storage | str = "input"
    update_source: str = "checkpoint"
    operand: str = "fp32"
    ring_len: int = DEFAULT_RING_LEN

    def __post_init__(self):
        if self.update_source not in UPDATE_SOURCES:
            raise ValueError(_not_one_of("update source", self.update_source, UPDATE_SOURCES))
        if self.update_source == "read" and self.read_copy is None:
            raise ValueError("update source 'read' needs a read copy (A+B); there is nothing else")
        if self.operand not in OPERANDS:
            raise ValueError(_not_one_of("operand", self.operand, OPERANDS))
        if type(self.ring_len) is not int or self.ring_len < 1:
            raise ValueError(f"ring length {self.ring_len!r} is not an integer of at least 1")
        if isinstance(self.ring, Storage):
            if isinstance(self.ring.format, BlockFormat) or self.ring.needs_random_bits:
                raise ValueError(
                    f"ring {self.ring.label!r} is not possible: ring entries are numbers (no block "
                    "formats), rounded deterministically"
                )
        elif self.ring != "input":
            raise ValueError(f"ring {self.ring!r} is neither 'input' nor a storage")

    @property
    def read_storage(self) -> Storage:
        """What outputs are read from."""
        return self.read_copy or self.checkpoint

    @property
    def label(self) -> str:
        """The grammar's spelling without defaults.

        `parse_policy(label)` gives the policy back, unless it contains a storage without a name:
        that one is spelled with a digest after "~", which identifies but cannot be parsed.
        """
        label = self.checkpoint.label
        if self.read_copy is not None:
            label += f"+{self.read_copy.label}"
        if self.ring_len != DEFAULT_RING_LEN:
            label += f"@{self.ring_len}"
        if self.update_source != "checkpoint":
            label += f":update={self.update_source}"
        if self.operand != "fp32":
            label += f":operand={self.operand}"
        if isinstance(self.ring, Storage):
            label += f":ring={self.ring.label}"
        return label

    @property
    def digest(self) -> str:
        """12 hex digits over every field."""
        return digest(self.to_dict())[:12]

    def to_dict(self) -> dict:
        """YAML mapping with every field; `from_dict` is the inverse."""
        return {
            "checkpoint": self.checkpoint.to_dict(),
            "read_copy": None if self.read_copy is None else self.read_copy.to_dict(),
            "ring": self.ring.to_dict() if isinstance(self.ring, Storage) else self.ring,
            "update_source": self.update_source,
            "operand": self.operand,
            "ring_len": self.ring_len,
        }

    @classmethod
    def from_dict(cls, mapping: dict) -> PrecisionPolicy:
        """A policy from a YAML mapping: `checkpoint` is required, storages may be names.

        Raises:
            ValueError: unknown key or name (with the allowed ones), impossible combination.
        """
        refuse_unknown_keys(mapping, [f.name for f in fields(cls)], "policy")
        if mapping.get("checkpoint") is None:
            raise ValueError("policy needs a checkpoint")
        storages = {
            key: storage_from(mapping[key])
            for key in ("checkpoint", "read_copy", "ring")
            if mapping.get(key) is not None and (key, mapping[key]) != ("ring", "input")
        }
        return cls(**{**mapping, **storages})

    def bytes_per_state_element(self, geometry: StateGeometry) -> float:
        """Memory per state element: checkpoint plus read copy, scales included."""
        copies = [self.checkpoint] + ([self.read_copy] if self.read_copy else [])
        return sum(s.bytes_per_element(geometry.rows, geometry.cols) for s in copies)

    def bytes_per_token(self, geometry: StateGeometry, ring_len: int | None = None) -> float:
        """Bytes that one layer moves per decoded token of one sequence, averaged over a ring cycle.

            state + (L - 1)/2 * replayed + written + flush_only + flush/L

        state: what outputs read, once a token. replayed: the fields of a ring record that the later
        tokens of a cycle read back, (L - 1)/2 records on average. written: a whole record.
        flush_only: fields that only a flush reads (v and beta of a delta rule that has a read copy
        and update_source "checkpoint"), L records per L tokens. flush: the checkpoint's write; with
        a read copy also its write and the checkpoint's read (without one, the output of the same
        step has already read the checkpoint). Inputs, outputs, gates and weights are the same for
        every policy and left out.

        Args:
            geometry: sizes of the layer.
            ring_len: L, if not the policy's own.
        """
        L = self.ring_len if ring_len is None else ring_len
        size = (geometry.rows, geometry.cols)
        checkpoint = geometry.heads * self.checkpoint.bytes_per_matrix(*size)
        state, flush = checkpoint, checkpoint
        if self.read_copy is not None:
            state = geometry.heads * self.read_copy.bytes_per_matrix(*size)
            flush = 2 * checkpoint + state
        replayed, flush_only = self._record_bytes(geometry)
        written = replayed + flush_only
        return state + (L - 1) / 2 * replayed + written + flush_only + flush / L

    def _record_bytes(self, g: StateGeometry) -> tuple[int, int]:
        """Bytes of the fields of one ring record: read at every token, read at a flush only."""

        def raw(heads: int, width: int) -> int:
            if isinstance(self.ring, Storage):
                return heads * self.ring.bytes_per_matrix(1, width)
            return heads * width * g.input_bytes

        per_head = 4 * g.heads
        if g.recurrence == "mamba2":  # x, B, dt
            return raw(g.heads, g.rows) + raw(g.key_groups, g.cols) + per_head, 0
        gate = per_head * (g.cols if g.recurrence == "kimi_delta" else 1)
        replayed = raw(g.key_groups, g.cols) + gate + per_head * g.rows  # k, g, u
        recomputed = self.read_copy is not None and self.update_source == "checkpoint"
        return replayed, raw(g.heads, g.rows) + per_head if recomputed else 0  # v, beta

    def describe(self) -> list[str]:
        """What is rounded where, one line per stored tensor and choice."""
        lines = [f"checkpoint: {self.checkpoint.describe()}; every {self.ring_len} tokens"]
        if self.read_copy is None:
            lines.append("outputs read: the checkpoint")
        else:
            lines.append(f"outputs read: a copy of that FP32 state, {self.read_copy.describe()}")
            lines.append(f"delta-rule correction: {_CORRECTION[self.update_source]}")
        ring = self.ring.describe() if isinstance(self.ring, Storage) else "inputs as they arrive"
        lines.append(f"ring: {ring}")
        lines.append(f"replay products: {self.operand} operands, FP32 accumulation")
        return lines


_CORRECTION = {
    "checkpoint": "recomputed against the checkpoint; a read copy's error never enters the state",
    "read": "as computed from the read copy, whose error therefore enters the state",
}


def parse_policy(text: str) -> PrecisionPolicy:
    """A policy from its label; the module docstring has the grammar.

    Raises:
        ValueError: naming what was not understood, and the nearest or the allowed values.
    """
    try:
        return _parse(spelled(text))
    except ValueError as error:
        raise ValueError(f"policy {text!r}: {error}") from None


def _parse(text: str) -> PrecisionPolicy:
    head, *options = text.split(":")
    settings = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in _OPTIONS:
            raise ValueError(_not_one_of("option", key, tuple(_OPTIONS)))
        if _OPTIONS[key] in settings:
            raise ValueError(f"option {key!r} is given twice")
        settings[_OPTIONS[key]] = value
    if settings.get("ring", "input") != "input":
        settings["ring"] = _storage(settings["ring"])
    storages, at, length = head.partition("@")
    if at:
        if not (length.isascii() and length.isdigit()):
            raise ValueError(f"ring length {length!r} is not an integer of at least 1")
        settings["ring_len"] = int(length)
    checkpoint, *read_copy = storages.split("+")
    if len(read_copy) > 1:
        raise ValueError("more than one '+'; a policy is CHECKPOINT or CHECKPOINT+READ_COPY")
    return PrecisionPolicy(
        checkpoint=_storage(checkpoint),
        read_copy=_storage(read_copy[0]) if read_copy else None,
        **settings,
    )


_OPTIONS = {"update": "update_source", "operand": "operand", "ring": "ring"}


def _storage(name: str) -> Storage:
    if "~" in name:
        raise ValueError(f"{name!r} names a storage by digest; spell it out as a YAML mapping")
    return STORAGES[known(name, STORAGES, "storage")]


def _not_one_of(what: str, value: object, allowed: tuple[str, ...]) -> str:
    return f"{what} {value!r} is not one of {', '.join(allowed)}"


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
