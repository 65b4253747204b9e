"""What kernels are timed on: layers of real models with random states, rings and inputs that agree.

Owns the layers' sizes, the sequences, and how many copies of them a time needs so that the cache of
the device does not serve it. Times and judges nothing, knows no kernel. A few distinct sequences
are computed with and then repeated over all slots, so that every row of a large batch has a known
answer; a ring holds the records of a real sequence, so that it can be decoded on from any position.

Legend: R distinct sequences, S slots, B rows of a launch, T tokens, L ring slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.formats.codec import dequantize
from replayssm.formats.quantized import Quantized
from replayssm.ops.gated_delta import reference as gated_delta
from replayssm.ops.gated_delta.reference import GatedDeltaGeometry, GatedDeltaInputs
from replayssm.ops.kimi_delta import reference as kimi_delta
from replayssm.ops.kimi_delta.reference import KimiDeltaGeometry, KimiDeltaInputs
from replayssm.ops.mamba2 import reference as mamba2
from replayssm.ops.mamba2.reference import Mamba2Geometry, Mamba2Inputs
from replayssm.ops.ring import token_slots
from replayssm.policy import CHECKPOINT_STREAM, READ_COPY_STREAM, PrecisionPolicy, StateGeometry

Geometry = Mamba2Geometry | GatedDeltaGeometry | KimiDeltaGeometry
Inputs = Mamba2Inputs | GatedDeltaInputs | KimiDeltaInputs
_RECURRENCES = {
    Mamba2Geometry: ("mamba2", mamba2),
    GatedDeltaGeometry: ("gated_delta", gated_delta),
    KimiDeltaGeometry: ("kimi_delta", kimi_delta),
}

DISTINCT = 4  # sequences that are computed with in float64
LAYER_INDEX = 0
# A pass over the working set must evict it: this many times the second-level cache.
CACHES = 3


@dataclass(frozen=True, kw_only=True)
class BenchLayer:
    """One recurrent layer of a model: a name for files and commands, and its sizes."""

    name: str
    title: str
    geometry: Geometry

    @property
    def recurrence(self) -> str:
        return _RECURRENCES[type(self.geometry)][0]

    @property
    def reference(self):
        """The module of the recurrence's reference."""
        return _RECURRENCES[type(self.geometry)][1]

    @property
    def sizes(self) -> StateGeometry:
        """Sizes as the policy's count of bytes wants them; inputs are BF16."""
        heads, rows, cols = self.geometry.state_shape
        groups = getattr(self.geometry, "n_groups", None) or self.geometry.num_k_heads
        return StateGeometry(
            recurrence=self.recurrence, heads=heads, rows=rows, cols=cols, key_groups=groups
        )


def _mamba2(name: str, title: str, heads: int, head_dim: int) -> BenchLayer:
    geometry = Mamba2Geometry(num_heads=heads, head_dim=head_dim, n_groups=8, d_state=128)
    return BenchLayer(name=name, title=title, geometry=geometry)


def _gated_delta(name: str, title: str, v_heads: int) -> BenchLayer:
    geometry = GatedDeltaGeometry(
        num_k_heads=16, num_v_heads=v_heads, head_k_dim=128, head_v_dim=128
    )
    return BenchLayer(name=name, title=title, geometry=geometry)


def _kimi_delta(name: str, title: str, heads: int) -> BenchLayer:
    geometry = KimiDeltaGeometry(
        num_k_heads=heads, num_v_heads=heads, head_k_dim=128, head_v_dim=128
    )
    return BenchLayer(name=name, title=title, geometry=geometry)


LAYERS = {
    layer.name: layer
    for layer in (
        _mamba2("nemotron-3-super", "Nemotron-3 Super", 128, 64),
        _mamba2("nemotron-3-nano-30b", "Nemotron-3 Nano 30B", 64, 64),
        _mamba2("nemotron-3-nano-4b", "Nemotron-3 Nano 4B", 96, 80),
        _gated_delta("qwen3.5-4b", "Qwen3.5 4B", 32),
        _gated_delta("qwen3.5-122b", "Qwen3.5 122B", 64),
        _kimi_delta("kimi-linear-48b", "Kimi Linear 48B", 32),
    )
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """R sequences of L tokens: inputs [R, L, ...] in BF16 (gates FP32), start [R, ...] FP32."""

    layer: BenchLayer
    inputs: Inputs
    start: Tensor

    @property
    def ring_len(self) -> int:
        """L."""
        return self.inputs[0].shape[1]

    def inputs_at(self, slots: Tensor, positions: Tensor, tokens: int = 1) -> Inputs:
        """Inputs [B, tokens, ...] of rows at `slots` [B] whose next token is `positions` [B]."""
        rows, at = slots[:, None] % DISTINCT, token_slots(positions, tokens)
        return type(self.inputs)(
            *(t if t is None or t.dim() < 3 else t[rows, at] for t in self.inputs)
        )


def make_sequences(layer: BenchLayer, ring_len: int, device: str | torch.device) -> Sequences:
    """Random sequences of a layer, the same for the same arguments on the same kind of device."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(DISTINCT, ring_len, *shape, generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(DISTINCT, ring_len, *shape, generator=generator, device=device)

    shapes = layer.geometry.input_shapes
    heads = layer.geometry.state_shape[0]
    rates = torch.logspace(-2, 0, heads, device=device)  # memories of tens to thousands of tokens
    if layer.recurrence == "mamba2":
        inputs = Mamba2Inputs(
            x=normal(*shapes["x"]).bfloat16(),
            dt=0.1 * uniform(heads) + 1e-3,
            A=-rates,
            B_=normal(*shapes["B_"]).bfloat16(),
            C=normal(*shapes["C"]).bfloat16(),
            D=torch.randn(heads, generator=generator, device=device),
        )
    else:
        unit = layer.geometry.head_k_dim**-0.5
        make = KimiDeltaInputs if layer.recurrence == "kimi_delta" else GatedDeltaInputs
        gates = shapes["g"]  # one a head, or one for each of its key channels
        inputs = make(
            q=(F.normalize(normal(*shapes["q"]), dim=-1) * unit).bfloat16(),
            k=F.normalize(normal(*shapes["k"]), dim=-1).bfloat16(),
            v=normal(*shapes["v"]).bfloat16(),
            g=-0.1 * rates.view(heads, *[1] * (len(gates) - 1)) * uniform(*gates),
            beta=uniform(heads),
        )
    shape = (DISTINCT, *layer.geometry.state_shape)
    start = torch.randn(shape, generator=generator, device=device)
    return Sequences(layer=layer, inputs=inputs, start=start)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """Slots of a layer under a policy, slot s holding sequence s mod R; and what must come of them.

    Attributes:
        checkpoint, read_copy: what is stored at position 0, S slots.
        ring: records of all L tokens, S slots.
        outputs: [R, L, heads, rows] float64, of every token, by the recurrence from what outputs
            read.
        flushed: checkpoint and read copy of R slots after a ring.
    """

    sequences: Sequences
    policy: PrecisionPolicy
    checkpoint: Quantized
    read_copy: Quantized | None
    ring: dict[str, Tensor]
    outputs: Tensor
    flushed: tuple[Quantized, Quantized | None]

    @property
    def read(self) -> Quantized:
        """What outputs read."""
        return self.read_copy or self.checkpoint

    @property
    def slots(self) -> int:
        """S."""
        return self.checkpoint.data.shape[0]

    def repeated(self, slots: int) -> Pool:
        """A pool of fresh memory with `slots` slots."""
        index = sequence_ids(torch.empty(slots, device=self.checkpoint.data.device))
        copies = [copy and copy.select(index) for copy in (self.checkpoint, self.read_copy)]
        return Pool(
            sequences=self.sequences,
            policy=self.policy,
            checkpoint=copies[0],
            read_copy=copies[1],
            ring={name: tensor[index] for name, tensor in self.ring.items()},
            outputs=self.outputs,
            flushed=self.flushed,
        )

    def restore(self, template: Pool) -> None:
        """Copies the R slots of `template` over all slots again, in place."""
        index = sequence_ids(self.checkpoint.data)
        self.checkpoint.put_(slice(None), template.checkpoint.select(index))
        if self.read_copy is not None:
            self.read_copy.put_(slice(None), template.read_copy.select(index))
        for name, tensor in self.ring.items():
            tensor.copy_(template.ring[name][index])


def make_pool(sequences: Sequences, policy: PrecisionPolicy) -> Pool:
    """A pool of the R sequences themselves.

    Raises:
        ValueError: the ring has a storage of its own, or is not as long as the sequences.
    """
    if policy.ring != "input":
        raise ValueError(f"policy {policy.label}: rings are timed in the inputs' dtype only")
    if policy.ring_len != sequences.ring_len:
        raise ValueError(f"policy {policy.label} with sequences of {sequences.ring_len} tokens")
    ops, inputs, L = sequences.layer.reference, sequences.inputs, policy.ring_len
    recompute = policy.read_copy is not None and policy.update_source == "checkpoint"
    copies = _write(policy, sequences.start, flush_index=1)
    checkpoint, read = dequantize(copies[0]).double(), dequantize(copies[1] or copies[0]).double()
    wide = type(inputs)(*(None if t is None else t.double() for t in inputs))
    outputs, final = ops.recurrence(read, wide)
    records = ops.records(inputs, recompute=recompute)
    exact = {name: record.double() for name, record in records.items()}
    computed = ops.window(read, exact, 0, wide)[1]
    if policy.read_copy is not None:
        final = ops.recurrence(checkpoint, wide)[1]
    if policy.update_source == "read":  # corrections as the read copy gave them
        final = ops.fold(checkpoint, exact | computed, L, ops.parameters(wide))
    return Pool(
        sequences=sequences,
        policy=policy,
        checkpoint=copies[0],
        read_copy=copies[1],
        ring={name: record.contiguous() for name, record in records.items()}
        | {name: record.float() for name, record in computed.items()},
        outputs=outputs,
        flushed=_write(policy, final.float(), flush_index=0),
    )


def _write(
    policy: PrecisionPolicy, state: Tensor, *, flush_index: int
) -> tuple[Quantized, Quantized | None]:
    """Both copies of `state`, rounded with the bits of sequence ids 0 .. R-1."""
    zero = torch.zeros(len(state), dtype=torch.int64, device=state.device)
    key = {"seed": zero, "flush_index": zero + flush_index, "sequence": sequence_ids(zero)}

    def write(storage, stream):
        bits = storage.draw_bits(state.shape, layer=LAYER_INDEX, stream=stream, **key)
        return storage.write(state, bits)

    read_copy = policy.read_copy and write(policy.read_copy, READ_COPY_STREAM)
    return write(policy.checkpoint, CHECKPOINT_STREAM), read_copy


def sequence_ids(slots: Tensor) -> Tensor:
    """[S] int64, the sequence of each of the first S slots; it keys random bits."""
    return torch.arange(len(slots), device=slots.device) % DISTINCT


def visits(bytes_per_block: int, cache_bytes: int, ring_len: int) -> list[tuple[int, int]]:
    """(block of slots, ring position) of the launches that make up one ring cycle.

    Blocks are as many as it takes for a block to have left the cache when its turn comes again; one
    if it does not fit there. All positions of a ring occur equally often. With few blocks each goes
    through all positions, in order; with many each stands at one.
    """
    blocks = max(1, math.ceil(CACHES * cache_bytes / bytes_per_block))
    if blocks >= ring_len:
        blocks = math.ceil(blocks / ring_len) * ring_len
        return [(block, block % ring_len) for block in range(blocks)]
    return [(block, position) for position in range(ring_len) for block in range(blocks)]


def relative(got: Tensor, wanted: Tensor) -> float:
    """Relative L2 difference in float64; NaN wherever either holds one."""
    wanted = wanted.double()
    return float((got.double() - wanted).norm() / wanted.norm())
