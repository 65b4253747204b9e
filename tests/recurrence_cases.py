"""Random inputs for every recurrence, and the small tools their tests share.

Decays range from a memory of a few tokens to thousands, keys share a mean (so that the triangular
system of the delta rule is far from the identity) and write strengths reach 1.
"""

import math

import torch
import torch.nn.functional as F

from replayssm.ops import ring as R
from replayssm.ops.gated_delta import GatedDeltaInputs
from replayssm.ops.kimi_delta import KimiDeltaInputs
from replayssm.ops.mamba2 import Mamba2Inputs
from replayssm.policy import parse_policy
from replayssm.state_update import RECURRENCES, StateUpdate

# Odd on purpose: widths that are no power of two, one group, groups that are no power of two.
GEOMETRIES = {
    "mamba2-p80-n16-g1": ("mamba2", dict(num_heads=4, head_dim=80, n_groups=1, d_state=16)),
    "mamba2-g3": ("mamba2", dict(num_heads=6, head_dim=16, n_groups=3, d_state=32)),
    "mamba2-p5-n7": ("mamba2", dict(num_heads=2, head_dim=5, n_groups=2, d_state=7)),
    "delta-r1": ("gated_delta", dict(num_k_heads=2, num_v_heads=2, head_k_dim=16, head_v_dim=32)),
    "delta-r2-odd": ("gated_delta", dict(num_k_heads=3, num_v_heads=6, head_k_dim=5, head_v_dim=7)),
    "delta-r3": ("gated_delta", dict(num_k_heads=1, num_v_heads=3, head_k_dim=32, head_v_dim=16)),
    "kimi-r1": ("kimi_delta", dict(num_k_heads=2, num_v_heads=2, head_k_dim=16, head_v_dim=32)),
    "kimi-r2-odd": ("kimi_delta", dict(num_k_heads=3, num_v_heads=6, head_k_dim=5, head_v_dim=7)),
    "kimi-r3": ("kimi_delta", dict(num_k_heads=1, num_v_heads=3, head_k_dim=32, head_v_dim=16)),
}
PLAIN = {
    "mamba2": dict(num_heads=4, head_dim=32, n_groups=2, d_state=32),
    "gated_delta": dict(num_k_heads=2, num_v_heads=4, head_k_dim=32, head_v_dim=32),
    "kimi_delta": dict(num_k_heads=2, num_v_heads=4, head_k_dim=32, head_v_dim=32),
}
# Small enough for Triton's interpreter, which takes milliseconds a program.
TINY = {
    "mamba2": dict(num_heads=2, head_dim=16, n_groups=1, d_state=32),
    "gated_delta": dict(num_k_heads=1, num_v_heads=2, head_k_dim=32, head_v_dim=16),
    "kimi_delta": dict(num_k_heads=1, num_v_heads=2, head_k_dim=32, head_v_dim=16),
}


def make_inputs(recurrence, geometry, batch, tokens, *, seed=0, dtype=torch.float32, ring=None):
    """Inputs [batch, tokens, ...]; `ring` is the dtype of all but the gates, if given."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(batch, tokens, *shape, generator=generator, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(batch, tokens, *shape, generator=generator, dtype=torch.float64)

    if recurrence == "mamba2":
        heads, groups = geometry["num_heads"], geometry["n_groups"]
        wide = (groups, geometry["d_state"])
        inputs = Mamba2Inputs(
            x=normal(heads, geometry["head_dim"]),
            dt=uniform(heads),
            A=-torch.logspace(-3.5, -0.3, heads, dtype=torch.float64),
            B_=normal(*wide) + 0.5,
            C=normal(*wide) + 0.5,
            D=torch.randn(heads, generator=generator, dtype=torch.float64),
        )
        narrow = ("x", "B_", "C")
    else:
        k_heads, v_heads = geometry["num_k_heads"], geometry["num_v_heads"]
        k_dim = geometry["head_k_dim"]
        rates = torch.logspace(-3.5, -0.3, v_heads, dtype=torch.float64)
        q = F.normalize(normal(k_heads, k_dim) + 0.5, dim=-1) * k_dim**-0.5
        k = F.normalize(normal(k_heads, k_dim) + 0.5, dim=-1)
        v = normal(v_heads, geometry["head_v_dim"])
        if recurrence == "gated_delta":
            inputs = GatedDeltaInputs(q, k, v, g=-rates * uniform(v_heads), beta=uniform(v_heads))
        else:
            # Channels of a head forget at rates from a tenth of the head's to ten times that.
            rates = rates[:, None] * torch.logspace(-1, 1, k_dim, dtype=torch.float64)
            g = -rates * uniform(v_heads, k_dim)
            inputs = KimiDeltaInputs(q, k, v, g=g, beta=uniform(v_heads))
        narrow = ("q", "k", "v")
    inputs = type(inputs)(*(t.to(dtype) for t in inputs))
    if ring is not None:
        inputs = inputs._replace(**{name: getattr(inputs, name).to(ring) for name in narrow})
    return inputs


def setup(name, batch, tokens, ring_len, *, recompute=False, dtype=torch.float64, seed=0):
    """Operator module, inputs, a random state and a ring full of NaN."""
    recurrence, sizes = GEOMETRIES[name]
    ops, make_geometry = RECURRENCES[recurrence]
    geometry = make_geometry(**sizes)
    inputs = make_inputs(recurrence, sizes, batch, tokens, dtype=dtype, seed=seed)
    state = torch.randn(batch, *geometry.state_shape, dtype=dtype)
    ring = {
        record: torch.full((batch, heads, ring_len, *width), math.nan, dtype=dtype)
        for record, (heads, *width) in ops.ring_layout(geometry, recompute=recompute).items()
    }
    return ops, inputs, state, ring


def run_window(ops, state, ring, pos, inputs, *, recompute=False, operand="fp32"):
    """Appends, computes, appends what was computed: what StateUpdate.window does."""
    R.append(ring, pos, ops.records(inputs, recompute=recompute))
    outputs, computed = ops.window(state, ring, pos, inputs, operand=operand)
    R.append(ring, pos, computed)
    return outputs


def random_state(update, batch, *, seed=1, dtype=torch.float32):
    """A state [batch, heads, rows, cols] of unit variance."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, *update.geometry.state_shape)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def take_rows(inputs, rows):
    """The given rows; layer constants (at most two axes) stay."""
    return type(inputs)(*(t if t is None or t.dim() < 3 else t[rows] for t in inputs))


def take_tokens(inputs, start, stop):
    """Tokens start .. stop-1; layer constants stay."""
    return type(inputs)(*(t if t is None or t.dim() < 3 else t[:, start:stop] for t in inputs))


def make_update(recurrence, policy="fp32", geometry=None, *, layer=3, **options):
    """A StateUpdate; `policy` is a label or a policy, `options` are backend and device."""
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    return StateUpdate(
        recurrence, policy, layer=layer, **options, **(geometry or PLAIN[recurrence])
    )


def make_cache(update, batch, *, state=None, sequence=None, seed=5, dtype=torch.float32):
    """A cache after hand-over of `state` (zero if None), rows numbered 0 .. batch-1."""
    sequence = list(range(batch)) if sequence is None else sequence
    cache = update.new_cache(batch, sequence=sequence, seed=seed, dtype=dtype)
    state = random_state(update, batch) if state is None else state
    update.load(cache, state.to(update.device))
    return cache


def oracle(recurrence, state, inputs):
    """Token recurrence in float64."""
    ops = RECURRENCES[recurrence][0]
    return ops.recurrence(state.to(torch.float64), inputs)


def decode(update, cache, inputs, tokens=1):
    """Outputs of `step` with `tokens` tokens a call."""
    total = inputs[0].shape[1]
    parts = [take_tokens(inputs, t, min(t + tokens, total)) for t in range(0, total, tokens)]
    return torch.cat([update.step(cache, part) for part in parts], dim=1)


def relative(a, b):
    """Relative L2 difference."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def same_cache(a, b):
    """Whether two caches hold the same bytes."""
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(
        torch.equal(a[n].contiguous().view(torch.uint8), b[n].contiguous().view(torch.uint8))
        for n in a
        if a[n].dim()
    )
