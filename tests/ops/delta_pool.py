"""Slots of a delta rule's states as a cache would hold them, for tests of kernels.

Owns what tests of Gated DeltaNet and of Kimi Delta Attention share: pools of poisoned slots, their
inputs on the device, and what `formats` makes of a state. Must not know what is tested.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from interpreter import DEVICE
from recurrence_cases import make_inputs, take_tokens

from replayssm.formats.quantized import Quantized
from replayssm.formats.storage import STORAGES
from replayssm.ops.gated_delta import reference as gated_delta
from replayssm.ops.gated_delta import triton_decode as gated_delta_decode
from replayssm.ops.gated_delta import triton_flush as gated_delta_flush
from replayssm.ops.gated_delta import triton_window as gated_delta_window
from replayssm.ops.kimi_delta import reference as kimi_delta
from replayssm.ops.kimi_delta import triton_decode as kimi_delta_decode
from replayssm.ops.kimi_delta import triton_flush as kimi_delta_flush
from replayssm.ops.kimi_delta import triton_window as kimi_delta_window
from replayssm.ops.triton_common import Cursors, commit, new_cursors
from replayssm.policy import PrecisionPolicy, parse_policy

# FP32 accuracy: a sum of a hundred products in any order.
FP32_ACCURATE = 5e-7
LAYER = 9
SMALL = dict(num_k_heads=1, num_v_heads=2, head_k_dim=32, head_v_dim=16)
STORED = pytest.mark.parametrize("name", STORAGES)


@dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """A recurrence and its kernels: modules with the functions they are named after.

    shapes: widths that are no power of two, by value heads a key head: "r1", "r2" and "r3".
    """

    name: str  # in `recurrence_cases`
    geometry: type
    inputs: type
    reference: ModuleType
    decode: ModuleType
    window: ModuleType
    flush: ModuleType
    shapes: dict[str, dict[str, int]]

    def make_pool(
        self, policy, shape, *, ring_len=16, slots=(2, 0), dtype=torch.float32, state=None
    ):
        """A pool of one slot more than rows, holding random states; slot s is request 10 + s."""
        policy = parse_policy(policy) if isinstance(policy, str) else policy
        geometry = self.geometry(**shape)
        count = max(slots) + 1
        if state is None:
            generator = torch.Generator().manual_seed(4)
            state = torch.randn(count, *geometry.state_shape, generator=generator)
        copies = []
        for storage in (policy.checkpoint, policy.read_copy):
            bits = None
            if storage is not None and storage.needs_random_bits:
                bits = torch.zeros(state.shape, dtype=torch.int32)
            copies.append(storage and storage.write(state, bits).map(lambda t: t.to(DEVICE)))
        recompute = policy.read_copy is not None and policy.update_source == "checkpoint"
        layout = self.reference.ring_layout(geometry, recompute=recompute)
        ring = {}
        for name, (heads, *width) in layout.items():
            held = dtype if name in ("k", "v") else torch.float32
            size = (count, heads, ring_len, *width)
            ring[name] = torch.full(size, math.nan, dtype=held, device=DEVICE)
        numbers = torch.arange(count, device=DEVICE)
        rows = torch.tensor(slots, device=DEVICE)
        cursors = new_cursors(rows, sequence=numbers + 10, seed=numbers * 0 + 77)
        return Pool(self, policy, *copies, ring, cursors)

    def inputs_for(self, shape, batch, tokens, **options):
        inputs = make_inputs(self.name, shape, batch, tokens, **options)
        return self.inputs(*(t.to(DEVICE) for t in inputs))

    def expected(self, state, inputs):
        """Outputs and state of the float64 recurrence, on the CPU."""
        inputs = self.inputs(*(t.cpu() for t in inputs))
        return self.reference.recurrence(state.double(), inputs)


GATED_DELTA = DeltaRule(
    name="gated_delta",
    geometry=gated_delta.GatedDeltaGeometry,
    inputs=gated_delta.GatedDeltaInputs,
    reference=gated_delta,
    decode=gated_delta_decode,
    window=gated_delta_window,
    flush=gated_delta_flush,
    shapes={
        "r1": dict(num_k_heads=2, num_v_heads=2, head_k_dim=80, head_v_dim=96),
        "r2": dict(num_k_heads=1, num_v_heads=2, head_k_dim=96, head_v_dim=80),
        "r3": dict(num_k_heads=1, num_v_heads=3, head_k_dim=16, head_v_dim=5),
    },
)
KIMI_DELTA = DeltaRule(
    name="kimi_delta",
    geometry=kimi_delta.KimiDeltaGeometry,
    inputs=kimi_delta.KimiDeltaInputs,
    reference=kimi_delta,
    decode=kimi_delta_decode,
    window=kimi_delta_window,
    flush=kimi_delta_flush,
    shapes={
        "r1": dict(num_k_heads=2, num_v_heads=2, head_k_dim=48, head_v_dim=24),
        "r2": dict(num_k_heads=1, num_v_heads=2, head_k_dim=96, head_v_dim=20),
        "r3": dict(num_k_heads=1, num_v_heads=3, head_k_dim=16, head_v_dim=5),
    },
)


class Pool(NamedTuple):
    """S slots as a cache would hold them on the device."""

    rule: DeltaRule
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
        one = inputs.q.shape[1] == 1
        op: Callable = self.rule.decode.decode if one else self.rule.window.window
        return op(self.read, self.ring, self.policy, self.cursors, inputs, launch=launch)

    def run_in_windows(self, inputs, windows):
        """Outputs of all tokens, in windows of the given lengths, all committed; on the CPU."""
        outputs, done = [], 0
        for tokens in windows:
            outputs.append(self.run(take_tokens(inputs, done, done + tokens)))
            self.commit(*[tokens] * len(self.cursors.slots))
            done += tokens
        return torch.cat(outputs, 1).cpu()

    def step(self, inputs, **options):
        """Outputs of one token, committed; full rings flushed."""
        copies = (self.checkpoint, self.read_copy)
        return self.rule.decode.step(
            *copies, self.ring, self.policy, self.cursors, inputs, layer=LAYER, **options
        )

    def commit(self, *accepted):
        commit(self.cursors, torch.tensor(accepted, device=DEVICE))

    def flush(self, rows=None):
        rows = None if rows is None else torch.tensor(rows, device=DEVICE)
        copies = (self.checkpoint, self.read_copy)
        self.rule.flush.flush(
            *copies, self.ring, self.policy, self.cursors, {}, layer=LAYER, rows=rows
        )

    def state(self):
        """FP32 values of the checkpoint in the order of the rows, on the CPU."""
        return values(self.checkpoint, self.policy.checkpoint)[self.cursors.slots.cpu()]

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


def values(stored, storage):
    """FP32 values of a stored state, on the CPU."""
    return storage.read(stored.map(lambda t: t.cpu()))


def assert_codes(pool, stored, storage, state, stream):
    """Rows 2 and 0 of `stored`, flushed for the sixth time, hold what `formats` makes of FP32
    `state`, to the last bit; what saturated on the way."""
    per_slot = {n: getattr(pool.cursors, n).cpu() for n in ("seed", "sequence")}
    bits = storage.draw_bits(
        state.shape, layer=LAYER, stream=stream, flush_index=torch.full((3,), 6), **per_slot
    )
    want = storage.write(state, bits)
    for name, tensor in want.tensors().items():
        got = stored.tensors()[name].cpu()
        assert torch.equal(as_bytes(got[[2, 0]]), as_bytes(tensor[[2, 0]])), name
    return want.saturated
