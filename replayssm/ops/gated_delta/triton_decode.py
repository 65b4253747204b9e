"""One token per row, T = 1: the state is read once, one record appended.

Owns the decode kernel and its launchers. The state tile meets k and q in one pass, on CUDA cores:
two products per element keep up with memory and round no operand. `decode` writes no state. `step`
also commits the token and flushes the rows whose ring it fills, in launches of their own: a fold in
this kernel would save one read of the state in L steps, and its registers would slow all of them.

Outputs of a flushing step read what every other token of the ring reads, the copy before the flush.

Legend: triton_tiles.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.formats.quantized import Quantized
from replayssm.ops.gated_delta.reference import GatedDeltaInputs
from replayssm.ops.gated_delta.triton_flush import commit_and_flush
from replayssm.ops.gated_delta.triton_launch import (
    Launch,
    default_launch,
    line_columns,
    power_of_two,
    ring_argument,
    sizes,
    state_columns,
    state_width,
    token_argument,
    writes,
)
from replayssm.ops.gated_delta.triton_tiles import (
    as_held,
    decay,
    last,
    load_rows,
    load_vector,
)
from replayssm.ops.quantize.layout import reads_words, stored
from replayssm.ops.quantize.tiles import (
    factor_of,
    load_codes,
    load_eighths,
    times_vector,
    unscaled_of,
)
from replayssm.ops.triton_common import Cursors
from replayssm.policy import PrecisionPolicy


@triton.jit
def decode_kernel(
    out,  # [B, HV, V] FP32
    tokens,  # Tokens
    ring,  # Ring
    cursors,  # Cursors
    read,  # Stored
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    READ: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
    COLUMNS: tl.constexpr,  # of the state that are read at a time
    KEYS: tl.constexpr,  # and of keys
):
    """Grid (tiles of V, HV, B).

    The state, whose place depends on the slot alone, is asked for first; then what depends on the
    cursor; nothing is computed, and so no warp waits for another, before all of it is on its way.
    Where a result for k stands beside one for q, they are two columns of one tensor: layouts change
    and warps meet once for both. Vectors come from memory in the layout that needs them.
    """
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(cursors.slots + row).to(tl.int64)
    value, record = tile * BV + tl.arange(0, BV), tl.arange(0, BL)
    in_v = value < V
    in_rows = None if V % BV == 0 else in_v
    out += (row * HV + head) * V + value
    if slot < 0:
        tl.store(out, tl.zeros([BV], tl.float32), mask=in_v)
        return

    count = tl.load(cursors.pos + slot).to(tl.int32)
    WORDS: tl.constexpr = reads_words(READ, K)
    state_row = head * V + value
    if WORDS:
        state = load_codes(read, slot, state_row, in_rows, V, K, BK, READ)
    else:
        state = _load_parts(read, slot, state_row, in_rows, V, K, COLUMNS, READ)
    key_head = head // (HV // HK)
    k_at = tokens.k + row * tokens.k_row + key_head * K
    q_at = tokens.q + row * tokens.q_row + key_head * K
    g = tl.load(tokens.g + row * tokens.g_row + head)
    beta = tl.load(tokens.beta + row * tokens.beta_row + head)
    v = tl.load(tokens.v + row * tokens.v_row + head * V + value, mask=in_v, other=0.0)

    past = record < count
    fits = count < L  # a ring without room is a caller's mistake; no number may come of it
    keys = ring.k + (slot * HK + key_head) * L * K
    first = (slot * HV + head) * L  # this head's oldest record
    old_keys = _load_keys(keys, record, past, K, KEYS)
    u_past = load_rows(ring.u + first * V, record, V, past, value, in_v)  # [BL, BV]
    g_past = tl.load(ring.g + first + record, mask=past, other=0.0)  # [BL]

    newest = record == count
    from_keys = _keys_times(old_keys, newest, k_at, q_at, ring.k, K, BL, KEYS)
    if WORDS:
        k_parts = _held_parts(load_eighths(k_at, K, BK // 8), k_at, ring.k)
        q_parts = load_eighths(q_at, K, BK // 8)
        with_k = times_vector(state, k_parts, K, BK, READ)
        with_q = times_vector(state, q_parts, K, BK, READ)
        both = tl.join(with_k, with_q)  # [BV, 2]
    else:
        both = _parts_times(state, k_at, q_at, ring.k, K, BV, COLUMNS, READ)

    log_decay = tl.cumsum(g_past, 0)
    now = last(log_decay, BL) + g
    weight = tl.where(newest, 1.0, decay(now, log_decay))
    w_k, w_q = tl.split(from_keys * weight[:, None])  # [BL]; u_past is zero at the newest
    both *= decay(now, 0.0)
    both += tl.sum(tl.join(u_past * w_k[:, None], u_past * w_q[:, None]), 0)  # [BV, 2]
    predicted, answer = tl.split(both)
    v = v.to(tl.float32) if ring.v is None else as_held(v, tokens.v, ring.v)
    u = beta * (v - predicted)  # [BV]
    k_q = tl.sum(tl.where(newest, w_q, 0.0), 0)
    answer = tl.where(fits, answer + u * k_q, float("nan"))
    tl.store(out, answer, mask=in_v)

    here = first + count
    if fits:
        tl.store(ring.u + here * V + value, u, mask=in_v)
        if ring.v is not None:
            tl.store(ring.v + here * V + value, v.to(ring.v.dtype.element_ty), mask=in_v)
        if tile == 0:
            tl.store(ring.g + here, g)
            if ring.beta is not None:
                tl.store(ring.beta + here, beta)
            if head % (HV // HK) == 0:
                column = tl.arange(0, BK)
                k = load_vector(k_at, column, ring.k, K)
                at = keys + count * K + column
                tl.store(at, k.to(ring.k.dtype.element_ty), mask=column < K)


@triton.jit
def _load_keys(keys, record, past, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Past keys as they lie, in parts [BL, COLUMNS]."""
    parts = ()
    for start in tl.static_range(0, K, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = past[:, None] & (column < K)[None, :]
        at = keys + record[:, None] * K + column[None, :]
        parts = parts + (tl.load(at, mask=mask, other=0.0),)
    return parts


@triton.jit
def _keys_times(
    parts, newest, k_at, q_at, ring_k, K: tl.constexpr, BL: tl.constexpr, COLUMNS: tl.constexpr
):
    """Products of the keys with k and q, [BL, 2]: of past ones and, at `newest`, of k itself.

    k and q are read for every row of a part, in its layout: vectors would go through shared memory.
    """
    with_k, with_q = tl.zeros([BL, COLUMNS], tl.float32), tl.zeros([BL, COLUMNS], tl.float32)
    for part in tl.static_range((K + COLUMNS - 1) // COLUMNS):
        column = tl.broadcast_to((part * COLUMNS + tl.arange(0, COLUMNS))[None, :], [BL, COLUMNS])
        k, q = load_vector(k_at, column, ring_k, K), load_vector(q_at, column, q_at, K)
        old = tl.where(newest[:, None], k, parts[part].to(tl.float32))
        with_k += old * k
        with_q += old * q
    return tl.sum(tl.join(with_k, with_q), 1)


@triton.jit
def _load_parts(
    read, slot, row, in_rows,
    V: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """The state as it lies, in parts of 128 bytes a row, which eight lanes read: every further lane
    would cost each row a shuffle. A row of K columns is K / COLUMNS rows."""
    PARTS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    parts = ()
    for part in tl.static_range(PARTS):
        at = row * PARTS + part
        parts = parts + (load_codes(read, slot, at, in_rows, V, K // PARTS, COLUMNS, READ),)
    return parts


@triton.jit
def _parts_times(
    parts, k_at, q_at, ring_k,
    K: tl.constexpr, BV: tl.constexpr, COLUMNS: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Products of the state with k and q, [BV, 2], one pass over the state."""
    PARTS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    with_k, with_q = tl.zeros([BV, COLUMNS], tl.float32), tl.zeros([BV, COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        s = unscaled_of(parts[part], K // PARTS, COLUMNS, READ)
        with_k += s * load_vector(k_at, column, ring_k, K)[None, :]
        with_q += s * load_vector(q_at, column, q_at, K)[None, :]
    return tl.sum(tl.join(with_k, with_q), 1) * factor_of(parts[0], READ)[:, None]


@triton.jit
def _held_parts(parts, source, ring):
    """`as_held` of the eight vectors of `load_eighths`."""
    return (
        as_held(parts[0], source, ring),
        as_held(parts[1], source, ring),
        as_held(parts[2], source, ring),
        as_held(parts[3], source, ring),
        as_held(parts[4], source, ring),
        as_held(parts[5], source, ring),
        as_held(parts[6], source, ring),
        as_held(parts[7], source, ring),
    )


def decode(
    read: Quantized,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: GatedDeltaInputs,
    *,
    launch: Launch | None = None,
) -> Tensor:
    """Outputs of one token per row; its record enters the ring at the cursor, which stays.

    Args:
        read: what outputs read, [S, HV, V, K]; not written.
        ring: of S slots, contiguous, as `reference.ring_layout`; slot `pos` of each row is written.
        policy: its `read_storage` is the storage of `read`.
        cursors: rows; pos < L, or the row's outputs are NaN and its record is dropped.
        inputs: of B rows and one token.
        launch: see `Launch`; by default from the table of `triton_launch`.

    Returns:
        Outputs [B, 1, HV, V] FP32, zero in padding rows.

    Raises:
        ValueError: a policy, dtype or layout that the kernels do not take.
    """
    ring = ring_argument(ring)
    constants = sizes(ring, policy)
    batch = len(cursors.slots)
    launch = launch or default_launch("decode", policy, constants, batch)
    out = torch.empty(inputs.v.shape, dtype=torch.float32, device=inputs.v.device)
    decode_kernel[(launch.tiles(constants), constants["HV"], batch)](
        out,
        token_argument(inputs),
        ring,
        cursors,
        stored(read),
        **constants,
        READ=policy.read_storage,
        **launch.options(),
        BV=launch.block_v,
        BK=state_width(policy, constants),
        COLUMNS=state_columns(policy, constants),
        KEYS=min(line_columns(8 * ring.k.element_size()), power_of_two(constants["K"])),
    )
    return out


def step(
    checkpoint: Quantized,
    read_copy: Quantized | None,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: GatedDeltaInputs,
    *,
    layer: int,
    launch: Launch | None = None,
    flush_launch: Launch | None = None,
) -> Tensor:
    """`decode`, then commit the token, then flush the rows whose ring it filled.

    In place: ring, cursors (pos, flushes, saturated, not_finite), and for full rows checkpoint and
    read copy. Other arguments, result and errors as in `decode` and `flush`.
    """
    writes(policy, checkpoint, read_copy)
    read = checkpoint if read_copy is None else read_copy
    out = decode(read, ring, policy, cursors, inputs, launch=launch)
    commit_and_flush(checkpoint, read_copy, ring, policy, cursors, layer=layer, launch=flush_launch)
    return out
