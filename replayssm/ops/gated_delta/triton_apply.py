"""A window's outputs and updates, once it is known how its tokens weigh on each other.

Owns what windows of all delta rules take, and a kernel that reads the state, all that a window does
per state row, for rules whose channels decay each by itself (a window of Gated DeltaNet is one
kernel). What it needs once a head comes from a kernel of the recurrence, in `weights`. With S
the state, U the past records, and what is left of the state at each token in `from_state`,

    right  = v - (S k from_state + U past_k)
    u      = right solve
    answer = S q from_state + U past_q + right (solve own)

`solve` is diag(β) (I + A)^-1 of the triangular system of the window's tokens; its entries are
products of contractions, at most 1. k and q decay before they meet the state: `from_state` is 1,
and `decays` has the decay of each token since the start of the window and, last, that of the state
up to there.

Legend: triton_tiles.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.formats.quantized import Quantized
from replayssm.ops.gated_delta.reference import GatedDeltaInputs
from replayssm.ops.gated_delta.triton_launch import (
    MAX_TOKENS,
    Launch,
    Ring,
    Tokens,
    pieces,
    power_of_two,
    ring_argument,
    sizes,
    token_argument,
)
from replayssm.ops.gated_delta.triton_tiles import as_held, load_columns, load_rows
from replayssm.ops.quantize.layout import stored
from replayssm.ops.quantize.tiles import load_unscaled, row_factor
from replayssm.ops.triton_common import Cursors, exact_dot, halves_of
from replayssm.ops.triton_policy import unscaled_dtype
from replayssm.policy import PrecisionPolicy


@triton.jit
def apply_kernel(
    out,  # [B, T, HV, V] FP32
    tokens,  # Tokens; k and q are of one type
    ring,  # Ring
    cursors,  # Cursors
    read,  # Stored
    weights,  # of `empty_weights`
    decays,  # [B, HV, T + 1, K] FP32
    T: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    READ: tl.constexpr,
    STATE_KEYS: tl.constexpr,  # precision of state times k, q
    FULL: tl.constexpr,  # of products of FP32 operands
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    BV: tl.constexpr,
    BL: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid (tiles of V, HV, B).

    Products of k and of q are one product, with 2 BT columns: few columns cost a tensor core as
    much. Each product starts from zero and is added by other means, because tensor cores cut what
    they add to: to the sum of all that came before they would do so at every step.
    """
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

    # Asked for before the state, though it is needed after it.
    count = tl.load(cursors.pos + slot).to(tl.int32)
    first = (slot * HV + head) * L  # this head's oldest record
    v = tokens.v + row * tokens.v_row + head * V
    v = load_columns(v, token, tokens.v_token, new, value, in_v)  # [BV, BT]
    v = v if ring.v is None else as_held(v, tokens.v, ring.v)
    weights += (row * HV + head) * (2 * BT + 2 * BL + 1) * BT
    from_state = tl.load(weights + (2 * BT + 2 * BL) * BT + tl.arange(0, 2 * BT) % BT)
    if T < L:
        u_past = load_columns(ring.u + first * V, record, V, record < count, value, in_v)

    # Products over K in pieces: whole operands would not fit in registers. A row of K elements is
    # PIECES rows of K / PIECES.
    both = tl.arange(0, 2 * BT)  # k of all tokens, then q
    is_q, at_token = (both >= BT)[:, None], both % BT
    k_at = tokens.k + row * tokens.k_row + head // (HV // HK) * K + at_token * tokens.k_token
    q_at = tokens.q + row * tokens.q_row + head // (HV // HK) * K + at_token * tokens.q_token
    readers_at = tl.where(is_q, q_at[:, None], k_at[:, None])  # [2 BT, 1]
    zero = tl.zeros([BV, 2 * BT], tl.float32)
    total = zero  # of k, what is predicted; of q, the answer
    in_rows = None if V % BV == 0 else in_v
    state_row = head * V + value
    scale = row_factor(read, slot, state_row, in_rows, V, READ)[:, None] * from_state[None, :]
    for piece in range(PIECES):
        column = piece * PIECE + tl.arange(0, PIECE)
        mask = (at_token < T)[:, None] & (column < K)[None, :]
        x = tl.load(readers_at + column[None, :], mask=mask, other=0.0)  # [2 BT, PIECE]
        x = tl.where(is_q, x.to(tl.float32), as_held(x, tokens.k, ring.k))
        at = decays + (row * HV + head) * (T + 1) * K
        before = tl.load(at + T * K + column, mask=column < K, other=0.0)
        x *= load_rows(at, at_token, K, at_token < T, column, column < K) * before[None, :]
        s = load_unscaled(  # [BV, PIECE]
            read, slot, state_row * PIECES + piece, in_rows, K // PIECES, PIECE, READ
        )
        # A plain sum with a product would be compiled into that product.
        total = tl.fma(exact_dot(s, tl.trans(x), zero, STATE_KEYS), scale, total)

    if T < L:
        total += exact_dot(u_past, _load_pair(weights + 2 * BT * BT, BL, BT), zero, FULL)
    predicted, answer = _halves_of(total, BV, BT)
    right = v - predicted
    solved = exact_dot(right, _load_pair(weights, BT, BT), zero, FULL)
    u, own = _halves_of(solved, BV, BT)
    # A ring without room is a caller's mistake; no number may come of it.
    tl.store(out, tl.where(count + T <= L, answer + own, float("nan")), mask=written)
    here = count + token
    target = (first + here)[None, :] * V + value[:, None]
    written = in_v[:, None] & (new & (here < L))[None, :]
    tl.store(ring.u + target, u, mask=written)
    if ring.v is not None:
        tl.store(ring.v + target, v.to(ring.v.dtype.element_ty), mask=written)


@triton.jit
def _halves_of(x, BV: tl.constexpr, BT: tl.constexpr):
    """The first and the last BT columns of x [BV, 2 BT]."""
    return tl.split(tl.permute(tl.reshape(x, [BV, 2, BT]), 0, 2, 1))


@triton.jit
def _load_pair(at, ROWS: tl.constexpr, BT: tl.constexpr):
    """Two matrices [ROWS, BT] that lie at `at` one after the other, side by side."""
    row, column = tl.arange(0, ROWS), tl.arange(0, 2 * BT)
    return tl.load(at + (column // BT * ROWS * BT + column % BT)[None, :] + row[:, None] * BT)


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


class Window(NamedTuple):
    """What the launches of a window share."""

    ring: Ring
    tokens: Tokens
    constants: dict[str, int]  # of kernels


def open_window(
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    inputs: GatedDeltaInputs,
) -> Window:
    """Arguments for a window of `inputs`, of any delta rule.

    Raises ValueError where there is no kernel for it.
    """
    ring, tokens = ring_argument(ring), token_argument(inputs)
    constants = sizes(ring, policy)
    count = inputs.k.shape[1]
    if count > min(constants["L"], MAX_TOKENS):
        raise ValueError(
            f"a window of {count} tokens: at most {MAX_TOKENS}, and the ring's {constants['L']}"
        )
    # A ring that has room for the window holds no more than L - T records.
    BT, BL = power_of_two(count), power_of_two(constants["L"] - count)
    constants |= {"T": count, "BT": BT, "BL": BL}
    return Window(ring, tokens, constants)


def empty_weights(window: Window) -> Tensor:
    """Room for what `store_weights` writes: FP32 [B, HV, ..., BT], not initialised."""
    BT, BL = window.constants["BT"], window.constants["BL"]
    shape = (window.tokens.v.shape[0], window.constants["HV"], 2 * BT + 2 * BL + 1, BT)
    return torch.empty(shape, dtype=torch.float32, device=window.tokens.v.device)


def _of_one_type(tokens: Tokens) -> Tokens:
    """`tokens` with k and q of the same dtype, copied where they were not."""
    if tokens.k.dtype == tokens.q.dtype:
        return tokens
    wide = torch.promote_types(tokens.k.dtype, tokens.q.dtype)
    k, q = tokens.k.to(wide), tokens.q.to(wide)
    strides = {"k_row": k.stride(0), "k_token": k.stride(1)}
    strides |= {"q_row": q.stride(0), "q_token": q.stride(1)}
    return tokens._replace(k=k, q=q, **strides)


def apply(
    read: Quantized,
    window: Window,
    policy: PrecisionPolicy,
    cursors: Cursors,
    weights: Tensor,
    decays: Tensor,
    launch: Launch,
) -> Tensor:
    """Outputs [B, T, HV, V] FP32 of a window; writes u and v to the ring.

    weights: of `empty_weights`, filled. decays: [B, HV, T + 1, K] FP32.
    """
    tokens, constants = _of_one_type(window.tokens), window.constants
    out = torch.empty(tokens.v.shape, dtype=torch.float32, device=tokens.v.device)
    apply_kernel[(launch.tiles(constants), constants["HV"], tokens.v.shape[0])](
        out,
        tokens,
        window.ring,
        cursors,
        stored(read),
        weights,
        decays,
        **constants,
        **pieces(policy.read_storage, constants),
        READ=policy.read_storage,
        STATE_KEYS=halves_of(unscaled_dtype(policy.read_storage), decays.dtype),
        FULL=halves_of(torch.float32, torch.float32),
        **launch.options(),
        BV=launch.block_v,
    )
    return out
