"""Fold committed records into the state, round once, write checkpoint and read copy in one pass.

Owns the flush kernel and its launchers. Most rows do not flush at most steps, and a program this
large leaves a multiprocessor room for few others: so programs share the tiles of a list of the rows
that are due, made on the device, instead of looking at one row each.

Legend: triton_tiles.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.formats.quantized import Quantized
from replayssm.ops.gated_delta.triton_fold import (
    combine_keys,
    decayed_size,
    fold_and_write,
    mixes_size,
    room_for,
)
from replayssm.ops.gated_delta.triton_launch import (
    Launch,
    Ring,
    default_launch,
    folding,
    ring_argument,
    sizes,
    writes,
)
from replayssm.ops.quantize.layout import stored
from replayssm.ops.triton_common import (
    Cursors,
    bound,
    halves_of,
    list_due,
    load_ticket,
    precision_of,
    resident_programs,
)
from replayssm.ops.triton_policy import scales_heads
from replayssm.policy import PrecisionPolicy


@triton.jit
def combine_kernel(
    ring,  # Ring
    due,  # from `list_due`
    mixes,  # FP32, for each head of the rows that are due as `combine_keys` fills it
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    KEYS: tl.constexpr,
    FULL: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
):
    """Grid of any size, of one warp each: what rows of a state have in common when u is solved for.

    Its steps depend on each other, and a program of `flush_kernel` leaves a multiprocessor room for
    few others meanwhile.
    """
    end = tl.load(due).to(tl.int32) * HV
    first_work, programs = tl.program_id(0), tl.num_programs(0)
    for work in tl.range(bound(first_work), bound(end), bound(programs), disable_licm=True):
        ticket = load_ticket(due, work // HV)
        of_head = mixes + work * mixes_size(BK, BL)
        combine_keys(
            ring, of_head, ticket.slot, work % HV, ticket.pos, HK, HV, K, L, KEYS, FULL, BK, BL
        )


@triton.jit(do_not_specialize=["layer"])
def flush_kernel(
    checkpoint,  # Stored
    read_copy,  # Stored, or None
    layer,
    ring,  # Ring; with v and beta, u is recomputed
    cursors,  # Cursors, of which only counters are used
    due,  # from `list_due`
    mixes,  # from `combine_kernel`; None where u is not recomputed
    decayed,  # FP32, `decayed_size` for each head of these rows, or None; see `fold_and_write`
    room,  # FP32, for each program as `room_for` says; None: it says 0
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    READ_COPY: tl.constexpr,
    WHOLE: tl.constexpr,  # a copy has a scale per head
    FULL: tl.constexpr,
    EXACT: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    BV: tl.constexpr,
    FOLDED: tl.constexpr,
    ROUNDED: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
):
    """Grid of any size: programs share the tiles of V, of all heads, of the rows that are due; the
    tiles of a head that has a scale go to one program."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    SHARES: tl.constexpr = 1 if WHOLE else TILES  # programs a head
    end = tl.load(due).to(tl.int32) * (HV * SHARES)
    SOLVES: tl.constexpr = ring.v is not None
    if room is not None:
        SIZE: tl.constexpr = room_for(SOLVES, WHOLE, CHECKPOINT, V, BV, BK, BL)[-1]
        room += tl.program_id(0) * SIZE
    first_work, programs = tl.program_id(0), tl.num_programs(0)
    # Addresses that are formed before a loop take registers all through it.
    for work in tl.range(bound(first_work), bound(end), bound(programs), disable_licm=True):
        ticket = load_ticket(due, work // (HV * SHARES))
        head = work // SHARES % HV
        first = 0 if WHOLE else work % TILES
        of_head = None
        if SOLVES:
            of_head = mixes + work // SHARES * mixes_size(BK, BL)
        of_keys = None
        if decayed is not None:
            of_keys = decayed + work // SHARES * decayed_size(BK, BL)
        fold_and_write(
            checkpoint, read_copy, layer, ring, cursors, of_head, room, ticket, head, first,
            HK, HV, K, V, L, CHECKPOINT, READ_COPY, WHOLE, FULL, EXACT,
            PIECES, PIECE, BV, FOLDED, ROUNDED, BK, BL, of_keys,
        )  # fmt: skip
        if room is not None:
            tl.debug_barrier()  # what is kept of the next head takes the place of this one's


def flush(
    checkpoint: Quantized,
    read_copy: Quantized | None,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    parameters: Mapping[str, Tensor],
    *,
    layer: int,
    rows: Tensor | None = None,
    launch: Launch | None = None,
) -> None:
    """Fold the committed records of some rows, write both copies, empty the rings; all in place.

    Args:
        checkpoint, read_copy: [S, HV, V, K], written for the rows that flush; read_copy None: there
            is one copy.
        ring: as in `decode`; not written. Where it keeps v and beta, u is recomputed against the
            checkpoint; otherwise the ring's u is folded.
        policy: how both copies round.
        cursors: of flushed rows, pos becomes 0, flushes grows by 1, saturated and not_finite by
            what was written. Random bits are keyed by seed, layer, copy, flushes and sequence.
        parameters: empty, see `reference.parameters`.
        layer: index of the layer in the model.
        rows: [B] bool or integer: which rows flush, whatever they hold; None: those with pos = L.
        launch: as in `decode`.

    Raises:
        ValueError: a policy, dtype or layout that the kernels do not take.
    """
    flush_due(checkpoint, read_copy, ring, policy, cursors, layer, launch, _RULE, rows=rows)


def commit_and_flush(
    checkpoint: Quantized,
    read_copy: Quantized | None,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    *,
    layer: int,
    launch: Launch | None = None,
) -> None:
    """Commit one record of every row, and `flush` the rows whose ring it filled."""
    flush_due(checkpoint, read_copy, ring, policy, cursors, layer, launch, _RULE, commits=True)


class Rule(NamedTuple):
    """What a delta rule's flush has of its own."""

    default_launch: Callable[[str, PrecisionPolicy, Mapping[str, int], int], Launch]
    # (ring, due, heads of the batch, constants, whether sums and products may be fused): `mixes`
    # and `decayed` of `flush_kernel`.
    combine: Callable[[Ring, Tensor, int, Mapping[str, Any], bool], tuple[Tensor | None, ...]]


def flush_due(
    checkpoint: Quantized,
    read_copy: Quantized | None,
    ring: Mapping[str, Tensor],
    policy: PrecisionPolicy,
    cursors: Cursors,
    layer: int,
    launch: Launch | None,
    rule: Rule,
    *,
    rows: Tensor | None = None,
    commits: bool = False,
) -> None:
    """`flush`, or with `commits` `commit_and_flush`, of any delta rule."""
    ring = ring_argument(ring)
    constants = sizes(ring, policy)
    storages = writes(policy, checkpoint, read_copy)
    batch = len(cursors.slots)
    kernel = "flush" if ring.v is None else "flush_solving"
    launch = launch or rule.default_launch(kernel, policy, constants, batch)
    due = list_due(cursors, constants["L"], rows, moves=True, commits=commits)
    work = batch * constants["HV"]
    if not scales_heads(policy):
        work *= launch.tiles(constants)
    programs = min(work, resident_programs(due.device, launch.resident))
    options = {
        **constants,
        **storages,
        **folding(policy, ring, constants, launch),
    }
    compiled = launch.options(*storages.values())
    heads = batch * constants["HV"]
    mixes, decayed = rule.combine(ring, due, heads, options, compiled["enable_fp_fusion"])
    if decayed is not None:
        options["FULL"] = halves_of(decayed.dtype, ring.u.dtype)
    flush_kernel[(programs,)](
        stored(checkpoint),
        None if read_copy is None else stored(read_copy),
        layer,
        ring,
        cursors,
        due,
        mixes,
        decayed,
        _room_of(ring, programs, options),
        **options,
        **compiled,
    )


def _combine(
    ring: Ring, due: Tensor, heads: int, constants: Mapping[str, Any], fused: bool
) -> tuple[Tensor | None, None]:
    """See `Rule`."""
    if ring.v is None:
        return None, None
    size = mixes_size(constants["BK"], constants["BL"])
    mixes = torch.empty(heads * size, dtype=torch.float32, device=due.device)
    names = ("HK", "HV", "K", "L", "FULL", "BK", "BL")
    combine_kernel[(min(heads, resident_programs(due.device, 16)),)](
        ring,
        due,
        mixes,
        **{name: constants[name] for name in names},
        KEYS=precision_of(ring.k.dtype, ring.k.dtype),
        num_warps=1,
        enable_fp_fusion=fused,
    )
    return mixes, None


_RULE = Rule(default_launch, _combine)


def _room_of(ring: Ring, programs: int, options: Mapping) -> Tensor | None:
    """Room for so many programs of `fold_and_write`, given its constants."""
    names = ("WHOLE", "CHECKPOINT", "V", "BV", "BK", "BL")
    size = room_for(ring.v is not None, *(options[name] for name in names))[-1]
    return torch.empty(programs * size, dtype=torch.float32, device=ring.u.device) if size else None
