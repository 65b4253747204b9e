"""Delta rules the conventional way: the whole state is read and written for every token.

Owns the kernel and the launcher of the conventional update, the yardstick of the benchmarks, also
for Kimi Delta Attention, where a decay for every key channel changes one load. Knows no policy and
no ring. Legend: reference.py; S slots, TILES tiles of BV rows a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.ops.gated_delta.reference import EXACT_INPUTS, GatedDeltaInputs
from replayssm.ops.gated_delta.triton_launch import token_argument
from replayssm.ops.kimi_delta.reference import KimiDeltaInputs
from replayssm.ops.quantize.layout import load_matrix, store_matrix
from replayssm.ops.triton_conventional import (
    ConventionalLaunch,
    check_exact,
    check_snapshots,
    check_state,
)


@triton.jit
def conventional_kernel(
    slots, state,                       # [B], [S, HV, V, K]: in the order in which they are needed
    HK, HV,                             # not constants: models that share V and K share a binary
    tokens,                             # Tokens
    out,                                # [B, T, HV, V] float32
    snapshots,                          # [B, T, HV, V, K] or None
    V: tl.constexpr, K: tl.constexpr, T: tl.constexpr,
    CHANNELS: tl.constexpr,             # whether every key channel has its decay
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

    carried = load_matrix(state, state_row, in_rows, K, WIDTH).to(tl.float32)
    at_key = head // (HV // HK) * K + column
    first = row.to(tl.int64) * T
    for token in range(T):
        at_k = tokens.k + row * tokens.k_row + token * tokens.k_token + at_key
        at_q = tokens.q + row * tokens.q_row + token * tokens.q_token + at_key
        at_v = tokens.v + row * tokens.v_row + token * tokens.v_token + state_row
        k = tl.load(at_k, mask=in_k, other=0).to(tl.float32)
        q = tl.load(at_q, mask=in_k, other=0).to(tl.float32)
        v = tl.load(at_v, mask=in_v, other=0).to(tl.float32)
        at_g = tokens.g + row * tokens.g_row + token * tokens.g_token
        if CHANNELS:
            decay = tl.exp(tl.load(at_g + head * K + column, mask=in_k, other=0))[None, :]
        else:
            decay = tl.exp(tl.load(at_g + head))
        beta = tl.load(tokens.beta + row * tokens.beta_row + token * tokens.beta_token + head)

        decayed = carried * decay
        u = beta * (v - tl.sum(decayed * k[None, :], 1))
        new = decayed + u[:, None] * k[None, :]
        stored = new.to(state.dtype.element_ty)
        if snapshots is not None:
            at = snapshots + (first + token) * (HV * V * K)
            store_matrix(at, state_row, in_rows, stored, K, WIDTH)
        at_out = out + (first + token) * (HV * V) + state_row
        tl.store(at_out, tl.sum(new * q[None, :], 1), mask=in_v)
        carried = stored.to(tl.float32)
    if snapshots is None:
        store_matrix(state, state_row, in_rows, carried.to(state.dtype.element_ty), K, WIDTH)


def conventional(
    state: Tensor,
    slots: Tensor,
    inputs: GatedDeltaInputs | KimiDeltaInputs,
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
        state: [S, HV, V, K], FP32, FP16 or BF16.
        slots: [B] integers, the slot of each row; negative: a padding row, left alone.
        inputs: of B rows and T tokens.
        launch: see `ConventionalLaunch`.
        snapshots: [B, T, HV, V, K] in the dtype of `state`.

    Returns:
        Outputs [B, T, HV, V] float32; padding rows are not written.

    Raises:
        ValueError: the state, or snapshots, are not what the inputs and the kernel need.
    """
    batch, count, HV, V = inputs.v.shape
    HK, K = inputs.k.shape[2:]
    check_state(state, HV, V, K)
    check_snapshots(snapshots, state, batch, count)
    check_exact(inputs, EXACT_INPUTS)
    out = torch.empty(inputs.v.shape, dtype=torch.float32, device=inputs.v.device)
    conventional_kernel[(HV * triton.cdiv(V, launch.rows), batch)](
        slots,
        state,
        HK,
        HV,
        token_argument(inputs),
        out,
        snapshots,
        V=V,
        K=K,
        T=count,
        CHANNELS=inputs.g.dim() == 4,
        BV=launch.rows,
        WIDTH=triton.next_power_of_2(K),
        num_warps=launch.num_warps,
    )
    return out
