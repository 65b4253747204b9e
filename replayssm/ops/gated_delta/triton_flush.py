"""Fold committed records into the state, round once, write checkpoint and read copy; move cursors.

Owns the flush and cursor kernels and their launchers. Both copies are rounded from one FP32 tile in
one pass. Cursors stay on the device: each row decides by its own whether it flushes, so rows whose
rings fill at different steps share a launch, and a captured graph replays any schedule.

Legend: triton_tiles.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from replayssm.formats.quantized import Quantized
from replayssm.ops.gated_delta.triton_launch import (
    Launch,
    Slots,
    keeps_fusion,
    power_of_two,
    precision,
    ring_argument,
    sizes,
    value_dtype,
    whole_matrices,
)
from replayssm.ops.gated_delta.triton_tiles import (
    decay,
    dot,
    fold_records,
    load_columns,
    load_rows,
    substitute,
    write_state,
)
from replayssm.ops.quantize.layout import stored
from replayssm.ops.quantize.tiles import load_tile
from replayssm.policy import CHECKPOINT_STREAM, READ_COPY_STREAM, PrecisionPolicy

_CHECKPOINT_STREAM = tl.constexpr(CHECKPOINT_STREAM)
_READ_COPY_STREAM = tl.constexpr(READ_COPY_STREAM)


@triton.jit
def is_due(count, room, L: tl.constexpr):
    """Whether a row with `count` committed records flushes: some, and less than `room` left."""
    return (count > 0) & (L - count < room)


@triton.jit
def flush_kernel(
    checkpoint,  # Stored, read and written
    read_copy,  # Stored, written, or None
    ring,  # Ring; with v and beta, u is recomputed
    slots,  # Slots
    rows,  # [B]
    accepted,  # [B] tokens to commit first
    room,  # flush where fewer ring slots are left
    layer,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    READ: tl.constexpr,
    STATE_KEYS: tl.constexpr,  # precision of state times k
    KEYS: tl.constexpr,  # of k times k
    FULL: tl.constexpr,  # of u times k
    BV: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
):
    """Grid (tiles of V, HV, B)."""
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(rows + row).to(tl.int64)
    if slot < 0:
        return
    count = (tl.load(slots.pos + slot) + tl.load(accepted + row)).to(tl.int32)
    if not is_due(count, room, L):
        return
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
        predicted = decay(log_decay, 0.0)[None, :] * dot(s, k_t, STATE_KEYS)
        between = decay(log_decay[None, :], log_decay[:, None])  # [BL, BL], earlier record first
        earlier = record[:, None] < record[None, :]
        system = tl.where(earlier, between * dot(k, k_t, KEYS), 0.0)
        u = substitute(beta * (v - predicted), system * beta, L, BL)
    s = fold_records(s, u, k, log_decay, FULL, BL)

    write_state(
        s, _CHECKPOINT_STREAM, checkpoint, slots, layer, slot, state_row, in_rows,
        V, K, BV, BK, CHECKPOINT,
    )  # fmt: skip
    if read_copy is not None:
        write_state(
            s, _READ_COPY_STREAM, read_copy, slots, layer, slot, state_row, in_rows,
            V, K, BV, BK, READ,
        )  # fmt: skip


@triton.jit
def cursor_kernel(slots, rows, accepted, room, batch, L: tl.constexpr, BLOCK: tl.constexpr):
    """Commit `accepted` tokens of each row, and empty the rings that a flush has just folded."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(rows + row, mask=row < batch, other=-1).to(tl.int64)
    live = slot >= 0
    count = tl.load(slots.pos + slot, mask=live, other=0)
    count += tl.load(accepted + row, mask=live, other=0)
    due = is_due(count, room, L)
    tl.store(slots.pos + slot, tl.where(due, 0, count), mask=live)
    flushes = tl.load(slots.flushes + slot, mask=live, other=0)
    tl.store(slots.flushes + slot, flushes + due.to(tl.int64), mask=live)


def flush(
    checkpoint: Quantized,
    read_copy: Quantized | None,
    policy: PrecisionPolicy,
    ring: Mapping[str, Tensor],
    slots: Slots,
    rows: Tensor,
    accepted: Tensor,
    *,
    room: int,
    layer: int,
    launch: Launch | None = None,
) -> None:
    """Commits tokens, then flushes the rows whose ring has fewer than `room` slots left, in place.

    A flush folds the row's committed records into the checkpoint in FP32, rounds the result once
    into checkpoint and read copy, empties the ring and counts the write. A row with nothing
    committed is left alone, and so is a padding row.

    Args:
        checkpoint, read_copy: of S slots.
        policy: their storages. Where the ring keeps v and beta, u is recomputed against the
            checkpoint; otherwise the ring's u is folded.
        ring: records of S slots, contiguous, as `reference.ring_layout`.
        slots: cursors, counters and keys of S slots; pos and flushes move, counts grow.
        rows: [B] int64, the slot of each row, distinct; negative for a padding row.
        accepted: [B] int64 tokens of the last window to commit first; zeros if that was done.
        room: tokens the next window needs; L + 1 flushes every row that has committed any.
        layer: part of the key of random bits.
        launch: default by storages.

    Raises:
        ValueError: a storage, dtype or layout that the kernels do not take.
    """
    ring = ring_argument(ring)
    constants = sizes(ring, policy)
    batch, v_dim = len(rows), constants["V"]
    written = (policy.checkpoint, policy.read_storage)
    launch = launch or Launch(block_v=power_of_two(v_dim) if whole_matrices(*written) else 64)
    keys = ring.k.dtype
    flush_kernel[(triton.cdiv(v_dim, launch.block_v), constants["HV"], batch)](
        stored(checkpoint),
        None if read_copy is None else stored(read_copy),
        ring,
        slots,
        rows,
        accepted,
        room,
        layer,
        **constants,
        CHECKPOINT=policy.checkpoint,
        READ=policy.read_copy,
        STATE_KEYS=precision(value_dtype(policy.checkpoint), keys),
        KEYS=precision(keys),
        FULL=precision(ring.u.dtype, keys),
        BV=launch.block_v,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=keeps_fusion(*written),
    )
    commit(slots, rows, accepted, room=room, ring_len=constants["L"])


def commit(slots: Slots, rows: Tensor, accepted: Tensor, *, ring_len: int, room: int = 0) -> None:
    """Moves the cursors of `rows` over `accepted` tokens; `room` as in `flush`, 0 for no flush."""
    block = min(power_of_two(len(rows)), 256)
    cursor_kernel[(triton.cdiv(len(rows), block),)](
        slots, rows, accepted, room, len(rows), L=ring_len, BLOCK=block, num_warps=1
    )
