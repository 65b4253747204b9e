"""The launches of one kernel at one batch size that make up a ring cycle, and their check.

Owns which launches a time is the mean of, and what their results must be: outputs of the token
recurrence in float64, stored copies of the state it ends in. What is checked is what is timed: the
same tensors, the same launch, every row's output. Takes no times.

    cycle     rows aligned: L - 1 times `decode`, then one `step`, which flushes every row. Cursors
              are moved between replays, not in them: one addition serves all layers of a model
    step      rows at staggered positions: always `step`; a share 1/L of the rows flushes each time
    window    `window` over T tokens, such as a verification of T - 1 drafts; cursors stay
    conventional   one token by reading and writing the whole state

Legend: bench_workload.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.formats.block import BlockFormat
from replayssm.formats.codec import dequantize
from replayssm.formats.quantized import Quantized
from replayssm.study.bench_public import Update, block_of
from replayssm.study.bench_workload import (
    DISTINCT,
    LAYER_INDEX,
    Inputs,
    Pool,
    Sequences,
    relative,
    sequence_ids,
    visits,
)

OUTPUT_TOLERANCE = 1e-5
# Of a stored state, by bits of an element. FP32: that the state was formed in FP32. Else: a value
# that another order of additions moved across a rounding boundary is stored one step off.
_STATE_TOLERANCE = {32: 1e-6, 16: 1e-4, 8: 1e-2, 4: 2e-2}
# Of a conventional update's state: one rounding to nearest.
_ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
_STATES_COMPARED = 2  # rows whose stored states are compared after a launch
_FEWEST_LAUNCHES = 4
REPLAY_KERNELS = ("cycle", "step", "window")


class WrongResultError(RuntimeError):
    """A kernel's result is not the recurrence's: its time would mean nothing."""


def refused(row: Any, error: Exception) -> Any:
    """`row`, a dataclass with `status` and `note`, of what has no time because of `error`."""
    wrong = isinstance(error, WrongResultError)
    note = " ".join(str(error).split())
    return replace(
        row,
        status="wrong" if wrong else "failed",
        note=note if wrong else f"{type(error).__name__}: {note[:300]}",
    )


class Kernels(NamedTuple):
    """The launchers of one recurrence."""

    decode: Callable
    step: Callable
    window: Callable
    conventional: Callable


def kernels_of(recurrence: str) -> Kernels:
    """The Triton launchers of "mamba2", "gated_delta" or "kimi_delta"."""
    if recurrence == "mamba2":
        from replayssm.ops.mamba2 import triton_conventional, triton_decode, triton_window
    elif recurrence == "gated_delta":
        from replayssm.ops.gated_delta import triton_conventional, triton_decode, triton_window
    else:
        from replayssm.ops.gated_delta import triton_conventional  # of both delta rules
        from replayssm.ops.kimi_delta import triton_decode, triton_window
    return Kernels(
        decode=triton_decode.decode,
        step=triton_decode.step,
        window=triton_window.window,
        conventional=triton_conventional.conventional,
    )


def sweep_updates(kernels: Kernels) -> list[Update]:
    """Our conventional kernel under every launch of its sweep."""
    from replayssm.ops.triton_conventional import SWEEP

    def prepare(launch):
        def prepared(states: Tensor, slots: Tensor, inputs: Inputs):
            after = block_of(states, slots)
            return lambda: (kernels.conventional(states, slots, inputs, launch=launch), after)

        return prepared

    return [
        Update(
            source="replayssm",
            detail=launch.label,
            prepare=prepare(launch),
            output_tolerance=OUTPUT_TOLERANCE,
        )
        for launch in SWEEP
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """What is timed.

    Attributes:
        launches: called in this order, each once a replay.
        reset: to be called before each replay.
        check: runs some launches; returns their largest error, raises WrongResultError.
        tokens: of one launch and row.
        working_set: bytes of state that a replay reads.
    """

    launches: list[Callable[[], object]]
    reset: Callable[[], None]
    check: Callable[[], float]
    tokens: int
    working_set: int


# -- replay ----------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, eq=False)
class _Launch:
    """One launch of B rows, with cursors of its own over slots that others use too."""

    call: Callable[[], Tensor]
    slots: Tensor  # [B]
    positions: Tensor  # [B] before the launch
    cursors: object  # Cursors
    commits: bool

    def reset(self) -> None:
        """Moves the cursors back."""
        self.cursors.pos[self.slots] = self.positions
        self.cursors.flushes.zero_()


def replay_pool(template: Pool, batch: int, cache: int) -> tuple[Pool, list[tuple[int, int]]]:
    """A pool for launches of `batch` rows, and the visits of a ring cycle."""
    per_slot = template.read.nbytes // template.slots
    plan = visits(per_slot * batch, cache, template.policy.ring_len)
    blocks = 1 + max(block for block, _ in plan)
    return template.repeated(blocks * batch), plan


def replay_case(
    kernels: Kernels,
    kernel: str,
    template: Pool,
    pool: Pool,
    plan: list[tuple[int, int]],
    batch: int,
    *,
    tokens: int = 1,
) -> Case:
    """A replay kernel of `REPLAY_KERNELS` on a pool from `replay_pool`; more than one token for
    windows only."""
    launches = replay_launches(kernels, kernel, pool, plan, batch, tokens=tokens)
    L = pool.policy.ring_len
    at = {position: i for i, (_, position) in reversed(list(enumerate(plan)))}
    checked = sorted({at[0], at[L // 2], at[L - 1], len(plan) - 1})

    def check() -> float:
        pool.restore(template)  # times were taken of it
        errors = [_check_launch(launches[i], template, pool, tokens) for i in checked]
        for one in launches:
            one.reset()
        return max(errors)

    def reset() -> None:
        # Staggered rows need none: all positions occur in every replay.
        if kernel == "cycle":
            for one in launches:
                if one.commits:
                    one.reset()

    return Case(
        launches=[one.call for one in launches],
        reset=reset,
        check=check,
        tokens=tokens,
        working_set=pool.read.nbytes,
    )


def replay_launches(
    kernels: Kernels,
    kernel: str,
    pool: Pool,
    plan: list[tuple[int, int]],
    batch: int,
    *,
    tokens: int = 1,
    padded: bool = False,
) -> list[_Launch]:
    """Launches of a replay kernel, one a visit of `plan`; those that read equal inputs share them.

    `padded`: all rows but the first are padding, so that a pool of one slot will do.
    """
    from replayssm.ops.triton_common import new_cursors

    L, all_slots = pool.policy.ring_len, torch.arange(pool.slots, device=pool.outputs.device)
    rows = torch.arange(batch, device=pool.outputs.device)
    sequence, seed = sequence_ids(all_slots), torch.zeros_like(all_slots)
    shared: dict[tuple[int, int], Inputs] = {}
    launches = []
    for block, position in plan:
        slots = rows + block * batch
        if padded:
            slots = slots.where(rows == 0, -1)
        if kernel == "window":
            position %= L - tokens + 1
        positions = torch.full_like(slots, position)
        if kernel == "step":
            positions = (positions + rows) % L
        key = position, block * batch % DISTINCT
        if key not in shared:
            shared[key] = pool.sequences.inputs_at(slots, positions, tokens)
        cursors = new_cursors(slots, sequence=sequence, seed=seed)
        cursors.pos[slots] = positions
        commits = kernel == "step" or (kernel == "cycle" and position == L - 1)
        launches.append(
            _Launch(
                call=_call(kernels, kernel, pool, cursors, shared[key], commits),
                slots=slots,
                positions=positions,
                cursors=cursors,
                commits=commits,
            )
        )
    return launches


def _call(
    kernels: Kernels, kernel: str, pool: Pool, cursors, inputs: Inputs, commits: bool
) -> Callable[[], Tensor]:
    if commits:
        copies = pool.checkpoint, pool.read_copy
        return lambda: kernels.step(
            *copies, pool.ring, pool.policy, cursors, inputs, layer=LAYER_INDEX
        )
    launcher = kernels.window if kernel == "window" else kernels.decode
    return lambda: launcher(pool.read, pool.ring, pool.policy, cursors, inputs)


def _check_launch(launch: _Launch, template: Pool, pool: Pool, tokens: int) -> float:
    """Runs a launch at its positions and puts the states that it flushed back."""
    launch.reset()
    at = launch.positions[:, None] + torch.arange(tokens, device=launch.positions.device)
    wanted = pool.outputs[launch.slots[:, None] % DISTINCT, at]
    _poison(wanted.shape, wanted.device)
    got = launch.call()
    errors = [_accept(relative(got, wanted), OUTPUT_TOLERANCE, "outputs")]
    full = launch.slots[launch.positions == pool.policy.ring_len - 1]
    if launch.commits and len(full):
        for name, copy, flushed in zip(
            ("checkpoint", "read copy"),
            (pool.checkpoint, pool.read_copy),
            pool.flushed,
            strict=True,
        ):
            if copy is not None:
                some = full[:_STATES_COMPARED]
                error = relative(
                    dequantize(copy.select(some)), dequantize(flushed.select(some % DISTINCT))
                )
                errors.append(_accept(error, _state_tolerance(copy), name))
        for copy, start in (
            (pool.checkpoint, template.checkpoint),
            (pool.read_copy, template.read_copy),
        ):
            if copy is not None:
                copy.put_(full, start.select(full % DISTINCT))
    return max(errors)


def _state_tolerance(copy: Quantized) -> float:
    fmt = copy.format.element if isinstance(copy.format, BlockFormat) else copy.format
    return _STATE_TOLERANCE[fmt.bits]


def _accept(error: float, tolerance: float, what: str) -> float:
    if not error <= tolerance:
        raise WrongResultError(
            f"{what} differ from the float64 recurrence by {error:.1e}, allowed {tolerance:.1e}"
        )
    return error


def _poison(shape: torch.Size, device: torch.device) -> None:
    """Leaves NaN where the allocator most likely puts the next FP32 tensor of this shape, so that
    an output that is not written is not an earlier right one."""
    torch.full(shape, torch.nan, device=device)


# -- conventional ----------------------------------------------------------------------------------
def conventional_states(
    sequences: Sequences, dtype: torch.dtype, batch: int, cache: int, *, transposed: bool = False
) -> Tensor:
    """States [S, ...] in `dtype` for launches of `batch` rows, more than the cache holds."""
    start = sequences.start.to(dtype)
    per_slot = start[0].numel() * start.element_size()
    blocks = 1 + max(block for block, _ in visits(per_slot * batch, cache, 1))
    index = torch.arange(blocks * batch, device=start.device) % DISTINCT
    return (start.transpose(-1, -2) if transposed else start)[index].contiguous()


def conventional_case(update: Update, sequences: Sequences, states: Tensor, batch: int) -> Case:
    """One token by `update` on states from `conventional_states`."""
    slots = torch.arange(len(states), device=states.device).view(-1, batch)
    first = torch.zeros_like(slots[0])
    launches = [update.prepare(states, rows, sequences.inputs_at(rows, first)) for rows in slots]
    start = sequences.start.to(states.dtype)
    wide = sequences.inputs_at(
        torch.arange(DISTINCT, device=states.device), first[:1].expand(DISTINCT)
    )
    outputs, ends = sequences.layer.reference.recurrence(
        start.double(), type(wide)(*(None if t is None else t.double() for t in wide))
    )

    def oriented(state: Tensor) -> Tensor:
        return state.transpose(-1, -2) if update.transposed else state

    def check() -> float:
        rows = slots[0]
        oriented(states)[rows] = start[rows % DISTINCT]
        _poison((batch, *outputs.shape[1:]), states.device)
        got, after = launches[0]()
        error = _accept(relative(got, outputs[rows % DISTINCT]), update.output_tolerance, "outputs")
        some = rows[:_STATES_COMPARED]
        state_error = relative(oriented(after)[: len(some)], ends[some % DISTINCT])
        return max(error, _accept(state_error, _ROUNDING[states.dtype], "states"))

    repeats = -(-_FEWEST_LAUNCHES // len(launches))
    return Case(
        launches=launches * repeats,
        reset=lambda: None,
        check=check,
        tokens=1,
        working_set=states.nbytes,
    )
