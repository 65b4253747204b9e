"""One token per row, T = 1: the state is read once, one record appended; a full ring may be folded.

Owns the decode kernel and its launchers. The state tile meets k and q in one pass, on CUDA cores:
two products per element keep up with memory and round no operand. `decode` writes no state. `step`
also commits the token and flushes the rows whose ring it fills; where one copy serves both jobs
that happens in the same launch, while the tile is in cache: a flush then costs a write, no read.

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
from replayssm.ops.gated_delta.triton_flush import flush
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
    fold_records,
    last,
    load_rows,
    load_vector,
    write_state,
)
from replayssm.ops.quantize.layout import reads_words, stored
from replayssm.ops.quantize.tiles import load_eighths, load_tile, load_unscaled, matvec, row_factor
from replayssm.ops.triton_common import Cursors, arrive, precision_of
from replayssm.policy import PrecisionPolicy


@triton.jit(do_not_specialize=["layer"])
def decode_kernel(
    out,  # [B, HV, V] FP32
    tokens,  # Tokens
    ring,  # Ring
    cursors,  # Cursors
    read,  # Stored
    layer,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    READ: tl.constexpr,
    COMMIT: tl.constexpr,  # whether the token is committed
    FOLD: tl.constexpr,  # and a ring that it fills folded into what was read
    FULL: tl.constexpr,  # precision of u times k
    HEADS: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
    COLUMNS: tl.constexpr,  # of the state that are read at a time
    KEYS: tl.constexpr,  # and of keys
):
    """Grid (tiles of V, HV / HEADS, B). HEADS value heads share k, q and past keys.

    Where a result for k stands beside one for q, they are two columns of one tensor: layouts change
    and warps meet once for both. Vectors come from memory in the layout that needs them.
    """
    tile, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(cursors.slots + row).to(tl.int64)
    value, record = tile * BV + tl.arange(0, BV), tl.arange(0, BL)
    in_v = value < V
    in_rows = None if V % BV == 0 else in_v
    out += (row * HV + group * HEADS) * V + value
    if slot < 0:
        for i in tl.static_range(HEADS):
            tl.store(out + i * V, tl.zeros([BV], tl.float32), mask=in_v)
        return

    count = tl.load(cursors.pos + slot).to(tl.int32)
    past = record < count
    fits = count < L  # a ring without room is a caller's mistake; no number may come of it
    key_head = group * HEADS // (HV // HK)
    k_at = tokens.k + row * tokens.k_row + key_head * K
    q_at = tokens.q + row * tokens.q_row + key_head * K
    keys = ring.k + (slot * HK + key_head) * L * K
    from_keys, k_q = _read_keys(keys, k_at, q_at, record, past, K, BL, KEYS)
    WORDS: tl.constexpr = reads_words(READ, K)
    if WORDS:
        k_parts = _held_parts(load_eighths(k_at, K, BK // 8), k_at, ring.k)
        q_parts = load_eighths(q_at, K, BK // 8)

    for i in tl.static_range(HEADS):
        head = group * HEADS + i
        first = (slot * HV + head) * L  # this head's oldest record
        g_past = tl.load(ring.g + first + record, mask=past, other=0.0)  # [BL]
        u_past = load_rows(ring.u + first * V, record, V, past, value, in_v)  # [BL, BV]
        g = tl.load(tokens.g + row * tokens.g_row + head)
        beta = tl.load(tokens.beta + row * tokens.beta_row + head)
        v = tl.load(tokens.v + row * tokens.v_row + head * V + value, mask=in_v, other=0.0)
        v = v.to(tl.float32) if ring.v is None else as_held(v, tokens.v, ring.v)
        state_row = head * V + value
        if WORDS:
            with_k, with_q = matvec(
                read, slot, state_row, in_rows, k_parts, q_parts, V, K, BK, READ
            )
            both = tl.join(with_k, with_q)  # [BV, 2]
        else:
            both = _read_state(
                read, slot, state_row, in_rows, k_at, q_at, ring.k, V, K, BV, COLUMNS, READ
            )

        log_decay = tl.cumsum(g_past, 0)
        now = last(log_decay, BL) + g
        w_k, w_q = tl.split(from_keys * decay(now, log_decay)[:, None])  # [BL]
        both *= decay(now, 0.0)
        both += tl.sum(tl.join(u_past * w_k[:, None], u_past * w_q[:, None]), 0)  # [BV, 2]
        predicted, answer = tl.split(both)
        u = beta * (v - predicted)  # [BV]
        answer = tl.where(fits, answer + u * k_q, float("nan"))
        tl.store(out + i * V, answer, mask=in_v)

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

        if FOLD:
            if count == L - 1:
                # Slots past the last record, where BL > L, stay zero and add no decay.
                column = tl.arange(0, BK)
                s = load_tile(read, slot, state_row, in_rows, V, K, BK, READ)
                k = load_vector(k_at, column, ring.k, K)
                k_all = load_rows(keys, record, K, past, column, column < K)  # [BL, BK]
                k_all = tl.where((record == count)[:, None], k[None, :], k_all)
                u_all = tl.where((record == count)[:, None], u[None, :], u_past)
                log_decay = tl.where(record < count, log_decay, now)
                s = fold_records(s, tl.trans(u_all), k_all, log_decay, FULL, BL)
                write_state(
                    s, read, None, cursors, layer, slot, state_row, in_rows,
                    V, K, BV, BK, READ, None,
                )  # fmt: skip
    if COMMIT:
        if arrive(cursors, slot, tl.num_programs(0) * tl.num_programs(1)):
            full = count == L - 1 if FOLD else False
            flushes = tl.load(cursors.flushes + slot)
            tl.store(cursors.flushes + slot, flushes + full)
            tl.store(cursors.pos + slot, tl.where(full, 0, count + 1).to(tl.int64))


@triton.jit
def _read_keys(
    keys, k_at, q_at, record, past, K: tl.constexpr, BL: tl.constexpr, COLUMNS: tl.constexpr
):
    """Products of past keys with k and q, [BL, 2], and of k with q, in parts of COLUMNS columns."""
    with_k, with_q = tl.zeros([BL, COLUMNS], tl.float32), tl.zeros([BL, COLUMNS], tl.float32)
    own = tl.zeros([COLUMNS], tl.float32)
    for start in tl.static_range(0, K, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k, q = load_vector(k_at, column, keys, K), load_vector(q_at, column, q_at, K)
        old = load_rows(keys, record, K, past, column, column < K)
        with_k += old * k[None, :]
        with_q += old * q[None, :]
        own += k * q
    return tl.sum(tl.join(with_k, with_q), 1), tl.sum(own, 0)


@triton.jit
def _read_state(
    read, slot, row, in_rows, k_at, q_at, ring_k,
    V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, COLUMNS: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Products of the state with k and q, [BV, 2], one pass over the state.

    In parts of 128 bytes a row, which eight lanes read: every further lane would cost each row a
    shuffle. A row of K columns is K / COLUMNS rows.
    """
    PARTS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    with_k, with_q = tl.zeros([BV, COLUMNS], tl.float32), tl.zeros([BV, COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        s = load_unscaled(read, slot, row * PARTS + part, in_rows, K // PARTS, COLUMNS, READ)
        with_k += s * load_vector(k_at, column, ring_k, K)[None, :]
        with_q += s * load_vector(q_at, column, q_at, K)[None, :]
    factor = row_factor(read, slot, row, in_rows, V, READ)
    return tl.sum(tl.join(with_k, with_q), 1) * factor[:, None]


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
    return _launch(read, ring, policy, cursors, inputs, launch)


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
) -> Tensor:
    """`decode`, then commit the token, then flush the rows whose ring it filled.

    In place: ring, cursors (pos, flushes, saturated, not_finite), and for full rows checkpoint and
    read copy. Other arguments, result and errors as in `decode` and `flush`.
    """
    writes(policy, checkpoint, read_copy)
    if read_copy is None:
        return _launch(
            checkpoint, ring, policy, cursors, inputs, launch, commits=True, folds=True, layer=layer
        )
    out = _launch(read_copy, ring, policy, cursors, inputs, launch, commits=True)
    flush(checkpoint, read_copy, ring, policy, cursors, {}, layer=layer)
    return out


def _launch(
    read: Quantized,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: GatedDeltaInputs,
    launch: Launch | None,
    *,
    commits: bool = False,
    folds: bool = False,
    layer: int = 0,
) -> Tensor:
    ring = ring_argument(ring)
    constants = sizes(ring, policy)
    storage, rows = policy.read_storage, len(cursors.slots)
    launch = launch or default_launch("step" if folds else "decode", policy, constants, rows)
    out = torch.empty(inputs.v.shape, dtype=torch.float32, device=inputs.v.device)
    groups = constants["HV"] // launch.heads
    decode_kernel[(launch.tiles(constants), groups, rows)](
        out,
        token_argument(inputs),
        ring,
        cursors,
        stored(read),
        layer,
        **constants,
        READ=storage,
        COMMIT=commits,
        FOLD=folds,
        FULL=precision_of(ring.u.dtype, ring.k.dtype),
        HEADS=launch.heads,
        **launch.options(storage if folds else None),
        BV=launch.block_v,
        BK=state_width(policy, constants),
        COLUMNS=state_columns(policy, constants),
        KEYS=min(line_columns(8 * ring.k.element_size()), power_of_two(constants["K"])),
    )
    return out
