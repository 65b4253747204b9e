"""Policies under a model: which rows of the batch keep their recurrent state in which format.

Owns the recurrent state of one model instance, whose parts are `row_groups`, and the hand-over from
prefill to decoding. Owns also that the last projection delivers FP32. Must not know token
generation, lockstep or studies.

A session starts from zero state and goes through two phases:

    prefill   any number of rows, FP32 state, no rounding, no policy
    decode    rows = the groups, in order; the state of each is rounded once at the hand-over

Shapes: B rows, T tokens, H heads, P/V rows of a state, N/K its contracted axis.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from replayssm.cache.replay import ReplayCache
from replayssm.models.adapter import Adapter
from replayssm.models.attention import shared_key_attention
from replayssm.models.errors import UnsupportedInputError
from replayssm.models.glue import SIDE_FUNCTIONS, glue
from replayssm.models.glue_layers import RECURRENT
from replayssm.models.invariance import invariant_order
from replayssm.models.patching import (
    OPERATOR,
    claimed_layer,
    never_one_token,
    replaced_forward,
    replaced_functions,
)
from replayssm.models.row_groups import LayerState, RowGroup, below
from replayssm.models.threads import few_threads
from replayssm.policy import PrecisionPolicy
from replayssm.state_update import StateUpdate
from replayssm.state_update.together import company, step_together

_BRANCHES = 16


def describe_backends(
    adapter: Adapter, policies: Mapping[str, PrecisionPolicy], *, backend: str
) -> str:
    """One line: the backend in effect for policies by label, with reasons where "auto" takes torch
    on a GPU. ValueError if `backend` is not possible.
    """
    groups = [RowGroup(policy=policy, sequences=(0,), seeds=(0,)) for policy in policies.values()]
    session = ReplaySession(adapter, groups, backend=backend)
    told: dict[str, list[str]] = {}
    for index, label in enumerate(policies):
        told.setdefault(" and ".join(session.group_backends(index)), []).append(label)
    if len(told) == 1:
        return next(iter(told))
    return "; ".join(f"{effective} for {', '.join(labels)}" for effective, labels in told.items())


class ReplaySession:
    """Context manager: while active, the model's recurrent layers run on our state update.

    It may be entered many times; its state stays between. While it is active, other models and
    other instances of the same architecture are untouched, and a session entered inside another on
    the same model takes its place until it leaves. On leaving, functions and methods are restored
    exactly.
    """

    def __init__(self, adapter: Adapter, groups: Sequence[RowGroup], *, backend: str = "auto"):
        if not groups:
            raise ValueError("a session needs at least one row group")
        self.adapter = adapter
        self.groups = tuple(groups)
        self._rows: list[slice] = []
        start = 0
        for group in self.groups:
            self._rows.append(slice(start, start + group.rows))
            start += group.rows
        self.rows = start
        self._layers = [
            LayerState(layer, adapter.family, self.groups, backend=backend)
            for layer in adapter.layers
        ]
        self._active: ExitStack | None = None
        self.decoding = False
        self.replaced: dict[str, str] = {}
        # How rows read tokens in a decode pass: `StateUpdate.step`, or what a speculative decoder
        # or a conventional baseline (`state_update.triton_conventional`) puts in its place.
        self.reader: Callable[[StateUpdate, ReplayCache, Any], Tensor] = StateUpdate.step
        # Called with (layer index, inputs of the operator, its outputs) of every decode pass, all
        # rows; may keep the tensors, must not write them.
        self.observer: Callable[[int, Any, Tensor], None] | None = None

    # -- activation --------------------------------------------------------------------------------

    def __enter__(self) -> "ReplaySession":
        if self._active is not None:
            raise RuntimeError("this session is already active")
        if self.adapter.model.training:
            raise UnsupportedInputError("the model is in training mode: call model.eval() first")
        with ExitStack() as stack:
            family = self.adapter.family
            self.replaced = stack.enter_context(
                replaced_functions(self.adapter.module_name, family.functions)
            )
            for state in self._layers:
                layer = state.layer
                where = f"{self.adapter.name!r} layer {layer.index} ({layer.name})"
                call = self._make_call(state)
                aside = body = None
                if self.adapter.fast:
                    aside, body = SIDE_FUNCTIONS, RECURRENT.get(type(layer.mixer).__name__)
                stack.enter_context(
                    claimed_layer(layer.mixer, call, where=where, aside=aside, body=body)
                )
                faulty = getattr(layer.mixer, self.adapter.architecture.one_token_fault or "", None)
                if faulty is not None and not isinstance(faulty, nn.Identity):
                    stack.enter_context(replaced_forward(faulty, never_one_token))
            stack.enter_context(few_threads(self.adapter.device))
            stack.enter_context(shared_key_attention(self.adapter.config))
            stack.enter_context(replaced_forward(self.adapter.head, self.adapter.fp32_head))
            if self.adapter.fast:
                stack.enter_context(glue(self.adapter))
            if self.adapter.invariant:
                stack.enter_context(invariant_order(self.adapter.config, self.adapter.device))
            self._active = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        active, self._active = self._active, None
        assert active is not None
        active.close()

    def _make_call(self, state: LayerState):
        family, mixer = self.adapter.family, state.layer.mixer

        def execute(inputs: Any, *, continued: bool) -> Tensor:
            return self._run_layer(state, inputs, continued=continued)

        def call(name: str, args: tuple, kwargs: dict) -> Any:
            if name == OPERATOR:
                return execute(*args, **kwargs)
            return family.call(name, mixer, execute, args, kwargs)

        return call

    # -- the recurrence ----------------------------------------------------------------------------

    def _run_layer(self, state: LayerState, inputs: Any, *, continued: bool) -> Tensor:
        """One layer, one forward pass: FP32 outputs [B, T, H, P] of `inputs` [B, T, ...]."""
        if continued != (state.tokens > 0):
            raise UnsupportedInputError(
                f"layer {state.layer.index}: the session has seen {state.tokens} tokens, but the "
                f"model's cache says that it {'continues' if continued else 'starts'}; a session "
                "and its cache must start together and be used together"
            )
        rows, tokens = inputs[0].shape[:2]
        if not self.decoding:
            out, state.prefill_state = state.updates[0].prefill(state.prefill_state, inputs)
        else:
            if rows != self.rows:
                raise UnsupportedInputError(f"the session decodes {self.rows} rows, got {rows}")
            parts = self._run_groups(state, inputs)
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
            if self.observer is not None:
                self.observer(state.layer.index, inputs, out)
        if not _capturing(out):
            state.tokens += tokens
        return out

    def _run_groups(self, state: LayerState, inputs: Any) -> list[Tensor]:
        """Outputs of each group. In a graph that is being captured, groups are branches beside each
        other: a group has too few rows to fill a GPU.
        """
        groups = [range(index, index + 1) for index in range(len(self.groups))]
        if len(groups) == 1 or not _capturing(inputs[0]):
            side_by_side = self.reader is StateUpdate.step
            found = self._companies if side_by_side else groups
            return [self._run_company(state, company, inputs) for company in found]
        main, sides = torch.cuda.current_stream(), self._side_streams[: len(groups)]
        for side in sides:
            side.wait_stream(main)
        parts = []
        for index, group in enumerate(groups):
            with torch.cuda.stream(sides[index % len(sides)]):
                parts.append(self._run_company(state, group, inputs))
        # What branches allocated is used again only by branches that wait for `main`, and so for
        # its use there.
        for side in sides:
            main.wait_stream(side)
        return parts

    @cached_property
    def _side_streams(self) -> list["torch.cuda.Stream"]:
        return [torch.cuda.Stream() for _ in range(_BRANCHES)]

    @cached_property
    def _companies(self) -> list[range]:
        """Neighbouring groups whose steps every layer takes together."""

        def shared(index: int) -> Any:
            found = [company(state.updates[index]) for state in self._layers]
            return index if None in found else (found, self.groups[index].log_decay_factor)

        runs = [list(run) for _, run in groupby(range(len(self.groups)), key=shared)]
        return [range(run[0], run[-1] + 1) for run in runs]

    def _run_company(self, state: LayerState, groups: range, inputs: Any) -> Tensor:
        """Outputs of one group, or of several that take their step together."""
        first, last, family = groups[0], groups[-1], self.adapter.family
        if len(groups) < len(self.groups):
            rows = slice(self._rows[first].start, self._rows[last].stop)
            inputs = family.select_rows(inputs, rows)
        factor = self.groups[first].log_decay_factor
        if factor != 1.0:
            inputs = family.scale_log_decay(inputs, factor)
        if len(groups) == 1:
            return self.reader(state.updates[first], state.caches[first], inputs)
        members = slice(first, last + 1)
        return step_together(state.updates[members], state.caches[members], inputs)

    def prefill_states(self) -> list[tuple[int, Tensor | None]]:
        """(tokens seen, FP32 state [rows, H, P, N] or None before any token) of each layer in
        prefill.
        """
        assert not self.decoding, "prefill has ended"
        return [(state.tokens, state.prefill_state) for state in self._layers]

    def load_prefill(self, prefilled: list[tuple[int, Tensor]]) -> None:
        """Go on in prefill from (tokens seen, FP32 state [rows, H, P, N]) of each layer, by
        reference.
        """
        assert not self.decoding, "prefill has ended"
        for state, (state.tokens, state.prefill_state) in zip(self._layers, prefilled, strict=True):
            assert len(state.prefill_state) == self.rows

    def hand_over(
        self, prefilled: list[tuple[int, Tensor | None]], *, source: Sequence[int]
    ) -> None:
        """End prefill: decode row r continues row `source[r]` of `prefilled` (from
        `prefill_states`).

        Each group's state is rounded once, with flush index 0, and every ring starts empty.
        """
        if self.decoding:
            raise RuntimeError("the session is already decoding; a new text needs a new session")
        if len(source) != self.rows:
            raise ValueError(f"source names {len(source)} rows, the session decodes {self.rows}")
        for state, (tokens, prefill_state) in zip(self._layers, prefilled, strict=True):
            state.hand_over(tokens, prefill_state, [source[rows] for rows in self._rows])
        self.decoding = True

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of every cache by name, by reference; only after the hand-over."""
        assert self.decoding, "nothing to save before the hand-over"
        return {
            f"{state.layer.index}.{name}": tensor
            for state in self._layers
            for name, tensor in state.tensors().items()
        }

    def load_tensors(self, tensors: dict[str, Tensor], *, tokens: int) -> None:
        """Go on from `tensors()` of a session with the same model and groups, after `tokens`."""
        for state in self._layers:
            state.load_tensors(below(f"{state.layer.index}.", tensors), tokens=tokens)
        self.decoding = True

    def row(self, row: int) -> dict[str, Tensor]:
        """Views of one row of every tensor that has rows, for `put_row`."""
        return {
            name: tensor[row]
            for name, tensor in self.tensors().items()
            if tensor.dim() and ".parameters." not in name
        }

    def put_row(self, row: int, tensors: dict[str, Tensor]) -> None:
        """Overwrite a row of the only group with tensors named as in `tensors()`, without row axis;
        in place.
        """
        assert self.decoding and len(self.groups) == 1
        for state in self._layers:
            state.put_row(row, below(f"{state.layer.index}.", tensors))

    def load_rows(
        self,
        rows: Sequence[int],
        states: Sequence[Sequence[Tensor]],
        *,
        sequences: Sequence[int],
        seeds: Sequence[int],
    ) -> None:
        """Start new sequences in `rows` of the only group, in place, as at a hand-over.

        states: for each row, the FP32 state of every layer, [1, H, P, N] (from `prefill_states`).
        """
        assert self.decoding and len(self.groups) == 1
        index = torch.tensor(rows)
        for layer, state in enumerate(self._layers):
            found = torch.cat([row[layer] for row in states])
            state.load_rows(index, found, sequences=sequences, seeds=seeds)

    def replayed(self, tokens: int) -> None:
        """Say that a captured graph of one forward pass over `tokens` tokens was replayed.

        While a graph is captured nothing moves, here or on the GPU.
        """
        for state in self._layers:
            state.tokens += tokens
            for update, cache in zip(state.updates, state.caches, strict=True):
                if self.reader is StateUpdate.step:
                    update.replayed(cache, tokens)
                elif self.reader is StateUpdate.window:  # moves nothing
                    cache.uncommitted = tokens

    def check_finite(self) -> None:
        """Raise NonFiniteStateError if kernels wrote Inf or NaN into a state, since the hand-over.

        Waits for the GPU, once for all layers. The reference backend raises when it would write.
        """
        counts: dict[torch.device, list[Tensor]] = {}
        for state in self._layers:
            for update, cache in zip(state.updates, state.caches, strict=True):
                if update.effective_backend != "reference":
                    counts.setdefault(cache.not_finite.device, []).append(cache.not_finite)
        if not any(bool(torch.cat(rows).any()) for rows in counts.values()):
            return
        for state in self._layers:
            for update, cache in zip(state.updates, state.caches, strict=True):
                update.check_finite(cache)

    # -- looking at the state ----------------------------------------------------------------------

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends in effect over all layers and groups, sorted; never "auto"."""
        return tuple(sorted({u.effective_backend for s in self._layers for u in s.updates}))

    def group_backends(self, group: int) -> tuple[str, ...]:
        """Backends in effect for a group over all layers, sorted, each with the reason why "auto"
        did not take kernels on a GPU.
        """
        told = set()
        for state in self._layers:
            update = state.updates[group]
            reason = f" ({update.backend_reason})" if update.backend_reason else ""
            told.add(update.effective_backend + reason)
        return tuple(sorted(told))

    @property
    def layer_indices(self) -> tuple[int, ...]:
        return tuple(state.layer.index for state in self._layers)

    def state_bytes(self, group: int = 0) -> dict[str, int]:
        """Bytes of recurrent state of one row of a group by part, over all layers."""
        parts: dict[str, int] = {}
        for state in self._layers:
            cache = state.caches[group]
            for name, size in cache.bytes().items():
                parts[name] = parts.get(name, 0) + size // cache.batch
        return parts

    def states(self, layer: int) -> list[Tensor]:
        """Effective state of each group at model layer `layer`: checkpoint with the ring folded in.

        FP32, [group rows, H, P, N] (or [.., HV, V, K]); what a policy would go on from, not what it
        reads.
        """
        state = self._find(layer)
        return [u.state(c) for u, c in zip(state.updates, state.caches, strict=True)]

    def updates(self, layer: int) -> list[tuple[StateUpdate, ReplayCache]]:
        """State update and cache of each group at model layer `layer`, by reference."""
        state = self._find(layer)
        return list(zip(state.updates, state.caches, strict=True))

    def saturated(self, layer: int) -> list[Tensor]:
        """Elements that saturated so far at model layer `layer`: int64 [rows] for each group."""
        return [cache.saturated for cache in self._find(layer).caches]

    def _find(self, layer: int) -> LayerState:
        for state in self._layers:
            if state.layer.index == layer:
                return state
        raise ValueError(f"layer {layer} is not recurrent; recurrent layers: {self.layer_indices}")


def _capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which case nothing happens now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
