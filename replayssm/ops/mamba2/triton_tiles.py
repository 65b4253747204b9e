"""Device functions that the Mamba-2 kernels share: rows, records, decays, the fold, the write.

Owns how a program's tile maps to heads and how a ring plus new tokens become tiles. Knows no launch
and no cache; formats come from `ops/quantize`.

Legend, for every kernel of this folder: S slots, B rows, T tokens, H heads, P head_dim, G groups,
N d_state, r = H/G heads a group, L ring slots. A program's tile has R = HEADS * BP state rows:
HEADS runs, of one group and next to each other, of BP rows of a head each (BP >= P: the head; else
a divisor of P). HEADS, BP, BL >= L and WIDTH >= N are powers of two. State tiles are [R, WIDTH],
ring tiles [BL, R], [BL, WIDTH] and [BL, HEADS]. What is [R] or [R, ...] is a tuple over the pieces
of a run: a head of 80 rows is no tile, but one of 64 and one of 16.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from replayssm.formats.number import FP32, NumberFormat
from replayssm.formats.storage import Storage
from replayssm.ops.quantize.layout import block_size, scales_of
from replayssm.ops.quantize.packing import decode_elements, encode_elements
from replayssm.ops.quantize.rounding import fact, round_to_format
from replayssm.ops.quantize.scaling import magnitude_bits
from replayssm.ops.quantize.store import store_tile
from replayssm.ops.quantize.tiles import load_codes, values_of
from replayssm.ops.triton_common import exact_dot
from replayssm.policy import READ_COPY_STREAM

_READ_COPY_KEY = tl.constexpr(READ_COPY_STREAM << 24)
FP32_RECORDS = tl.constexpr(Storage(format=FP32))


@triton.constexpr_function
def same_format(dtype, fmt: NumberFormat) -> bool:
    """Whether a Triton dtype is the format."""
    return dtype.name == fmt.name


@triton.constexpr_function
def runs_of(P: int, BP: int) -> int:
    """Runs of a head."""
    return (P + BP - 1) // BP


@triton.constexpr_function
def pieces_of(P: int, BP: int) -> tuple[int, ...]:
    """Rows of the pieces of a run, powers of two: of a head, they add up to P or the next multiple
    of 16."""
    rows = BP if BP < P else (P + 15) // 16 * 16
    return tuple(1 << i for i in reversed(range(rows.bit_length())) if rows >> i & 1)


@triton.constexpr_function
def piece_count(P: int, BP: int) -> int:
    """How many pieces a run has."""
    return len(pieces_of(P, BP))


@triton.constexpr_function
def piece_rows(P: int, BP: int, piece: int) -> int:
    """Rows of a piece."""
    return pieces_of(P, BP)[piece]


@triton.constexpr_function
def piece_start(P: int, BP: int, piece: int) -> int:
    """Rows of a run before a piece."""
    return sum(pieces_of(P, BP)[:piece])


@triton.constexpr_function
def is_exact(H: int, P: int, G: int, HEADS: int, BP: int) -> bool:
    """Whether all rows of all tiles exist."""
    return P % min(BP, 16 if BP > P else BP) == 0 and H // G * runs_of(P, BP) % HEADS == 0


class Ring(NamedTuple):
    """Records of S slots, and elements from slot to slot."""

    x: Tensor  # [S, H, L, P]
    B: Tensor  # [S, G, L, N]
    dt: Tensor  # [S, H, L] float32
    x_slot: int
    B_slot: int
    dt_slot: int


class Tokens(NamedTuple):
    """Inputs of B rows, and elements from row to row and from token to token."""

    x: Tensor  # [B, T, H, P]
    B: Tensor  # [B, T, G, N]
    C: Tensor  # [B, T, G, N]
    dt: Tensor  # [B, T, H] float32
    D: Tensor | None  # [H] or [H, P]
    x_row: int
    B_row: int
    C_row: int
    dt_row: int
    x_token: int
    B_token: int
    C_token: int
    dt_token: int


@triton.jit
def tile_rows(
    part, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, BP: tl.constexpr,
    PIECE: tl.constexpr = None,
):  # fmt: skip
    """Which rows are in tile number `part`, or in one piece of its runs.

    Returns the group, the first run's place in its head, the head of each run [HEADS], head and row
    inside the head of each of the R rows, and which runs and rows exist.
    """
    RUNS: tl.constexpr = runs_of(P, BP)
    PER_GROUP: tl.constexpr = (H // G * RUNS + HEADS - 1) // HEADS
    group = part // PER_GROUP
    first = part % PER_GROUP * HEADS  # inside the group
    ROWS: tl.constexpr = BP if PIECE is None else piece_rows(P, BP, PIECE)
    START: tl.constexpr = 0 if PIECE is None else piece_start(P, BP, PIECE)
    r = tl.arange(0, HEADS * ROWS)
    run, run_of = first + tl.arange(0, HEADS), first + r // ROWS
    base = group * (H // G)
    p = run_of % RUNS * BP + START + r % ROWS
    in_runs = run < H // G * RUNS
    in_rows = (run_of < H // G * RUNS) & (p < P)
    if RUNS == 1:  # sums of scalars first: vectors are computed again for every store, or spill
        head, head_of = base + first + tl.arange(0, HEADS), base + first + r // ROWS
    else:
        head, head_of = base + run // RUNS, base + run_of // RUNS
    return group, first % RUNS * BP, head, head_of, p, in_runs, in_rows


@triton.jit
def by_head(v, HEADS: tl.constexpr):
    """The last axis of v [..., R] as [..., HEADS, BP]."""
    if len(v.shape) == 1:
        return tl.reshape(v, [HEADS, v.shape[0] // HEADS])
    else:
        return tl.reshape(v, [v.shape[0], HEADS, v.shape[1] // HEADS])


@triton.jit
def of_runs(v, R: tl.constexpr):
    """[R] from a value for each run."""
    RUNS: tl.constexpr = v.shape[0]
    return tl.reshape(tl.broadcast_to(v[:, None], [RUNS, R // RUNS]), [R])


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
def load_x_records(
    ring, slot, part, count,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, L: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Codes [BL, R] of the x of the ring's first `count` slots."""
    codes = ()
    for i in tl.static_range(piece_count(P, BP)):
        _, _, _, head_of, p, _, in_tile = tile_rows(part, H, P, G, HEADS, BP, i)
        ring_x = ring.x + slot * ring.x_slot + head_of * L * P + p
        codes = codes + (load_records(ring_x, P, in_tile, count, BL),)
    return codes


@triton.jit
def load_checkpoint(
    stored, slot, part,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, STORAGE: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`load_codes` of tile `part`, to be folded: where it is written is where it was read."""
    loaded = ()
    for i in tl.static_range(piece_count(P, BP)):
        _, _, _, head_of, p, _, in_tile = tile_rows(part, H, P, G, HEADS, BP, i)
        in_rows = None if is_exact(H, P, G, HEADS, BP) else in_tile
        loaded = loaded + (
            load_codes(stored, slot, head_of * P + p, in_rows, P, N, WIDTH, STORAGE),
        )
    return loaded


@triton.jit
def values_of_pieces(loaded, N: tl.constexpr, WIDTH: tl.constexpr, STORAGE: tl.constexpr):
    """`values_of` what `load_checkpoint` loaded."""
    values = ()
    for i in tl.static_range(len(loaded)):
        values = values + (values_of(loaded[i], N, WIDTH, STORAGE),)
    return values


@triton.jit
def fold(states, xs, B, dt, log_decay, now, PRECISION: tl.constexpr):
    """States [R, WIDTH] carried to log decay `now` [HEADS] with records [BL, R], B [BL, WIDTH]."""
    HEADS: tl.constexpr = now.shape[0]
    weights = dt * decay(now[None, :], log_decay)  # [BL, HEADS]
    kept = decay(now, 0.0)
    folded = ()
    for i in tl.static_range(len(states)):
        weighted = tl.reshape(by_head(xs[i], HEADS) * weights[:, :, None], xs[i].shape)
        # Added afterwards, the state never takes the layout of the product: one exchange less.
        added = exact_dot(tl.trans(weighted), B, tl.zeros_like(states[i]), PRECISION)
        folded = folded + (states[i] * of_runs(kept, xs[i].shape[1])[:, None] + added,)
    return folded


@triton.jit
def write_state(
    states, checkpoint, read_copy, cursors, layer, ticket, part,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    CHECKPOINT: tl.constexpr, READ_COPY: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Round the FP32 state once into the checkpoint and once into the read copy (READ_COPY None:
    there is none), both from the same values; count what saturated and what was not finite."""
    slot, seed = ticket.slot, ticket.seed
    key = (seed, layer, ticket.flushes, ticket.sequence)
    over, not_finite = _store_pieces(
        states, key, checkpoint, slot, part, H, P, G, N, CHECKPOINT, HEADS, BP, WIDTH
    )
    if READ_COPY is not None:
        key = (seed, layer + _READ_COPY_KEY, ticket.flushes, ticket.sequence)
        over_copy, _ = _store_pieces(
            states, key, read_copy, slot, part, H, P, G, N, READ_COPY, HEADS, BP, WIDTH
        )
        over += over_copy
    if over > 0:
        tl.atomic_add(cursors.saturated + slot, over.to(tl.int64), sem="relaxed")
    if not_finite > 0:
        tl.atomic_add(cursors.not_finite + slot, not_finite.to(tl.int64), sem="relaxed")


@triton.jit
def _store_pieces(
    states, key, stored, slot, part,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, STORAGE: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`store_tile` of all pieces; sums of what it returns."""
    amax = None
    if len(states) > 1 and scales_of(STORAGE) == "nvfp4":  # a scale of the head, not of a piece
        tl.static_assert(HEADS == 1, "a head in pieces has a tile for itself")
        amax = _largest(states[0], STORAGE)
        for i in tl.static_range(1, len(states)):
            amax = tl.maximum(amax, _largest(states[i], STORAGE))
    over, not_finite = 0, 0
    for i in tl.static_range(len(states)):
        _, _, _, head_of, p, _, in_tile = tile_rows(part, H, P, G, HEADS, BP, i)
        in_rows = None if is_exact(H, P, G, HEADS, BP) else in_tile
        more_over, more_not_finite = store_tile(
            states[i], key, stored, slot, head_of * P + p, in_rows,
            P, piece_rows(P, BP, i), N, WIDTH, STORAGE, amax,
        )  # fmt: skip
        over += more_over
        not_finite += more_not_finite
    return over, not_finite


@triton.jit
def _largest(x, STORAGE: tl.constexpr):
    """Pattern of the largest magnitude; blocks first, as they are needed for their scales, too."""
    SIZE: tl.constexpr = block_size(STORAGE)
    blocks = tl.reshape(magnitude_bits(x), [x.shape[0], x.shape[1] // SIZE, SIZE])
    return tl.max(tl.max(blocks, 2))
