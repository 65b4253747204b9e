"""T = 2 … 32 tokens per row, for verify and teacher-forced replay; no state is ever formed.

Owns the window's kernel and its launcher. What meets what in a product lies as `quantize/operand`
says.

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
from replayssm.ops.gated_delta.triton_apply import open_window
from replayssm.ops.gated_delta.triton_launch import Launch, default_launch
from replayssm.ops.gated_delta.triton_tiles import as_held, decay, last, load_rows, substitute
from replayssm.ops.quantize.layout import stored
from replayssm.ops.quantize.operand import (
    in_order,
    load_operand,
    load_readers,
    operand,
    operand_factor,
    piece_of,
    plain_piece,
)
from replayssm.ops.triton_common import Cursors, exact_dot, halves_of, readers_times
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
    K_STATE: tl.constexpr,  # precision of k times state
    Q_STATE: tl.constexpr,
    K_KEYS: tl.constexpr,  # of k times keys
    Q_KEYS: tl.constexpr,
    FULL: tl.constexpr,  # of products of FP32 operands
    PIECE: tl.constexpr,
    RING_PIECE: tl.constexpr,
    BV: tl.constexpr,
    BL: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid (HV, B): a head, in tiles of BV rows.

    For one warp, which waits for no other: many of them hide what each waits for. Tokens are rows
    of every product, so that weights are operands as they come out of one, and a state is an
    operand as it is loaded.
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(cursors.slots + row).to(tl.int64)
    token, record = tl.arange(0, BT), tl.arange(0, BL)
    new = token < T
    outputs = out + ((row * T + token[:, None]) * HV + head) * V
    if slot < 0:
        for tile in range((V + BV - 1) // BV):
            value = tile * BV + tl.arange(0, BV)
            tl.store(outputs + value[None, :], 0.0, mask=new[:, None] & (value < V)[None, :])
        return

    count = tl.load(cursors.pos + slot).to(tl.int32)
    key_head = head // (HV // HK)
    g = tl.load(tokens.g + row * tokens.g_row + head + token * tokens.g_token, mask=new, other=0.0)
    beta = tokens.beta + row * tokens.beta_row + head + token * tokens.beta_token
    beta = tl.load(beta, mask=new, other=0.0)
    k_at = tokens.k + row * tokens.k_row + key_head * K
    q_at = tokens.q + row * tokens.q_row + key_head * K
    keys = ring.k + (slot * HK + key_head) * L * K
    first = (slot * HV + head) * L  # this head's oldest record
    past, here = record < count, count + token
    fits = new & (here < L)
    g_past = tl.load(ring.g + first + record, mask=past, other=0.0)
    ks, qs, olds = (), (), ()
    for start in tl.static_range(0, K, RING_PIECE):
        column = start + tl.arange(0, RING_PIECE)
        in_k = column < K
        ks = ks + (load_rows(k_at, token, tokens.k_token, new, column, in_k),)
        qs = qs + (load_rows(q_at, token, tokens.q_token, new, column, in_k),)
        if T < L:
            olds = olds + (load_rows(keys, record, K, past, column, in_k),)
    log_decay = tl.cumsum(g_past, 0)  # [BL]
    now = last(log_decay, BL) + tl.cumsum(g, 0)  # [BT]
    k_k, q_k = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    k_past, q_past = tl.zeros([BT, BL], tl.float32), tl.zeros([BT, BL], tl.float32)
    for part in tl.static_range(len(ks)):
        k, q = in_order(as_held(ks[part], tokens.k, ring.k)), in_order(qs[part])
        # Each product from zero: tensor cores cut what they add to, and to the sum of all that came
        # before they would do so at every step.
        k_k += exact_dot(k, tl.trans(k), tl.zeros_like(k_k), K_KEYS)
        q_k += exact_dot(q, tl.trans(k), tl.zeros_like(k_k), Q_KEYS)
        if T < L:
            old = tl.trans(in_order(olds[part]))
            k_past += exact_dot(k, old, tl.zeros_like(k_past), K_KEYS)
            q_past += exact_dot(q, old, tl.zeros_like(k_past), Q_KEYS)
    if head % (HV // HK) == 0:
        for part in tl.static_range(len(ks)):
            column = part * RING_PIECE + tl.arange(0, RING_PIECE)
            at = keys + here[:, None] * K + column[None, :]
            held = as_held(ks[part], tokens.k, ring.k).to(ring.k.dtype.element_ty)
            tl.store(at, held, mask=fits[:, None] & (column < K)[None, :])

    # Weights [later, earlier].
    from_past = decay(now[:, None], log_decay[None, :])
    k_past, q_past = _in_halves(k_past * from_past), _in_halves(q_past * from_past)
    paired = record // 8 * 8 + record % 4 * 2 + record % 8 // 4  # records in that order
    between = decay(now[:, None], now[None, :])
    system = tl.where(token[:, None] > token[None, :], between * k_k, 0.0) * beta[:, None]
    own = tl.where(token[:, None] >= token[None, :], between * q_k, 0.0)
    scaled = tl.where(token[:, None] == token[None, :], beta[None, :], 0.0)
    solve = tl.trans(substitute(scaled, tl.trans(system), T, BT))
    own = exact_dot(own, solve, tl.zeros_like(own), FULL)
    from_state = decay(now, 0.0)[:, None]
    tl.store(ring.g + first + here, g, mask=fits)
    if ring.beta is not None:
        tl.store(ring.beta + first + here, beta, mask=fits)

    k_parts, q_parts = (), ()
    for piece in tl.static_range((K + PIECE - 1) // PIECE):
        k = load_readers(k_at, token, tokens.k_token, new, piece, K, PIECE, READ)
        k_parts = k_parts + (as_held(k, tokens.k, ring.k),)
        q = load_readers(q_at, token, tokens.q_token, new, piece, K, PIECE, READ)
        q_parts = q_parts + (q,)
    for tile in range((V + BV - 1) // BV):
        value = tile * BV + tl.arange(0, BV)
        in_v = value < V
        in_rows = None if V % BV == 0 else in_v
        state_row = head * V + value
        stored_rows = load_operand(read, slot, state_row, in_rows, V, K, PIECE, READ)
        factor = operand_factor(read, slot, state_row, in_rows, V, K, READ)
        v = tokens.v + row * tokens.v_row + head * V
        v = load_rows(v, token, tokens.v_token, new, value, in_v)  # [BT, BV]
        v = v if ring.v is None else as_held(v, tokens.v, ring.v)
        if T < L:
            u_past = load_rows(ring.u + first * V, paired, V, paired < count, value, in_v)
        zero = tl.zeros([BT, BV], tl.float32)
        predicted, answer = zero, zero
        for piece in tl.static_range((K + PIECE - 1) // PIECE):
            s = tl.trans(operand(stored_rows, piece, K, READ))
            predicted += exact_dot(k_parts[piece], s, zero, K_STATE)
            answer += exact_dot(q_parts[piece], s, zero, Q_STATE)
        scale = factor[None, :] * from_state
        # A plain sum with a product would be compiled into that product.
        predicted, answer = predicted * scale, answer * scale
        if T < L:
            predicted += exact_dot(k_past, u_past, zero, FULL)
            answer += exact_dot(q_past, u_past, zero, FULL)
        right = v - predicted
        u = exact_dot(solve, right, zero, FULL)
        answer += exact_dot(own, right, zero, FULL)
        # A ring without room is a caller's mistake; no number may come of it.
        answer = tl.where(count + T <= L, answer, float("nan"))
        tl.store(outputs + value[None, :], answer, mask=new[:, None] & in_v[None, :])
        target = (first + here)[:, None] * V + value[None, :]
        written = fits[:, None] & in_v[None, :]
        tl.store(ring.u + target, u, mask=written)
        if ring.v is not None:
            tl.store(ring.v + target, v.to(ring.v.dtype.element_ty), mask=written)


@triton.jit
def _in_halves(x):
    """Columns of a product, of which a lane has pairs, in an order in which they are an operand of
    FP32: of every eight, the first of each pair and then the second."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, [R, C // 8, 4, 2]), [0, 1, 3, 2]), [R, C])


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
    opened = open_window(ring, policy, inputs)
    constants, tokens = opened.constants, opened.tokens
    batch = inputs.k.shape[0]
    launch = launch or default_launch("window", policy, constants, batch)
    out = torch.empty(tokens.v.shape, dtype=torch.float32, device=tokens.v.device)
    keys, queries = opened.ring.k.dtype, tokens.q.dtype
    state = unscaled_dtype(policy.read_storage)
    options = launch.options()
    options["num_warps"] = max(launch.num_warps, constants["BT"] // 16)
    window_kernel[(constants["HV"], batch)](
        out,
        tokens,
        opened.ring,
        cursors,
        stored(read),
        **constants,
        READ=policy.read_storage,
        K_STATE=readers_times(keys, state),
        Q_STATE=readers_times(queries, state),
        K_KEYS=halves_of(keys, keys),
        Q_KEYS=halves_of(queries, keys),
        FULL=halves_of(torch.float32, torch.float32),
        PIECE=piece_of(policy.read_storage, constants["K"]),
        RING_PIECE=plain_piece(8 * keys.itemsize),
        BV=launch.block_v,
        **options,
    )
    return out
