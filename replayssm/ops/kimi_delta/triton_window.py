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
from replayssm.ops.gated_delta.triton_apply import apply, new_weights, store_weights, window_sizes
from replayssm.ops.gated_delta.triton_launch import (
    MAX_TOKENS,
    Launch,
    power_of_two,
    ring_argument,
    sizes,
    token_argument,
)
from replayssm.ops.gated_delta.triton_tiles import as_held, load_rows, substitute
from replayssm.ops.kimi_delta.reference import KimiDeltaInputs
from replayssm.ops.kimi_delta.triton_launch import default_launch
from replayssm.ops.kimi_delta.triton_tiles import pair_weights, sums_after, sums_before
from replayssm.ops.triton_common import Cursors, exact_dot, halves_of, precision_of
from replayssm.policy import PrecisionPolicy


@triton.jit
def weigh_kernel(
    weights,  # of `triton_apply.new_weights`
    since_state,  # [B, HV, T, K] FP32
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
    BK: tl.constexpr,
    BL: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid (HV, B): weights of a head, and all of its record that is not in rows of the state."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(cursors.slots + row).to(tl.int64)
    if slot < 0:
        return
    token, record, column = tl.arange(0, BT), tl.arange(0, BL), tl.arange(0, BK)
    new, in_k = token < T, column < K
    count = tl.load(cursors.pos + slot).to(tl.int32)
    key_head = head // (HV // HK)
    first = (slot * HV + head) * L  # this head's oldest record
    keys, gates = ring.k + (slot * HK + key_head) * L * K, ring.g + first * K
    new_k = tokens.k + row * tokens.k_row + key_head * K
    new_q = tokens.q + row * tokens.q_row + key_head * K
    new_g = tokens.g + row * tokens.g_row + head * K
    beta = tokens.beta + row * tokens.beta_row + head + token * tokens.beta_token
    beta = tl.load(beta, mask=new, other=0.0)
    k = load_rows(new_k, token, tokens.k_token, new, column, in_k)  # [BT, BK]
    k = as_held(k, tokens.k, ring.k)
    q = load_rows(new_q, token, tokens.q_token, new, column, in_k)
    g = load_rows(new_g, token, tokens.g_token, new, column, in_k)
    so_far = sums_before(g, SUMS)  # from the start of the window
    past_k, past_q = tl.zeros([BL, BT], tl.float32), tl.zeros([BL, BT], tl.float32)
    since = so_far  # the state
    if T < L:
        past = record < count
        g_past = load_rows(gates, record, K, past, column, in_k)  # [BL, BK]
        k_past = load_rows(keys, record, K, past, column, in_k)
        since += tl.sum(g_past, 0)[None, :]
        k_past *= tl.exp(sums_after(g_past, SUMS))
        within = tl.exp(so_far)
        past_k = exact_dot(k_past, tl.trans(k * within), past_k, FULL)
        past_q = exact_dot(k_past, tl.trans(q * within), past_q, FULL)
    since_state += ((row * HV + head) * T + token[:, None]) * K + column[None, :]
    tl.store(since_state, tl.exp(since), mask=new[:, None] & in_k[None, :])

    k_k, k_q = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    k_k, k_q = pair_weights(
        new_k, tokens.k_token, new_q, tokens.q_token, new_g, tokens.g_token,
        ring.k, T, column, in_k, k_k, k_q,
    )  # fmt: skip
    scaled = tl.where(token[:, None] == token[None, :], beta[None, :], 0.0)
    solve = substitute(scaled, k_k * beta[None, :], T, BT)
    solve_own = exact_dot(solve, k_q, tl.zeros([BT, BT], tl.float32), FULL)
    weights += (row * HV + head) * (2 * BT + 2 * BL + 1) * BT
    from_state = tl.full([BT], 1.0, tl.float32)
    store_weights(weights, solve, solve_own, past_k, past_q, from_state, BT, BL)

    here = count + token
    fits = new & (here < L)
    target = here[:, None] * K + column[None, :]
    mask = fits[:, None] & in_k[None, :]
    tl.store(gates + target, g, mask=mask)
    if head % (HV // HK) == 0:
        tl.store(keys + target, k.to(ring.k.dtype.element_ty), mask=mask)
    if ring.beta is not None:
        tl.store(ring.beta + first + here, beta, mask=fits)


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
    constants = window_sizes(constants, count)
    device = inputs.v.device
    weights = new_weights(constants, batch, device)
    shape = (batch, constants["HV"], count, constants["K"])
    since_state = torch.empty(shape, dtype=torch.float32, device=device)
    weigh_kernel[(constants["HV"], batch)](
        weights,
        since_state,
        tokens,
        ring,
        cursors,
        **constants,
        SUMS=precision_of(torch.float32, torch.bfloat16),
        FULL=halves_of(torch.float32, torch.float32),
        BK=power_of_two(constants["K"]),
        num_warps=4,
    )
    return apply(read, ring, policy, cursors, tokens, weights, since_state, constants, launch)
