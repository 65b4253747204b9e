"""Gated DeltaNet token by token: the whole state is read and written for every token.

Owns the kernel and the launcher of the conventional update, the yardstick of `bench kernels`.
Knows no policy and no ring. Legend: reference.py; S slots, TILES tiles of BV rows a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.ops.gated_delta.reference import EXACT_INPUTS, GatedDeltaInputs
from replayssm.ops.gated_delta.triton_launch import token_argument
from replayssm.ops.quantize.layout import load_matrix, store_matrix
from replayssm.ops.triton_conventional import ConventionalLaunch, check_state


@triton.jit
def conventional_kernel(
    out,                                # [B, HV, V] float32
    tokens, slots, state,               # Tokens, [B], [S, HV, V, K]
    HK, HV,                             # not constants: models that share V and K share a binary
    V: tl.constexpr, K: tl.constexpr,
    BV: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (HV * TILES, B)."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    head, row = tl.program_id(0) // TILES, tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    value = tl.program_id(0) % TILES * BV + tl.arange(0, BV)
    column = tl.arange(0, WIDTH)
    in_v, in_k = value < V, column < K
    state_row = head * V + value
    state += slot * (HV * V * K)
    in_rows = None if V % BV == 0 else in_v

    old = load_matrix(state, state_row, in_rows, K, WIDTH)
    at_key = head // (HV // HK) * K + column
    k = tl.load(tokens.k + row * tokens.k_row + at_key, mask=in_k, other=0).to(tl.float32)
    q = tl.load(tokens.q + row * tokens.q_row + at_key, mask=in_k, other=0).to(tl.float32)
    v = tl.load(tokens.v + row * tokens.v_row + state_row, mask=in_v, other=0).to(tl.float32)
    decay = tl.exp(tl.load(tokens.g + row * tokens.g_row + head))
    beta = tl.load(tokens.beta + row * tokens.beta_row + head)

    decayed = old.to(tl.float32) * decay
    u = beta * (v - tl.sum(decayed * k[None, :], 1))
    new = decayed + u[:, None] * k[None, :]
    store_matrix(state, state_row, in_rows, new.to(state.dtype.element_ty), K, WIDTH)
    tl.store(out + row * (HV * V) + state_row, tl.sum(new * q[None, :], 1), mask=in_v)


def conventional(
    state: Tensor, slots: Tensor, inputs: GatedDeltaInputs, *, launch: ConventionalLaunch
) -> Tensor:
    """One token per row: updates the state of each row and answers from it, unrounded.

    In place: `state`, rounded to nearest even in its dtype (beyond its range: to infinity).

    Args:
        state: [S, HV, V, K], FP32, FP16 or BF16.
        slots: [B] integers, the slot of each row; negative: a padding row, left alone.
        inputs: of B rows and one token.
        launch: see `ConventionalLaunch`.

    Returns:
        Outputs [B, 1, HV, V] float32; padding rows are not written.

    Raises:
        ValueError: the state is not what the inputs and the kernel need.
    """
    batch, count, HV, V = inputs.v.shape
    HK, K = inputs.k.shape[2:]
    check_state(state, HV, V, K)
    narrow = [name for name in EXACT_INPUTS if getattr(inputs, name).dtype != torch.float32]
    if count != 1 or narrow:
        raise ValueError(f"{count} tokens, gates not FP32: {narrow}; expected 1 and none")
    out = torch.empty(inputs.v.shape, dtype=torch.float32, device=inputs.v.device)
    conventional_kernel[(HV * triton.cdiv(V, launch.rows), batch)](
        out,
        token_argument(inputs),
        slots,
        state,
        HK,
        HV,
        V=V,
        K=K,
        BV=launch.rows,
        WIDTH=triton.next_power_of_2(K),
        num_warps=launch.num_warps,
    )
    return out
