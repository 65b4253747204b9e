"""A full ring folded into one head's state: the device functions of every kernel that flushes.

Owns the order in which u is solved for, the records are folded, and both copies are written. Knows
no launch, and not which rows are due.

Legend: triton_tiles.py.
"""

import triton
import triton.language as tl

from replayssm.ops.gated_delta.triton_tiles import (
    decay,
    fold_records,
    load_columns,
    load_rows,
    substitute,
    write_state,
)
from replayssm.ops.quantize.scaling import magnitude_bits
from replayssm.ops.quantize.tiles import load_tile, load_unscaled, row_factor
from replayssm.ops.triton_common import exact_dot


@triton.jit
def fold_and_write(
    checkpoint,  # Stored
    read_copy,  # Stored, or None
    layer,
    ring,  # Ring
    cursors,  # Cursors, of which only counters are used
    solved,  # [L or more, V] FP32, room for the u that is solved for; None: the ring's u is folded
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
    EACH: tl.constexpr,  # tiles, from `first` on
    WHOLE: tl.constexpr,  # a copy has a scale per head: they are all of the head
    STATE_KEYS: tl.constexpr,  # precision of state times k
    KEYS: tl.constexpr,  # of k times k
    FULL: tl.constexpr,  # of u times k
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
):
    """Fold the records of one head into some tiles of V rows, and write both copies.

    Where a copy has a scale per head, the tiles are taken one after the other, and twice: for the
    largest magnitude and then, from cache, to write. All of a head at once would leave a
    multiprocessor to one program, whose loads, products and stores would take turns.
    """
    slot, count = ticket.slot, ticket.pos
    if solved is not None:
        for i in range(EACH):
            _solve_tile(
                checkpoint, ring, solved, slot, head, first + i, count,
                HK, HV, K, V, L, CHECKPOINT, STATE_KEYS, KEYS, PIECES, PIECE, BV, BL,
            )  # fmt: skip
        tl.debug_barrier()
    amax = None
    if WHOLE and EACH > 1:
        amax = head * 0
        for tile in range(EACH):
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
