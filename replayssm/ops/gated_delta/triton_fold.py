"""A full ring folded into one head's state: the device functions of every kernel that flushes.

Owns the order in which u is solved for, the records are folded, and both copies are written. Knows
no launch, and not which rows are due.

What one product leaves for the next goes through memory that belongs to the program: values that
stay in registers keep one layout, which gives every warp 16 rows, and holding a state through it
all spills. Legend: triton_tiles.py.
"""

import triton
import triton.language as tl

from replayssm.ops.gated_delta.triton_tiles import (
    decay,
    fold_decayed,
    fold_records,
    load_columns,
    load_rows,
    substitute,
)
from replayssm.ops.gated_delta.triton_whole import keep_tile, write_head
from replayssm.ops.quantize.tiles import load_tile, load_unscaled, row_factor
from replayssm.ops.triton_common import exact_dot
from replayssm.ops.triton_rows import is_exact, write_state

# A window's ring has more slots than are ever committed when it is flushed at the end of L tokens.
FEW = tl.constexpr(16)


@triton.constexpr_function
def may_be_few(BL: int) -> bool:
    """Whether a flush asks if the first slots are all that count: products have at least 16."""
    return BL > 16


@triton.constexpr_function
def mixes_size(BK: int, BL: int) -> int:
    """FP32 numbers of a head's `combine_keys`."""
    return BL * BL + BL * BK


@triton.constexpr_function
def decayed_size(BK: int, BL: int) -> int:
    """FP32 numbers of a head that a fold needs where every channel of its keys has a decay: those
    since the state [BK], then the keys as they have decayed [BL, BK]."""
    return BK + BL * BK


@triton.constexpr_function
def room_for(solves: bool, whole: bool, checkpoint, V: int, BV: int, BK: int, BL: int):
    """Where in a program's FP32 room things lie, and at last how large it is: u [BL, V]; block
    scales [V, BK / 16], states [V, BK]."""
    rows = -(-V // BV) * BV
    sizes = (BL * rows if solves else 0,)
    sizes += (rows * BK // 16, 0 if is_exact(checkpoint) else rows * BK) if whole else (0, 0)
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return tuple(starts)


@triton.jit
def fold_and_write(
    checkpoint,  # Stored
    read_copy,  # Stored, or None
    layer,
    ring,  # Ring; with v and beta, u is solved for; otherwise the ring's is folded
    cursors,  # Cursors, of which only counters are used
    mixes,  # FP32, what `combine_keys` left of this head
    room,  # FP32, as large as `room_for` says
    ticket,  # of the row
    head,
    first,  # of its tiles
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    READ_COPY: tl.constexpr,
    WHOLE: tl.constexpr,  # all tiles of a head, because a copy has a scale per head, not one
    FULL: tl.constexpr,  # precision of u times k
    EXACT: tl.constexpr,  # of FP32 times FP32
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    BV: tl.constexpr,
    FOLDED: tl.constexpr,  # columns of a whole head that are folded at a time
    ROUNDED: tl.constexpr,  # and rows that are rounded at a time
    BK: tl.constexpr,
    BL: tl.constexpr,
    decayed=None,  # FP32, `decayed_size` of this head's channels; None: its gates are the ring's
):
    """Fold the records of one head into some tiles of V rows, and write both copies.

    Where a copy has a scale per head, tiles are folded one after the other, then scales chosen for
    all their blocks, then the tiles written. All of a head at once would leave a multiprocessor to
    one program, whose loads, products and stores would take turns.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    EACH: tl.constexpr = TILES if WHOLE else 1
    SOLVES: tl.constexpr = ring.v is not None
    AT: tl.constexpr = room_for(SOLVES, WHOLE, CHECKPOINT, V, BV, BK, BL)
    slot, count = ticket.slot, ticket.pos
    if SOLVES:
        for i in tl.range(EACH, disable_licm=True):
            _solve_tile(
                checkpoint, ring, mixes, room, slot, head, first + i, count, AT,
                HV, K, V, L, CHECKPOINT, EXACT, PIECES, PIECE, BV, BK, BL,
            )  # fmt: skip
        tl.debug_barrier()
    if WHOLE:
        amax = head * 0
        for i in tl.range(EACH, disable_licm=True):
            tile = first + i
            for part in tl.range(BK // FOLDED, disable_licm=True):
                s = _fold_tile(
                    checkpoint, ring, decayed, room, slot, head, tile, count, AT,
                    HK, HV, K, V, L, CHECKPOINT, FULL, BV, BK, BL, BK // FOLDED, part,
                )  # fmt: skip
                tl.debug_barrier()  # all of the part is read
                peak = keep_tile(
                    s, checkpoint, cursors, room, slot, head, tile, AT,
                    V, K, CHECKPOINT, BV, BK, BK // FOLDED, part,
                )  # fmt: skip
                amax = tl.maximum(amax, peak)
        tl.debug_barrier()
        write_head(
            room, checkpoint, read_copy, cursors, layer, ticket, head, amax,
            AT, V, K, CHECKPOINT, READ_COPY, BV, ROUNDED, BK,
        )  # fmt: skip
    else:
        s = _fold_tile(
            checkpoint, ring, decayed, room, slot, head, first, count, AT,
            HK, HV, K, V, L, CHECKPOINT, FULL, BV, BK, BL, 1, 0,
        )  # fmt: skip
        tl.debug_barrier()
        value = first * BV + tl.arange(0, BV)
        in_rows = None if V % BV == 0 else value < V
        write_state(
            s, checkpoint, read_copy, cursors, layer, ticket, head * V + value, in_rows,
            V, K, BV, BK, CHECKPOINT, READ_COPY,
        )  # fmt: skip


@triton.jit
def combine_keys(
    ring, mixes, slot, head, count,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    KEYS: tl.constexpr, FULL: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """`_combine_keys` of as many slots as are needed."""
    if may_be_few(BL):
        if count <= FEW:
            _combine_keys(
                ring, mixes, slot, head, count, HK, HV, K, L, KEYS, FULL, BK, FEW
            )  # fmt: skip
        else:
            _combine_keys(ring, mixes, slot, head, count, HK, HV, K, L, KEYS, FULL, BK, BL)
    else:
        _combine_keys(ring, mixes, slot, head, count, HK, HV, K, L, KEYS, FULL, BK, BL)


@triton.jit
def _combine_keys(
    ring, mixes, slot, head, count,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    KEYS: tl.constexpr, FULL: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """The solve of a head, as two matrices that its rows are multiplied by, into `mixes`.

    u is linear in v and S: with M = (I + A)^-1 diag(β), u = M v - M diag(e^G) K Sᵀ, for each row of
    S and v. The inverse is solved for on the identity; its entries are products of contractions and
    at most 1. M is kept transposed, [earlier, later].
    """
    record, column = tl.arange(0, BL), tl.arange(0, BK)
    past, in_k = record < count, column < K
    first = (slot * HV + head) * L  # this head's oldest record
    keys = ring.k + (slot * HK + head // (HV // HK)) * L * K
    k = load_rows(keys, record, K, past, column, in_k)  # [BL, BK]
    log_decay = tl.cumsum(tl.load(ring.g + first + record, mask=past, other=0.0), 0)  # [BL]
    beta = tl.load(ring.beta + first + record, mask=past, other=0.0)
    k_k = exact_dot(k, tl.trans(k), tl.zeros([BL, BL], tl.float32), KEYS)
    between = decay(log_decay[None, :], log_decay[:, None])  # [BL, BL], earlier first
    system = tl.where(record[:, None] < record[None, :], between * k_k, 0.0)
    identity = tl.where(record[:, None] == record[None, :], 1.0, 0.0)
    inverse = substitute(identity, system * beta[None, :], L if L < BL else BL, BL)
    at = mixes + record[:, None] * BL + record[None, :]
    tl.store(at, inverse * beta[:, None])
    tl.debug_barrier()
    at = mixes + record[None, :] * BL + record[:, None]  # transposed: [later, earlier]
    mix = tl.load(at) * decay(log_decay, 0.0)[None, :]
    combined = exact_dot(mix, k, tl.zeros([BL, BK], tl.float32), FULL)
    tl.store(mixes + BL * BL + record[:, None] * BK + column[None, :], combined)
    tl.debug_barrier()


@triton.jit
def _solve_tile(
    checkpoint, ring, mixes, room, slot, head, tile, count, AT: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    CHECKPOINT: tl.constexpr, EXACT: tl.constexpr,
    PIECES: tl.constexpr, PIECE: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """`_solve_tile_of` as many slots as are needed, those of `combine_keys`."""
    if may_be_few(BL):
        if count <= FEW:
            _solve_tile_of(
                checkpoint, ring, mixes, room, slot, head, tile, count, AT,
                HV, K, V, L, CHECKPOINT, EXACT, PIECES, PIECE, BV, BK, FEW,
            )  # fmt: skip
        else:
            _solve_tile_of(
                checkpoint, ring, mixes, room, slot, head, tile, count, AT,
                HV, K, V, L, CHECKPOINT, EXACT, PIECES, PIECE, BV, BK, BL,
            )  # fmt: skip
    else:
        _solve_tile_of(
            checkpoint, ring, mixes, room, slot, head, tile, count, AT,
            HV, K, V, L, CHECKPOINT, EXACT, PIECES, PIECE, BV, BK, BL,
        )  # fmt: skip


@triton.jit
def _solve_tile_of(
    checkpoint, ring, mixes, room, slot, head, tile, count, AT: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    CHECKPOINT: tl.constexpr, EXACT: tl.constexpr,
    PIECES: tl.constexpr, PIECE: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """u of a tile's records against the checkpoint, into `room`."""
    value, record = tile * BV + tl.arange(0, BV), tl.arange(0, BL)
    in_v, past = value < V, record < count
    in_rows = None if V % BV == 0 else in_v
    # In pieces, as in a window; all are asked for before one is needed.
    state_row = head * V + value
    pieces = ()
    for piece in tl.static_range(PIECES):
        at = state_row * PIECES + piece
        s = load_unscaled(checkpoint, slot, at, in_rows, K // PIECES, PIECE, CHECKPOINT)
        pieces = pieces + (s,)  # [BV, PIECE]
    first = (slot * HV + head) * L  # this head's oldest record
    v = load_columns(ring.v + first * V, record, V, past, value, in_v)  # [BV, BL]
    mix = tl.load(mixes + record[:, None] * BL + record[None, :])
    tl.debug_barrier()
    predicted = tl.zeros([BV, BL], tl.float32)
    for piece in tl.static_range(PIECES):
        column = piece * PIECE + tl.arange(0, PIECE)
        k = tl.load(mixes + BL * BL + record[None, :] * BK + column[:, None])  # [PIECE, BL]
        predicted = exact_dot(pieces[piece], k, predicted, EXACT)
    predicted *= row_factor(checkpoint, slot, state_row, in_rows, V, CHECKPOINT)[:, None]
    if BL > 16:  # as in `fold_records`: so many steps of a sum do not cut what is predicted
        u = exact_dot(v, mix, tl.zeros_like(predicted), EXACT) - predicted
    else:
        u = exact_dot(v, mix, -predicted, EXACT)
    tl.store(room + AT[0] + record[None, :] * V + value[:, None], u, mask=in_v[:, None])


@triton.jit
def _fold_tile(
    checkpoint, ring, decayed, room, slot, head, tile, count, AT: tl.constexpr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    CHECKPOINT: tl.constexpr, FULL: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, PARTS: tl.constexpr, part,
):  # fmt: skip
    """One of PARTS of a tile's columns, [BV, BK / PARTS] FP32, with the records folded in. With
    more than one part, K is BK, and a row is read as so many rows, none of which has a scale."""
    value, column = tile * BV + tl.arange(0, BV), tl.arange(0, BK // PARTS)
    in_v = value < V
    in_rows = None if V % BV == 0 else in_v
    first = (slot * HV + head) * L  # this head's oldest record
    keys = ring.k + (slot * HK + head // (HV // HK)) * L * K + part * (BK // PARTS)
    row = (head * V + value) * PARTS + part
    s = load_tile(checkpoint, slot, row, in_rows, V * PARTS, K // PARTS, BK // PARTS, CHECKPOINT)
    u_at = ring.u + first * V if ring.v is None else room + AT[0]
    in_k = column < K // PARTS
    if decayed is not None:
        decayed += part * (BK // PARTS)
    if may_be_few(BL):
        if count <= FEW:
            s = _folded(
                s, keys, ring.g + first, decayed, u_at, count, value, in_v, column, in_k,
                K, V, FULL, BK, FEW,
            )  # fmt: skip
        else:
            s = _folded(
                s, keys, ring.g + first, decayed, u_at, count, value, in_v, column, in_k,
                K, V, FULL, BK, BL,
            )  # fmt: skip
    else:
        s = _folded(
            s, keys, ring.g + first, decayed, u_at, count, value, in_v, column, in_k,
            K, V, FULL, BK, BL,
        )  # fmt: skip
    return s


@triton.jit
def _folded(
    s, keys, gates, decayed, u_at, count, value, in_v, column, in_k,
    K: tl.constexpr, V: tl.constexpr, FULL: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """s with the first BL slots folded in, which are all that count."""
    record = tl.arange(0, BL)
    past = record < count
    if decayed is None:
        k = load_rows(keys, record, K, past, column, in_k)  # [BL, columns]
        log_decay = tl.cumsum(tl.load(gates + record, mask=past, other=0.0), 0)  # [BL]
        u = load_columns(u_at, record, V, past, value, in_v)  # [BV, BL]
        return fold_records(s, u, k, log_decay, FULL, BL)
    else:
        factors = tl.load(decayed + column)
        k = tl.load(decayed + BK + record[:, None] * BK + column[None, :])  # [BL, columns]
        u = load_columns(u_at, record, V, past, value, in_v)
        return fold_decayed(s, u, k, factors, FULL)
