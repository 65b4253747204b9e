"""T = 2 … 32 tokens per row, for verify and teacher-forced replay; no state is ever formed.

Owns the window kernel and its launcher. Products with k and q of all tokens are matrix products on
tensor cores; what the tokens write is solved for in registers.

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
from replayssm.ops.gated_delta.triton_launch import (
    MAX_TOKENS,
    Launch,
    default_launch,
    pieces,
    power_of_two,
    ring_argument,
    sizes,
    token_argument,
)
from replayssm.ops.gated_delta.triton_tiles import (
    as_held,
    decay,
    last,
    load_columns,
    load_rows,
    substitute,
)
from replayssm.ops.quantize.layout import stored
from replayssm.ops.quantize.tiles import load_unscaled, row_factor
from replayssm.ops.triton_common import Cursors, exact_dot, precision_of
from replayssm.ops.triton_policy import unscaled_dtype
from replayssm.policy import PrecisionPolicy


@triton.jit
def window_kernel(
    out,  # [B, T, HV, V] FP32
    tokens,  # Tokens
    ring,  # Ring
    cursors,  # Cursors
    read,  # Stored
    T: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    READ: tl.constexpr,
    STATE_KEYS: tl.constexpr,  # precision of state times k, q
    KEYS: tl.constexpr,  # of k times k, q
    FULL: tl.constexpr,  # of products with an FP32 operand
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    BV: tl.constexpr,
    BL: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid (tiles of V, HV, B)."""
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(cursors.slots + row).to(tl.int64)
    value, token, record = tile * BV + tl.arange(0, BV), tl.arange(0, BT), tl.arange(0, BL)
    in_v, new = value < V, token < T
    out += (row * T * HV + head) * V
    out += token[None, :] * (HV * V) + value[:, None]
    written = in_v[:, None] & new[None, :]
    if slot < 0:
        tl.store(out, tl.zeros([BV, BT], tl.float32), mask=written)
        return

    count = tl.load(cursors.pos + slot).to(tl.int32)
    past = record < count
    key_head = head // (HV // HK)
    keys = ring.k + (slot * HK + key_head) * L * K
    first = (slot * HV + head) * L  # this head's oldest record
    here = count + token
    fits = new & (here < L)

    # Products over K in pieces: whole operands would not fit in registers. A row of K elements is
    # PIECES rows of K / PIECES.
    state_k, state_q = tl.zeros([BV, BT], tl.float32), tl.zeros([BV, BT], tl.float32)
    past_k, past_q = tl.zeros([BL, BT], tl.float32), tl.zeros([BL, BT], tl.float32)
    k_k, k_q = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    in_rows = None if V % BV == 0 else in_v
    state_row = head * V + value
    for piece in range(PIECES):
        column = piece * PIECE + tl.arange(0, PIECE)
        in_k = column < K
        k = tokens.k + row * tokens.k_row + key_head * K
        k = load_rows(k, token, tokens.k_token, new, column, in_k)  # [BT, PIECE]
        k = as_held(k, tokens.k, ring.k)
        q = tokens.q + row * tokens.q_row + key_head * K
        q = load_rows(q, token, tokens.q_token, new, column, in_k)
        k_t, q_t = tl.trans(k), tl.trans(q)
        s = load_unscaled(  # [BV, PIECE]
            read, slot, state_row * PIECES + piece, in_rows, K // PIECES, PIECE, READ
        )
        state_k = exact_dot(s, k_t, state_k, STATE_KEYS)
        state_q = exact_dot(s, q_t, state_q, STATE_KEYS)
        if T < L:
            k_past = load_rows(keys, record, K, past, column, in_k)  # [BL, PIECE]
            past_k = exact_dot(k_past, k_t, past_k, KEYS)
            past_q = exact_dot(k_past, q_t, past_q, KEYS)
        k_k = exact_dot(k, k_t, k_k, KEYS)
        k_q = exact_dot(k, q_t, k_q, KEYS)
        if (tile == 0) & (head % (HV // HK) == 0):
            target = keys + here[:, None] * K + column[None, :]
            k_held = k.to(ring.k.dtype.element_ty)
            tl.store(target, k_held, mask=fits[:, None] & in_k[None, :])

    g = tokens.g + row * tokens.g_row + head + token * tokens.g_token
    g = tl.load(g, mask=new, other=0.0)
    beta = tokens.beta + row * tokens.beta_row + head + token * tokens.beta_token
    beta = tl.load(beta, mask=new, other=0.0)
    log_decay = tl.cumsum(tl.load(ring.g + first + record, mask=past, other=0.0), 0)  # [BL]
    now = last(log_decay, BL) + tl.cumsum(g, 0)  # [BT]

    # What the state and the records before the window contribute, [BV, BT].
    factor = row_factor(read, slot, state_row, in_rows, V, READ)
    from_state = factor[:, None] * decay(now, 0.0)[None, :]
    predicted, answer = from_state * state_k, from_state * state_q
    if T < L:
        u_past = load_columns(ring.u + first * V, record, V, past, value, in_v)  # [BV, BL]
        from_past = decay(now[None, :], log_decay[:, None])  # [BL, BT]
        predicted = exact_dot(u_past, from_past * past_k, predicted, FULL)
        answer = exact_dot(u_past, from_past * past_q, answer, FULL)

    # What the window's tokens write, each on top of the earlier ones.
    v = tokens.v + row * tokens.v_row + head * V
    v = load_columns(v, token, tokens.v_token, new, value, in_v)  # [BV, BT]
    v = v if ring.v is None else as_held(v, tokens.v, ring.v)
    between = decay(now[None, :], now[:, None])  # [BT, BT], earlier token first
    earlier = token[:, None] < token[None, :]
    system = tl.where(earlier, between * k_k, 0.0)
    u = substitute(beta[None, :] * (v - predicted), system * beta[None, :], T, BT)  # [BV, BT]
    upto = token[:, None] <= token[None, :]
    own = tl.where(upto, between * k_q, 0.0)
    answer = exact_dot(u, own, answer, FULL)
    # A ring without room is a caller's mistake; no number may come of it.
    tl.store(out, tl.where(count + T <= L, answer, float("nan")), mask=written)

    if tile == 0:
        tl.store(ring.g + first + here, g, mask=fits)
        if ring.beta is not None:
            tl.store(ring.beta + first + here, beta, mask=fits)
    target = (first + here)[None, :] * V + value[:, None]
    written = in_v[:, None] & fits[None, :]
    tl.store(ring.u + target, u, mask=written)
    if ring.v is not None:
        tl.store(ring.v + target, v.to(ring.v.dtype.element_ty), mask=written)


def window(
    read: Quantized,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: GatedDeltaInputs,
    *,
    launch: Launch | None = None,
) -> Tensor:
    """Outputs of T tokens on top of `read` and the committed records.

    In place: slots pos .. pos+T-1 of each row's ring, nothing else. Rows with pos + T > L get NaN.
    Arguments, result [B, T, HV, V] FP32 and errors as in `decode`; T at most 32.
    """
    ring, tokens = ring_argument(ring), token_argument(inputs)
    constants = sizes(ring, policy)
    batch, count = inputs.k.shape[:2]
    if count > min(constants["L"], MAX_TOKENS):
        raise ValueError(
            f"a window of {count} tokens: at most {MAX_TOKENS}, and the ring's {constants['L']}"
        )
    launch = launch or default_launch("window", policy, constants, batch)
    out = torch.empty(inputs.v.shape, dtype=torch.float32, device=inputs.v.device)
    keys, readers = ring.k.dtype, torch.promote_types(ring.k.dtype, tokens.q.dtype)
    window_kernel[(launch.tiles(constants), constants["HV"], batch)](
        out,
        tokens,
        ring,
        cursors,
        stored(read),
        T=count,
        **constants,
        **pieces(policy.read_storage, constants),
        READ=policy.read_storage,
        STATE_KEYS=precision_of(unscaled_dtype(policy.read_storage), readers),
        KEYS=precision_of(keys, readers),
        FULL=precision_of(torch.float32, torch.float32),
        **launch.options(),
        BV=launch.block_v,
        BT=power_of_two(count),
    )
    return out
