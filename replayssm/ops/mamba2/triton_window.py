"""T = 2 ... 32 tokens per row on tensor cores: verify and teacher-forced replay.

Owns the window kernel and its launcher. No state is formed or written; the records of the tokens
enter the ring past the cursor, which stays: a draft that is not committed leaves no trace.
Legend: triton_tiles.py; BT >= T is a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.formats.quantized import Quantized
from replayssm.ops.mamba2 import triton_launch
from replayssm.ops.mamba2.reference import Mamba2Inputs
from replayssm.ops.mamba2.triton_launch import Launch
from replayssm.ops.mamba2.triton_tiles import (
    FP32_RECORDS,
    decay,
    load_and_append,
    tile_rows,
)
from replayssm.ops.quantize.layout import stored
from replayssm.ops.quantize.tiles import load_unscaled, row_factor
from replayssm.ops.triton_common import Cursors, exact_dot, prefix_sums
from replayssm.ops.triton_policy import unscaled_dtype
from replayssm.policy import PrecisionPolicy


@triton.jit
def window_kernel(
    out,                                # [B, T, H, P] float32
    tokens, A, ring, cursors, read,     # Tokens, [H], Ring, Cursors, Stored
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    T: tl.constexpr, READ: tl.constexpr, RING: tl.constexpr,
    D_PER_CHANNEL: tl.constexpr,
    BC: tl.constexpr, SC: tl.constexpr, XW: tl.constexpr,  # precisions of the three products
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, BT: tl.constexpr,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of a row / LOOP, B); HEADS is 1, LOOP tiles belong to one group.

    Products over N are taken in PIECES, which bounds the registers an operand takes.
    """
    row = tl.program_id(1)
    slot = tl.load(cursors.slots + row).to(tl.int64)
    first = tl.program_id(0) * LOOP
    t, record = tl.arange(0, BT), tl.arange(0, BL)
    if slot < 0:
        for i in range(LOOP):
            _, _, _, head_of, p, _, in_tile = tile_rows(first + i, H, P, G, HEADS, BP)
            at = out + (row * T + t[None, :]) * (H * P) + (head_of * P + p)[:, None]
            tl.store(at, 0.0, mask=(t < T)[None, :] & in_tile[:, None])
        return
    pos = tl.load(cursors.pos + slot).to(tl.int32)
    PIECE: tl.constexpr = WIDTH // PIECES
    PIECE_N: tl.constexpr = N // PIECES

    group = first // (tl.num_programs(0) * LOOP // G)
    starts_group = first % (tl.num_programs(0) * LOOP // G) == 0
    new_B = tokens.B + row * tokens.B_row + group * N
    new_C = tokens.C + row * tokens.C_row + group * N
    bc = tl.zeros([BL, BT], tl.float32)
    for piece in tl.static_range(PIECES):
        n = piece * PIECE + tl.arange(0, PIECE)
        B = load_and_append(
            ring.B + slot * ring.B_slot + group * L * N + n, N, new_B + n, tokens.B_token,
            n < N, pos, starts_group, T, L, BL, RING,
        )  # fmt: skip
        bc = exact_dot(B, _load_columns(new_C, n, t, tokens.C_token, N, T), bc, BC)
    causal = (record[:, None] <= pos + t[None, :]) & (t < T)[None, :]
    bc = tl.where(causal, bc, 0.0)  # [BL, BT]

    for i in range(LOOP):
        _, first_p, head, head_of, p, in_heads, in_tile = tile_rows(first + i, H, P, G, HEADS, BP)
        in_rows = None if P % BP == 0 else in_tile
        state_row = head_of * P + p
        new_x = tokens.x + row * tokens.x_row + state_row
        dt = load_and_append(
            ring.dt + slot * ring.dt_slot + head * L, 1,
            tokens.dt + row * tokens.dt_row + head, tokens.dt_token,
            in_heads, pos, first_p == 0, T, L, BL, FP32_RECORDS,
        )  # fmt: skip
        x = load_and_append(
            ring.x + slot * ring.x_slot + head_of * L * P + p, P, new_x, tokens.x_token,
            in_tile, pos, True, T, L, BL, RING,
        )  # fmt: skip
        rate = tl.load(A + head, mask=in_heads, other=0.0)
        log_decay = prefix_sums(rate[None, :] * dt)  # [BL, 1]
        is_now = record[:, None] == pos + t[None, :]
        now = tl.sum(tl.where(is_now, log_decay, 0.0), 0)[None, :]  # [1, BT], one term each

        y = tl.zeros([BP, BT], tl.float32)
        for piece in tl.static_range(PIECES):
            # A row of N is PIECES rows of N / PIECES.
            state = load_unscaled(
                read, slot, state_row * PIECES + piece, in_rows, PIECE_N, PIECE, READ
            )
            n = piece * PIECE + tl.arange(0, PIECE)
            y = exact_dot(state, _load_columns(new_C, n, t, tokens.C_token, N, T), y, SC)
        y *= row_factor(read, slot, state_row, in_rows, P, READ)[:, None] * decay(now, 0.0)
        weights = bc * decay(now, log_decay) * dt
        y = exact_dot(tl.trans(x), weights, y, XW)
        token = (t < T)[None, :] & in_tile[:, None]
        if tokens.D is not None:
            skip = tl.load(
                tokens.D + (state_row if D_PER_CHANNEL else head_of), mask=in_tile, other=0
            )
            raw = tl.load(new_x[:, None] + t[None, :] * tokens.x_token, mask=token, other=0)
            y += skip.to(tl.float32)[:, None] * raw.to(tl.float32)
        y = tl.where(pos + T <= L, y, float("nan"))
        tl.store(out + (row * T + t[None, :]) * (H * P) + state_row[:, None], y, mask=token)


@triton.jit
def _load_columns(base, n, t, pitch, N: tl.constexpr, T: tl.constexpr):
    """FP32 [n, t] of vectors of N elements, one a token, `pitch` apart; 0 outside."""
    at = base + t[None, :] * pitch + n[:, None]
    return tl.load(at, mask=(t < T)[None, :] & (n < N)[:, None], other=0).to(tl.float32)


def window(
    read: Quantized,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: Mamba2Inputs,
    *,
    launch: Launch | None = None,
) -> Tensor:
    """Outputs of T tokens per row on top of `read` and the committed records.

    In place: slots pos .. pos+T-1 of each row's ring, nothing else. Rows with pos + T > L get NaN.
    Arguments, result [B, T, H, P] float32 and errors as in `decode`.
    """
    count = inputs.x.shape[1]
    sizes = triton_launch.sizes(read, ring, cursors, inputs, tokens=count)
    launch = launch or triton_launch.default_launch("window", policy, sizes, inputs.x.shape[0])
    out = torch.empty(inputs.x.shape, dtype=torch.float32, device=inputs.x.device)
    tiles = triton_launch.tiles(sizes, launch)
    loop = math.gcd(launch.loop, tiles // sizes["G"])
    width = triton_launch.width(sizes, read)
    window_kernel[(tiles // loop, inputs.x.shape[0])](
        out,
        triton_launch.tokens(inputs),
        inputs.A,
        triton_launch.ring(ring),
        cursors,
        stored(read),
        **sizes,
        T=count,
        READ=triton_launch.reading(read),
        RING=triton_launch.ring_storage(policy, ring),
        D_PER_CHANNEL=triton_launch.has_d_per_channel(inputs),
        BC=triton_launch.precision(policy, ring["B"].dtype, inputs.C.dtype),
        SC=triton_launch.precision(policy, unscaled_dtype(read), inputs.C.dtype),
        XW=triton_launch.precision(policy, ring["x"].dtype, torch.float32),
        **launch.tile(sizes),
        BL=triton_launch.slots(sizes),
        BT=max(16, triton.next_power_of_2(count)),
        WIDTH=width,
        PIECES=triton_launch.pieces(sizes, read, width),
        LOOP=loop,
        **launch.options(),
    )
    return out
