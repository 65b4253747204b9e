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
    power_of_two,
    precision,
    ring_argument,
    sizes,
    token_argument,
    unscaled_dtype,
)
from replayssm.ops.gated_delta.triton_tiles import (
    as_held,
    decay,
    dot,
    last,
    load_columns,
    load_rows,
    substitute,
)
from replayssm.ops.quantize.layout import stored
from replayssm.ops.quantize.tiles import load_unscaled, row_factor
from replayssm.ops.triton_common import Cursors
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
    BV: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid (tiles of V, HV, B)."""
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(cursors.slots + row).to(tl.int64)
    value, column = tile * BV + tl.arange(0, BV), tl.arange(0, BK)
    token, record = tl.arange(0, BT), tl.arange(0, BL)
    in_v, in_k, new = value < V, column < K, token < T
    out += ((row * T + token[None, :]) * HV + head) * V + value[:, None]
    written = in_v[:, None] & new[None, :]
    if slot < 0:
        tl.store(out, tl.zeros([BV, BT], tl.float32), mask=written)
        return

    count = tl.load(cursors.pos + slot).to(tl.int32)
    past = record < count
    key_head = head // (HV // HK)
    keys = ring.k + (slot * HK + key_head) * L * K
    first = (slot * HV + head) * L  # this head's oldest record
    k = tokens.k + row * tokens.k_row + key_head * K
    k = load_rows(k, token, tokens.k_token, new, column, in_k)  # [BT, BK]
    k = as_held(k, tokens.k, ring.k)
    q = tokens.q + row * tokens.q_row + key_head * K
    q = load_rows(q, token, tokens.q_token, new, column, in_k)
    k_t, q_t = tl.trans(k), tl.trans(q)

    g = tokens.g + row * tokens.g_row + head + token * tokens.g_token
    g = tl.load(g, mask=new, other=0.0)
    beta = tokens.beta + row * tokens.beta_row + head + token * tokens.beta_token
    beta = tl.load(beta, mask=new, other=0.0)
    log_decay = tl.cumsum(tl.load(ring.g + first + record, mask=past, other=0.0), 0)  # [BL]
    now = last(log_decay, BL) + tl.cumsum(g, 0)  # [BT]

    # What the state and the records before the window contribute, [BV, BT].
    in_rows = None if V % BV == 0 else in_v
    s = load_unscaled(read, slot, head * V + value, in_rows, K, BK, READ)  # [BV, BK]
    factor = row_factor(read, slot, head * V + value, in_rows, V, READ)
    from_state = factor[:, None] * decay(now, 0.0)[None, :]
    predicted = from_state * dot(s, k_t, STATE_KEYS)
    answer = from_state * dot(s, q_t, STATE_KEYS)
    if T < L:
        k_past = load_rows(keys, record, K, past, column, in_k)  # [BL, BK]
        u_past = load_columns(ring.u + first * V, record, V, past, value, in_v)  # [BV, BL]
        from_past = decay(now[None, :], log_decay[:, None])  # [BL, BT]
        predicted += dot(u_past, from_past * dot(k_past, k_t, KEYS), FULL)
        answer += dot(u_past, from_past * dot(k_past, q_t, KEYS), FULL)

    # What the window's tokens write, each on top of the earlier ones.
    v = tokens.v + row * tokens.v_row + head * V
    v = load_columns(v, token, tokens.v_token, new, value, in_v)  # [BV, BT]
    v = v if ring.v is None else as_held(v, tokens.v, ring.v)
    between = decay(now[None, :], now[:, None])  # [BT, BT], earlier token first
    earlier = token[:, None] < token[None, :]
    system = tl.where(earlier, between * dot(k, k_t, KEYS), 0.0)
    u = substitute(beta[None, :] * (v - predicted), system * beta[None, :], T, BT)  # [BV, BT]
    upto = token[:, None] <= token[None, :]
    own = tl.where(upto, between * dot(k, q_t, KEYS), 0.0)
    answer += dot(u, own, FULL)
    # A ring without room is a caller's mistake; no number may come of it.
    tl.store(out, tl.where(count + T <= L, answer, float("nan")), mask=written)

    here = count + token
    fits = new & (here < L)
    if (tile == 0) & (head % (HV // HK) == 0):
        target = keys + here[:, None] * K + column[None, :]
        tl.store(target, k.to(ring.k.dtype.element_ty), mask=fits[:, None] & in_k[None, :])
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
        READ=policy.read_storage,
        STATE_KEYS=precision(unscaled_dtype(policy.read_storage), readers),
        KEYS=precision(keys, readers),
        FULL=precision(torch.float32, torch.float32),
        **launch.options(),
        BV=launch.block_v,
        BT=power_of_two(count),
    )
    return out
