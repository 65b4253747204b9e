"""One token per row: read the state once, append one record, and fold rings that it fills.

Owns three kernels and their launchers. `decode` writes no state. `step` also commits the token and
flushes the rows whose ring it fills; rows decide by their own cursors. Few rows take one launch, in
which the last program of a row to have read its cursor moves it. Else `list_due` moves cursors
after the outputs: with one copy, rows that flush are left to a last kernel, which reads the state
once for both jobs (the registers that folding takes would slow every other row down); with two, all
rows decode and a flush follows. Both ways give the same bits.

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
from replayssm.ops.mamba2.triton_tiles import load_checkpoint, values_of_pieces
from replayssm.ops.mamba2.triton_token import (
    answer,
    append,
    ask_early,
    decode_token,
    flush_token,
    fold_token,
    load_ring,
    load_token,
    store_constant,
    times_C,
)
from replayssm.ops.quantize.layout import stored
from replayssm.ops.triton_common import (
    Cursors,
    Ticket,
    bound,
    count_arrival,
    list_due,
    load_ticket,
    move_if_last,
    no_offset,
)
from replayssm.ops.triton_inputs import compiled_in
from replayssm.ops.triton_policy import check_copies
from replayssm.policy import PrecisionPolicy


@triton.jit
def decode_kernel(
    slots,                              # [B], of `cursors`: what is loaded first
    tokens, A, ring,                    # Tokens, [H], Ring
    read,                               # Stored
    out, cursors,                       # [B, H, P] float32, Cursors
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    TILES: tl.constexpr,                # of a row
    READ: tl.constexpr, RING: tl.constexpr, D_PER_CHANNEL: tl.constexpr,
    EXCEPT: tl.constexpr,               # rows with so many committed records are left alone
    EAGER: tl.constexpr,                # see `ask_early`
    DOTS: tl.constexpr,                 # see `decode_token`
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of a row, B)."""
    row, part = tl.program_id(1), tl.program_id(0)
    slot_at = slots + row
    slot = tl.load(slot_at).to(tl.int64)
    nothing = 0
    if EAGER:
        if slot_at.to(tl.int64) < 0:  # it never is: see `no_offset`
            return
        nothing = no_offset(ring.B, cursors.pos)
    PARTS: tl.constexpr = DOTS is not None
    token = load_token(
        tokens, A, row, part, nothing, H, P, G, N, READ, PARTS, D_PER_CHANNEL, HEADS, BP, WIDTH
    )  # fmt: skip
    if slot < 0:
        store_constant(out, row, part, 0.0, H, P, G, HEADS, BP)
        return
    asked = None
    if EAGER:
        asked = ask_early(read, ring, slot, part, H, P, G, N, L, READ, HEADS, BP, BL, WIDTH)
    pos = tl.load(cursors.pos + slot).to(tl.int32)
    if EXCEPT is not None:
        if pos == EXCEPT:
            return
    decode_token(
        out, tokens, token, ring, read, asked, row, slot, pos, part, TILES,
        H, P, G, N, L, READ, RING, DOTS, HEADS, BP, BL, WIDTH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def decode_and_flush_kernel(
    out, tokens, A, ring, cursors,      # as above
    state, layer,                       # Stored, read and written
    due,                                # from `list_due`: rows whose ring the token fills
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    TILES: tl.constexpr, STORAGE: tl.constexpr, RING: tl.constexpr, D_PER_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
    LOOPS: tl.constexpr,                # whether there may be more tiles than programs
):  # fmt: skip
    """Grid of any size: programs share the tiles of the rows that are due, whose cursors `due` has
    moved."""
    first = tl.program_id(0)
    end = tl.load(due).to(tl.int32) * TILES
    if LOOPS:
        step = tl.num_programs(0)
        for work in tl.range(bound(first), bound(end), bound(step), disable_licm=True):
            decode_and_flush_tile(
                out, tokens, A, ring, cursors, state, layer, load_ticket(due, work // TILES),
                work % TILES, H, P, G, N, L, STORAGE, RING, D_PER_CHANNEL, PRECISION,
                HEADS, BP, BL, WIDTH,
            )  # fmt: skip
    else:
        ticket = load_ticket(due, first // TILES)  # in memory, filled or not
        if first < end:
            decode_and_flush_tile(
                out, tokens, A, ring, cursors, state, layer, ticket,
                first % TILES, H, P, G, N, L, STORAGE, RING, D_PER_CHANNEL, PRECISION,
                HEADS, BP, BL, WIDTH,
            )  # fmt: skip


@triton.jit
def decode_and_flush_tile(
    out, tokens, A, ring, cursors, state, layer, ticket, part,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    STORAGE: tl.constexpr, RING: tl.constexpr, D_PER_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Tile `part` of a row whose ring the token fills."""
    token = load_token(
        tokens, A, ticket.row, part, 0, H, P, G, N, None, False, D_PER_CHANNEL, HEADS, BP, WIDTH
    )  # fmt: skip
    records = load_ring(
        ring, ticket.slot, part, L - 1, H, P, G, N, L, HEADS, BP, BL, WIDTH
    )  # fmt: skip
    flush_token(
        out, tokens, token, records, cursors, state, layer, ticket, part,
        H, P, G, N, L, STORAGE, RING, PRECISION, HEADS, BP, WIDTH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def step_kernel(
    slots, tokens, A, ring,             # as above
    read_copy, checkpoint,              # Stored or None; Stored
    out, cursors, layer,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    TILES: tl.constexpr,
    RING: tl.constexpr, CHECKPOINT: tl.constexpr, READ_COPY: tl.constexpr,
    D_PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of a row, B): outputs, records, flushes and cursors in one launch."""
    row, part = tl.program_id(1), tl.program_id(0)
    READ: tl.constexpr = CHECKPOINT if READ_COPY is None else READ_COPY
    slot_at = slots + row
    slot = tl.load(slot_at).to(tl.int64)
    if slot_at.to(tl.int64) < 0:  # it never is: see `no_offset`
        return
    token = load_token(
        tokens, A, row, part, no_offset(ring.B, cursors.arrivals),
        H, P, G, N, READ, False, D_PER_CHANNEL, HEADS, BP, WIDTH,
    )  # fmt: skip
    if slot < 0:
        store_constant(out, row, part, 0.0, H, P, G, HEADS, BP)
        return
    read = checkpoint if READ_COPY is None else read_copy
    loaded, records = ask_early(read, ring, slot, part, H, P, G, N, L, READ, HEADS, BP, BL, WIDTH)
    pos = tl.load(cursors.pos + slot).to(tl.int32)
    ticket = Ticket(
        row, slot, pos, tl.load(cursors.flushes + slot), tl.load(cursors.sequence + slot),
        tl.load(cursors.seed + slot),
    )  # fmt: skip
    if pos >= L:
        before = count_arrival(cursors, slot, True, THREADS)
        store_constant(out, row, part, float("nan"), H, P, G, HEADS, BP)
        move_if_last(cursors, slot, before, TILES, pos + 1, None, THREADS)
        return
    flushes = pos == L - 1
    if READ_COPY is None:
        if flushes:
            before = count_arrival(cursors, slot, ticket.flushes >= 0, THREADS)
            flush_token(
                out, tokens, token, records, cursors, checkpoint, layer, ticket, part,
                H, P, G, N, L, CHECKPOINT, RING, PRECISION, HEADS, BP, WIDTH,
            )  # fmt: skip
            move_if_last(cursors, slot, before, TILES, 0, ticket.flushes + 1, THREADS)
        else:
            y = times_C(loaded, token[1], N, WIDTH, READ)
            before = count_arrival(cursors, slot, True, THREADS)
            answer(
                out, tokens, token, records, row, part, y, None, None, pos,
                H, P, G, RING, HEADS, BP,
            )  # fmt: skip
            append(token, ring, slot, part, TILES, pos, H, P, G, N, L, RING, HEADS, BP, WIDTH)
            move_if_last(cursors, slot, before, TILES, pos + 1, None, THREADS)
    else:
        y = times_C(loaded, token[1], N, WIDTH, READ)
        before = count_arrival(cursors, slot, ticket.flushes >= 0, THREADS)
        answer(
            out, tokens, token, records, row, part, y, None, None, pos,
            H, P, G, RING, HEADS, BP,
        )  # fmt: skip
        if flushes:
            folded = load_checkpoint(
                checkpoint, slot, part, H, P, G, N, CHECKPOINT, HEADS, BP, WIDTH
            )
            fold_token(
                values_of_pieces(folded, N, WIDTH, CHECKPOINT), token, records, layer,
                checkpoint, read_copy, cursors, ticket, part,
                H, P, G, N, L, RING, CHECKPOINT, READ_COPY, PRECISION, HEADS, BP, WIDTH,
            )  # fmt: skip
            move_if_last(cursors, slot, before, TILES, 0, ticket.flushes + 1, THREADS)
        else:
            append(token, ring, slot, part, TILES, pos, H, P, G, N, L, RING, HEADS, BP, WIDTH)
            move_if_last(cursors, slot, before, TILES, pos + 1, None, THREADS)


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
    flush_launch: Launch | None = None,
    single: bool | None = None,
) -> Tensor:
    """`decode`, then commit the token, then flush the rows whose ring it filled.

    In place: ring, cursors (pos, flushes, saturated, not_finite), and for full rows checkpoint and
    read copy. `flush_launch` is for what rows that flush take. `single`: whether it is one launch,
    which then takes `launch`; None: if rows are few. Other arguments, result and errors as in
    `decode` and `flush`.
    """
    check_copies(policy, checkpoint, read_copy)
    sizes = triton_launch.sizes(checkpoint, ring, cursors, inputs, tokens=1)
    if single is None:
        single = triton_launch.is_few(sizes, inputs.x.shape[0])
    if single:
        return _single(checkpoint, read_copy, ring, policy, cursors, inputs, layer, launch, sizes)
    if read_copy is not None:
        out = _decode(read_copy, ring, policy, cursors, inputs, launch)
        commit_and_flush(
            checkpoint, read_copy, ring, policy, cursors, inputs.A, layer=layer, launch=flush_launch
        )
        return out
    out = _decode(checkpoint, ring, policy, cursors, inputs, launch, excepted=sizes["L"] - 1)
    due = list_due(cursors, sizes["L"], commits=True, moves=True)
    _decode_and_flush(checkpoint, ring, policy, cursors, inputs, flush_launch, due, out, layer)
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
    tiles = triton_launch.tiles(sizes, launch)
    arguments = triton_launch.tokens(inputs), triton_launch.ring(ring), stored(read)
    if launch.eager:
        arguments = map(compiled_in, arguments)
    tokens, records, state = arguments
    decode_kernel[(tiles, rows)](
        cursors.slots,
        tokens,
        inputs.A,
        records,
        state,
        out,
        cursors,
        **sizes,
        TILES=tiles,
        READ=triton_launch.reading(read),
        RING=triton_launch.ring_storage(policy, ring),
        D_PER_CHANNEL=triton_launch.has_d_per_channel(inputs),
        EXCEPT=excepted,
        EAGER=launch.eager,
        DOTS=triton_launch.dots(read, ring, inputs, sizes, launch),
        **launch.tile(sizes),
        BL=triton_launch.slots(sizes),
        WIDTH=triton_launch.width(sizes, read),
        **launch.options(),
    )
    return out


def _single(
    checkpoint: Quantized,
    read_copy: Quantized | None,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: Mamba2Inputs,
    layer: int,
    launch: Launch | None,
    sizes: triton_launch.Sizes,
) -> Tensor:
    rows = inputs.x.shape[0]
    launch = launch or triton_launch.default_launch("step", policy, sizes, rows)
    out = torch.empty(inputs.x.shape, dtype=torch.float32, device=inputs.x.device)
    tiles = triton_launch.tiles(sizes, launch)
    step_kernel[(tiles, rows)](
        cursors.slots,
        compiled_in(triton_launch.tokens(inputs)),
        inputs.A,
        compiled_in(triton_launch.ring(ring)),
        None if read_copy is None else compiled_in(stored(read_copy)),
        compiled_in(stored(checkpoint)),
        out,
        cursors,
        layer,
        **sizes,
        TILES=tiles,
        RING=triton_launch.ring_storage(policy, ring),
        CHECKPOINT=policy.checkpoint,
        READ_COPY=policy.read_copy,
        D_PER_CHANNEL=triton_launch.has_d_per_channel(inputs),
        PRECISION=triton_launch.precision(policy, torch.float32, ring["B"].dtype),
        **launch.tile(sizes),
        BL=triton_launch.slots(sizes),
        WIDTH=triton_launch.width(sizes, checkpoint, read_copy),
        THREADS=32 * launch.num_warps,
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
    rows = inputs.x.shape[0]
    launch = launch or triton_launch.default_launch("step", policy, sizes, rows, any_row=True)
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
        STORAGE=policy.checkpoint,
        RING=triton_launch.ring_storage(policy, ring),
        D_PER_CHANNEL=triton_launch.has_d_per_channel(inputs),
        PRECISION=triton_launch.precision(policy, torch.float32, ring["B"].dtype),
        **launch.tile(sizes),
        BL=triton_launch.slots(sizes),
        WIDTH=triton_launch.width(sizes, state),
        LOOPS=launch.loop > 1,
        **launch.options(),
    )
