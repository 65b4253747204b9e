"""A window's outputs and updates, once it is known how its tokens weigh on each other.

Owns the kernel that reads the state, all that a window does per state row: it serves every delta
rule. What a window needs once a head comes from a kernel of the recurrence, in `weights`. With S
the state, U the past records, and what is left of the state at each token in `from_state`,

    right  = v - (S k from_state + U past_k)
    u      = right solve
    answer = S q from_state + U past_q + right (solve own)

`solve` is diag(β) (I + A)^-1 of the triangular system of the window's tokens; its entries are
products of contractions, at most 1. Where channels decay each by itself, k and q do before they
meet the state: `from_state` is 1, and `decays` has that of each token since the start of the
window and, last, that of the state up to there.

Legend: triton_tiles.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.formats.block import BlockFormat
from replayssm.formats.quantized import Quantized
from replayssm.formats.storage import Storage
from replayssm.ops.gated_delta.triton_launch import (
    Launch,
    Ring,
    Tokens,
    line_columns,
    power_of_two,
)
from replayssm.ops.gated_delta.triton_tiles import as_held, load_columns, load_rows
from replayssm.ops.quantize.layout import stored, tile_width
from replayssm.ops.quantize.tiles import factor_of, load_codes, unscaled_of
from replayssm.ops.triton_common import Cursors, exact_dot, halves_of
from replayssm.ops.triton_policy import unscaled_dtype
from replayssm.policy import PrecisionPolicy


@triton.jit
def apply_kernel(
    out,  # [B, T, HV, V] FP32
    tokens,  # Tokens
    ring,  # Ring
    cursors,  # Cursors
    read,  # Stored
    weights,  # of `new_weights`
    decays,  # [B, HV, T + 1, K] FP32, or None
    T: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    READ: tl.constexpr,
    STATE_KEYS: tl.constexpr,  # precision of state times k, q
    FULL: tl.constexpr,  # of products of FP32 operands
    COLUMNS: tl.constexpr,  # of a part of the state; K is a multiple, or there is one part
    BV: tl.constexpr,
    BL: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid (tiles of V, HV, B).

    Everything is asked for before anything is computed: first what does not depend on the slot,
    then what does. Each product starts from zero and is added by other means, because tensor cores
    cut what they add to: to sums of all that came before they would do so at every step.
    """
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(cursors.slots + row).to(tl.int64)
    value, token, record = tile * BV + tl.arange(0, BV), tl.arange(0, BT), tl.arange(0, BL)
    in_v, new = value < V, token < T
    PARTS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    k_at = tokens.k + row * tokens.k_row + head // (HV // HK) * K
    q_at = tokens.q + row * tokens.q_row + head // (HV // HK) * K
    k_parts, q_parts, decay_parts = (), (), ()
    for part in tl.static_range(PARTS):
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        mask = new[:, None] & (column < K)[None, :]
        at = token[:, None] * tokens.k_token + column[None, :]
        k_parts = k_parts + (tl.load(k_at + at, mask=mask, other=0.0),)  # [BT, COLUMNS]
        at = token[:, None] * tokens.q_token + column[None, :]
        q_parts = q_parts + (tl.load(q_at + at, mask=mask, other=0.0),)
        if decays is not None:
            at = decays + (row * HV + head) * (T + 1) * K
            decay = load_rows(at, token, K, new, column, column < K)
            before = tl.load(at + T * K + column, mask=column < K, other=0.0)
            decay_parts = decay_parts + (decay * before[None, :],)
    v = tokens.v + row * tokens.v_row + head * V
    v = load_columns(v, token, tokens.v_token, new, value, in_v)  # [BV, BT]
    v = v if ring.v is None else as_held(v, tokens.v, ring.v)
    weights += (row * HV + head) * (2 * BT + 2 * BL + 1) * BT
    solve, solve_own, past_k, past_q, from_state = _load_weights(weights, BT, BL)

    out += (row * T * HV + head) * V
    out += token[None, :] * (HV * V) + value[:, None]
    written = in_v[:, None] & new[None, :]
    if slot < 0:
        tl.store(out, tl.zeros([BV, BT], tl.float32), mask=written)
        return

    count = tl.load(cursors.pos + slot).to(tl.int32)
    in_rows = None if V % BV == 0 else in_v
    state_row = head * V + value
    state = ()
    for part in tl.static_range(PARTS):  # a row of K columns is PARTS rows
        at = state_row * PARTS + part
        state = state + (load_codes(read, slot, at, in_rows, V, K // PARTS, COLUMNS, READ),)
    first = (slot * HV + head) * L  # this head's oldest record
    if T < L:
        u_past = load_columns(ring.u + first * V, record, V, record < count, value, in_v)

    zero = tl.zeros([BV, BT], tl.float32)
    predicted, answer = zero, zero
    scale = factor_of(state[0], READ)[:, None] * from_state[None, :]
    for part in tl.static_range(PARTS):
        s = unscaled_of(state[part], K // PARTS, COLUMNS, READ)  # [BV, COLUMNS]
        k, q = as_held(k_parts[part], tokens.k, ring.k), q_parts[part].to(tl.float32)
        if decays is not None:
            k, q = k * decay_parts[part], q * decay_parts[part]
        # A plain sum with a product would be compiled into that product.
        predicted = tl.fma(exact_dot(s, tl.trans(k), zero, STATE_KEYS), scale, predicted)
        answer = tl.fma(exact_dot(s, tl.trans(q), zero, STATE_KEYS), scale, answer)
    if T < L:
        predicted += exact_dot(u_past, past_k, zero, FULL)
        answer += exact_dot(u_past, past_q, zero, FULL)
    right = v - predicted
    answer += exact_dot(right, solve_own, zero, FULL)
    # A ring without room is a caller's mistake; no number may come of it.
    tl.store(out, tl.where(count + T <= L, answer, float("nan")), mask=written)
    u = exact_dot(right, solve, zero, FULL)
    here = count + token
    target = (first + here)[None, :] * V + value[:, None]
    written = in_v[:, None] & (new & (here < L))[None, :]
    tl.store(ring.u + target, u, mask=written)
    if ring.v is not None:
        tl.store(ring.v + target, v.to(ring.v.dtype.element_ty), mask=written)


@triton.jit
def store_weights(
    weights, solve, solve_own, past_k, past_q, from_state, BT: tl.constexpr, BL: tl.constexpr
):
    """Write what a head's window needs to `weights`, that head's: [BT, BT], [BT, BT], [BL, BT],
    [BL, BT] and [BT]."""
    token, record = tl.arange(0, BT), tl.arange(0, BL)
    square = token[:, None] * BT + token[None, :]
    tl.store(weights + square, solve)
    tl.store(weights + BT * BT + square, solve_own)
    past = record[:, None] * BT + token[None, :]
    tl.store(weights + 2 * BT * BT + past, past_k)
    tl.store(weights + (2 * BT + BL) * BT + past, past_q)
    tl.store(weights + (2 * BT + 2 * BL) * BT + token, from_state)


@triton.jit
def _load_weights(weights, BT: tl.constexpr, BL: tl.constexpr):
    """What `store_weights` wrote."""
    token, record = tl.arange(0, BT), tl.arange(0, BL)
    square = token[:, None] * BT + token[None, :]
    past = record[:, None] * BT + token[None, :]
    return (
        tl.load(weights + square),
        tl.load(weights + BT * BT + square),
        tl.load(weights + 2 * BT * BT + past),
        tl.load(weights + (2 * BT + BL) * BT + past),
        tl.load(weights + (2 * BT + 2 * BL) * BT + token),
    )


def window_sizes(constants: dict[str, int], tokens: int) -> dict[str, int]:
    """`constants` for a window: a ring that has room for it holds no more than L - T records."""
    past = power_of_two(constants["L"] - tokens)
    return constants | {"T": tokens, "BT": power_of_two(tokens), "BL": past}


def new_weights(constants: dict[str, int], batch: int, device: torch.device) -> Tensor:
    """Room for what `store_weights` writes for every value head, FP32, not initialised."""
    rows = 2 * constants["BT"] + 2 * constants["BL"] + 1
    shape = (batch, constants["HV"], rows, constants["BT"])
    return torch.empty(shape, dtype=torch.float32, device=device)


def _columns(storage: Storage, K: int) -> int:
    """Columns of a part of the state: 128 bytes, or all where K is no multiple or there are
    scales."""
    part = line_columns(storage.code_bits)
    scaled = isinstance(storage.format, BlockFormat) or storage.scale != "none"
    return tile_width(K, storage) if scaled or K % part else part


def apply(
    read: Quantized,
    ring: Ring,
    policy: PrecisionPolicy,
    cursors: Cursors,
    tokens: Tokens,
    weights: Tensor,
    decays: Tensor | None,
    constants: dict[str, int],
    launch: Launch,
) -> Tensor:
    """Outputs [B, T, HV, V] FP32 of a window whose `weights` are known; writes u and v to `ring`.

    decays: [B, HV, T + 1, K] FP32, or None. constants: of `window_sizes`.
    """
    out = torch.empty(tokens.v.shape, dtype=torch.float32, device=tokens.v.device)
    readers = torch.promote_types(ring.k.dtype, tokens.q.dtype)
    if decays is not None:
        readers = decays.dtype
    apply_kernel[(launch.tiles(constants), constants["HV"], tokens.v.shape[0])](
        out,
        tokens,
        ring,
        cursors,
        stored(read),
        weights,
        decays,
        **constants,
        READ=policy.read_storage,
        COLUMNS=_columns(policy.read_storage, constants["K"]),
        STATE_KEYS=halves_of(unscaled_dtype(policy.read_storage), readers),
        FULL=halves_of(torch.float32, torch.float32),
        **launch.options(),
        BV=launch.block_v,
    )
    return out
