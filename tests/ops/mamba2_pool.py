"""Slots of Mamba-2 states as a cache would hold them, for tests of kernels."""

from dataclasses import dataclass, replace

import torch
from interpreter import DEVICE
from recurrence_cases import relative
from same_bits import assert_same_bits, pattern

from replayssm.formats.codec import dequantize
from replayssm.formats.quantized import Quantized
from replayssm.ops.mamba2 import reference, triton_launch
from replayssm.ops.mamba2.reference import Mamba2Geometry, Mamba2Inputs
from replayssm.ops.mamba2.triton_decode import decode, step
from replayssm.ops.mamba2.triton_flush import flush
from replayssm.ops.mamba2.triton_window import window
from replayssm.ops.triton_common import Cursors, new_cursors
from replayssm.policy import CHECKPOINT_STREAM, READ_COPY_STREAM, PrecisionPolicy, parse_policy

# FP32 accuracy, relative L2: a sum of a hundred products in any order.
FP32_ACCURATE = 5e-7
# Share of codes that may differ, by their bytes, where what was rounded differs by a few units in
# the last place of FP32: 2^13 make a unit of FP16, and 2^16 or more one of what is narrower.
DIFFERENT = {2: 1e-3, 1: 1e-4}
LAYER = 11
SMALL = Mamba2Geometry(num_heads=4, head_dim=16, n_groups=2, d_state=32)
ODD = Mamba2Geometry(num_heads=3, head_dim=80, n_groups=1, d_state=16)
THREE_GROUPS = Mamba2Geometry(num_heads=6, head_dim=24, n_groups=3, d_state=24)
GEOMETRIES = {"small": SMALL, "head_dim80": ODD, "three groups": THREE_GROUPS}


def random_inputs(geometry, rows, tokens, dtype=torch.float32, seed=0, per_channel=False):
    g = torch.Generator().manual_seed(seed)
    H, P, N = geometry.state_shape
    G = geometry.n_groups
    normal = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    return Mamba2Inputs(
        x=normal(rows, tokens, H, P).to(dtype),
        dt=torch.rand(rows, tokens, H, generator=g) * 0.2 + 1e-3,
        A=-torch.logspace(-2, 0.5, H),
        B_=normal(rows, tokens, G, N).to(dtype),
        C=normal(rows, tokens, G, N).to(dtype),
        D=normal(H, P) if per_channel else normal(H),
    )


def to_device(inputs):
    return Mamba2Inputs(*(None if t is None else t.to(DEVICE) for t in inputs))


def tokens_of(inputs, start, stop):
    cut = lambda t: t[:, start:stop]  # noqa: E731
    return inputs._replace(x=cut(inputs.x), dt=cut(inputs.dt), B_=cut(inputs.B_), C=cut(inputs.C))


@dataclass
class Pool:
    """S slots of one layer with everything the kernels take, and the states they stand for."""

    geometry: Mamba2Geometry
    policy: PrecisionPolicy
    state: torch.Tensor  # [S, H, P, N] what was rounded into the copies
    checkpoint: Quantized
    read_copy: Quantized | None
    ring: dict[str, torch.Tensor]
    cursors: Cursors
    A: torch.Tensor

    @property
    def read(self):
        return self.read_copy or self.checkpoint

    @property
    def sizes(self):
        return triton_launch.sizes(self.checkpoint, self.ring, self.cursors)

    def launch(self, kernel, inputs, **more):
        state = (self.read,) if kernel in (decode, window) else (self.checkpoint, self.read_copy)
        if kernel is step:
            more["layer"] = LAYER
        if kernel is flush:
            return flush(
                *state, self.ring, self.policy, self.cursors, {"A": self.A}, layer=LAYER, **more
            )
        return kernel(*state, self.ring, self.policy, self.cursors, to_device(inputs), **more)

    def on(self, slots):
        """The same pool, seen by rows at other slots."""
        slots = torch.tensor(slots, device=DEVICE)
        return replace(self, cursors=self.cursors._replace(slots=slots))

    def states(self):
        """What the copies are stored as, by name."""
        named = {f"checkpoint {k}": v for k, v in self.checkpoint.tensors().items()}
        if self.read_copy is not None:
            named |= {f"read copy {k}": v for k, v in self.read_copy.tensors().items()}
        return named

    def bytes(self):
        """Copies of everything that is stored, by name."""
        named = self.states() | {f"ring {k}": v for k, v in self.ring.items()}
        named |= {k: v for k, v in self.cursors._asdict().items() if k != "slots"}
        return {k: pattern(v).clone() for k, v in named.items()}


def make_pool(geometry, policy, slots, rows, dtype=torch.float32, seed=1):
    """A pool of `slots` slots with random states and empty, poisoned rings; rows at `rows`."""
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    g = torch.Generator().manual_seed(seed)
    H, P, N = geometry.state_shape
    state = torch.randn(slots, H, P, N, generator=g)
    key = {
        "seed": torch.arange(slots) + 2**31,
        "sequence": torch.arange(slots) * 7 + 1,
        "flush_index": torch.zeros(slots, dtype=torch.int64),
    }

    def stored(storage, stream):
        bits = storage.draw_bits(state.shape, layer=LAYER, stream=stream, **key)
        return storage.write(state, bits).map(lambda t: t.to(DEVICE))

    ring_dtype = dtype if policy.ring == "input" else policy.ring.format.torch_dtype
    ring = {}
    for name, (heads, *width) in reference.ring_layout(geometry, recompute=False).items():
        kind = torch.float32 if name == "dt" else ring_dtype
        shape = (slots, heads, policy.ring_len, *width)
        ring[name] = torch.full(shape, torch.nan, dtype=kind, device=DEVICE)
    cursors = new_cursors(
        torch.tensor(rows, device=DEVICE),
        sequence=key["sequence"].to(DEVICE),
        seed=key["seed"].to(DEVICE),
    )
    cursors.flushes.fill_(1)
    return Pool(
        geometry=geometry,
        policy=policy,
        state=state,
        checkpoint=stored(policy.checkpoint, CHECKPOINT_STREAM),
        read_copy=policy.read_copy and stored(policy.read_copy, READ_COPY_STREAM),
        ring=ring,
        cursors=cursors,
        A=-torch.logspace(-2, 0.5, H).to(DEVICE),
    )


def values(quantized):
    """What stored states stand for, float64 on the CPU."""
    return dequantize(quantized.map(lambda t: t.cpu())).double()


def error(got, want):
    """Largest error relative to the norm of each head's outputs or state."""
    got, want = got.cpu().double(), want.double()
    assert got.isfinite().all(), "not finite: something was not written, or poison was read"
    scale = want.flatten(-1).norm(dim=-1, keepdim=True) / want.shape[-1] ** 0.5
    return float(((got - want).abs() / scale.clamp(min=1e-30)).max())


def oracle(slot_states, inputs):
    """Outputs of the float64 recurrence from `slot_states` [B, H, P, N]."""
    wide = Mamba2Inputs(*(None if t is None else t.cpu().double() for t in inputs))
    return reference.recurrence(slot_states, wide)


def written(pool, storage, state, stream):
    """What the second write of every slot stores of `state`, by the reference."""
    bits = storage.draw_bits(
        state.shape,
        seed=pool.cursors.seed.cpu(),
        layer=LAYER,
        stream=stream,
        flush_index=torch.ones(len(state), dtype=torch.int64),
        sequence=pool.cursors.sequence.cpu(),
    )
    return storage.write(state, bits)


def flips(one, several):
    """How many codes differ, by name, between what one kernel and several made of the same step.

    Cursors and records must be the same, and FP32 values to FP32 accuracy. One kernel adds records
    one after the other, several take products of matrices: what they round is the same to FP32
    accuracy only, and now and then a code falls to the other side.
    """
    for name in Cursors._fields[1:]:
        got, want = (getattr(pool.cursors, name).tolist() for pool in (one, several))
        assert got == want, name
    for name, want in several.ring.items():  # the last record may be folded without entering it
        assert_same_bits(one.ring[name][:, :, :-1], want[:, :, :-1], name)
    found = {}
    for name, want in several.states().items():
        got = one.states()[name]
        if want.dtype == torch.float32:
            assert relative(got, want) < FP32_ACCURATE, name
        else:
            found[name] = int((pattern(got) != pattern(want)).sum())
    return found


def assert_few_flips(pool, found, writes):
    """That a small share of all codes in `writes` states, or one, differs; `found`: by `flips`."""
    for name, count in found.items():
        codes = pool.states()[name]
        total = writes * codes[0].numel()
        assert count <= max(1, DIFFERENT[codes.element_size()] * total), (name, count, total)
