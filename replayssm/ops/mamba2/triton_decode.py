"""One token per row: read the state once, append one record, and fold rings that it fills.

Owns the launchers, and the kernels for many rows. `decode` writes no state. `step` also commits the
token and flushes the rows whose ring it fills; rows decide by their own cursors. Few rows take one
kernel, that of `triton_few.py`, in which the last program of a row to have read its cursor moves
it. Else `list_due` moves cursors after the outputs: with one copy, rows that flush are left to a
last kernel, which reads the state once for both jobs (the registers that folding takes would slow
every other row down); with two, all rows decode and a flush follows. What the two ways round is the
same to FP32 accuracy: they add in different orders.

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
from replayssm.ops.mamba2.triton_few import few_kernel
from replayssm.ops.mamba2.triton_flush import commit_and_flush
from replayssm.ops.mamba2.triton_launch import Launch
from replayssm.ops.mamba2.triton_token import (
    decode_token,
    flush_token,
    load_ring,
    load_token,
    store_constant,
)
from replayssm.ops.quantize.layout import stored
from replayssm.ops.triton_common import (
    Cursors,
    bound,
    list_due,
    load_ticket,
)
from replayssm.ops.triton_inputs import compiled_in
from replayssm.ops.triton_pairs import in_pairs
from replayssm.ops.triton_policy import check_copies, shares_heads
from replayssm.ops.triton_rows import folded_columns, line_columns, part_columns
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
    DOTS: tl.constexpr,                 # see `decode_token`
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of a row, B)."""
    row, part = tl.program_id(1), tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    PARTS: tl.constexpr = DOTS is not None
    token = load_token(
        tokens, A, row, part, H, P, G, N, READ, PARTS, D_PER_CHANNEL, HEADS, BP, WIDTH
    )  # fmt: skip
    if slot < 0:
        store_constant(out, row, part, 0.0, H, P, G, HEADS, BP)
        return
    pos = tl.load(cursors.pos + slot).to(tl.int32)
    if EXCEPT is not None:
        if pos == EXCEPT:
            return
    decode_token(
        out, tokens, token, ring, read, row, slot, pos, part, TILES,
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
        tokens, A, ticket.row, part, H, P, G, N, None, False, D_PER_CHANNEL, HEADS, BP, WIDTH
    )  # fmt: skip
    records = load_ring(
        ring, ticket.slot, part, L - 1, H, P, G, N, L, HEADS, BP, BL, WIDTH
    )  # fmt: skip
    flush_token(
        out, tokens, token, records, cursors, state, layer, ticket, part,
        H, P, G, N, L, STORAGE, RING, PRECISION, HEADS, BP, WIDTH,
    )  # fmt: skip


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
        launch = launch or triton_launch.default_launch("step", policy, sizes, inputs.x.shape[0])
        read = checkpoint if read_copy is None else read_copy
        both = (checkpoint, read_copy)
        return _few(read, ring, policy, cursors, inputs, launch, sizes, copies=both, layer=layer)
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
    if launch.eager:
        return _few(read, ring, policy, cursors, inputs, launch, sizes)
    out = torch.empty(inputs.x.shape, dtype=torch.float32, device=inputs.x.device)
    tiles = triton_launch.tiles(sizes, launch)
    decode_kernel[(tiles, rows)](
        cursors.slots,
        triton_launch.tokens(inputs),
        inputs.A,
        triton_launch.ring(ring),
        stored(read),
        out,
        cursors,
        **sizes,
        TILES=tiles,
        READ=triton_launch.reading(read),
        RING=triton_launch.ring_storage(policy, ring),
        D_PER_CHANNEL=triton_launch.has_d_per_channel(inputs),
        EXCEPT=excepted,
        DOTS=triton_launch.dots(read, ring, inputs, sizes, launch),
        **launch.tile(sizes),
        BL=triton_launch.slots(sizes),
        WIDTH=triton_launch.width(sizes, read),
        **launch.options(),
    )
    return out


def _few(
    read: Quantized,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: Mamba2Inputs,
    launch: Launch,
    sizes: triton_launch.Sizes,
    *,
    copies: tuple[Quantized | None, Quantized | None] = (None, None),
    layer: int = 0,
) -> Tensor:
    """`decode`, or, given both copies, `step` in one kernel."""
    triton_launch.check_operand(policy)
    if launch.heads != 1:
        raise ValueError(f"heads {launch.heads} in a tile of the kernel for few rows; allowed is 1")
    commits = copies[0] is not None
    tiles = triton.cdiv(sizes["P"], launch.tile(sizes)["BP"])
    cut = f"block_p {launch.block_p}"
    shared = commits and shares_heads(policy, sizes["H"], tiles, cut)
    written = (policy.checkpoint, policy.read_copy) if commits else (None, None)
    reading = triton_launch.reading(read)
    width = triton_launch.width(sizes, read, *copies)
    tokens = compiled_in(triton_launch.tokens(inputs))
    out = torch.empty(inputs.x.shape, dtype=torch.float32, device=inputs.x.device)
    few_kernel[(tiles, sizes["H"], inputs.x.shape[0])](
        cursors.slots,
        tokens,
        inputs.A,
        compiled_in(stored(read)),
        compiled_in(triton_launch.ring(ring)),
        out,
        cursors,
        *(None if copy is None else compiled_in(stored(copy)) for copy in copies),
        layer,
        **sizes,
        READ=reading,
        RING=triton_launch.ring_storage(policy, ring),
        CHECKPOINT=written[0],
        READ_COPY=written[1],
        D_PER_CHANNEL=triton_launch.has_d_per_channel(inputs),
        SHARED=shared,
        THREADS=32 * launch.num_warps,
        BP=launch.block_p,
        BL=triton_launch.slots(sizes),
        WIDTH=width,
        COLUMNS=part_columns(reading, sizes["N"], width),
        RECORD_COLUMNS=min(
            line_columns(8 * ring["B"].element_size()), triton.next_power_of_2(sizes["N"])
        ),
        FOLDED=folded_columns(policy.checkpoint, sizes["N"], width),
        PAIRED=in_pairs(
            (ring["B"], inputs.B_, inputs.C),
            *(sizes["N"], ring["B"].stride(0), tokens.B_row, tokens.C_row),
        ),
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
