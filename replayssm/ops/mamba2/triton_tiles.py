"""Device functions that the Mamba-2 kernels share: rows, records, decays, the fold, the write.

Owns how a program's tile maps to heads and how a ring plus new tokens become tiles. Knows no launch
and no cache; formats come from `ops/quantize`.

Legend, for every kernel of this folder: S slots, B rows, T tokens, H heads, P head_dim, G groups,
N d_state, r = H/G heads a group, L ring slots. A program's tile has R = HEADS * BP state rows:
HEADS heads of one group times BP rows of each (BP >= P, or a divisor of P); HEADS, BP, BL >= L and
WIDTH >= N are powers of two. State tiles are [R, WIDTH], ring tiles [BL, R], [BL, WIDTH] and
[BL, HEADS].
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from replayssm.formats.number import FP32
from replayssm.formats.storage import Storage
from replayssm.ops.quantize.packing import decode_elements, encode_elements
from replayssm.ops.quantize.rounding import fact, round_to_format
from replayssm.ops.quantize.tiles import store_tile
from replayssm.ops.triton_common import exact_dot
from replayssm.policy import READ_COPY_STREAM

_READ_COPY_KEY = tl.constexpr(READ_COPY_STREAM << 24)
FP32_RECORDS = tl.constexpr(Storage(format=FP32))


class Ring(NamedTuple):
    """Records of S slots, and elements from slot to slot."""

    x: Tensor  # [S, H, L, P]
    x_slot: int
    B: Tensor  # [S, G, L, N]
    B_slot: int
    dt: Tensor  # [S, H, L] float32
    dt_slot: int


class Tokens(NamedTuple):
    """Inputs of B rows, and elements from row to row and from token to token."""

    x: Tensor  # [B, T, H, P]
    x_row: int
    x_token: int
    B: Tensor  # [B, T, G, N]
    B_row: int
    B_token: int
    C: Tensor  # [B, T, G, N]
    C_row: int
    C_token: int
    dt: Tensor  # [B, T, H] float32
    dt_row: int
    dt_token: int
    D: Tensor | None  # [H] or [H, P]


@triton.jit
def tile_heads(
    part, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, BP: tl.constexpr
):
    """Group, first of the P rows, and heads [HEADS] of tile number `part`; H marks no head."""
    P_TILES: tl.constexpr = (P + BP - 1) // BP
    PER_GROUP: tl.constexpr = (H // G + HEADS - 1) // HEADS
    group = part // (PER_GROUP * P_TILES)
    local = part // P_TILES % PER_GROUP * HEADS + tl.arange(0, HEADS)
    head = tl.where(local < H // G, group * (H // G) + local, H)
    return group, part % P_TILES * BP, head


@triton.jit
def over_rows(v, BP: tl.constexpr):
    """[A, HEADS] repeated for the rows of each head: [A, R]."""
    A: tl.constexpr = v.shape[0]
    HEADS: tl.constexpr = v.shape[1]
    return tl.reshape(tl.broadcast_to(v[:, :, None], [A, HEADS, BP]), [A, HEADS * BP])


@triton.jit
def tile_rows(first_p, head, P: tl.constexpr, BP: tl.constexpr):
    """Head, row p and number in the slot of each of the R state rows."""
    HEADS: tl.constexpr = head.shape[0]
    R: tl.constexpr = HEADS * BP
    head_of = tl.reshape(over_rows(head[None, :], BP), [R])
    p = first_p + tl.arange(0, R) % BP
    return head_of, p, head_of * P + p


@triton.jit
def load_records(
    ring,
    ring_column,
    RING_PITCH: tl.constexpr,
    tokens,
    token_column,
    token_pitch,
    in_columns,
    pos,
    append,
    T: tl.constexpr,
    L: tl.constexpr,
    BL: tl.constexpr,
    STORAGE: tl.constexpr,
):
    """FP32 [BL, columns]: slots below `pos` from the ring, the next T from the tokens, else zero.

    Zeros are selected, so a NaN left in an unused slot cannot reach any product. Tokens are rounded
    to the ring's STORAGE first, so a token's value does not depend on when it was appended; where
    `append`, the ring gets them.
    """
    FORMAT: tl.constexpr = fact(STORAGE, "format")
    slot = tl.arange(0, BL)[:, None]
    at = ring + slot * RING_PITCH + ring_column[None, :]
    codes = tl.load(at, mask=(slot < pos) & in_columns[None, :], other=0)
    values = decode_elements(codes, FORMAT, False)
    if T > 0:
        new = (slot >= pos) & (slot < tl.minimum(pos + T, L)) & in_columns[None, :]
        source = tokens + (slot - pos) * token_pitch + token_column[None, :]
        fresh = tl.load(source, mask=new, other=0).to(tl.float32)
        fresh = round_to_format(
            fresh, None, FORMAT, fact(STORAGE, "rounding"), fact(STORAGE, "saturate")
        )[0]
        values = tl.where(new, fresh, values)
        if append:
            tl.store(at, encode_elements(fresh, FORMAT), mask=new)
    return values


@triton.jit
def decay(later, earlier):
    """exp(later - earlier) of cumulative log decays, in (0, 1]; see `ring.decay_between`."""
    return tl.exp(tl.minimum(later - earlier, 0.0))


@triton.jit
def last(log_decay):
    """The last of cumulative log decays [BL, HEADS], [1, HEADS].

    They never grow, and unused slots repeat them: the least is the last, without a second summation
    in another order.
    """
    return tl.min(log_decay, 0)[None, :]


@triton.jit
def fold(state, x, B, dt, log_decay, BP: tl.constexpr, PRECISION: tl.constexpr):
    """The state [R, WIDTH] after the records x [BL, R], B [BL, WIDTH], dt [BL, HEADS]."""
    R: tl.constexpr = state.shape[0]
    total = last(log_decay)
    weighted = x * over_rows(dt * decay(total, log_decay), BP)
    state *= tl.reshape(over_rows(decay(total, 0.0), BP), [R])[:, None]
    return exact_dot(tl.trans(weighted), B, state, PRECISION)


@triton.jit
def write_state(
    state,
    checkpoint,
    read_copy,
    cursors,
    layer,
    slot,
    row,
    in_rows,
    P: tl.constexpr,
    BP: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    READ_COPY: tl.constexpr,
):
    """Round the FP32 state once into the checkpoint and once into the read copy (READ_COPY None:
    there is none), both from the same values; count what saturated and what was not finite."""
    seed, sequence = tl.load(cursors.seed + slot), tl.load(cursors.sequence + slot)
    flush = tl.load(cursors.flushes + slot)
    key = (seed, layer, flush, sequence)
    over, not_finite = store_tile(
        state, key, checkpoint, slot, row, in_rows, P, BP, N, WIDTH, CHECKPOINT
    )
    if READ_COPY is not None:
        key = (seed, layer + _READ_COPY_KEY, flush, sequence)
        over_copy, _ = store_tile(
            state, key, read_copy, slot, row, in_rows, P, BP, N, WIDTH, READ_COPY
        )
        over += over_copy
    if over > 0:
        tl.atomic_add(cursors.saturated + slot, over.to(tl.int64))
    if not_finite > 0:
        tl.atomic_add(cursors.not_finite + slot, not_finite.to(tl.int64))
