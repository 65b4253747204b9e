"""One token per row: read the state once, append one record, and fold rings that it fills.

Owns the decode kernel and its two launchers. `decode` writes no state. `step` also commits the
token and flushes the rows whose ring it fills; rows decide by their own cursors. With one copy that
is one launch, which reads the state once for both jobs. With two, a flush kernel follows: the
registers that encoding a copy takes would slow every step down.

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
from replayssm.ops.mamba2.triton_flush import flush
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
from replayssm.ops.quantize.layout import reads_words, stored
from replayssm.ops.quantize.packing import encode_elements
from replayssm.ops.quantize.rounding import fact
from replayssm.ops.quantize.tiles import load_codes, load_vector_for, times_vector, values_of
from replayssm.ops.triton_common import Cursors, arrive, prefix_sums
from replayssm.policy import PrecisionPolicy


@triton.jit(do_not_specialize=["layer"])
def decode_kernel(
    out,                                # [B, H, P] float32
    tokens, A, ring, cursors,           # Tokens, [H], Ring, Cursors
    read, layer,                        # Stored
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    READ: tl.constexpr, RING: tl.constexpr, D_PER_CHANNEL: tl.constexpr,
    COMMIT: tl.constexpr,               # whether the token is committed
    FLUSH: tl.constexpr,                # and a ring that it fills folded into `read`
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of a row, B)."""
    row = tl.program_id(1)
    group, first_p, head, head_of, p, in_heads, in_tile = tile_rows(
        tl.program_id(0), H, P, G, HEADS, BP
    )
    EXACT: tl.constexpr = P % BP == 0 and (H // G) % HEADS == 0
    in_rows = None if EXACT else in_tile
    state_row = head_of * P + p
    n = tl.arange(0, WIDTH)

    # Loads come first, those that need no cursor before those that do: what they wait for is what
    # a program's time goes to.
    group_n = group * N + n
    C = tl.load(tokens.C + row * tokens.C_row + group_n, mask=n < N, other=0).to(tl.float32)
    C_read = load_vector_for(tokens.C + row * tokens.C_row + group * N, N, WIDTH, READ)
    B_new = tl.load(tokens.B + row * tokens.B_row + group_n, mask=n < N, other=0)
    x_given = tl.load(tokens.x + row * tokens.x_row + state_row, mask=in_tile, other=0)
    dt_new = tl.load(tokens.dt + row * tokens.dt_row + head, mask=in_heads, other=0.0)
    rate = tl.load(A + head, mask=in_heads, other=0.0)
    slot = tl.load(cursors.slots + row).to(tl.int64)
    if slot < 0:
        return
    pos = tl.load(cursors.pos + slot).to(tl.int32)
    loaded = load_codes(read, slot, state_row, in_rows, P, N, WIDTH, READ)
    ring_B = ring.B + slot * ring.B_slot + group * L * N
    ring_dt = ring.dt + slot * ring.dt_slot + head * L
    ring_x = ring.x + slot * ring.x_slot + head_of * L * P + p
    B = load_past(ring_B + n, N, n < N, pos, BL, RING)  # [BL, WIDTH]
    dt = load_past(ring_dt, 1, in_heads, pos, BL, FP32_RECORDS)  # [BL, HEADS]
    x = load_past(ring_x, P, in_tile, pos, BL, RING)  # [BL, R]
    # The state is read once, as a tile that a flush can reuse where that costs an output nothing.
    REUSE: tl.constexpr = FLUSH and not reads_words(READ, N)
    if REUSE:
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

    if fits:
        FORMAT: tl.constexpr = fact(RING, "format")
        tl.store(ring_x + pos * P, encode_elements(x_new, FORMAT), mask=in_tile)
        if first_p == 0:
            tl.store(ring_dt + pos, dt_new, mask=in_heads)
            if tl.program_id(0) % (tl.num_programs(0) // G) == 0:
                tl.store(ring_B + pos * N + n, encode_elements(B_new, FORMAT), mask=n < N)

    full = pos + 1 == L
    if FLUSH:
        if full:
            if not REUSE:
                state = values_of(loaded, N, WIDTH, READ)
            state = fold(state, x, B, dt, log_decay, now, PRECISION)
            x_weighted = tl.reshape(by_head(x_new, HEADS) * dt_new[:, None], [HEADS * BP])
            state += x_weighted[:, None] * B_new[None, :]
            write_state(
                state, read, None, cursors, layer, slot, state_row, in_rows,
                P, BP, N, WIDTH, READ, None,
            )  # fmt: skip
    if COMMIT:
        if arrive(cursors, slot, tl.num_programs(0)):
            if FLUSH:
                if full:
                    tl.store(cursors.flushes + slot, tl.load(cursors.flushes + slot) + 1)
                tl.store(cursors.pos + slot, tl.where(full, 0, pos + 1).to(tl.int64))
            else:
                tl.store(cursors.pos + slot, (pos + 1).to(tl.int64))


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
        Outputs [B, 1, H, P] float32; padding rows are not written.

    Raises:
        ValueError: something has no kernel, or shapes disagree.
    """
    return _launch(read, ring, policy, cursors, inputs, launch)


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
) -> Tensor:
    """`decode`, then commit the token, then flush the rows whose ring it filled.

    In place: ring, cursors (pos, flushes, saturated, not_finite), and for full rows checkpoint and
    read copy. Other arguments, result and errors as in `decode` and `flush`.
    """
    triton_launch.check_copies(policy, checkpoint, read_copy)
    if read_copy is None:
        return _launch(
            checkpoint,
            ring,
            policy,
            cursors,
            inputs,
            launch,
            commits=True,
            flushes=True,
            layer=layer,
        )
    out = _launch(read_copy, ring, policy, cursors, inputs, launch, commits=True)
    flush(checkpoint, read_copy, ring, policy, cursors, {"A": inputs.A}, layer=layer)
    return out


def _launch(
    read: Quantized,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: Mamba2Inputs,
    launch: Launch | None,
    *,
    commits: bool = False,
    flushes: bool = False,
    layer: int = 0,
) -> Tensor:
    sizes = triton_launch.sizes(read, ring, cursors, inputs, tokens=1)
    launch = launch or triton_launch.default_launch(
        "step" if flushes else "decode", policy, sizes, inputs.x.shape[0]
    )
    out = torch.empty(inputs.x.shape, dtype=torch.float32, device=inputs.x.device)
    decode_kernel[(triton_launch.tiles(sizes, launch), inputs.x.shape[0])](
        out,
        triton_launch.tokens(inputs),
        inputs.A,
        triton_launch.ring(ring),
        cursors,
        stored(read),
        layer,
        **sizes,
        READ=policy.checkpoint if flushes else triton_launch.reading(read),
        RING=triton_launch.ring_storage(policy, ring),
        D_PER_CHANNEL=inputs.D is not None and inputs.D.dim() == 2,
        COMMIT=commits,
        FLUSH=flushes,
        PRECISION=triton_launch.precision(policy, torch.float32, ring["B"].dtype),
        **launch.tile(sizes),
        BL=triton_launch.slots(sizes, least=16 if flushes else 1),
        WIDTH=triton_launch.width(sizes, read),
        **launch.options(),
    )
    return out
