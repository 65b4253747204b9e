"""T = 2 … 32 tokens per row, for verify and teacher-forced replay; no state is ever formed.

Owns how tokens and past records of a head weigh on each other, and the window's launcher. Where the
state is read: triton_apply.py.

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
from replayssm.ops.gated_delta.triton_apply import apply, open_window, store_weights
from replayssm.ops.gated_delta.triton_launch import (
    Launch,
    default_launch,
)
from replayssm.ops.gated_delta.triton_tiles import as_held, decay, last, load_rows, substitute
from replayssm.ops.triton_common import Cursors, exact_dot, halves_of
from replayssm.policy import PrecisionPolicy


@triton.jit
def weigh_kernel(
    weights,  # of `triton_apply.Window`
    tokens,  # Tokens
    ring,  # Ring
    cursors,  # Cursors
    T: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    KEYS: tl.constexpr,  # precision of k times k, q
    FULL: tl.constexpr,  # of products of FP32 operands
    COLUMNS: tl.constexpr,  # of keys that are multiplied at a time
    BL: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid (HV, B): weights of a head, and all of its record that is not in rows of the state.

    One warp for 16 tokens: what is added over lanes is added by shuffles, without barriers.
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(cursors.slots + row).to(tl.int64)
    token, record = tl.arange(0, BT), tl.arange(0, BL)
    new = token < T
    key_head = head // (HV // HK)
    g = tokens.g + row * tokens.g_row + head + token * tokens.g_token
    g = tl.load(g, mask=new, other=0.0)
    beta = tokens.beta + row * tokens.beta_row + head + token * tokens.beta_token
    beta = tl.load(beta, mask=new, other=0.0)
    k_at = tokens.k + row * tokens.k_row + key_head * K
    q_at = tokens.q + row * tokens.q_row + key_head * K
    k_parts, q_parts = (), ()
    for start in tl.static_range(0, K, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k = load_rows(k_at, token, tokens.k_token, new, column, column < K)  # [BT, COLUMNS]
        k_parts = k_parts + (as_held(k, tokens.k, ring.k),)
        q_parts = q_parts + (load_rows(q_at, token, tokens.q_token, new, column, column < K),)
    if slot < 0:
        return

    count = tl.load(cursors.pos + slot).to(tl.int32)
    past = record < count
    keys = ring.k + (slot * HK + key_head) * L * K
    first = (slot * HV + head) * L  # this head's oldest record
    here = count + token
    fits = new & (here < L)
    g_past = tl.load(ring.g + first + record, mask=past, other=0.0)
    past_parts = ()
    if T < L:
        for start in tl.static_range(0, K, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            k_past = load_rows(keys, record, K, past, column, column < K)  # [BL, COLUMNS]
            past_parts = past_parts + (k_past,)
    square, oblong = tl.zeros([BT, BT], tl.float32), tl.zeros([BL, BT], tl.float32)
    k_k, k_q, past_k, past_q = square, square, oblong, oblong
    for start in tl.static_range(0, K, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k, q = k_parts[start // COLUMNS], q_parts[start // COLUMNS]
        k_t, q_t = tl.trans(k), tl.trans(q)
        k_k += exact_dot(k, k_t, square, KEYS)
        k_q += exact_dot(k, q_t, square, KEYS)
        if T < L:
            past_k += exact_dot(past_parts[start // COLUMNS], k_t, oblong, KEYS)
            past_q += exact_dot(past_parts[start // COLUMNS], q_t, oblong, KEYS)
        if head % (HV // HK) == 0:
            mask = fits[:, None] & (column < K)[None, :]
            at = keys + here[:, None] * K + column[None, :]
            tl.store(at, k.to(ring.k.dtype.element_ty), mask=mask)

    log_decay = tl.cumsum(g_past, 0)  # [BL]
    now = last(log_decay, BL) + tl.cumsum(g, 0)  # [BT]
    from_past = decay(now[None, :], log_decay[:, None])  # [BL, BT]
    between = decay(now[None, :], now[:, None])  # [BT, BT], earlier token first
    system = tl.where(token[:, None] < token[None, :], between * k_k, 0.0)
    own = tl.where(token[:, None] <= token[None, :], between * k_q, 0.0)
    scaled = tl.where(token[:, None] == token[None, :], beta[None, :], 0.0)
    solve = substitute(scaled, system * beta[None, :], T, BT)
    solve_own = exact_dot(solve, own, square, FULL)
    weights += (row * HV + head) * (2 * BT + 2 * BL + 1) * BT
    store_weights(
        weights, solve, solve_own, from_past * past_k, from_past * past_q, decay(now, 0.0), BT, BL
    )
    tl.store(ring.g + first + here, g, mask=fits)
    if ring.beta is not None:
        tl.store(ring.beta + first + here, beta, mask=fits)


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
    constants, batch = opened.constants, inputs.k.shape[0]
    launch = launch or default_launch("window", policy, constants, batch)
    readers = torch.promote_types(opened.ring.k.dtype, inputs.q.dtype)
    weigh_kernel[(constants["HV"], batch)](
        opened.weights,
        opened.tokens,
        opened.ring,
        cursors,
        **constants,
        KEYS=halves_of(opened.ring.k.dtype, readers),
        FULL=halves_of(torch.float32, torch.float32),
        COLUMNS=32,
        num_warps=constants["BT"] // 16,
    )
    return apply(read, opened, policy, cursors, None, launch)
