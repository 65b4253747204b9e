"""One token per row, T = 1: the state is read once, one record appended.

Owns the kernel of `decode` for many rows, and the launchers of `decode` and `step` (their other
kernels: triton_few.py, triton_step.py). `decode` writes no state. `step` also commits the token and
flushes the rows whose ring it fills: for few rows in one kernel, for many in launches of their own,
because the registers of a fold would slow every step down. With FP32 states alone, rows that flush
are left to the last of these launches, which reads their state once for both jobs.

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
from replayssm.ops.gated_delta.reference import GatedDeltaInputs
from replayssm.ops.gated_delta.triton_few import few_kernel
from replayssm.ops.gated_delta.triton_flush import commit_and_flush
from replayssm.ops.gated_delta.triton_launch import (
    Launch,
    Ring,
    default_launch,
    folding,
    power_of_two,
    programs_of,
    ring_argument,
    single_launch,
    sizes,
    state_columns,
    state_width,
    token_argument,
)
from replayssm.ops.gated_delta.triton_step import step_due_kernel
from replayssm.ops.gated_delta.triton_token import one_token
from replayssm.ops.quantize.layout import stored
from replayssm.ops.triton_common import (
    Cursors,
    list_due,
    precision_of,
    resident_programs,
)
from replayssm.ops.triton_inputs import compiled_in
from replayssm.ops.triton_pairs import in_pairs
from replayssm.ops.triton_policy import check_copies, shares_heads
from replayssm.ops.triton_rows import folded_columns, line_columns, no_token
from replayssm.policy import PrecisionPolicy


@triton.jit
def decode_kernel(
    slots,  # [B], of `cursors`: what is loaded first
    tokens,  # Tokens
    read,  # Stored
    ring,  # Ring
    out,  # [B, HV, V] FP32
    cursors,  # Cursors
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    READ: tl.constexpr,
    PRODUCTS: tl.constexpr,
    EXCEPT: tl.constexpr,  # rows with so many committed records are left alone; None: no row is
    BV: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
):
    """Grid (tiles of V, HV, B). Constants: `one_token`."""
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        no_token(out, row, tile, head, HV, V, BV)
        return
    count = tl.load(cursors.pos + slot).to(tl.int32)
    if EXCEPT is not None:
        if count == EXCEPT:
            return
    one_token(
        out, tokens, ring, read, row, slot, count, tile, head,
        HK, HV, K, V, L, READ, PRODUCTS, False, BV, BK, BL, COLUMNS, KEY_COLUMNS,
    )  # fmt: skip


def decode(
    read: Quantized,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: GatedDeltaInputs,
    *,
    launch: Launch | None = None,
) -> Tensor:
    """Outputs of one token per row; its record enters the ring at the cursor, which stays.

    Args:
        read: what outputs read, [S, HV, V, K]; not written.
        ring: of S slots, contiguous, as `reference.ring_layout`; slot `pos` of each row is written.
        policy: its `read_storage` is the storage of `read`.
        cursors: rows; pos < L, or the row's outputs are NaN and its record is dropped.
        inputs: of B rows and one token.
        launch: see `Launch`; by default from the table of `triton_launch`.

    Returns:
        Outputs [B, 1, HV, V] FP32, zero in padding rows.

    Raises:
        ValueError: a policy, dtype or layout that the kernels do not take.
    """
    records = ring_argument(ring)
    return _decode(read, records, policy, cursors, inputs, launch, sizes(records, policy))


def _decode(
    read: Quantized,
    ring: Ring,
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: GatedDeltaInputs,
    launch: Launch | None,
    constants: Mapping[str, int],
    *,
    excepted: int | None = None,
) -> Tensor:
    batch = len(cursors.slots)
    kernel = "decode_bf16" if _are_bf16(ring, inputs) else "decode"
    launch = launch or default_launch(kernel, policy, constants, batch)
    if launch.ahead:
        return _few(read, ring, policy, cursors, inputs, launch, constants)
    out = torch.empty(inputs.v.shape, dtype=torch.float32, device=inputs.v.device)
    decode_kernel[(launch.tiles(constants), constants["HV"], batch)](
        cursors.slots,
        token_argument(inputs),
        stored(read),
        ring,
        out,
        cursors,
        **constants,
        **_reading(policy, ring, constants, inputs, launch),
        EXCEPT=excepted,
        **launch.options(),
        BV=launch.block_v,
        BK=state_width(policy, constants),
    )
    return out


def step(
    checkpoint: Quantized,
    read_copy: Quantized | None,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: GatedDeltaInputs,
    *,
    layer: int,
    launch: Launch | None = None,
    flush_launch: Launch | None = None,
    single: bool | None = None,
) -> Tensor:
    """`decode`, then commit the token, then flush the rows whose ring it filled.

    In place: ring, cursors (pos, flushes, saturated, not_finite), and for full rows checkpoint and
    read copy. `single`: whether one kernel does it all; None: for few rows it does, where waiting
    for launches would take longer than the work; then `launch` is that kernel's. Other arguments,
    result and errors as in `decode` and `flush`.

    Raises:
        ValueError: also where one kernel is asked for and has no launch for so many rows.
    """
    check_copies(policy, checkpoint, read_copy)
    read = checkpoint if read_copy is None else read_copy
    records = ring_argument(ring)
    constants = sizes(records, policy)
    alone = single_launch(policy, constants, len(cursors.slots))
    if single is None:
        single = alone is not None and launch is None and flush_launch is None
    if not single and read_copy is None and policy.checkpoint.code_bits == 32:
        token = (policy, cursors, inputs)
        out = _decode(read, records, *token, launch, constants, excepted=constants["L"] - 1)
        due = list_due(cursors, constants["L"], moves=True, commits=True)
        _step_due(checkpoint, records, *token, flush_launch, constants, due, out, layer)
        return out
    if not single:
        out = _decode(read, records, policy, cursors, inputs, launch, constants)
        commit_and_flush(
            checkpoint, read_copy, ring, policy, cursors, layer=layer, launch=flush_launch
        )
        return out
    launch = launch or alone
    if launch is None:
        raise ValueError(
            f"single: {len(cursors.slots)} rows of {constants['HV']} heads are too many for one "
            "kernel unless `launch` says how"
        )
    both = (checkpoint, read_copy)
    return _few(read, records, policy, cursors, inputs, launch, constants, copies=both, layer=layer)


def _few(
    read: Quantized,
    ring: Ring,
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: GatedDeltaInputs,
    launch: Launch,
    constants: Mapping[str, int],
    *,
    copies: tuple[Quantized | None, Quantized | None] = (None, None),
    layer: int = 0,
) -> Tensor:
    """`decode`, or, given both copies, `step` in one kernel."""
    commits = copies[0] is not None
    tiles = launch.tiles(constants)
    cut = f"block_v {launch.block_v}"
    shared = commits and shares_heads(policy, constants["HV"], tiles, cut)
    written = (policy.checkpoint, policy.read_copy) if commits else (None, None)
    columns, width = line_columns(8 * ring.k.element_size()), state_width(policy, constants)
    tokens = compiled_in(token_argument(inputs))
    out = torch.empty(inputs.v.shape, dtype=torch.float32, device=inputs.v.device)
    few_kernel[(tiles, constants["HV"], len(cursors.slots))](
        cursors.slots,
        tokens,
        compiled_in(stored(read)),
        ring,
        out,
        cursors,
        *(None if copy is None else compiled_in(stored(copy)) for copy in copies),
        layer,
        **constants,
        READ=policy.read_storage,
        CHECKPOINT=written[0],
        READ_COPY=written[1],
        SHARED=shared,
        THREADS=32 * launch.num_warps,
        BV=launch.block_v,
        BK=width,
        COLUMNS=state_columns(policy, constants),
        KEY_COLUMNS=min(columns, power_of_two(constants["K"])),
        FOLDED=folded_columns(policy.checkpoint, constants["K"], width),
        PAIRED=in_pairs((ring.k, tokens.k, tokens.q), constants["K"], tokens.k_row, tokens.q_row),
        **launch.options(*written),
    )
    return out


def _step_due(
    state: Quantized,
    ring: Ring,
    policy: PrecisionPolicy,
    cursors: Cursors,
    inputs: GatedDeltaInputs,
    launch: Launch | None,
    constants: Mapping[str, int],
    due: Tensor,
    out: Tensor,
    layer: int,
) -> None:
    rows = len(cursors.slots)
    launch = launch or default_launch("flush", policy, constants, rows)
    work = programs_of(launch, constants, rows)
    step_due_kernel[(min(work, resident_programs(due.device, launch.resident)),)](
        out,
        token_argument(inputs),
        ring,
        cursors,
        stored(state),
        layer,
        due,
        **constants,
        CHECKPOINT=policy.checkpoint,
        **folding(policy, ring, constants, launch),
        **_reading(policy, ring, constants, inputs, launch),
        **launch.options(policy.checkpoint),
    )


def _are_bf16(ring: Ring, inputs: GatedDeltaInputs) -> bool:
    return all(tensor.dtype == torch.bfloat16 for tensor in (ring.k, inputs.k, inputs.q))


def _reading(
    policy: PrecisionPolicy,
    ring: Ring,
    constants: Mapping[str, int],
    inputs: GatedDeltaInputs,
    launch: Launch,
) -> dict:
    """Constants of `one_token`: storage, kind of products, columns that are read at a time."""
    columns = line_columns(8 * ring.k.element_size())
    alone = launch.num_warps == 1 and constants["K"] % 32 == 0
    multiplies = alone and _are_bf16(ring, inputs)
    return {
        "READ": policy.read_storage,
        "PRODUCTS": precision_of(ring.k.dtype, inputs.q.dtype) if multiplies else None,
        "COLUMNS": state_columns(policy, constants),
        "KEY_COLUMNS": min(columns, power_of_two(constants["K"])),
    }
