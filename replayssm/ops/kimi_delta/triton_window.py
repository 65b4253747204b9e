"""T = 2 … 32 tokens per row, for verify and teacher-forced replay; no state is ever formed.

Owns how tokens and past records of a head weigh on each other, and the window's launcher. Past
records weigh by matrix products: the decay from a record to a token is that up to the window times
that within it, both at most 1. Pairs within the window are taken one by one. Where the state is
read: `../gated_delta/triton_apply.py`.

Legend: triton_tiles.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.formats.quantized import Quantized
from replayssm.ops.gated_delta.triton_apply import apply, empty_weights, open_window, store_weights
from replayssm.ops.gated_delta.triton_launch import (
    Launch,
    power_of_two,
)
from replayssm.ops.gated_delta.triton_tiles import as_held, load_rows, substitute
from replayssm.ops.kimi_delta.reference import KimiDeltaInputs
from replayssm.ops.kimi_delta.triton_launch import default_launch
from replayssm.ops.kimi_delta.triton_tiles import pair_weights, sums_after
from replayssm.ops.triton_common import Cursors, exact_dot, halves_of, precision_of
from replayssm.policy import PrecisionPolicy

_MOST_UNROLLED = tl.constexpr(16)


@triton.jit
def weigh_kernel(
    weights,  # of `triton_apply.empty_weights`
    decays,  # [B, HV, T + 1, K] FP32, see `triton_apply`
    tokens,  # Tokens
    ring,  # Ring
    cursors,  # Cursors
    T: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    SUMS: tl.constexpr,  # precision of sums of gates
    FULL: tl.constexpr,  # of products of FP32 operands
    COLUMNS: tl.constexpr,  # of past keys that are read at a time
    BK: tl.constexpr,
    BL: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid (HV, B): weights of a head, and all of its record that is not in rows of the state.

    One warp: all that is added over lanes is added by shuffles, and nobody waits at a barrier.
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(cursors.slots + row).to(tl.int64)
    token, record, column = tl.arange(0, BT), tl.arange(0, BL), tl.arange(0, BK)
    new = token < T
    key_head = head // (HV // HK)
    new_k = tokens.k + row * tokens.k_row + key_head * K
    new_q = tokens.q + row * tokens.q_row + key_head * K
    new_g = tokens.g + row * tokens.g_row + head * K
    beta = tokens.beta + row * tokens.beta_row + head + token * tokens.beta_token
    beta = tl.load(beta, mask=new, other=0.0)
    weights += (row * HV + head) * (2 * BT + 2 * BL + 1) * BT
    decays += (row * HV + head) * (T + 1) * K
    # Pairs in place of `solve` and `solve_own`, which will be made from them.
    pairs_k, pairs_q = weights, weights + BT * BT
    if T <= _MOST_UNROLLED:
        _store_pairs(
            pairs_k, pairs_q, decays, new_k, tokens.k_token, new_q, tokens.q_token,
            new_g, tokens.g_token, ring.k, T, K, BK, BT,
        )  # fmt: skip
    else:
        so_far = tl.zeros([BK], tl.float32)
        for i in tl.range(T):
            g = tl.load(new_g + i * tokens.g_token + column, mask=column < K, other=0.0)
            so_far += g
            tl.store(decays + i * K + column, tl.exp(so_far), mask=column < K)
    if slot < 0:
        return

    tl.debug_barrier()  # what was stored is read below
    count = tl.load(cursors.pos + slot).to(tl.int32)
    first = (slot * HV + head) * L  # this head's oldest record
    keys, gates = ring.k + (slot * HK + key_head) * L * K, ring.g + first * K
    past, here = record < count, count + token
    fits = new & (here < L)
    square, oblong = tl.zeros([BT, BT], tl.float32), tl.zeros([BL, BT], tl.float32)
    past_k, past_q = oblong, oblong
    for start in range(0, K, COLUMNS):
        part = start + tl.arange(0, COLUMNS)
        in_k = part < K
        k = load_rows(new_k, token, tokens.k_token, new, part, in_k)  # [BT, COLUMNS]
        k = as_held(k, tokens.k, ring.k)
        g = load_rows(new_g, token, tokens.g_token, new, part, in_k)
        before = tl.zeros([COLUMNS], tl.float32)  # from the state to the window
        if T < L:
            q = load_rows(new_q, token, tokens.q_token, new, part, in_k)
            within = load_rows(decays, token, K, new, part, in_k)
            g_past = load_rows(gates, record, K, past, part, in_k)  # [BL, COLUMNS]
            k_past = load_rows(keys, record, K, past, part, in_k)
            before = tl.sum(g_past, 0)
            k_past *= tl.exp(sums_after(g_past, SUMS))
            # Each product from zero: see `triton_apply`.
            past_k += exact_dot(k_past, tl.trans(k * within), oblong, FULL)
            past_q += exact_dot(k_past, tl.trans(q * within), oblong, FULL)
        tl.store(decays + T * K + part, tl.exp(before), mask=in_k)
        target = here[:, None] * K + part[None, :]
        mask = fits[:, None] & in_k[None, :]
        tl.store(gates + target, g, mask=mask)
        if head % (HV // HK) == 0:
            tl.store(keys + target, k.to(ring.k.dtype.element_ty), mask=mask)

    if T <= _MOST_UNROLLED:
        at = token[:, None] * BT + token[None, :]
        upto = new[None, :] & (token[:, None] <= token[None, :])
        k_k = tl.load(pairs_k + at, mask=upto & (token[:, None] < token[None, :]), other=0.0)
        k_q = tl.load(pairs_q + at, mask=upto, other=0.0)
        tl.debug_barrier()  # before others overwrite it
    else:
        k_k, k_q = pair_weights(
            new_k, tokens.k_token, new_q, tokens.q_token, new_g, tokens.g_token,
            ring.k, T, column, column < K, square, square,
        )  # fmt: skip
    scaled = tl.where(token[:, None] == token[None, :], beta[None, :], 0.0)
    solve = substitute(scaled, k_k * beta[None, :], T, BT)
    solve_own = exact_dot(solve, k_q, square, FULL)
    from_state = tl.full([BT], 1.0, tl.float32)
    store_weights(weights, solve, solve_own, past_k, past_q, from_state, BT, BL)
    if ring.beta is not None:
        tl.store(ring.beta + first + here, beta, mask=fits)


@triton.jit
def _store_pairs(
    k_k,
    k_q,
    decays,
    keys,
    key_stride,
    queries,
    query_stride,
    gates,
    gate_stride,
    ring_keys,
    T: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
):
    """`pair_weights` of T tokens in memory, at k_k and k_q [BT, BT], every pair by itself, so that
    none is computed that there is not. At `decays` [T, K]: those since the start of the window."""
    column = tl.arange(0, BK)
    in_k = column < K
    g_of, k_of, q_of = (), (), ()
    for i in tl.static_range(T):
        g_of = g_of + (tl.load(gates + i * gate_stride + column, mask=in_k, other=0.0),)
        k_of = k_of + (tl.load(keys + i * key_stride + column, mask=in_k, other=0.0),)
        q_of = q_of + (tl.load(queries + i * query_stride + column, mask=in_k, other=0.0),)
    past = ()
    so_far = tl.zeros([BK], tl.float32)
    for i in tl.static_range(T):
        so_far += g_of[i]
        tl.store(decays + i * K + column, tl.exp(so_far), mask=in_k)
        a = tl.exp(g_of[i])
        k, q = as_held(k_of[i], keys, ring_keys), q_of[i].to(tl.float32)
        decayed = ()
        for j in tl.static_range(i):
            decayed = decayed + (past[j] * a,)
            tl.store(k_k + j * BT + i, tl.sum(decayed[j] * k, 0))
            tl.store(k_q + j * BT + i, tl.sum(decayed[j] * q, 0))
        tl.store(k_q + i * BT + i, tl.sum(k * q, 0))
        past = decayed + (k,)


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
    opened = open_window(ring, policy, inputs)
    constants, batch = opened.constants, inputs.k.shape[0]
    launch = launch or default_launch("window", policy, constants, batch)
    shape = (batch, constants["HV"], constants["T"] + 1, constants["K"])
    decays = torch.empty(shape, dtype=torch.float32, device=inputs.v.device)
    weights = empty_weights(opened)
    weigh_kernel[(constants["HV"], batch)](
        weights,
        decays,
        opened.tokens,
        opened.ring,
        cursors,
        **constants,
        SUMS=precision_of(torch.float32, torch.bfloat16),
        FULL=halves_of(torch.float32, torch.float32),
        COLUMNS=32,
        BK=power_of_two(constants["K"]),
        num_warps=1,
    )
    return apply(read, opened, policy, cursors, weights, decays, launch)
