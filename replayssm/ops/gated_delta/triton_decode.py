"""One token per row, T = 1: the state is read once, one record appended; a full ring may be folded.

Owns the decode kernel and its launchers. The state tile meets k and q in one pass, on CUDA cores:
two products per element keep up with memory and round no operand. Where one copy serves as
checkpoint and as what outputs read, `decode_and_flush` folds a ring that this token fills while the
tile is still in cache, so that a flush costs one more write and no read.

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
from replayssm.ops.gated_delta.triton_flush import commit
from replayssm.ops.gated_delta.triton_launch import (
    Launch,
    Slots,
    keeps_fusion,
    power_of_two,
    precision,
    ring_argument,
    sizes,
    token_argument,
    whole_matrices,
)
from replayssm.ops.gated_delta.triton_tiles import (
    as_held,
    decay,
    fold_records,
    last,
    load_rows,
    write_state,
)
from replayssm.ops.quantize.layout import stored
from replayssm.ops.quantize.tiles import load_tile, matvec
from replayssm.policy import CHECKPOINT_STREAM, PrecisionPolicy

_CHECKPOINT_STREAM = tl.constexpr(CHECKPOINT_STREAM)


@triton.jit
def decode_kernel(
    state,  # Stored: what outputs read
    ring,  # Ring
    tokens,  # Tokens
    slots,  # Slots
    rows,  # [B]
    out,  # [B, HV, V] FP32
    layer,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    READ: tl.constexpr,
    FOLD: tl.constexpr,  # precision of u times k in a fold; None: no row is folded
    HEADS: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
):
    """Grid (tiles of V, HV / HEADS, B). HEADS value heads share k, q and past keys."""
    tile, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(rows + row).to(tl.int64)
    value, column, record = tile * BV + tl.arange(0, BV), tl.arange(0, BK), tl.arange(0, BL)
    in_v, in_k = value < V, column < K
    out += (row * HV + group * HEADS) * V + value
    if slot < 0:
        for i in tl.static_range(HEADS):
            tl.store(out + i * V, tl.zeros([BV], tl.float32), mask=in_v)
        return

    count = tl.load(slots.pos + slot).to(tl.int32)
    past = record < count
    fits = count < L  # a full ring is the caller's mistake; it must not reach the next slot's
    key_head = group * HEADS // (HV // HK)
    keys = ring.k + (slot * HK + key_head) * L * K
    k_past = load_rows(keys, record, K, past, column, in_k)  # [BL, BK]
    at_key = key_head * K + column
    k = tl.load(tokens.k + row * tokens.k_row + at_key, mask=in_k, other=0.0)
    k = as_held(k, tokens.k, ring.k)  # [BK]
    q = tl.load(tokens.q + row * tokens.q_row + at_key, mask=in_k, other=0.0).to(tl.float32)
    past_k, past_q = tl.sum(k_past * k[None, :], 1), tl.sum(k_past * q[None, :], 1)  # [BL]
    k_q = tl.sum(k * q, 0)
    if (tile == 0) & (group * HEADS % (HV // HK) == 0):
        tl.store(keys + count * K + column, k.to(ring.k.dtype.element_ty), mask=in_k & fits)

    for i in tl.static_range(HEADS):
        head = group * HEADS + i
        in_rows = None if V % BV == 0 else in_v
        state_row = head * V + value
        state_k, state_q = matvec(state, slot, state_row, in_rows, k, q, V, K, BK, READ)

        first = (slot * HV + head) * L  # this head's oldest record
        g = tl.load(tokens.g + row * tokens.g_row + head)
        log_decay = tl.cumsum(tl.load(ring.g + first + record, mask=past, other=0.0), 0)
        now = last(log_decay, BL) + g
        from_past, from_state = decay(now, log_decay), decay(now, 0.0)
        u_past = load_rows(ring.u + first * V, record, V, past, value, in_v)  # [BL, BV]
        predicted = from_state * state_k + tl.sum(u_past * (from_past * past_k)[:, None], 0)
        answer = from_state * state_q + tl.sum(u_past * (from_past * past_q)[:, None], 0)

        beta = tl.load(tokens.beta + row * tokens.beta_row + head)
        v = tl.load(tokens.v + row * tokens.v_row + head * V + value, mask=in_v, other=0.0)
        v = v.to(tl.float32) if ring.v is None else as_held(v, tokens.v, ring.v)
        u = beta * (v - predicted)  # [BV]
        tl.store(out + i * V, answer + u * k_q, mask=in_v)

        here = first + count
        tl.store(ring.u + here * V + value, u, mask=in_v & fits)
        if ring.v is not None:
            tl.store(ring.v + here * V + value, v.to(ring.v.dtype.element_ty), mask=in_v & fits)
        if tile == 0:
            tl.store(ring.g + here, g, mask=fits)
            if ring.beta is not None:
                tl.store(ring.beta + here, beta, mask=fits)

        if FOLD is not None:
            if count == L - 1:
                # Slots past the last record, where BL > L, stay zero and add no decay.
                s = load_tile(state, slot, state_row, in_rows, V, K, BK, READ)
                u_all = tl.where((record == count)[:, None], u[None, :], u_past)
                k_all = tl.where((record == count)[:, None], k[None, :], k_past)
                log_decay = tl.where(record < count, log_decay, now)
                s = fold_records(s, tl.trans(u_all), k_all, log_decay, FOLD, BL)
                write_state(
                    s, _CHECKPOINT_STREAM, state, slots, layer, slot, state_row, in_rows,
                    V, K, BV, BK, READ,
                )  # fmt: skip


def decode(
    state: Quantized,
    policy: PrecisionPolicy,
    ring: Mapping[str, Tensor],
    slots: Slots,
    rows: Tensor,
    inputs: GatedDeltaInputs,
    *,
    launch: Launch | None = None,
) -> Tensor:
    """Outputs of one token per row; appends its record, commits nothing, writes no state.

    Args:
        state: what outputs read, of S slots.
        policy: its `read_storage` is the storage of `state`.
        ring: records of S slots, contiguous, as `reference.ring_layout`; slot `pos` of each row is
            written, in place.
        slots: cursors of S slots, each below L.
        rows: [B] int64, the slot of each row, distinct; negative for a padding row.
        inputs: of B rows and one token.
        launch: default by storage.

    Returns:
        Outputs [B, 1, HV, V] FP32, zero in padding rows.

    Raises:
        ValueError: a policy, dtype or layout that the kernels do not take.
    """
    return _decode(state, policy, ring, slots, rows, inputs, None, 0, launch)


def decode_and_flush(
    checkpoint: Quantized,
    policy: PrecisionPolicy,
    ring: Mapping[str, Tensor],
    slots: Slots,
    rows: Tensor,
    accepted: Tensor,
    inputs: GatedDeltaInputs,
    *,
    layer: int,
    launch: Launch | None = None,
) -> Tensor:
    """`decode`, then `flush` with room for one token, in one pass; for policies with one copy.

    Args:
        checkpoint: of S slots, also what outputs read; written where a ring fills.
        accepted: [B] int64 ones, for the cursor kernel.
        layer: part of the key of random bits.
    """
    if policy.read_copy is not None:
        raise ValueError(f"policy {policy.label} reads a copy: use decode, then flush")
    fold = precision(torch.float32, ring["k"].dtype)
    out = _decode(checkpoint, policy, ring, slots, rows, inputs, fold, layer, launch)
    commit(slots, rows, accepted, room=1, ring_len=ring["g"].shape[-1])
    return out


def _decode(
    state: Quantized,
    policy: PrecisionPolicy,
    ring: Mapping[str, Tensor],
    slots: Slots,
    rows: Tensor,
    inputs: GatedDeltaInputs,
    fold: str | None,
    layer: int,
    launch: Launch | None,
) -> Tensor:
    storage, ring = policy.read_storage, ring_argument(ring)
    constants = sizes(ring, policy)
    batch, v_heads, v_dim = len(rows), constants["HV"], constants["V"]
    whole = fold is not None and whole_matrices(storage)
    launch = launch or Launch(block_v=power_of_two(v_dim) if whole else 64)
    out = torch.empty((batch, 1, v_heads, v_dim), dtype=torch.float32, device=rows.device)
    decode_kernel[(triton.cdiv(v_dim, launch.block_v), v_heads // launch.heads, batch)](
        stored(state),
        ring,
        token_argument(inputs),
        slots,
        rows,
        out,
        layer,
        **constants,
        READ=storage,
        FOLD=fold,
        HEADS=launch.heads,
        BV=launch.block_v,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=fold is None or keeps_fusion(storage),
    )
    return out
