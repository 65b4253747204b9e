"""Kernels of a step, which answers one token per row, commits it, and folds the rings it fills.

Owns the kernel that does all of it, for few rows, and the one that does it for a list of the rows
whose rings fill, for many. Knows no launch. Legend: triton_tiles.py.
"""

import triton
import triton.language as tl

from replayssm.ops.gated_delta.triton_fold import fold_and_write, room_for
from replayssm.ops.gated_delta.triton_token import load_token, one_token
from replayssm.ops.triton_common import (
    Ticket,
    bound,
    count_arrival,
    forget_heads,
    load_ticket,
    move_if_last,
)


@triton.jit(do_not_specialize=["layer"])
def step_kernel(
    slots,  # [B], of `cursors`: what is loaded first
    tokens,  # Tokens
    read,  # Stored
    ring,  # Ring
    out,  # [B, HV, V] FP32
    cursors,  # Cursors
    checkpoint,  # Stored
    read_copy,  # Stored, or None
    layer,
    room,  # FP32, for each program as `room_for` says; None: it says 0
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    READ: tl.constexpr,
    PRODUCTS: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    READ_COPY: tl.constexpr,
    WHOLE: tl.constexpr,
    SHARED: tl.constexpr,
    KEYS: tl.constexpr,
    FULL: tl.constexpr,
    EXACT: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    BV: tl.constexpr,
    FOLDED: tl.constexpr,
    ROUNDED: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    THREADS: tl.constexpr,  # of a program
):  # fmt: skip
    """Grid (tiles of V, HV, B). Constants: `one_token`, `fold_and_write`.

    A program that finds that its token fills the ring folds it, with all that the ring holds for
    its tile. A row's last program to finish moves its cursor, when all others have read it.
    """
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    token = load_token(tokens, row, head, HK, HV, K, READ, PRODUCTS, BK, BL, COLUMNS, KEY_COLUMNS)
    tl.debug_barrier()  # the compiler would ask for the token behind the branch
    if slot < 0:
        no_token(out, row, tile, head, HV, V, BV)
        return
    pos = tl.load(cursors.pos + slot)
    TILES: tl.constexpr = (V + BV - 1) // BV  # the grid's size costs a trip to memory
    programs: tl.constexpr = TILES * HV
    before = one_token(
        out, tokens, token, ring, cursors, read, row, slot, pos.to(tl.int32), tile, head,
        HK, HV, K, V, L, READ, PRODUCTS, True, THREADS, BV, BK, BL, COLUMNS, KEY_COLUMNS,
    )  # fmt: skip
    if pos != L - 1:
        move_if_last(cursors, slot, before, programs, pos + 1, None, THREADS)
    else:
        tl.debug_barrier()  # the record is in memory
        flushes = tl.load(cursors.flushes + slot)
        sequence, seed = tl.load(cursors.sequence + slot), tl.load(cursors.seed + slot)
        ticket = Ticket(row.to(tl.int32), slot, pos.to(tl.int32) + 1, flushes, sequence, seed)
        if room is not None:
            program = row * HV + head
            if not SHARED:
                program = program * TILES + tile
            SOLVES: tl.constexpr = ring.v is not None
            SIZE: tl.constexpr = room_for(SOLVES, SOLVES, WHOLE, CHECKPOINT, V, BV, BK, BL)[-1]
            room += program * SIZE
        if not SHARED:
            before = count_arrival(cursors, slot, flushes >= 0, THREADS)
        fold_and_write(
            checkpoint, read_copy, layer, ring, cursors, None, room, ticket, head, tile,
            HK, HV, K, V, L, CHECKPOINT, READ_COPY, WHOLE, SHARED, KEYS, FULL, EXACT,
            PIECES, PIECE, BV, FOLDED, ROUNDED, BK, BL,
        )  # fmt: skip
        if SHARED:
            before = count_arrival(cursors, slot, flushes >= 0, THREADS)
            forget_heads(cursors, slot, before, programs)
        move_if_last(cursors, slot, before, programs, pos * 0, flushes + 1, THREADS)


@triton.jit(do_not_specialize=["layer"])
def step_due_kernel(
    out,
    tokens,
    ring,
    cursors,
    state,  # Stored, read and written
    layer,
    due,  # from `list_due`: rows whose ring the token fills
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    READ: tl.constexpr,
    PRODUCTS: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    WHOLE: tl.constexpr,
    KEYS: tl.constexpr,
    FULL: tl.constexpr,
    EXACT: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    BV: tl.constexpr,
    FOLDED: tl.constexpr,
    ROUNDED: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    THREADS: tl.constexpr,  # of a program
):  # fmt: skip
    """Grid of any size: programs share the tiles of the rows that are due, whose cursors `due` has
    moved. Each answers the token and folds the ring into the tile, which is in the cache by then.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    end = tl.load(due).to(tl.int32) * (HV * TILES)
    first_work, programs = tl.program_id(0), tl.num_programs(0)
    for work in tl.range(bound(first_work), bound(end), bound(programs), disable_licm=True):
        ticket = load_ticket(due, work // (HV * TILES))
        head, tile = work // TILES % HV, work % TILES
        one_token(
            out, tokens, None, ring, cursors, state, ticket.row.to(tl.int64), ticket.slot, L - 1,
            tile, head, HK, HV, K, V, L, READ, PRODUCTS, False, THREADS,
            BV, BK, BL, COLUMNS, KEY_COLUMNS,
        )  # fmt: skip
        tl.debug_barrier()  # the record is in memory
        fold_and_write(
            state, None, layer, ring, cursors, None, None, ticket, head, tile,
            HK, HV, K, V, L, CHECKPOINT, None, WHOLE, False, KEYS, FULL, EXACT,
            PIECES, PIECE, BV, FOLDED, ROUNDED, BK, BL,
        )  # fmt: skip


@triton.jit
def no_token(out, row, tile, head, HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Outputs of a padding row."""
    value = tile * BV + tl.arange(0, BV)
    tl.store(out + (row * HV + head) * V + value, tl.zeros([BV], tl.float32), mask=value < V)
