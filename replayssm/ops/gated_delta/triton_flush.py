"""Fold committed records into the state, round once, write checkpoint and read copy in one pass.

Owns the flush kernel, the list of rows it works through, and their launcher. Most rows do not flush
at most steps, and a program this large has a multiprocessor almost to itself: so programs take
tiles from a list of the rows that are due, made on the device, instead of looking at one row each.

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
    default_launch,
    resident_programs,
    ring_argument,
    sizes,
    state_width,
    value_dtype,
    writes,
)
from replayssm.ops.gated_delta.triton_tiles import (
    decay,
    fold_records,
    load_columns,
    load_rows,
    substitute,
    write_state,
)
from replayssm.ops.quantize.layout import stored
from replayssm.ops.quantize.tiles import load_tile
from replayssm.ops.triton_common import Cursors, arrive, exact_dot, precision_of
from replayssm.policy import PrecisionPolicy


@triton.jit
def due_kernel(due, cursors, rows, batch, L: tl.constexpr, BLOCK: tl.constexpr):
    """Lists the rows that flush: due[0] is their number, due[1], due[2], ... their indices."""
    row = tl.arange(0, BLOCK)
    slot = tl.load(cursors.slots + row, mask=row < batch, other=-1).to(tl.int64)
    if rows is None:
        flushes = tl.load(cursors.pos + slot, mask=slot >= 0, other=0) >= L
    else:
        flushes = tl.load(rows + row, mask=slot >= 0, other=0) != 0
    place = tl.cumsum(flushes.to(tl.int32), 0)
    tl.store(due + place, row, mask=flushes)
    tl.store(due, tl.sum(flushes.to(tl.int32), 0))


@triton.jit(do_not_specialize=["layer"])
def flush_kernel(
    checkpoint,  # Stored
    read_copy,  # Stored, or None
    layer,
    ring,  # Ring; with v and beta, u is recomputed
    cursors,  # Cursors
    due,  # [1 + B], see `due_kernel`
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    READ_COPY: tl.constexpr,
    STATE_KEYS: tl.constexpr,  # precision of state times k
    KEYS: tl.constexpr,  # of k times k
    FULL: tl.constexpr,  # of u times k
    BV: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
):
    """Grid of any size: programs share the tiles of V, of all heads, of the rows that are due."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    work = tl.program_id(0)
    end = tl.load(due) * (HV * TILES)
    while work < end:
        row = tl.load(due + 1 + work // (HV * TILES))
        head, tile = work // TILES % HV, work % TILES
        slot = tl.load(cursors.slots + row).to(tl.int64)
        count = tl.load(cursors.pos + slot).to(tl.int32)
        value, column, record = tile * BV + tl.arange(0, BV), tl.arange(0, BK), tl.arange(0, BL)
        in_v, in_k, past = value < V, column < K, record < count
        in_rows = None if V % BV == 0 else in_v
        state_row = head * V + value
        s = load_tile(checkpoint, slot, state_row, in_rows, V, K, BK, CHECKPOINT)  # [BV, BK]

        first = (slot * HV + head) * L  # this head's oldest record
        keys = ring.k + (slot * HK + head // (HV // HK)) * L * K
        k = load_rows(keys, record, K, past, column, in_k)  # [BL, BK]
        log_decay = tl.cumsum(tl.load(ring.g + first + record, mask=past, other=0.0), 0)  # [BL]
        if ring.v is None:
            u = load_columns(ring.u + first * V, record, V, past, value, in_v)  # [BV, BL]
        else:
            v = load_columns(ring.v + first * V, record, V, past, value, in_v)
            beta = tl.load(ring.beta + first + record, mask=past, other=0.0)[None, :]
            k_t = tl.trans(k)
            state_k = exact_dot(s, k_t, tl.zeros([BV, BL], tl.float32), STATE_KEYS)
            predicted = decay(log_decay, 0.0)[None, :] * state_k
            k_k = exact_dot(k, k_t, tl.zeros([BL, BL], tl.float32), KEYS)
            between = decay(log_decay[None, :], log_decay[:, None])  # [BL, BL], earlier first
            system = tl.where(record[:, None] < record[None, :], between * k_k, 0.0)
            u = substitute(beta * (v - predicted), system * beta, L, BL)
        s = fold_records(s, u, k, log_decay, FULL, BL)

        write_state(
            s, checkpoint, read_copy, cursors, layer, slot, state_row, in_rows,
            V, K, BV, BK, CHECKPOINT, READ_COPY,
        )  # fmt: skip
        if arrive(cursors, slot, HV * TILES):
            tl.store(cursors.pos + slot, 0)
            tl.store(cursors.flushes + slot, tl.load(cursors.flushes + slot) + 1)
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
    ring = ring_argument(ring)
    constants = sizes(ring, policy)
    storages = writes(policy, checkpoint, read_copy)
    launch = launch or default_launch("flush", policy, constants, len(cursors.slots))
    if rows is not None and rows.dtype == torch.bool:
        rows = rows.view(torch.uint8)
    batch = len(cursors.slots)
    due = torch.empty(batch + 1, dtype=torch.int32, device=cursors.slots.device)
    block = triton.next_power_of_2(batch)
    due_kernel[(1,)](due, cursors, rows, batch, L=constants["L"], BLOCK=block)
    work = batch * constants["HV"] * launch.tiles(constants)
    flush_kernel[(min(work, resident_programs(due.device)),)](
        stored(checkpoint),
        None if read_copy is None else stored(read_copy),
        layer,
        ring,
        cursors,
        due,
        **constants,
        **storages,
        STATE_KEYS=precision_of(value_dtype(policy.checkpoint), ring.k.dtype),
        KEYS=precision_of(ring.k.dtype, ring.k.dtype),
        FULL=precision_of(ring.u.dtype, ring.k.dtype),
        **launch.options(*storages.values()),
        BV=launch.block_v,
        BK=state_width(policy, constants),
    )
