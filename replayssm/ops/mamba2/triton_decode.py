"""One token per row: read the state once, append one record, and fold rings that it fills.

Owns two kernels and their launchers. `decode` writes no state. `step` also commits the token and
flushes the rows whose ring it fills; rows decide by their own cursors, which `list_due` moves after
the outputs. With one copy, rows that flush are left to a last kernel, which reads the state once
for both jobs: the registers that folding takes would slow every other row down. With two, all rows
decode and a flush follows.

Outputs of a flushing step read what every other token of the ring reads, the copy before the flush.
Legend: triton_tiles.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.formats.quantized import Quantized
from replayssm.ops.mamba2 import triton_launch
from replayssm.ops.mamba2.reference import Mamba2Inputs
from replayssm.ops.mamba2.triton_flush import commit_and_flush
from replayssm.ops.mamba2.triton_launch import Launch
from replayssm.ops.mamba2.triton_tiles import (
    FP32_RECORDS,
    as_recorded,
    by_head,
    decay,
    fold,
    last,
    load_past,
    tile_rows,
    write_state,
)
from replayssm.ops.quantize.layout import stored
from replayssm.ops.quantize.packing import encode_elements
from replayssm.ops.quantize.rounding import fact
from replayssm.ops.quantize.tiles import (
    load_codes,
    load_factor,
    load_vector_for,
    times_vector,
    values_of,
)
from replayssm.ops.triton_common import Cursors, list_due, load_ticket, prefix_sums
from replayssm.policy import PrecisionPolicy


@triton.jit(do_not_specialize=["layer"])
def decode_kernel(
    out,                                # [B, H, P] float32
    tokens, A, ring, cursors,           # Tokens, [H], Ring, Cursors
    read,                               # Stored
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    READ: tl.constexpr, RING: tl.constexpr, D_PER_CHANNEL: tl.constexpr,
    EXCEPT: tl.constexpr,               # rows with so many committed records are left alone
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of a row, B)."""
    row, part, parts = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    token = load_token(
        tokens, A, row, part, H, P, G, N, READ, HEADS, BP, WIDTH
    )  # fmt: skip
    slot = tl.load(cursors.slots + row).to(tl.int64)
    if slot < 0:
        _, _, _, head_of, p, _, in_tile = tile_rows(part, H, P, G, HEADS, BP)
        tl.store(out + row * (H * P) + head_of * P + p, 0.0, mask=in_tile)
        return
    pos = tl.load(cursors.pos + slot).to(tl.int32)
    if EXCEPT is not None:
        if pos == EXCEPT:
            return
    one_token(
        out, tokens, token, ring, cursors, read, 0, row, slot, pos, None, part, parts,
        H, P, G, N, L, READ, RING, D_PER_CHANNEL, None, HEADS, BP, BL, WIDTH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def decode_and_flush_kernel(
    out, tokens, A, ring, cursors,      # as above
    state, layer,                       # Stored, read and written
    due,                                # from `list_due`: rows whose ring the token fills
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    TILES: tl.constexpr, READ: tl.constexpr, RING: tl.constexpr, D_PER_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
    LOOPS: tl.constexpr,                # whether there may be more tiles than programs
):  # fmt: skip
    """Grid of any size: programs share the TILES of the rows that are due, whose cursors `due` has
    moved."""
    work = tl.program_id(0)
    end = tl.load(due).to(tl.int32) * TILES
    if LOOPS:
        while work < end:
            flush_token(
                out, tokens, A, ring, cursors, state, layer, load_ticket(due, work // TILES),
                work % TILES, H, P, G, N, L, TILES, READ, RING, D_PER_CHANNEL, PRECISION,
                HEADS, BP, BL, WIDTH,
            )  # fmt: skip
            work += tl.num_programs(0)
    else:
        ticket = load_ticket(due, work // TILES)  # in memory, filled or not
        if work < end:
            flush_token(
                out, tokens, A, ring, cursors, state, layer, ticket, work % TILES,
                H, P, G, N, L, TILES, READ, RING, D_PER_CHANNEL, PRECISION, HEADS, BP, BL, WIDTH,
            )  # fmt: skip


@triton.jit
def flush_token(
    out, tokens, A, ring, cursors, state, layer, ticket, part,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    TILES: tl.constexpr, READ: tl.constexpr, RING: tl.constexpr, D_PER_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Tile `part` of a row whose ring its token fills."""
    row = ticket.row
    token = load_token(tokens, A, row, part, H, P, G, N, None, HEADS, BP, WIDTH)
    one_token(
        out, tokens, token, ring, cursors, state, layer, row, ticket.slot, L - 1, ticket, part,
        TILES, H, P, G, N, L, READ, RING, D_PER_CHANNEL, PRECISION, HEADS, BP, BL, WIDTH,
    )  # fmt: skip


@triton.jit
def load_token(
    tokens, A, row, part,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    READ: tl.constexpr,                 # storage that `times_vector` reads, or None
    HEADS: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What tile `part` needs of a row's token, which needs no cursor: loaded while one is awaited.

    Returns C [WIDTH], C for `times_vector`, B [WIDTH], x [R], dt [HEADS] and A [HEADS].
    """
    group, _, head, head_of, p, in_heads, in_tile = tile_rows(part, H, P, G, HEADS, BP)
    n = tl.arange(0, WIDTH)
    C_at = tokens.C + row * tokens.C_row + group * N
    B_at = tokens.B + row * tokens.B_row + group * N
    x_at = tokens.x + row * tokens.x_row + head_of * P + p
    C = tl.load(C_at + n, mask=n < N, other=0).to(tl.float32)
    C_read = C if READ is None else load_vector_for(C_at, N, WIDTH, READ)
    B = tl.load(B_at + n, mask=n < N, other=0)
    x = tl.load(x_at, mask=in_tile, other=0)
    dt = tl.load(tokens.dt + row * tokens.dt_row + head, mask=in_heads, other=0.0)
    return C, C_read, B, x, dt, tl.load(A + head, mask=in_heads, other=0.0)


@triton.jit
def one_token(
    out, tokens, token, ring, cursors, read, layer, row, slot, pos,
    ticket,                             # of a row whose ring is folded, with the token, into `read`
    part, parts,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    READ: tl.constexpr, RING: tl.constexpr, D_PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Outputs of tile `part` of a row; its share of the record enters the ring, unless it is folded
    with the others."""
    C, C_read, B_new, x_given, dt_new, rate = token
    group, first_p, head, head_of, p, in_heads, in_tile = tile_rows(part, H, P, G, HEADS, BP)
    EXACT: tl.constexpr = P % BP == 0 and (H // G) % HEADS == 0
    FLUSH: tl.constexpr = ticket is not None
    in_rows = None if EXACT else in_tile
    state_row = head_of * P + p
    n = tl.arange(0, WIDTH)

    # All loads come before the first reduction, which brings a barrier.
    if FLUSH:
        loaded = load_codes(read, slot, state_row, in_rows, P, N, WIDTH, READ)
    else:
        loaded = load_factor(read, slot, state_row, in_rows, P, N, WIDTH, READ)
    ring_B = ring.B + slot * ring.B_slot + group * L * N
    ring_dt = ring.dt + slot * ring.dt_slot + head * L
    ring_x = ring.x + slot * ring.x_slot + head_of * L * P + p
    B = load_past(ring_B + n, N, n < N, pos, BL, RING)  # [BL, WIDTH]
    dt = load_past(ring_dt, 1, in_heads, pos, BL, FP32_RECORDS)  # [BL, HEADS]
    x = load_past(ring_x, P, in_tile, pos, BL, RING)  # [BL, R]
    if FLUSH:
        state = values_of(loaded, N, WIDTH, READ)
        y = tl.sum(state * C[None, :], 1)
    else:
        y = times_vector(loaded, C_read, N, WIDTH, READ)

    B_new, x_new = as_recorded(B_new, RING), as_recorded(x_given, RING)
    log_decay = prefix_sums(rate[None, :] * dt)  # [BL, HEADS]
    now = last(log_decay) + rate * dt_new  # [HEADS]
    weights = dt * decay(now[None, :], log_decay) * tl.sum(B * C[None, :], 1)[:, None]
    weight_new = dt_new * tl.sum(B_new * C, 0)
    y = by_head(y, HEADS) * decay(now, 0.0)[:, None]
    y += tl.sum(by_head(x, HEADS) * weights[:, :, None], 0)
    y += by_head(x_new, HEADS) * weight_new[:, None]
    y = tl.reshape(y, [HEADS * BP])
    if tokens.D is not None:
        skip = tl.load(tokens.D + (state_row if D_PER_CHANNEL else head_of), mask=in_tile, other=0)
        y += skip.to(tl.float32) * x_given.to(tl.float32)
    # A ring without room is a caller's mistake; no number may come of it.
    fits = pos < L
    tl.store(out + row * (H * P) + state_row, tl.where(fits, y, float("nan")), mask=in_tile)

    if FLUSH:
        state = fold(state, x, B, dt, log_decay, now, PRECISION)
        x_weighted = tl.reshape(by_head(x_new, HEADS) * dt_new[:, None], [HEADS * BP])
        state += x_weighted[:, None] * B_new[None, :]
        write_state(
            state, read, None, cursors, layer, ticket, state_row, in_rows,
            P, BP, N, WIDTH, READ, None,
        )  # fmt: skip
    elif fits:
        FORMAT: tl.constexpr = fact(RING, "format")
        tl.store(ring_x + pos * P, encode_elements(x_new, FORMAT), mask=in_tile)
        if first_p == 0:
            tl.store(ring_dt + pos, dt_new, mask=in_heads)
            if part % (parts // G) == 0:
                tl.store(ring_B + pos * N + n, encode_elements(B_new, FORMAT), mask=n < N)


def decode(
    read: Quantized,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: Mamba2Inputs,
    *,
    launch: Launch | None = None,
) -> Tensor:
    """Outputs of one token per row; its record enters the ring at the cursor, which stays.

    Args:
        read: what outputs read, [S, H, P, N]; not written.
        ring: x [S, H, L, P], B [S, G, L, N], dt [S, H, L]; slot `pos` of each row is written.
        policy: gives the ring's storage and the operands of products (fp32 only).
        cursors: rows; pos < L, or the row's outputs are NaN and its record is dropped.
        inputs: of B rows and one token.
        launch: see `Launch`; by default from the table of `triton_launch`.

    Returns:
        Outputs [B, 1, H, P] float32; 0 for padding rows.

    Raises:
        ValueError: something has no kernel, or shapes disagree.
    """
    return _decode(read, ring, policy, cursors, inputs, launch)


def step(
    checkpoint: Quantized,
    read_copy: Quantized | None,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: Mamba2Inputs,
    *,
    layer: int,
    launch: Launch | None = None,
    fold_launch: Launch | None = None,
) -> Tensor:
    """`decode`, then commit the token, then flush the rows whose ring it filled.

    In place: ring, cursors (pos, flushes, saturated, not_finite), and for full rows checkpoint and
    read copy. `fold_launch` is for what rows that flush take. Other arguments, result and errors as
    in `decode` and `flush`.
    """
    triton_launch.check_copies(policy, checkpoint, read_copy)
    if read_copy is not None:
        out = _decode(read_copy, ring, policy, cursors, inputs, launch)
        commit_and_flush(
            checkpoint, read_copy, ring, policy, cursors, inputs.A, layer=layer, launch=fold_launch
        )
        return out
    ring_len = triton_launch.sizes(checkpoint, ring, cursors)["L"]
    out = _decode(checkpoint, ring, policy, cursors, inputs, launch, excepted=ring_len - 1)
    due = list_due(cursors, ring_len, commits=True, moves=True)
    _decode_and_flush(checkpoint, ring, policy, cursors, inputs, fold_launch, due, out, layer)
    return out


def _decode(
    read: Quantized,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: Mamba2Inputs,
    launch: Launch | None,
    *,
    excepted: int | None = None,
) -> Tensor:
    triton_launch.check_operand(policy)
    rows = inputs.x.shape[0]
    sizes = triton_launch.sizes(read, ring, cursors, inputs, tokens=1)
    launch = launch or triton_launch.default_launch("decode", policy, sizes, rows)
    out = torch.empty(inputs.x.shape, dtype=torch.float32, device=inputs.x.device)
    decode_kernel[(triton_launch.tiles(sizes, launch), rows)](
        out,
        triton_launch.tokens(inputs),
        inputs.A,
        triton_launch.ring(ring),
        cursors,
        stored(read),
        **sizes,
        READ=triton_launch.reading(read),
        RING=triton_launch.ring_storage(policy, ring),
        D_PER_CHANNEL=_has_d_per_channel(inputs),
        EXCEPT=excepted,
        **launch.tile(sizes),
        BL=triton_launch.slots(sizes, least=1),
        WIDTH=triton_launch.width(sizes, read),
        **launch.options(),
    )
    return out


def _decode_and_flush(
    state: Quantized,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: Mamba2Inputs,
    launch: Launch | None,
    due: Tensor,
    out: Tensor,
    layer: int,
) -> None:
    sizes = triton_launch.sizes(state, ring, cursors, inputs, tokens=1)
    launch = launch or triton_launch.default_launch(
        "step", policy, sizes, inputs.x.shape[0], any_row=True
    )
    tiles = triton_launch.tiles(sizes, launch)
    decode_and_flush_kernel[(triton_launch.programs(tiles, launch, cursors),)](
        out,
        triton_launch.tokens(inputs),
        inputs.A,
        triton_launch.ring(ring),
        cursors,
        stored(state),
        layer,
        due,
        **sizes,
        TILES=tiles,
        READ=policy.checkpoint,
        RING=triton_launch.ring_storage(policy, ring),
        D_PER_CHANNEL=_has_d_per_channel(inputs),
        PRECISION=triton_launch.precision(policy, torch.float32, ring["B"].dtype),
        **launch.tile(sizes),
        BL=triton_launch.slots(sizes, least=16),
        WIDTH=triton_launch.width(sizes, state),
        LOOPS=launch.loop > 1,
        **launch.options(),
    )


def _has_d_per_channel(inputs: Mamba2Inputs) -> bool:
    return inputs.D is not None and inputs.D.dim() == 2
