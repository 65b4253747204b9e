"""Slots of Gated DeltaNet states as a cache would hold them, for tests of kernels."""

import math
from typing import NamedTuple

import pytest
import torch
from recurrence_cases import make_inputs

from replayssm.formats.quantized import Quantized
from replayssm.formats.storage import STORAGES
from replayssm.ops.gated_delta.reference import (
    GatedDeltaGeometry,
    GatedDeltaInputs,
    recurrence,
    ring_layout,
)
from replayssm.ops.gated_delta.triton_decode import decode, step
from replayssm.ops.gated_delta.triton_flush import flush
from replayssm.ops.gated_delta.triton_window import window
from replayssm.ops.triton_common import Cursors, commit, new_cursors
from replayssm.policy import PrecisionPolicy, parse_policy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# FP32 accuracy: a sum of a hundred products in any order.
FP32_ACCURATE = 5e-7
LAYER = 9
SMALL = dict(num_k_heads=1, num_v_heads=2, head_k_dim=32, head_v_dim=16)
# Widths that are no power of two; one, two and three value heads a key head.
SHAPES = {
    "r1-k80-v96": dict(num_k_heads=2, num_v_heads=2, head_k_dim=80, head_v_dim=96),
    "r2-k96-v80": dict(num_k_heads=1, num_v_heads=2, head_k_dim=96, head_v_dim=80),
    "r3-k16-v5": dict(num_k_heads=1, num_v_heads=3, head_k_dim=16, head_v_dim=5),
}
STORED = pytest.mark.parametrize("name", STORAGES)
READ = pytest.mark.parametrize("name", [name for name in STORAGES if "-sr" not in name])


class Pool(NamedTuple):
    """S slots as a cache would hold them on the device."""

    policy: PrecisionPolicy
    checkpoint: Quantized
    read_copy: Quantized | None
    ring: dict[str, torch.Tensor]
    cursors: Cursors

    @property
    def read(self):
        return self.checkpoint if self.read_copy is None else self.read_copy

    def run(self, inputs, launch=None):
        """Outputs of all tokens in one launch; commits nothing."""
        op = decode if inputs.q.shape[1] == 1 else window
        return op(self.read, self.ring, self.policy, self.cursors, inputs, launch=launch)

    def step(self, inputs, **options):
        """Outputs of one token, committed; full rings flushed."""
        copies = (self.checkpoint, self.read_copy)
        return step(*copies, self.ring, self.policy, self.cursors, inputs, layer=LAYER, **options)

    def commit(self, *accepted):
        commit(self.cursors, torch.tensor(accepted, device=DEVICE))

    def flush(self, rows=None):
        rows = None if rows is None else torch.tensor(rows, device=DEVICE)
        copies = (self.checkpoint, self.read_copy)
        flush(*copies, self.ring, self.policy, self.cursors, {}, layer=LAYER, rows=rows)

    def tensors(self):
        """Every tensor of the pool but the cursors, by name."""
        tensors = {f"ring {name}": tensor for name, tensor in self.ring.items()}
        for part in ("checkpoint", "read_copy"):
            stored = getattr(self, part)
            if stored is not None:
                tensors |= {f"{part} {name}": t for name, t in stored.tensors().items()}
        return tensors

    def bytes(self):
        """A copy of `tensors`, as bytes."""
        return {name: as_bytes(tensor) for name, tensor in self.tensors().items()}


def as_bytes(tensor):
    return tensor.contiguous().clone().view(torch.uint8)


def make_pool(policy, shape, *, ring_len=16, slots=(2, 0), dtype=torch.float32, state=None):
    """A pool of one slot more than rows, holding random states; slot s is request 10 + s."""
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    geometry = GatedDeltaGeometry(**shape)
    count = max(slots) + 1
    generator = torch.Generator().manual_seed(4)
    if state is None:
        state = torch.randn(count, *geometry.state_shape, generator=generator)
    copies = []
    for storage in (policy.checkpoint, policy.read_copy):
        bits = None
        if storage is not None and storage.needs_random_bits:
            bits = torch.zeros(state.shape, dtype=torch.int32)
        copies.append(storage and storage.write(state, bits).map(lambda t: t.to(DEVICE)))
    recompute = policy.read_copy is not None and policy.update_source == "checkpoint"
    ring = {}
    for name, (heads, *width) in ring_layout(geometry, recompute=recompute).items():
        held = dtype if name in ("k", "v") else torch.float32
        shape = (count, heads, ring_len, *width)
        ring[name] = torch.full(shape, math.nan, dtype=held, device=DEVICE)
    numbers = torch.arange(count, device=DEVICE)
    rows = torch.tensor(slots, device=DEVICE)
    cursors = new_cursors(rows, sequence=numbers + 10, seed=numbers * 0 + 77)
    return Pool(policy, *copies, ring, cursors)


def inputs_for(shape, batch, tokens, **options):
    inputs = make_inputs("gated_delta", shape, batch, tokens, **options)
    return GatedDeltaInputs(*(t.to(DEVICE) for t in inputs))


def values(stored, storage):
    """FP32 values of a stored state, on the CPU."""
    return storage.read(stored.map(lambda t: t.cpu()))


def expected(state, inputs):
    """Outputs and state of the float64 recurrence, on the CPU."""
    inputs = GatedDeltaInputs(*(t.cpu() for t in inputs))
    return recurrence(state.double(), inputs)
