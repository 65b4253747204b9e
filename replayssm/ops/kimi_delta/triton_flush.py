"""Fold committed records into the state, round once, write checkpoint and read copy in one pass.

Owns the flush kernel and its launcher. Programs share the tiles of the rows that are due, as in
`../gated_delta/triton_flush.py`.

Legend: triton_tiles.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.formats.quantized import Quantized
from replayssm.ops.gated_delta.triton_launch import (
    Launch,
    ring_argument,
    sizes,
    state_width,
    value_dtype,
    writes,
)
from replayssm.ops.gated_delta.triton_tiles import (
    load_columns,
    load_rows,
    substitute,
    write_state,
)
from replayssm.ops.kimi_delta.triton_launch import default_launch
from replayssm.ops.kimi_delta.triton_tiles import (
    fold_records,
    pair_weights,
    sums_after,
    sums_before,
)
from replayssm.ops.quantize.layout import stored
from replayssm.ops.quantize.tiles import load_tile
from replayssm.ops.triton_common import (
    Cursors,
    exact_dot,
    list_due,
    load_ticket,
    precision_of,
    resident_programs,
)
from replayssm.policy import PrecisionPolicy


@triton.jit(do_not_specialize=["layer"])
def flush_kernel(
    checkpoint,  # Stored
    read_copy,  # Stored, or None
    layer,
    ring,  # Ring; with v and beta, u is recomputed
    cursors,  # Cursors, of which only counters are used
    due,  # from `list_due`
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    READ_COPY: tl.constexpr,
    SUMS: tl.constexpr,  # precision of sums of gates
    KEYS_STATE: tl.constexpr,  # of decayed k times state
    FULL: tl.constexpr,  # of u times decayed k
    BV: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
):
    """Grid of any size: programs share the tiles of V, of all heads, of the rows that are due."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    work = tl.program_id(0)
    end = tl.load(due).to(tl.int32) * (HV * TILES)
    while work < end:
        ticket = load_ticket(due, work // (HV * TILES))
        head, tile = work // TILES % HV, work % TILES
        slot, count = ticket.slot, ticket.pos
        value, column, record = tile * BV + tl.arange(0, BV), tl.arange(0, BK), tl.arange(0, BL)
        in_v, in_k, past = value < V, column < K, record < count
        in_rows = None if V % BV == 0 else in_v
        state_row = head * V + value
        first = (slot * HV + head) * L  # this head's oldest record
        keys = ring.k + (slot * HK + head // (HV // HK)) * L * K
        gates = ring.g + first * K
        s = load_tile(checkpoint, slot, state_row, in_rows, V, K, BK, CHECKPOINT)  # [BV, BK]
        k = load_rows(keys, record, K, past, column, in_k)  # [BL, BK]
        g = load_rows(gates, record, K, past, column, in_k)
        if ring.v is None:
            u = load_columns(ring.u + first * V, record, V, past, value, in_v)  # [BV, BL]
        else:
            v = load_columns(ring.v + first * V, record, V, past, value, in_v)
            beta = tl.load(ring.beta + first + record, mask=past, other=0.0)[None, :]
            decayed = k * tl.exp(sums_before(g, SUMS))
            state_k = tl.zeros([BL, BV], tl.float32)
            state_k = exact_dot(decayed, tl.trans(s), state_k, KEYS_STATE)
            system = tl.zeros([BL, BL], tl.float32)
            system, _ = pair_weights(
                keys, K, None, 0, gates, K, ring.k, count, column, in_k, system, system
            )
            u = substitute(beta * (v - tl.trans(state_k)), system * beta, L, BL)
            # Read again, from cache: kept through the solve it would spill. The barrier keeps the
            # compiler from making one load of both.
            tl.debug_barrier()
            s = load_tile(checkpoint, slot, state_row, in_rows, V, K, BK, CHECKPOINT)
        s = fold_records(s, u, k, sums_after(g, SUMS), tl.sum(g, 0), FULL)

        write_state(
            s, checkpoint, read_copy, cursors, layer, ticket, state_row, in_rows,
            V, K, BV, BK, CHECKPOINT, READ_COPY,
        )  # fmt: skip
        work += tl.num_programs(0)


def flush(
    checkpoint: Quantized,
    read_copy: Quantized | None,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    parameters: Mapping[str, Tensor],
    *,
    layer: int,
    rows: Tensor | None = None,
    launch: Launch | None = None,
) -> None:
    """Fold the committed records of some rows, write both copies, empty the rings; all in place.

    Args:
        checkpoint, read_copy: [S, HV, V, K], written for the rows that flush; read_copy None: there
            is one copy.
        ring: as in `decode`; not written. Where it keeps v and beta, u is recomputed against the
            checkpoint; otherwise the ring's u is folded.
        policy: how both copies round.
        cursors: of flushed rows, pos becomes 0, flushes grows by 1, saturated and not_finite by
            what was written. Random bits are keyed by seed, layer, copy, flushes and sequence.
        parameters: empty, see `reference.parameters`.
        layer: index of the layer in the model.
        rows: [B] bool or integer: which rows flush, whatever they hold; None: those with pos = L.
        launch: as in `decode`.

    Raises:
        ValueError: a policy, dtype or layout that the kernels do not take.
    """
    _flush(checkpoint, read_copy, ring, policy, cursors, layer, launch, rows=rows)


def commit_and_flush(
    checkpoint: Quantized,
    read_copy: Quantized | None,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    *,
    layer: int,
) -> None:
    """Commit one record of every row, and `flush` the rows whose ring it filled."""
    _flush(checkpoint, read_copy, ring, policy, cursors, layer, None, commits=True)


def _flush(
    checkpoint: Quantized,
    read_copy: Quantized | None,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    layer: int,
    launch: Launch | None,
    *,
    rows: Tensor | None = None,
    commits: bool = False,
) -> None:
    ring = ring_argument(ring)
    constants = sizes(ring, policy)
    storages = writes(policy, checkpoint, read_copy)
    launch = launch or default_launch("flush", policy, constants, len(cursors.slots))
    batch = len(cursors.slots)
    due = list_due(cursors, constants["L"], rows, moves=True, commits=commits)
    work = batch * constants["HV"] * launch.tiles(constants)
    flush_kernel[(min(work, resident_programs(due.device, 4)),)](
        stored(checkpoint),
        None if read_copy is None else stored(read_copy),
        layer,
        ring,
        cursors,
        due,
        **constants,
        **storages,
        SUMS=precision_of(torch.float32, torch.bfloat16),
        KEYS_STATE=precision_of(torch.float32, value_dtype(policy.checkpoint)),
        FULL=precision_of(torch.float32, torch.float32),
        **launch.options(policy.checkpoint, policy.read_copy),
        BV=launch.block_v,
        BK=state_width(policy, constants),
    )
