"""Fold committed records into the state, round once, write checkpoint and read copy in one pass.

Owns the flush kernel and its launcher. Legend: triton_tiles.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.formats.quantized import Quantized
from replayssm.ops.mamba2 import triton_launch
from replayssm.ops.mamba2.triton_launch import Launch
from replayssm.ops.mamba2.triton_tiles import (
    FP32_RECORDS,
    fold,
    last,
    load_checkpoint,
    load_past,
    load_records,
    load_x_records,
    past_of,
    tile_rows,
    values_of_pieces,
    write_state,
)
from replayssm.ops.quantize.layout import stored
from replayssm.ops.triton_common import Cursors, bound, list_due, load_ticket, prefix_sums
from replayssm.ops.triton_policy import check_copies
from replayssm.policy import PrecisionPolicy


@triton.jit(do_not_specialize=["layer"])
def flush_kernel(
    checkpoint, read_copy, layer,       # Stored; Stored or None
    A, ring, cursors, due,              # [H], Ring, Cursors (only counters), from `list_due`
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    TILES: tl.constexpr, RING: tl.constexpr, CHECKPOINT: tl.constexpr, READ_COPY: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
    LOOPS: tl.constexpr,                # whether there may be more tiles than programs
):  # fmt: skip
    """Grid of any size: programs share the TILES of the rows that are due."""
    first = tl.program_id(0)
    end = tl.load(due).to(tl.int32) * TILES
    if LOOPS:
        step = tl.num_programs(0)
        for work in tl.range(bound(first), bound(end), bound(step), disable_licm=True):
            flush_tile(
                checkpoint, read_copy, layer, A, ring, cursors, load_ticket(due, work // TILES),
                work % TILES, H, P, G, N, L, RING, CHECKPOINT, READ_COPY, PRECISION,
                HEADS, BP, BL, WIDTH,
            )  # fmt: skip
    else:
        ticket = load_ticket(due, first // TILES)  # in memory, filled or not
        if first < end:
            flush_tile(
                checkpoint, read_copy, layer, A, ring, cursors, ticket,
                first % TILES, H, P, G, N, L, RING, CHECKPOINT, READ_COPY, PRECISION,
                HEADS, BP, BL, WIDTH,
            )  # fmt: skip


@triton.jit
def flush_tile(
    checkpoint, read_copy, layer, A, ring, cursors, ticket, part,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    RING: tl.constexpr, CHECKPOINT: tl.constexpr, READ_COPY: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Tile `part` of a row, which reads no cursor and so waits for no other tile."""
    n = tl.arange(0, WIDTH)
    slot, pos = ticket.slot, ticket.pos
    group, _, head, _, _, in_heads, _ = tile_rows(part, H, P, G, HEADS, BP)
    loaded = load_checkpoint(checkpoint, slot, part, H, P, G, N, CHECKPOINT, HEADS, BP, WIDTH)
    rate = tl.load(A + head, mask=in_heads, other=0.0)
    ring_B = ring.B + slot * ring.B_slot + group * L * N + n
    ring_dt = ring.dt + slot * ring.dt_slot + head * L
    states = values_of_pieces(loaded, N, WIDTH, CHECKPOINT)
    # A window's ring has more slots than are committed when it is flushed at the end of L tokens;
    # products have at least 16.
    FEW: tl.constexpr = 16
    if BL > FEW:
        if pos <= FEW:
            states = _folded(
                states, rate, ring_B, ring_dt, ring, slot, part, pos, in_heads, n,
                H, P, G, N, L, RING, PRECISION, HEADS, BP, FEW,
            )  # fmt: skip
        else:
            states = _folded(
                states, rate, ring_B, ring_dt, ring, slot, part, pos, in_heads, n,
                H, P, G, N, L, RING, PRECISION, HEADS, BP, BL,
            )  # fmt: skip
    else:
        states = _folded(
            states, rate, ring_B, ring_dt, ring, slot, part, pos, in_heads, n,
            H, P, G, N, L, RING, PRECISION, HEADS, BP, BL,
        )  # fmt: skip
    write_state(
        states, checkpoint, read_copy, cursors, layer, ticket, part,
        H, P, G, N, CHECKPOINT, READ_COPY, HEADS, BP, WIDTH,
    )  # fmt: skip


@triton.jit
def _folded(
    states, rate, ring_B, ring_dt, ring, slot, part, pos, in_heads, n,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    RING: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """The states with the first BL slots folded in, which are all that count."""
    dt = load_past(ring_dt, 1, in_heads, pos, BL, FP32_RECORDS)  # [BL, HEADS]
    B = past_of(load_records(ring_B, N, n < N, pos, BL), None, RING, PRECISION)  # [BL, WIDTH]
    records = load_x_records(ring, slot, part, pos, H, P, G, L, HEADS, BP, BL)
    xs = ()
    for i in tl.static_range(len(records)):
        xs = xs + (past_of(records[i], None, RING),)  # [BL, R]
    log_decay = prefix_sums(rate[None, :] * dt)
    return fold(states, xs, B, dt, log_decay, last(log_decay), PRECISION)


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
        checkpoint, read_copy: [S, H, P, N], written for the rows that flush; read_copy None: there
            is one copy.
        ring: as in `decode`; not written.
        policy: how both copies round, the ring's storage, the operands of products (fp32 only).
        cursors: of flushed rows, pos becomes 0, flushes grows by 1, saturated and not_finite by
            what was written. Random bits are keyed by seed, layer, copy, flushes and sequence.
        parameters: "A" [H] float32.
        layer: index of the layer in the model.
        rows: [B] bool or integer: which rows flush, whatever they hold; None: those with pos = L.
        launch: as in `decode`.

    Raises:
        ValueError: something has no kernel, or shapes disagree.
    """
    _flush(
        checkpoint, read_copy, ring, policy, cursors, parameters["A"], layer, rows, launch, False
    )


def commit_and_flush(
    checkpoint: Quantized,
    read_copy: Quantized | None,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    A: Tensor,
    *,
    layer: int,
    launch: Launch | None = None,
) -> None:
    """Commit one more record of every row, then `flush` those whose rings are full then."""
    _flush(checkpoint, read_copy, ring, policy, cursors, A, layer, None, launch, True)


def _flush(
    checkpoint: Quantized,
    read_copy: Quantized | None,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    A: Tensor,
    layer: int,
    rows: Tensor | None,
    launch: Launch | None,
    commits: bool,
) -> None:
    check_copies(policy, checkpoint, read_copy)
    sizes = triton_launch.sizes(checkpoint, ring, cursors)
    launch = launch or triton_launch.default_launch(
        "flush", policy, sizes, len(cursors.slots), any_row=rows is None
    )
    tiles = triton_launch.tiles(sizes, launch)
    flush_kernel[(triton_launch.programs(tiles, launch, cursors),)](
        stored(checkpoint),
        None if read_copy is None else stored(read_copy),
        layer,
        A,
        triton_launch.ring(ring),
        cursors,
        list_due(cursors, sizes["L"], rows, commits=commits, moves=True),
        **sizes,
        TILES=tiles,
        RING=triton_launch.ring_storage(policy, ring),
        CHECKPOINT=policy.checkpoint,
        READ_COPY=policy.read_copy,
        PRECISION=triton_launch.precision(policy, torch.float32, ring["B"].dtype),
        **launch.tile(sizes),
        BL=triton_launch.slots(sizes),
        WIDTH=triton_launch.width(sizes, checkpoint, read_copy),
        LOOPS=launch.loop > 1,
        **launch.options(),
    )
