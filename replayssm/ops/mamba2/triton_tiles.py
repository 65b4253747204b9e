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

from replayssm.formats.number import FP32, NumberFormat
from replayssm.formats.storage import Storage
from replayssm.ops.quantize.packing import decode_elements, encode_elements
from replayssm.ops.quantize.rounding import fact, round_to_format
from replayssm.ops.quantize.store import store_tile
from replayssm.ops.triton_common import exact_dot
from replayssm.policy import READ_COPY_STREAM

_READ_COPY_KEY = tl.constexpr(READ_COPY_STREAM << 24)
FP32_RECORDS = tl.constexpr(Storage(format=FP32))


@triton.constexpr_function
def same_format(dtype, fmt: NumberFormat) -> bool:
    """Whether a Triton dtype is the format."""
    return dtype.name == fmt.name


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
def tile_rows(
    part, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, BP: tl.constexpr
):
    """Which rows are in tile number `part`.

    Returns the group, the first of the tile's rows in each head, its heads [HEADS], head and row
    inside the head of each of the R rows, and which heads and rows exist.
    """
    P_TILES: tl.constexpr = (P + BP - 1) // BP
    PER_GROUP: tl.constexpr = (H // G + HEADS - 1) // HEADS
    group = part // (PER_GROUP * P_TILES)
    first_p = part % P_TILES * BP
    first_head = part // P_TILES % PER_GROUP * HEADS  # inside the group
    i = tl.arange(0, HEADS)
    r = tl.arange(0, HEADS * BP)
    base = group * (H // G) + first_head
    in_heads = first_head + i < H // G
    in_rows = (first_head + r // BP < H // G) & (first_p + r % BP < P)
    return group, first_p, base + i, base + r // BP, first_p + r % BP, in_heads, in_rows


@triton.jit
def by_head(v, HEADS: tl.constexpr):
    """The last axis of v [..., R] as [..., HEADS, BP]."""
    if len(v.shape) == 1:
        return tl.reshape(v, [HEADS, v.shape[0] // HEADS])
    else:
        return tl.reshape(v, [v.shape[0], HEADS, v.shape[1] // HEADS])


@triton.jit
def as_recorded(x, STORAGE: tl.constexpr):
    """Values of x, of an input's dtype, as the ring's STORAGE holds them, FP32."""
    FORMAT: tl.constexpr = fact(STORAGE, "format")
    if same_format(x.dtype, FORMAT):
        return x.to(tl.float32)
    else:
        ROUNDING: tl.constexpr = fact(STORAGE, "rounding")
        SATURATE: tl.constexpr = fact(STORAGE, "saturate")
        return round_to_format(x.to(tl.float32), None, FORMAT, ROUNDING, SATURATE)[0]


@triton.jit
def load_records(ring, PITCH: tl.constexpr, in_columns, count, BL: tl.constexpr):
    """Codes [BL, columns] of the ring's first `count` slots, as they lie; else zero.

    `ring` points at each column of slot 0, slots are PITCH apart.
    """
    slot = tl.arange(0, BL)[:, None]
    mask = (slot < count) & in_columns[None, :]
    return tl.load(ring[None, :] + slot * PITCH, mask=mask, other=0)


@triton.jit
def past_of(codes, pos, STORAGE: tl.constexpr, PRECISION: tl.constexpr = None):
    """FP32 values of codes from `load_records`, zero from slot `pos` on (None: all count); for the
    second operand of an `exact_dot` with BF16 terms, BF16 values.

    Zeros are selected, so a NaN left in an unused slot cannot reach any product.
    """
    if pos is not None:
        slot = tl.arange(0, codes.shape[0])[:, None]
        codes = tl.where(slot < pos, codes, 0)
    if PRECISION == "bf16_terms":  # the way through FP32 would only be undone
        return codes.to(tl.bfloat16, bitcast=True)
    else:
        return decode_elements(codes, fact(STORAGE, "format"), False)


@triton.jit
def load_past(ring, PITCH: tl.constexpr, in_columns, pos, BL: tl.constexpr, STORAGE: tl.constexpr):
    """FP32 [BL, columns] of the records below slot `pos`, else zero; see `load_records`."""
    return past_of(load_records(ring, PITCH, in_columns, pos, BL), None, STORAGE)


@triton.jit
def with_last(past, new, L: tl.constexpr):
    """Records [BL, columns] with `new` [columns] as number L - 1."""
    slot = tl.arange(0, past.shape[0])[:, None]
    return tl.where(slot == L - 1, new.to(past.dtype)[None, :], past)


@triton.jit
def load_and_append(
    ring, PITCH: tl.constexpr, tokens, token_pitch, in_columns, pos, append,
    T: tl.constexpr, L: tl.constexpr, BL: tl.constexpr, STORAGE: tl.constexpr,
):  # fmt: skip
    """`load_past`, and at the next T slots the tokens, which enter the ring where `append`.

    `tokens` points at each column of token 0. Tokens are rounded to the ring's STORAGE before use:
    a token's value does not depend on when it was appended.
    """
    past = load_past(ring, PITCH, in_columns, pos, BL, STORAGE)
    slot = tl.arange(0, BL)[:, None]
    new = (slot >= pos) & (slot < tl.minimum(pos + T, L)) & in_columns[None, :]
    fresh = tl.load(tokens[None, :] + (slot - pos) * token_pitch, mask=new, other=0)
    fresh = as_recorded(fresh, STORAGE)
    if append:
        codes = encode_elements(fresh, fact(STORAGE, "format"))
        tl.store(ring[None, :] + slot * PITCH, codes, mask=new)
    return tl.where(new, fresh, past)


@triton.jit
def decay(later, earlier):
    """exp(later - earlier) of cumulative log decays, in (0, 1]; see `ring.decay_between`."""
    return tl.exp(tl.minimum(later - earlier, 0.0))


@triton.jit
def last(log_decay):
    """The last of cumulative log decays [BL, HEADS]: [HEADS].

    They never grow, and unused slots repeat them: the least is the last, without a second summation
    in another order.
    """
    return tl.min(log_decay, 0)


@triton.jit
def fold(state, x, B, dt, log_decay, now, PRECISION: tl.constexpr):
    """State [R, WIDTH] carried to log decay `now` [HEADS] with records x [BL, R], B [BL, WIDTH]."""
    R: tl.constexpr = state.shape[0]
    BL: tl.constexpr = x.shape[0]
    HEADS: tl.constexpr = now.shape[0]
    weights = dt * decay(now[None, :], log_decay)  # [BL, HEADS]
    weighted = tl.reshape(by_head(x, HEADS) * weights[:, :, None], [BL, R])
    kept = tl.reshape(tl.broadcast_to(decay(now, 0.0)[:, None], [HEADS, R // HEADS]), [R])
    # Added afterwards, the state never takes the layout of the product: one exchange less.
    added = exact_dot(tl.trans(weighted), B, tl.zeros_like(state), PRECISION)
    return state * kept[:, None] + added


@triton.jit
def write_state(
    state,
    checkpoint,
    read_copy,
    cursors,
    layer,
    ticket,
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
    slot, seed = ticket.slot, ticket.seed
    key = (seed, layer, ticket.flushes, ticket.sequence)
    over, not_finite = store_tile(
        state, key, checkpoint, slot, row, in_rows, P, BP, N, WIDTH, CHECKPOINT
    )
    if READ_COPY is not None:
        key = (seed, layer + _READ_COPY_KEY, ticket.flushes, ticket.sequence)
        over_copy, _ = store_tile(
            state, key, read_copy, slot, row, in_rows, P, BP, N, WIDTH, READ_COPY
        )
        over += over_copy
    if over > 0:
        tl.atomic_add(cursors.saturated + slot, over.to(tl.int64), sem="relaxed")
    if not_finite > 0:
        tl.atomic_add(cursors.not_finite + slot, not_finite.to(tl.int64), sem="relaxed")
