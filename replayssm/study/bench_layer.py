"""A recurrent layer taken out of a model: what it reads, and what must come of it.

Owns the check that comes before every time of `bench decode` and `bench speculate`: outputs of a
way to read tokens, conventional or replay, against the token recurrence in float64 on the same
state and inputs, which are the model's own. Takes no times.

Legend: R distinct rows, B rows of a batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.cache.replay import ReplayCache
from replayssm.engine.stream import Stream
from replayssm.models.adapter import Adapter
from replayssm.models.session import RowGroup
from replayssm.policy import PrecisionPolicy, parse_policy
from replayssm.state_update import RECURRENCES, Inputs, StateUpdate, select_tokens
from replayssm.study.bench_cases import WrongResultError
from replayssm.study.bench_workload import relative

DISTINCT = 8  # rows that differ; the others repeat them
PROMPT = 16
# Relative error of outputs, by the bits of an element of the copy that they are read from: FP32
# sums in any order; for the others, that the right state was read, not how well it is stored.
TOLERANCE = {32: 1e-5, 16: 1e-2, 8: 0.1, 4: 0.3}

Read = Callable[[StateUpdate, ReplayCache, Inputs], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """The first recurrent layer of a model, and the T tokens that follow a prompt there.

    prefilled: R rows that have read the prompt, still in prefill. inputs: of the layer,
    [R, T, ...]. state: to start from, FP32 [R, heads, rows, cols], random: in a model with random
    weights the layer's own may be too small to be seen in its outputs. outputs: float64
    [R, T, heads, rows], by the token recurrence.
    """

    prefilled: Stream
    inputs: Inputs
    state: Tensor
    outputs: Tensor

    @property
    def adapter(self) -> Adapter:
        return self.prefilled.adapter

    def inputs_of(self, batch: int, tokens: int) -> Inputs:
        """The first `tokens` tokens of B rows."""
        index = self._rows(batch)
        rows = (t if t is None or t.dim() < 3 else t[index] for t in self.inputs)
        return select_tokens(type(self.inputs)(*rows), 0, tokens)

    def update(
        self, policy: PrecisionPolicy, batch: int, backend: str
    ) -> tuple[StateUpdate, ReplayCache]:
        """The layer under `policy`, and a cache of B rows that holds the state."""
        family, layer = self.adapter.family, self.adapter.layers[0]
        update = StateUpdate(
            family.recurrence,
            policy,
            layer=layer.index,
            backend=backend,
            device=self.state.device,
            **family.shapes(layer.mixer),
        )
        cache = update.new_cache(
            batch, sequence=list(range(batch)), seed=0, dtype=family.ring_dtype(layer.mixer)
        )
        update.load(cache, self.state[self._rows(batch)])
        return update, cache

    def check(
        self, policy: PrecisionPolicy, read: Read, *, batch: int, tokens: int, backend: str
    ) -> float:
        """Largest relative error of B rows' outputs of the first `tokens` tokens.

        read: reads them, under `policy`, in whatever pieces. Raises WrongResultError.
        """
        update, cache = self.update(policy, batch, backend)
        got = read(update, cache, self.inputs_of(batch, tokens))
        index = self._rows(batch)
        error = max(relative(got[:, token], self.outputs[index, token]) for token in range(tokens))
        allowed = TOLERANCE[policy.read_storage.code_bits]
        if not error <= allowed:
            raise WrongResultError(
                f"outputs differ from the float64 recurrence by {error:.1e}, allowed {allowed:.1e}"
            )
        return error

    def _rows(self, batch: int) -> Tensor:
        return torch.arange(batch, device=self.state.device) % DISTINCT


def one_by_one(read: Read) -> Read:
    """`read`, called with a single token at a time."""

    def tokens(update: StateUpdate, cache: ReplayCache, inputs: Inputs) -> Tensor:
        total = inputs[0].shape[1]
        outputs = [read(update, cache, select_tokens(inputs, t, t + 1)) for t in range(total)]
        return torch.cat(outputs, dim=1)

    return tokens


@torch.inference_mode()
def observe(adapter: Adapter, tokens: int) -> Probe:
    """A probe of `tokens` tokens; prompts and tokens are random, the same each time."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(adapter.vocab_size, (DISTINCT, PROMPT + tokens), generator=generator)
    text = text.to(adapter.device)
    group = RowGroup(
        policy=parse_policy("fp32"), sequences=tuple(range(DISTINCT)), seeds=(0,) * DISTINCT
    )
    options = {"source": range(DISTINCT), "capacity": PROMPT + tokens}
    options |= {"backend": "reference", "graphs": "off"}
    prefilled, reading = (Stream(adapter, [group], **options) for _ in range(2))
    prefilled.prefill(text[:, :PROMPT])
    reading.continue_from(prefilled)
    first, seen = adapter.layers[0].index, []

    def note(layer: int, inputs: Inputs, outputs: Tensor) -> None:
        if layer == first:
            seen.append(inputs)

    reading.session.observer = note
    reading.step(text[:, PROMPT:])
    (inputs,) = seen
    shape = prefilled.session.prefill_states()[0][1].shape
    state = torch.randn(shape, generator=generator).to(adapter.device)
    reference = RECURRENCES[adapter.family.recurrence][0]
    wide = type(inputs)(*(None if t is None else t.double() for t in inputs))
    outputs, _ = reference.recurrence(state.double(), wide)
    return Probe(prefilled=prefilled, inputs=inputs, state=state, outputs=outputs)
