"""Mamba-2 the conventional way: the whole state is read and written for every token.

Owns the kernel and the launcher of the conventional update, the yardstick of the benchmarks.
Knows no policy and no ring. Legend: reference.py; S slots, TILES tiles of BP rows a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.ops.mamba2.reference import EXACT_INPUTS, Mamba2Inputs
from replayssm.ops.mamba2.triton_launch import has_d_per_channel
from replayssm.ops.mamba2.triton_launch import tokens as token_argument
from replayssm.ops.quantize.layout import load_matrix, store_matrix
from replayssm.ops.triton_conventional import (
    ConventionalLaunch,
    check_exact,
    check_snapshots,
    check_state,
)


@triton.jit
def conventional_kernel(
    slots, state,                       # [B], [S, H, P, N]: in the order in which they are needed
    H, G,                               # not constants: models that share P and N share a binary
    tokens, A,                          # Tokens, [H]
    out,                                # [B, T, H, P] float32
    snapshots,                          # [B, T, H, P, N] or None
    P: tl.constexpr, N: tl.constexpr, T: tl.constexpr, D_PER_CHANNEL: tl.constexpr,
    BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (H * TILES, B)."""
    TILES: tl.constexpr = (P + BP - 1) // BP
    head, row = tl.program_id(0) // TILES, tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    group = head // (H // G)
    p = tl.program_id(0) % TILES * BP + tl.arange(0, BP)
    n = tl.arange(0, WIDTH)
    in_p, in_n = p < P, n < N
    state_row = head * P + p
    state += slot * (H * P * N)
    in_rows = None if P % BP == 0 else in_p

    carried = load_matrix(state, state_row, in_rows, N, WIDTH).to(tl.float32)
    group_n = group * N + n
    rate = tl.load(A + head)
    first = row.to(tl.int64) * T
    for token in range(T):
        at_B = tokens.B + row * tokens.B_row + token * tokens.B_token + group_n
        at_C = tokens.C + row * tokens.C_row + token * tokens.C_token + group_n
        at_x = tokens.x + row * tokens.x_row + token * tokens.x_token + state_row
        B = tl.load(at_B, mask=in_n, other=0).to(tl.float32)
        C = tl.load(at_C, mask=in_n, other=0).to(tl.float32)
        x = tl.load(at_x, mask=in_p, other=0).to(tl.float32)
        dt = tl.load(tokens.dt + row * tokens.dt_row + token * tokens.dt_token + head)

        new = carried * tl.exp(rate * dt) + (dt * x)[:, None] * B[None, :]
        stored = new.to(state.dtype.element_ty)
        if snapshots is not None:
            at = snapshots + (first + token) * (H * P * N)
            store_matrix(at, state_row, in_rows, stored, N, WIDTH)
        y = tl.sum(new * C[None, :], 1)
        if tokens.D is not None:
            if D_PER_CHANNEL:
                y += tl.load(tokens.D + state_row, mask=in_p, other=0).to(tl.float32) * x
            else:
                y += tl.load(tokens.D + head).to(tl.float32) * x
        tl.store(out + (first + token) * (H * P) + state_row, y, mask=in_p)
        carried = stored.to(tl.float32)
    if snapshots is None:
        store_matrix(state, state_row, in_rows, carried.to(state.dtype.element_ty), N, WIDTH)


def conventional(
    state: Tensor,
    slots: Tensor,
    inputs: Mamba2Inputs,
    *,
    launch: ConventionalLaunch,
    snapshots: Tensor | None = None,
) -> Tensor:
    """T tokens per row, one after the other: each is answered from the state that it updates,
    before that is rounded.

    In place: `state`, rounded after every token to nearest even in its dtype (beyond its range: to
    infinity); or, if they are given, `snapshots`: the state after each token, for a caller that may
    go back to any of them. `state` is then left alone.

    Args:
        state: [S, H, P, N], FP32, FP16 or BF16.
        slots: [B] integers, the slot of each row; negative: a padding row, left alone.
        inputs: of B rows and T tokens.
        launch: see `ConventionalLaunch`.
        snapshots: [B, T, H, P, N] in the dtype of `state`.

    Returns:
        Outputs [B, T, H, P] float32; padding rows are not written.

    Raises:
        ValueError: the state, or snapshots, are not what the inputs and the kernel need.
    """
    batch, count, H, P = inputs.x.shape
    G, N = inputs.B_.shape[2:]
    check_state(state, H, P, N)
    check_snapshots(snapshots, state, batch, count)
    check_exact(inputs, EXACT_INPUTS)
    out = torch.empty(inputs.x.shape, dtype=torch.float32, device=inputs.x.device)
    conventional_kernel[(H * triton.cdiv(P, launch.rows), batch)](
        slots,
        state,
        H,
        G,
        token_argument(inputs),
        inputs.A,
        out,
        snapshots,
        P=P,
        N=N,
        T=count,
        D_PER_CHANNEL=has_d_per_channel(inputs),
        BP=launch.rows,
        WIDTH=triton.next_power_of_2(N),
        num_warps=launch.num_warps,
    )
    return out
