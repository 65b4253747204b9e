"""Mamba-2 token by token: the whole state is read and written for every token.

Owns the kernel and the launcher of the conventional update, the yardstick of `bench kernels`.
Knows no policy and no ring. Legend: reference.py; S slots, TILES tiles of BP rows a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.ops.mamba2.reference import Mamba2Inputs
from replayssm.ops.mamba2.triton_launch import tokens as token_argument
from replayssm.ops.quantize.layout import load_matrix, store_matrix
from replayssm.ops.triton_conventional import ConventionalLaunch, check_state


@triton.jit
def conventional_kernel(
    out,                                # [B, H, P] float32
    tokens, A, slots, state,            # Tokens, [H], [B], [S, H, P, N]
    H, G,                               # not constants: models that share P and N share a binary
    P: tl.constexpr, N: tl.constexpr, D_PER_CHANNEL: tl.constexpr,
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

    old = load_matrix(state, state_row, in_rows, N, WIDTH)
    group_n = group * N + n
    B = tl.load(tokens.B + row * tokens.B_row + group_n, mask=in_n, other=0).to(tl.float32)
    C = tl.load(tokens.C + row * tokens.C_row + group_n, mask=in_n, other=0).to(tl.float32)
    x = tl.load(tokens.x + row * tokens.x_row + state_row, mask=in_p, other=0).to(tl.float32)
    dt = tl.load(tokens.dt + row * tokens.dt_row + head)
    decay = tl.exp(tl.load(A + head) * dt)

    new = old.to(tl.float32) * decay + (dt * x)[:, None] * B[None, :]
    store_matrix(state, state_row, in_rows, new.to(state.dtype.element_ty), N, WIDTH)
    y = tl.sum(new * C[None, :], 1)
    if tokens.D is not None:
        if D_PER_CHANNEL:
            y += tl.load(tokens.D + state_row, mask=in_p, other=0).to(tl.float32) * x
        else:
            y += tl.load(tokens.D + head).to(tl.float32) * x
    tl.store(out + row * (H * P) + state_row, y, mask=in_p)


def conventional(
    state: Tensor, slots: Tensor, inputs: Mamba2Inputs, *, launch: ConventionalLaunch
) -> Tensor:
    """One token per row: updates the state of each row and answers from it, unrounded.

    In place: `state`, rounded to nearest even in its dtype (beyond its range: to infinity).

    Args:
        state: [S, H, P, N], FP32, FP16 or BF16.
        slots: [B] integers, the slot of each row; negative: a padding row, left alone.
        inputs: of B rows and one token.
        launch: see `ConventionalLaunch`.

    Returns:
        Outputs [B, 1, H, P] float32; padding rows are not written.

    Raises:
        ValueError: the state is not what the inputs and the kernel need.
    """
    batch, count, H, P = inputs.x.shape
    G, N = inputs.B_.shape[2:]
    check_state(state, H, P, N)
    if count != 1 or inputs.dt.dtype != torch.float32:
        raise ValueError(f"{count} tokens with dt {inputs.dt.dtype}, expected 1 and torch.float32")
    out = torch.empty(inputs.x.shape, dtype=torch.float32, device=inputs.x.device)
    conventional_kernel[(H * triton.cdiv(P, launch.rows), batch)](
        out,
        token_argument(inputs),
        inputs.A,
        slots,
        state,
        H,
        G,
        P=P,
        N=N,
        D_PER_CHANNEL=inputs.D is not None and inputs.D.dim() == 2,
        BP=launch.rows,
        WIDTH=triton.next_power_of_2(N),
        num_warps=launch.num_warps,
    )
    return out
