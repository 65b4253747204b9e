"""One token per row, T = 1: the state is read once, one record appended.

Owns the kernels of `decode` for many rows, and the launchers of `decode` and `step`. One finds what
a head's rows have in common: decayed k and q, and weights of past records. The other reads the
state, in one pass, on CUDA cores. For few rows one kernel does both (triton_few.py).

`decode` writes no state; `step` also commits the token and flushes the rows whose ring it fills, in
launches of their own. Outputs of a flushing step read the copy before the flush.

Legend: triton_tiles.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.formats.quantized import Quantized
from replayssm.ops.gated_delta.triton_launch import (
    Launch,
    power_of_two,
    ring_argument,
    sizes,
    state_width,
    token_argument,
)
from replayssm.ops.gated_delta.triton_tiles import as_held, load_rows
from replayssm.ops.kimi_delta.reference import KimiDeltaInputs
from replayssm.ops.kimi_delta.triton_few import decode_few_kernel
from replayssm.ops.kimi_delta.triton_flush import commit_and_flush
from replayssm.ops.kimi_delta.triton_launch import default_launch
from replayssm.ops.quantize.layout import stored
from replayssm.ops.quantize.tiles import load_factor, load_vector_for, times_vector
from replayssm.ops.triton_common import Cursors, halves_of, precision_of
from replayssm.ops.triton_policy import check_copies
from replayssm.ops.triton_rows import line_columns
from replayssm.policy import PrecisionPolicy


@triton.jit
def weigh_kernel(
    weights,  # [B, HV, 2 K + 2 BL + 4] FP32: decayed k and q, weights of past u, k times q
    tokens,  # Tokens
    ring,  # Ring
    cursors,  # Cursors
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
):
    """Grid (HV, B): what a head's rows of the state have in common, and of its record what is not
    in rows.

    One warp, so that a lane has all records of its channels and adds their gates by itself.
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(cursors.slots + row).to(tl.int64)
    column, record = tl.arange(0, BK), BL - 1 - tl.arange(0, BL)  # the newest first
    in_k = column < K
    at_key = head // (HV // HK) * K + column
    k = tl.load(tokens.k + row * tokens.k_row + at_key, mask=in_k, other=0.0)
    k = as_held(k, tokens.k, ring.k)  # [BK]
    q = tl.load(tokens.q + row * tokens.q_row + at_key, mask=in_k, other=0.0).to(tl.float32)
    g = tl.load(tokens.g + row * tokens.g_row + head * K + column, mask=in_k, other=0.0)
    beta = tl.load(tokens.beta + row * tokens.beta_row + head)
    if slot < 0:
        return

    count = tl.load(cursors.pos + slot).to(tl.int32)
    first = (slot * HV + head) * L  # this head's oldest record
    keys, gates = ring.k + (slot * HK + head // (HV // HK)) * L * K, ring.g + first * K
    k_past = load_rows(keys, record, K, record < count, column, in_k)  # [BL, BK]
    # Of each record the gates of the next one: what it has decayed by since is their sum.
    g_next = load_rows(gates + K, record, K, record + 1 < count, column, in_k)
    # Triton 3.9's interpreter wants a comparison here.
    g_first = tl.load(gates + column, mask=(in_k & (count > 0)) != 0, other=0.0)
    after = tl.cumsum(g_next, 0) + g[None, :]
    from_state = tl.exp(g_first + (tl.sum(g_next, 0) + g))
    decayed = k_past * tl.exp(after)
    weights += (row * HV + head) * (2 * K + 2 * BL + 4)
    tl.store(weights + column, k * from_state, mask=in_k)
    tl.store(weights + K + column, q * from_state, mask=in_k)
    tl.store(weights + 2 * K + record, tl.sum(decayed * k[None, :], 1))
    tl.store(weights + 2 * K + BL + record, tl.sum(decayed * q[None, :], 1))
    tl.store(weights + 2 * K + 2 * BL, tl.sum(k * q, 0))
    if count < L:
        tl.store(gates + count * K + column, g, mask=in_k)
        if ring.beta is not None:
            tl.store(ring.beta + first + count, beta)
        if head % (HV // HK) == 0:
            tl.store(keys + count * K + column, k.to(ring.k.dtype.element_ty), mask=in_k)


@triton.jit
def decode_kernel(
    out,  # [B, HV, V] FP32
    weights,  # of `weigh_kernel`
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
):
    """Grid (tiles of V, HV, B)."""
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(cursors.slots + row).to(tl.int64)
    value, record = tile * BV + tl.arange(0, BV), tl.arange(0, BL)
    in_v = value < V
    out += (row * HV + head) * V + value
    if slot < 0:
        tl.store(out, tl.zeros([BV], tl.float32), mask=in_v)
        return

    # Everything is asked for before anything is computed.
    count = tl.load(cursors.pos + slot).to(tl.int32)
    state_row = head * V + value
    in_rows = None if V % BV == 0 else in_v
    state = load_factor(read, slot, state_row, in_rows, V, K, BK, READ)
    v = tl.load(tokens.v + row * tokens.v_row + head * V + value, mask=in_v, other=0.0)
    beta = tl.load(tokens.beta + row * tokens.beta_row + head)
    weights += (row * HV + head) * (2 * K + 2 * BL + 4)
    w_k = tl.load(weights + 2 * K + record)
    w_q = tl.load(weights + 2 * K + BL + record)
    k_q = tl.load(weights + 2 * K + 2 * BL)
    first = (slot * HV + head) * L  # this head's oldest record
    u_past = load_rows(ring.u + first * V, record, V, record < count, value, in_v)  # [BL, BV]

    k, q = load_vector_for(weights, K, BK, READ), load_vector_for(weights + K, K, BK, READ)
    predicted = times_vector(state, k, K, BK, READ) + tl.sum(u_past * w_k[:, None], 0)
    answer = times_vector(state, q, K, BK, READ) + tl.sum(u_past * w_q[:, None], 0)
    v = v.to(tl.float32) if ring.v is None else as_held(v, tokens.v, ring.v)
    u = beta * (v - predicted)  # [BV]
    # A ring without room is a caller's mistake; no number may come of it.
    tl.store(out, tl.where(count < L, answer + u * k_q, float("nan")), mask=in_v)
    if count < L:
        at = (first + count) * V + value
        tl.store(ring.u + at, u, mask=in_v)
        if ring.v is not None:
            tl.store(ring.v + at, v.to(ring.v.dtype.element_ty), mask=in_v)


def decode(
    read: Quantized,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: KimiDeltaInputs,
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
        launch: see `Launch`; by default as for Gated DeltaNet.

    Returns:
        Outputs [B, 1, HV, V] FP32, zero in padding rows.

    Raises:
        ValueError: a policy, dtype or layout that the kernels do not take.
    """
    ring = ring_argument(ring)
    constants = sizes(ring, policy)
    rows = len(cursors.slots)
    launch = launch or default_launch("decode", policy, constants, rows)
    grid, device = (launch.tiles(constants), constants["HV"], rows), inputs.v.device
    token = token_argument(inputs)
    out = torch.empty(inputs.v.shape, dtype=torch.float32, device=device)
    options = {**constants, **launch.options(), "READ": policy.read_storage, "BV": launch.block_v}
    keys = power_of_two(constants["K"])
    if launch.ahead:
        width = max(32, keys)
        decode_few_kernel[grid](
            cursors.slots,
            token,
            stored(read),
            ring,
            out,
            cursors,
            **options,
            SUMS=halves_of(torch.bfloat16, torch.float32),
            BK=width,
            COLUMNS=min(line_columns(policy.read_storage.code_bits), width),
            WARPS=launch.num_warps,
            PRODUCTS=precision_of(torch.bfloat16, torch.bfloat16),
        )
        return out
    room = 2 * constants["K"] + 2 * constants["BL"] + 4
    weights = torch.empty(rows, constants["HV"], room, dtype=torch.float32, device=device)
    weigh_kernel[grid[1:]](weights, token, ring, cursors, **constants, BK=keys, num_warps=1)
    decode_kernel[grid](
        out,
        weights,
        token,
        ring,
        cursors,
        stored(read),
        **options,
        BK=state_width(policy, constants),
    )
    return out


def step(
    checkpoint: Quantized,
    read_copy: Quantized | None,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: KimiDeltaInputs,
    *,
    layer: int,
    launch: Launch | None = None,
) -> Tensor:
    """`decode`, then commit the token, then flush the rows whose ring it filled.

    In place: ring, cursors (pos, flushes, saturated, not_finite), and for full rows checkpoint and
    read copy. Other arguments, result and errors as in `decode` and `flush`.
    """
    check_copies(policy, checkpoint, read_copy)  # before anything is written
    read = checkpoint if read_copy is None else read_copy
    out = decode(read, ring, policy, cursors, inputs, launch=launch)
    commit_and_flush(checkpoint, read_copy, ring, policy, cursors, layer=layer)
    return out
