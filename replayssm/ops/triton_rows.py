"""Rows of a state: read in parts, folded in parts, written once.

Owns how a row is shared by few lanes, the one place where a folded state becomes both copies, and
how a step of few rows ends. Knows no recurrence and no launch. Legend: R rows of a head's matrix
[ROWS, COLS]; a part is some columns of all R rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.formats.number import FP32
from replayssm.formats.storage import Storage
from replayssm.ops.quantize.layout import columns_of_scale, reads_words, scales_of
from replayssm.ops.quantize.scaling import magnitude_bits
from replayssm.ops.quantize.store import store_tile
from replayssm.ops.quantize.tiles import load_codes
from replayssm.ops.triton_common import (
    count_arrival,
    forget_heads,
    largest_of_head,
    move_if_last,
    tell_head,
)
from replayssm.policy import READ_COPY_STREAM

LANES = tl.constexpr(8)  # that share a row
_READ_COPY_KEY = tl.constexpr(READ_COPY_STREAM << 24)


def line_columns(bits: int) -> int:
    """Elements of so many bits in 128 bytes."""
    return 1024 // bits


def part_columns(storage: Storage, cols: int, width: int) -> int:
    """Columns of a state [.., cols] in tiles of `width` that are read at a time: 128 bytes, or all
    where cols is no multiple of that or rows have scales."""
    part = line_columns(storage.code_bits)
    return width if cols % part or storage.scale == "row" else part


def folded_columns(storage: Storage, cols: int, width: int) -> int:
    """Columns of a checkpoint that are folded at a time, four for each of eight lanes that share a
    row; all where cols is no power of two, or a scale belongs to more."""
    whole_blocks = 32 % columns_of_scale(storage) == 0
    parts = cols == width <= 256 and storage.scale != "row" and whole_blocks
    return min(32, width) if parts else width


@triton.constexpr_function
def is_exact(storage: Storage) -> bool:
    """Whether a state is stored as it is."""
    return storage.format == FP32 and storage.scale == "none"


@triton.jit
def load_parts(
    read, slot, row, in_rows,
    V: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """The state as it lies, in parts of 128 bytes a row, which eight lanes read: every further lane
    would cost each row a shuffle. A row of K columns is K / COLUMNS rows."""
    PARTS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    parts = ()
    for part in tl.static_range(PARTS):
        at = row * PARTS + part
        parts = parts + (load_codes(read, slot, at, in_rows, V * PARTS, K // PARTS, COLUMNS, READ),)
    return parts


@triton.jit
def load_to_multiply(
    read, slot, row, in_rows, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """The state as it lies, for products with vectors: words of codes from `load_codes`, or parts
    from `load_parts`."""
    if reads_words(READ, COLS):
        return load_codes(read, slot, row, in_rows, ROWS, COLS, WIDTH, READ)
    else:
        return load_parts(read, slot, row, in_rows, ROWS, COLS, COLUMNS, READ)


@triton.jit
def no_token(out, row, tile, head, HEADS: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr):
    """Outputs of a padding row."""
    value = tile * R + tl.arange(0, R)
    zeros = tl.zeros([R], tl.float32)
    tl.store(out + (row * HEADS + head) * ROWS + value, zeros, mask=value < ROWS)


@triton.jit
def lone_rows(tile, R: tl.constexpr):
    """The rows of a tile, [R], which the compiler does not know to follow each other: it would give
    neighbours to neighbouring lanes, and not to the warps whose rows they are."""
    return ((tile * R + tl.arange(0, R)) << 1) >> 1


@triton.jit
def times(parts, factor):
    """All parts times a number."""
    scaled = ()
    for part in tl.static_range(len(parts)):
        scaled = scaled + (parts[part] * factor,)
    return scaled


@triton.jit
def plus_outer(parts, u, k):
    """parts + u kᵀ, for u [BV] and k in parts."""
    u = tl.broadcast_to(u[:, None], parts[0].shape)
    after = ()
    for part in tl.static_range(len(parts)):
        x = tl.broadcast_to(k[part][None, :], parts[part].shape)
        after = after + (tl.fma(u, x, parts[part]),)
    return after


@triton.jit
def side_by_side(parts):
    """One tile of all columns of 1, 2, 4 or 8 parts."""
    if len(parts) == 1:
        return parts[0]
    elif len(parts) == 2:
        return _beside(parts[0], parts[1])
    elif len(parts) == 4:
        return _beside(_beside(parts[0], parts[1]), _beside(parts[2], parts[3]))
    else:
        tl.static_assert(len(parts) == 8)
        return _beside(
            _beside(_beside(parts[0], parts[1]), _beside(parts[2], parts[3])),
            _beside(_beside(parts[4], parts[5]), _beside(parts[6], parts[7])),
        )


@triton.jit
def _beside(a, b):
    return tl.reshape(tl.permute(tl.join(a, b), [0, 2, 1]), [a.shape[0], 2 * a.shape[1]])


@triton.jit
def store_parts(
    parts, pattern, checkpoint, cursors, slot, row, in_rows,
    V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, CHECKPOINT: tl.constexpr,
):  # fmt: skip
    """Store parts in a checkpoint that holds them as they are; pattern: of their largest
    magnitude. Numbers that are not finite are counted."""
    PARTS: tl.constexpr = len(parts)
    COLUMNS: tl.constexpr = parts[0].shape[1]
    not_finite = 0
    for part in tl.static_range(PARTS):
        _, count = store_tile(
            parts[part], None, checkpoint, slot, row * PARTS + part, in_rows,
            V * PARTS, BV, K // PARTS, COLUMNS, CHECKPOINT, pattern,
        )  # fmt: skip
        not_finite += count
    if not_finite > 0:
        tl.atomic_add(cursors.not_finite + slot, not_finite.to(tl.int64))


@triton.jit
def write_state(
    s,
    checkpoint,
    read_copy,
    cursors,
    layer,
    ticket,
    row,
    in_rows,
    V: tl.constexpr,
    K: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    READ_COPY: tl.constexpr,
    amax=None,
    scales=None,
    HELD: tl.constexpr = False,
):
    """Round the FP32 tile s [BV, BK] once into the checkpoint (HELD: it is there) and, from the
    same values, once into the read copy (READ_COPY None: there is none); count what saturated and
    what was not finite.

    amax: pattern of the largest magnitude in the head, where s is not all of it.
    scales: of the blocks of what outputs read, where they are stored already; see `store_tile`.
    """
    slot = ticket.slot
    if HELD:
        over, not_finite = 0, 0
    else:
        key = (ticket.seed, layer, ticket.flushes, ticket.sequence)
        over, not_finite = store_tile(
            s, key, checkpoint, slot, row, in_rows, V, BV, K, BK, CHECKPOINT, amax,
            scales if READ_COPY is None else None,
        )  # fmt: skip
    if READ_COPY is not None:
        key = (ticket.seed, layer + _READ_COPY_KEY, ticket.flushes, ticket.sequence)
        over_copy, _ = store_tile(
            s, key, read_copy, slot, row, in_rows, V, BV, K, BK, READ_COPY, amax, scales
        )
        over = over + over_copy
    if over > 0:
        tl.atomic_add(cursors.saturated + slot, over.to(tl.int64))
    if not HELD:
        if not_finite > 0:
            tl.atomic_add(cursors.not_finite + slot, not_finite.to(tl.int64))


@triton.jit
def tell_tile(
    parts, cursors, slot, head, tile, state,
    ROWS: tl.constexpr, R: tl.constexpr, READ: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """A folded tile's parts, all of it, and the pattern of its largest magnitude, which, if SHARED,
    the other programs of its head are told. A program that has heard all may write a scale that is
    read with `state`, the tile as `load_to_multiply` loaded it: it is here before this one tells,
    even if all else of an answer comes later."""
    s = side_by_side(parts)
    largest = tl.max(magnitude_bits(s), 1)
    if SHARED and scales_of(READ) == "nvfp4":
        largest |= state[2].to(tl.int32, bitcast=True) >> 31  # 0: scales are positive
    pattern = tl.max(largest)
    if SHARED:
        tell_head(cursors, slot, head, tile, (ROWS + R - 1) // R, pattern)
    return parts, s, pattern


@triton.jit
def write_and_move(
    folded, checkpoint, read_copy, cursors, layer, ticket, head, tile, said,
    ROWS: tl.constexpr, COLS: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
    CHECKPOINT: tl.constexpr, READ_COPY: tl.constexpr,
    SHARED: tl.constexpr,  # a copy has a scale for more rows than a tile has
    PROGRAMS: tl.constexpr,  # of a row
    THREADS: tl.constexpr,
):  # fmt: skip
    """End of a step that folds, where every tile of a row has a program of one launch: write what
    `tell_tile` returned into both copies, and move the row's cursor if all others have counted.

    `said`: of `hear_head`, if SHARED. A checkpoint that needs no scale is stored while the others
    are heard.
    """
    TILES: tl.constexpr = (ROWS + R - 1) // R
    HELD: tl.constexpr = is_exact(CHECKPOINT)
    slot, value = ticket.slot, tile * R + tl.arange(0, R)
    row, in_rows = head * ROWS + value, None if ROWS % R == 0 else value < ROWS
    parts, s, pattern = folded
    amax = None
    if HELD:
        store_parts(
            parts, pattern, checkpoint, cursors, slot, row, in_rows, ROWS, COLS, R, CHECKPOINT
        )
    if SHARED:
        amax = largest_of_head(cursors, slot, head, TILES, said, THREADS)
    before = count_arrival(cursors, slot, ticket.flushes >= 0, THREADS)
    if not HELD or READ_COPY is not None:
        write_state(
            s, checkpoint, read_copy, cursors, layer, ticket, row, in_rows,
            ROWS, COLS, R, WIDTH, CHECKPOINT, READ_COPY, amax, None, HELD,
        )  # fmt: skip
    if SHARED:
        forget_heads(cursors, slot, before, PROGRAMS)
    move_if_last(cursors, slot, before, PROGRAMS, ticket.flushes * 0, ticket.flushes + 1, THREADS)
