"""T = 2 … 32 tokens per row, for verify and teacher-forced replay; no state is ever formed.

Owns the window kernel and its launcher. Products with the state and with the records before the
window are matrix products on tensor cores: the decay from a record to a token is that up to the
window times that within it, both at most 1. Pairs within the window are taken one by one.

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
    MAX_TOKENS,
    Launch,
    pieces,
    power_of_two,
    ring_argument,
    sizes,
    token_argument,
)
from replayssm.ops.gated_delta.triton_tiles import as_held, load_columns, load_rows, substitute
from replayssm.ops.kimi_delta.reference import KimiDeltaInputs
from replayssm.ops.kimi_delta.triton_launch import default_launch
from replayssm.ops.kimi_delta.triton_tiles import pair_weights, sums_after, sums_before
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
    SUMS: tl.constexpr,  # precision of sums of gates
    KEYS_STATE: tl.constexpr,  # of decayed k, q times state
    FULL: tl.constexpr,  # of products of FP32 operands
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
    first = (slot * HV + head) * L  # this head's oldest record
    keys, gates = ring.k + (slot * HK + key_head) * L * K, ring.g + first * K
    here = count + token
    fits = new & (here < L)
    new_k = tokens.k + row * tokens.k_row + key_head * K
    new_q = tokens.q + row * tokens.q_row + key_head * K
    new_g = tokens.g + row * tokens.g_row + head * K

    # Products over K in pieces: whole operands would not fit in registers. A row of K elements is
    # PIECES rows of K / PIECES.
    k_state, q_state = tl.zeros([BT, BV], tl.float32), tl.zeros([BT, BV], tl.float32)
    past_k, past_q = tl.zeros([BL, BT], tl.float32), tl.zeros([BL, BT], tl.float32)
    k_k, k_q = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    in_rows = None if V % BV == 0 else in_v
    state_row = head * V + value
    for piece in range(PIECES):
        column = piece * PIECE + tl.arange(0, PIECE)
        in_k = column < K
        k = load_rows(new_k, token, tokens.k_token, new, column, in_k)  # [BT, PIECE]
        k = as_held(k, tokens.k, ring.k)
        q = load_rows(new_q, token, tokens.q_token, new, column, in_k)
        g = load_rows(new_g, token, tokens.g_token, new, column, in_k)
        so_far = sums_before(g, SUMS)  # from the start of the window
        within = tl.exp(so_far)
        before = tl.zeros([PIECE], tl.float32)  # from the state to the window
        if T < L:
            g_past = load_rows(gates, record, K, past, column, in_k)  # [BL, PIECE]
            before = tl.sum(g_past, 0)
            k_past = load_rows(keys, record, K, past, column, in_k)
            k_past *= tl.exp(sums_after(g_past, SUMS))
            past_k = exact_dot(k_past, tl.trans(k * within), past_k, FULL)
            past_q = exact_dot(k_past, tl.trans(q * within), past_q, FULL)
        since_state = tl.exp(before[None, :] + so_far)
        s = load_unscaled(  # [BV, PIECE]
            read, slot, state_row * PIECES + piece, in_rows, K // PIECES, PIECE, READ
        )
        s_t = tl.trans(s)
        k_state = exact_dot(k * since_state, s_t, k_state, KEYS_STATE)
        q_state = exact_dot(q * since_state, s_t, q_state, KEYS_STATE)
        k_k, k_q = pair_weights(
            new_k, tokens.k_token, new_q, tokens.q_token, new_g, tokens.g_token,
            ring.k, T, column, in_k, k_k, k_q,
        )  # fmt: skip
        if tile == 0:
            target = here[:, None] * K + column[None, :]
            mask = fits[:, None] & in_k[None, :]
            tl.store(gates + target, g, mask=mask)
            if head % (HV // HK) == 0:
                tl.store(keys + target, k.to(ring.k.dtype.element_ty), mask=mask)

    beta = tokens.beta + row * tokens.beta_row + head + token * tokens.beta_token
    beta = tl.load(beta, mask=new, other=0.0)

    # What the state and the records before the window contribute, [BV, BT].
    factor = row_factor(read, slot, state_row, in_rows, V, READ)[:, None]
    predicted, answer = factor * tl.trans(k_state), factor * tl.trans(q_state)
    if T < L:
        u_past = load_columns(ring.u + first * V, record, V, past, value, in_v)  # [BV, BL]
        predicted = exact_dot(u_past, past_k, predicted, FULL)
        answer = exact_dot(u_past, past_q, answer, FULL)

    # What the window's tokens write, each on top of the earlier ones.
    v = tokens.v + row * tokens.v_row + head * V
    v = load_columns(v, token, tokens.v_token, new, value, in_v)  # [BV, BT]
    v = v if ring.v is None else as_held(v, tokens.v, ring.v)
    u = substitute(beta[None, :] * (v - predicted), k_k * beta[None, :], T, BT)  # [BV, BT]
    answer = exact_dot(u, k_q, answer, FULL)
    # A ring without room is a caller's mistake; no number may come of it.
    tl.store(out, tl.where(count + T <= L, answer, float("nan")), mask=written)

    if tile == 0:
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
    inputs: KimiDeltaInputs,
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
        SUMS=precision_of(torch.float32, torch.bfloat16),
        KEYS_STATE=precision_of(torch.float32, unscaled_dtype(policy.read_storage)),
        FULL=precision_of(torch.float32, torch.float32),
        **launch.options(),
        BV=launch.block_v,
        BT=power_of_two(count),
    )
    return out
