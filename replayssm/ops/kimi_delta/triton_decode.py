"""One token per row, T = 1: the state is read once, one record appended.

Owns the decode kernel and its launchers. The state tile meets the decayed k and q in one pass, on
CUDA cores. `decode` writes no state; `step` also commits the token and flushes the rows whose ring
it fills, in launches of their own. Outputs of a flushing step read the copy before the flush.

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
    ring_argument,
    sizes,
    state_width,
    token_argument,
)
from replayssm.ops.gated_delta.triton_tiles import as_held, load_rows
from replayssm.ops.kimi_delta.reference import KimiDeltaInputs
from replayssm.ops.kimi_delta.triton_flush import commit_and_flush
from replayssm.ops.kimi_delta.triton_launch import default_launch
from replayssm.ops.kimi_delta.triton_tiles import sums_after
from replayssm.ops.quantize.layout import stored
from replayssm.ops.quantize.tiles import load_unscaled, row_factor
from replayssm.ops.triton_common import Cursors, precision_of
from replayssm.ops.triton_policy import check_copies
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
    SUMS: tl.constexpr,  # precision of sums of gates
    BV: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
):
    """Grid (tiles of V, HV, B)."""
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(cursors.slots + row).to(tl.int64)
    value, column, record = tile * BV + tl.arange(0, BV), tl.arange(0, BK), tl.arange(0, BL)
    in_v, in_k = value < V, column < K
    out += (row * HV + head) * V + value
    if slot < 0:
        tl.store(out, tl.zeros([BV], tl.float32), mask=in_v)
        return

    count = tl.load(cursors.pos + slot).to(tl.int32)
    past = record < count
    fits = count < L  # a ring without room is a caller's mistake; no number may come of it
    key_head = head // (HV // HK)
    at_key = key_head * K + column
    k = tl.load(tokens.k + row * tokens.k_row + at_key, mask=in_k, other=0.0)
    k = as_held(k, tokens.k, ring.k)  # [BK]
    q = tl.load(tokens.q + row * tokens.q_row + at_key, mask=in_k, other=0.0).to(tl.float32)
    g = tl.load(tokens.g + row * tokens.g_row + head * K + column, mask=in_k, other=0.0)
    beta = tl.load(tokens.beta + row * tokens.beta_row + head)
    v = tl.load(tokens.v + row * tokens.v_row + head * V + value, mask=in_v, other=0.0)
    v = v.to(tl.float32) if ring.v is None else as_held(v, tokens.v, ring.v)

    first = (slot * HV + head) * L  # this head's oldest record
    keys, gates = ring.k + (slot * HK + key_head) * L * K, ring.g + first * K
    k_past = load_rows(keys, record, K, past, column, in_k)  # [BL, BK]
    g_past = load_rows(gates, record, K, past, column, in_k)  # [BL, BK]
    u_past = load_rows(ring.u + first * V, record, V, past, value, in_v)  # [BL, BV]
    total = tl.sum(g_past, 0) + g  # [BK]
    after = sums_after(g_past, SUMS) + g[None, :]  # [BL, BK]
    state_row = head * V + value
    in_rows = None if V % BV == 0 else in_v
    s = load_unscaled(read, slot, state_row, in_rows, K, BK, READ)  # [BV, BK]
    factor = row_factor(read, slot, state_row, in_rows, V, READ)
    from_state = tl.exp(total)
    state_k = factor * tl.sum(s * (k * from_state)[None, :], 1)
    state_q = factor * tl.sum(s * (q * from_state)[None, :], 1)
    decayed = k_past * tl.exp(after)
    past_k, past_q = tl.sum(decayed * k[None, :], 1), tl.sum(decayed * q[None, :], 1)  # [BL]
    predicted = state_k + tl.sum(u_past * past_k[:, None], 0)
    answer = state_q + tl.sum(u_past * past_q[:, None], 0)
    u = beta * (v - predicted)  # [BV]
    answer = tl.where(fits, answer + u * tl.sum(k * q, 0), float("nan"))
    tl.store(out, answer, mask=in_v)

    here = first + count
    if fits:
        tl.store(ring.u + here * V + value, u, mask=in_v)
        if ring.v is not None:
            tl.store(ring.v + here * V + value, v.to(ring.v.dtype.element_ty), mask=in_v)
        if tile == 0:
            tl.store(gates + count * K + column, g, mask=in_k)
            if ring.beta is not None:
                tl.store(ring.beta + here, beta)
            if head % (HV // HK) == 0:
                k_held = k.to(ring.k.dtype.element_ty)
                tl.store(keys + count * K + column, k_held, mask=in_k)


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
    out = torch.empty(inputs.v.shape, dtype=torch.float32, device=inputs.v.device)
    decode_kernel[(launch.tiles(constants), constants["HV"], rows)](
        out,
        token_argument(inputs),
        ring,
        cursors,
        stored(read),
        **constants,
        READ=policy.read_storage,
        SUMS=precision_of(torch.float32, torch.bfloat16),
        **launch.options(),
        BV=launch.block_v,
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
