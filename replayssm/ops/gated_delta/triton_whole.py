"""Heads with a scale for all of their rows: kept in FP32 until it is known, then rounded.

Owns what is kept of folded tiles, and the choice of block scales once all of a head is kept. Knows
no records; the order of phases is `triton_fold.py`'s, and so is the room they share. Legend:
triton_tiles.py.
"""

import triton
import triton.language as tl

from replayssm.formats.storage import Storage
from replayssm.ops.quantize.layout import scales_of
from replayssm.ops.quantize.scaling import magnitude_bits
from replayssm.ops.quantize.store import store_scales, store_tile
from replayssm.ops.quantize.tiles import load_tile
from replayssm.ops.triton_rows import is_exact, write_state


@triton.constexpr_function
def chooses_ahead(storage: Storage) -> bool:
    """Whether block scales follow from the largest magnitudes of blocks and of their head."""
    ahead = scales_of(storage) == "nvfp4" and not storage.format.four_over_six
    return ahead and storage.format.block_size == 16


@triton.jit
def keep_tile(
    s, checkpoint, cursors, room, slot, head, tile, AT: tl.constexpr,
    V: tl.constexpr, K: tl.constexpr, CHECKPOINT: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, part,
):  # fmt: skip
    """Keep what `_fold_tile` returned: where the checkpoint holds it exactly, there, otherwise in
    `room`, beside the patterns of the largest magnitudes of blocks of 16. Returns the largest."""
    WIDTH: tl.constexpr = BK // PARTS
    value, column, block = (
        tile * BV + tl.arange(0, BV),
        tl.arange(0, WIDTH),
        tl.arange(0, WIDTH // 16),
    )
    magnitude = magnitude_bits(s)
    amax = tl.max(tl.reshape(magnitude, [BV, WIDTH // 16, 16]), 2)
    line = value[:, None] * PARTS + part
    at = room + AT[1] + line * (WIDTH // 16) + block[None, :]
    tl.store(at, amax.to(tl.float32, bitcast=True))
    if is_exact(CHECKPOINT):
        in_rows = None if V % BV == 0 else value < V
        row = (head * V + value) * PARTS + part
        _, not_finite = store_tile(
            s, None, checkpoint, slot, row, in_rows, V, BV, K // PARTS, WIDTH, CHECKPOINT
        )
        if not_finite > 0:
            tl.atomic_add(cursors.not_finite + slot, not_finite.to(tl.int64))
    else:
        tl.store(room + AT[2] + line * WIDTH + column[None, :], s)
    return tl.max(amax)


@triton.jit
def write_head(
    room, checkpoint, read_copy, cursors, layer, ticket, head, amax,
    AT: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    CHECKPOINT: tl.constexpr, READ_COPY: tl.constexpr,
    BV: tl.constexpr, ROUNDED: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Choose a head's scales and round all of its tiles, which were kept; amax: the pattern of
    their largest magnitude."""
    READ: tl.constexpr = CHECKPOINT if READ_COPY is None else READ_COPY
    read = checkpoint if READ_COPY is None else read_copy
    may_overflow = amax < 0
    if chooses_ahead(READ):
        may_overflow = _choose_scales(room, read, ticket.slot, head, amax, AT, V, K, READ, BK)
        tl.debug_barrier()
    ROWS: tl.constexpr = ROUNDED if ROUNDED < BV else BV
    for tile in tl.range((V + ROWS - 1) // ROWS, disable_licm=True):
        _write_kept(
            room, checkpoint, read_copy, cursors, layer, ticket, head, tile, amax, may_overflow,
            AT, V, K, CHECKPOINT, READ_COPY, ROWS, BK,
        )  # fmt: skip


@triton.jit
def _choose_scales(
    room, read, slot, head, amax, AT: tl.constexpr,
    V: tl.constexpr, K: tl.constexpr, READ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Block scales of a head from the magnitudes in `room`, which they replace; whether a code may
    overflow under them."""
    ROWS: tl.constexpr = triton.next_power_of_2(V)
    value, block = tl.arange(0, ROWS), tl.arange(0, BK // 16)
    in_rows = None if V == ROWS else value < V
    at = room + AT[1] + value[:, None] * (BK // 16) + block[None, :]
    largest = tl.load(at, mask=(value < V)[:, None], other=0.0).to(tl.int32, bitcast=True)
    scales, may_overflow = store_scales(
        largest, amax, read, slot, head * V + value, in_rows, V, K, BK, READ
    )
    tl.store(at, scales, mask=(value < V)[:, None])
    return may_overflow


@triton.jit
def _write_kept(
    room, checkpoint, read_copy, cursors, layer, ticket, head, tile, amax, may_overflow,
    AT: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    CHECKPOINT: tl.constexpr, READ_COPY: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Round a tile that was kept into what does not hold it yet."""
    value, column = tile * BV + tl.arange(0, BV), tl.arange(0, BK)
    in_rows = None if V % BV == 0 else value < V
    row = head * V + value
    if is_exact(CHECKPOINT):
        s = load_tile(checkpoint, ticket.slot, row, in_rows, V, K, BK, CHECKPOINT)
    else:
        s = tl.load(room + AT[2] + value[:, None] * BK + column[None, :])
    READ: tl.constexpr = CHECKPOINT if READ_COPY is None else READ_COPY
    scales = None
    if chooses_ahead(READ):
        block = tl.arange(0, BK // 16)
        scales = (
            tl.load(room + AT[1] + value[:, None] * (BK // 16) + block[None, :]),
            may_overflow,
        )
    write_state(
        s, checkpoint, read_copy, cursors, layer, ticket, row, in_rows,
        V, K, BV, BK, CHECKPOINT, READ_COPY, amax, scales, is_exact(CHECKPOINT),
    )  # fmt: skip
