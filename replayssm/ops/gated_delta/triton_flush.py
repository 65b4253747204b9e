"""Fold committed records into the state, round once, write checkpoint and read copy in one pass.

Owns the flush kernel and its launchers. Most rows do not flush at most steps, and a program this
large leaves a multiprocessor room for few others: so programs share the tiles of a list of the rows
that are due, made on the device, instead of looking at one row each.

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
    pieces,
    ring_argument,
    scales_heads,
    sizes,
    state_width,
    unscaled_dtype,
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
from replayssm.ops.quantize.scaling import magnitude_bits
from replayssm.ops.quantize.tiles import load_tile, load_unscaled, row_factor
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
    solved,  # [programs, BL, V] FP32, room for the u that a program recomputes; or None
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    READ_COPY: tl.constexpr,
    WHOLE: tl.constexpr,  # a copy has a scale per head
    STATE_KEYS: tl.constexpr,  # precision of state times k
    KEYS: tl.constexpr,  # of k times k
    FULL: tl.constexpr,  # of u times k
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
):
    """Grid of any size: programs share the tiles of V, of all heads, of the rows that are due.

    Where a copy has a scale per head, a program takes the tiles of a head one after the other, and
    twice: for the largest magnitude and then, from cache, to write. All of a head at once would
    leave a multiprocessor to one program, whose loads, products and stores would take turns.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    SHARES: tl.constexpr = 1 if WHOLE else TILES  # programs a head
    EACH: tl.constexpr = TILES if WHOLE else 1  # tiles of a program
    work = tl.program_id(0)
    end = tl.load(due).to(tl.int32) * (HV * SHARES)
    if solved is not None:
        solved += work * (BL * V)
    while work < end:
        ticket = load_ticket(due, work // (HV * SHARES))
        head = work // SHARES % HV
        slot, count = ticket.slot, ticket.pos
        first = 0 if WHOLE else work % TILES
        if solved is not None:
            for i in range(EACH):
                _solve_tile(
                    checkpoint, ring, solved, slot, head, first + i, count,
                    HK, HV, K, V, L, CHECKPOINT, STATE_KEYS, KEYS, PIECES, PIECE, BV, BL,
                )  # fmt: skip
            tl.debug_barrier()
        amax = None
        if WHOLE:
            amax = head * 0
            for tile in range(TILES):
                s = _fold_tile(
                    checkpoint, ring, solved, slot, head, tile, count,
                    HK, HV, K, V, L, CHECKPOINT, FULL, BV, BK, BL,
                )  # fmt: skip
                amax = tl.maximum(amax, tl.max(magnitude_bits(s)))
        for after in range(EACH):
            # The first tile last: it writes the scale, which the others read to the end.
            tile = first + EACH - 1 - after
            tl.debug_barrier()
            s = _fold_tile(
                checkpoint, ring, solved, slot, head, tile, count,
                HK, HV, K, V, L, CHECKPOINT, FULL, BV, BK, BL,
            )  # fmt: skip
            tl.debug_barrier()
            value = tile * BV + tl.arange(0, BV)
            in_rows = None if V % BV == 0 else value < V
            write_state(
                s, checkpoint, read_copy, cursors, layer, ticket, head * V + value, in_rows,
                V, K, BV, BK, CHECKPOINT, READ_COPY, amax,
            )  # fmt: skip
        if solved is not None:
            tl.debug_barrier()  # the next head's u takes the place of this one's
        work += tl.num_programs(0)


@triton.jit
def _solve_tile(
    checkpoint, ring, solved, slot, head, tile, count,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    CHECKPOINT: tl.constexpr, STATE_KEYS: tl.constexpr, KEYS: tl.constexpr,
    PIECES: tl.constexpr, PIECE: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """u of a tile's records against the checkpoint, into `solved`.

    Through memory, although the fold is next: values that go from product to product in registers
    keep one layout, which gives every warp 16 rows, and holding the state through it all spills.
    """
    value, record = tile * BV + tl.arange(0, BV), tl.arange(0, BL)
    in_v, past = value < V, record < count
    in_rows = None if V % BV == 0 else in_v
    first = (slot * HV + head) * L  # this head's oldest record
    keys = ring.k + (slot * HK + head // (HV // HK)) * L * K
    # In pieces, as in a window.
    state_row = head * V + value
    state_k, k_k = tl.zeros([BV, BL], tl.float32), tl.zeros([BL, BL], tl.float32)
    for piece in range(PIECES):
        column = piece * PIECE + tl.arange(0, PIECE)
        k = load_rows(keys, record, K, past, column, column < K)  # [BL, PIECE]
        s = load_unscaled(  # [BV, PIECE]
            checkpoint, slot, state_row * PIECES + piece, in_rows, K // PIECES, PIECE, CHECKPOINT
        )
        state_k = exact_dot(s, tl.trans(k), state_k, STATE_KEYS)
        k_k = exact_dot(k, tl.trans(k), k_k, KEYS)
    state_k *= row_factor(checkpoint, slot, state_row, in_rows, V, CHECKPOINT)[:, None]
    log_decay = tl.cumsum(tl.load(ring.g + first + record, mask=past, other=0.0), 0)  # [BL]
    v = load_columns(ring.v + first * V, record, V, past, value, in_v)  # [BV, BL]
    beta = tl.load(ring.beta + first + record, mask=past, other=0.0)[None, :]
    predicted = decay(log_decay, 0.0)[None, :] * state_k
    between = decay(log_decay[None, :], log_decay[:, None])  # [BL, BL], earlier first
    system = tl.where(record[:, None] < record[None, :], between * k_k, 0.0)
    u = substitute(beta * (v - predicted), system * beta, L, BL)
    at = solved + record[None, :] * V + value[:, None]
    tl.store(at, u, mask=in_v[:, None] & past[None, :])


@triton.jit
def _fold_tile(
    checkpoint, ring, solved, slot, head, tile, count,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    CHECKPOINT: tl.constexpr, FULL: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """A tile of the state, [BV, BK] FP32, with the records folded in: their u from `solved`, or,
    where that is None, from the ring."""
    value, column, record = tile * BV + tl.arange(0, BV), tl.arange(0, BK), tl.arange(0, BL)
    in_v, in_k, past = value < V, column < K, record < count
    in_rows = None if V % BV == 0 else in_v
    first = (slot * HV + head) * L  # this head's oldest record
    keys = ring.k + (slot * HK + head // (HV // HK)) * L * K
    s = load_tile(checkpoint, slot, head * V + value, in_rows, V, K, BK, CHECKPOINT)
    k = load_rows(keys, record, K, past, column, in_k)  # [BL, BK]
    log_decay = tl.cumsum(tl.load(ring.g + first + record, mask=past, other=0.0), 0)  # [BL]
    if solved is None:
        u = load_columns(ring.u + first * V, record, V, past, value, in_v)  # [BV, BL]
    else:
        u = load_columns(solved, record, V, past, value, in_v)
    return fold_records(s, u, k, log_decay, FULL, BL)


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
    launch: Launch | None = None,
) -> None:
    """Commit one record of every row, and `flush` the rows whose ring it filled."""
    _flush(checkpoint, read_copy, ring, policy, cursors, layer, launch, commits=True)


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
    batch = len(cursors.slots)
    launch = launch or default_launch("flush", policy, constants, batch)
    due = list_due(cursors, constants["L"], rows, moves=True, commits=commits)
    whole = scales_heads(policy)
    work = batch * constants["HV"] * (1 if whole else launch.tiles(constants))
    # 16 warps a multiprocessor are enough for any tile.
    programs = min(work, resident_programs(due.device, max(1, 16 // launch.num_warps)))
    solved = None
    if ring.v is not None:
        shape = (programs, constants["BL"], constants["V"])
        solved = torch.empty(shape, dtype=torch.float32, device=due.device)
    flush_kernel[(programs,)](
        stored(checkpoint),
        None if read_copy is None else stored(read_copy),
        layer,
        ring,
        cursors,
        due,
        solved,
        **constants,
        **storages,
        **pieces(policy.checkpoint, constants),
        WHOLE=whole,
        STATE_KEYS=precision_of(unscaled_dtype(policy.checkpoint), ring.k.dtype),
        KEYS=precision_of(ring.k.dtype, ring.k.dtype),
        FULL=precision_of(ring.u.dtype, ring.k.dtype),
        **launch.options(*storages.values()),
        BV=launch.block_v,
        BK=state_width(policy, constants),
    )
