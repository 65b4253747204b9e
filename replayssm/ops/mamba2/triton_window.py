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
from replayssm.ops.mamba2.triton_tiles import decay, load_and_append
from replayssm.ops.quantize.layout import stored
from replayssm.ops.quantize.operand import (
    in_order,
    load_operand,
    load_readers,
    operand,
    operand_factor,
    piece_of,
    plain_piece,
)
from replayssm.ops.triton_common import Cursors, exact_dot, readers_times
from replayssm.ops.triton_policy import unscaled_dtype
from replayssm.policy import PrecisionPolicy


@triton.jit
def window_kernel(
    out,                                # [B, T, H, P] float32
    tokens, A, ring, cursors, read,     # Tokens, [H], Ring, Cursors, Stored
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    T: tl.constexpr, READ: tl.constexpr, RING: tl.constexpr,
    D_PER_CHANNEL: tl.constexpr,
    CB: tl.constexpr, CS: tl.constexpr, WX: tl.constexpr,  # precisions of the three products
    BP: tl.constexpr, BL: tl.constexpr, BT: tl.constexpr,
    PIECE: tl.constexpr, RING_PIECE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid (H / HEADS, B): HEADS heads of one group, one after the other, in tiles of BP rows.

    For one warp, which waits for no other: many of them hide what each waits for. Tokens are rows
    of every product, so that weights [BT, BL] are an operand as they come out of one, and a state
    is an operand as it is loaded (`in_order`). Products over N are taken in PIECES.
    """
    row = tl.program_id(1)
    slot = tl.load(cursors.slots + row).to(tl.int64)
    first = tl.program_id(0) * HEADS
    t, record = tl.arange(0, BT), tl.arange(0, BL)
    outputs = out + (row * T + t[:, None]) * (H * P)
    if slot < 0:
        for i in range(HEADS):
            for tile in range((P + BP - 1) // BP):
                p = tile * BP + tl.arange(0, BP)
                mask = (t < T)[:, None] & (p < P)[None, :]
                tl.store(outputs + ((first + i) * P + p)[None, :], 0.0, mask=mask)
        return
    pos = tl.load(cursors.pos + slot).to(tl.int32)
    group = first // (H // G)
    new_B = tokens.B + row * tokens.B_row + group * N
    new_C = tokens.C + row * tokens.C_row + group * N
    c_b = tl.zeros([BT, BL], tl.float32)
    for piece in tl.static_range((N + RING_PIECE - 1) // RING_PIECE):
        n = piece * RING_PIECE + tl.arange(0, RING_PIECE)
        B = load_and_append(
            ring.B + slot * ring.B_slot + group * L * N + n, N, new_B + n, tokens.B_token,
            n < N, pos, first % (H // G) == 0, T, L, BL, RING,
        )  # fmt: skip
        C = load_readers(new_C, t, tokens.C_token, t < T, piece, N, RING_PIECE, None)
        c_b = exact_dot(C, tl.trans(in_order(B)), c_b, CB)
    PIECES: tl.constexpr = (N + PIECE - 1) // PIECE
    C_parts = ()
    for piece in tl.static_range(PIECES):
        C = load_readers(new_C, t, tokens.C_token, t < T, piece, N, PIECE, READ)
        C_parts = C_parts + (C,)
    causal = (record[None, :] <= pos + t[:, None]) & (t < T)[:, None]
    c_b = tl.where(causal, c_b, 0.0)

    for i in range(HEADS):
        head = first + i
        rate = tl.load(A + head)
        dt = tl.load(
            ring.dt + slot * ring.dt_slot + head * L + record, mask=record < pos, other=0.0
        )
        new_dt = tokens.dt + row * tokens.dt_row + head + (record - pos) * tokens.dt_token
        is_new = (record >= pos) & (record < tl.minimum(pos + T, L))
        new_dt = tl.load(new_dt, mask=is_new, other=0.0)
        tl.store(ring.dt + slot * ring.dt_slot + head * L + record, new_dt, mask=is_new)
        dt = tl.where(is_new, new_dt, dt)
        log_decay = tl.cumsum(rate * dt, 0)
        now = tl.gather(log_decay, tl.minimum(pos + t, BL - 1), 0)[:, None]
        weights = c_b * decay(now, log_decay[None, :]) * dt[None, :]
        from_state = decay(now, 0.0)
        for tile in range((P + BP - 1) // BP):
            p = tile * BP + tl.arange(0, BP)
            in_p = p < P
            in_rows = None if P % BP == 0 else in_p
            state_row = head * P + p
            stored_rows = load_operand(read, slot, state_row, in_rows, P, N, PIECE, READ)
            factor = operand_factor(read, slot, state_row, in_rows, P, N, READ)
            new_x = tokens.x + row * tokens.x_row + state_row
            ring_x = ring.x + slot * ring.x_slot + head * L * P + p
            x = load_and_append(ring_x, P, new_x, tokens.x_token, in_p, pos, True, T, L, BL, RING)
            token = (t < T)[:, None] & in_p[None, :]
            y = tl.zeros([BT, BP], tl.float32)
            for piece in tl.static_range(PIECES):
                s = tl.trans(operand(stored_rows, piece, N, READ))
                y = exact_dot(C_parts[piece], s, y, CS)
            y = exact_dot(weights, x, y * factor[None, :] * from_state, WX)
            if tokens.D is not None:
                skip = tokens.D + (state_row if D_PER_CHANNEL else state_row * 0 + head)
                skip = tl.load(skip, mask=in_p, other=0)
                raw = tl.load(new_x[None, :] + t[:, None] * tokens.x_token, mask=token, other=0)
                y += skip.to(tl.float32)[None, :] * raw.to(tl.float32)
            y = tl.where(pos + T <= L, y, float("nan"))
            tl.store(outputs + state_row[None, :], y, mask=token)


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
    heads = math.gcd(launch.heads, sizes["H"] // sizes["G"])
    window_kernel[(sizes["H"] // heads, inputs.x.shape[0])](
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
        CB=triton_launch.precision(policy, inputs.C.dtype, ring["B"].dtype),
        CS=readers_times(inputs.C.dtype, unscaled_dtype(read)),
        WX=triton_launch.precision(policy, torch.float32, ring["x"].dtype),
        BP=launch.block_p,
        BL=triton_launch.slots(sizes),
        BT=max(16, triton.next_power_of_2(count)),
        PIECE=piece_of(triton_launch.reading(read), sizes["N"]),
        RING_PIECE=plain_piece(8 * ring["B"].itemsize),
        HEADS=heads,
        **launch.options(),
    )
    return out
