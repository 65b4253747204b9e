"""Fold committed records into the state, round once, write checkpoint and read copy in one pass.

Owns what a decay per key channel adds to a flush: a kernel that finds, once a head, the decayed
keys that are folded and, where u is solved for, the two matrices that solve for it. What remains is
the same for both delta rules, `../gated_delta/triton_flush.py`.

Legend: triton_tiles.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.formats.quantized import Quantized
from replayssm.ops.gated_delta.triton_flush import Rule, flush_due
from replayssm.ops.gated_delta.triton_fold import FEW, decayed_size, may_be_few, mixes_size
from replayssm.ops.gated_delta.triton_launch import Launch, Ring
from replayssm.ops.gated_delta.triton_tiles import load_rows, substitute
from replayssm.ops.kimi_delta.triton_launch import default_launch
from replayssm.ops.kimi_delta.triton_tiles import pair_weights, sums_after, sums_before
from replayssm.ops.triton_common import (
    Cursors,
    bound,
    exact_dot,
    halves_of,
    load_ticket,
    precision_of,
    resident_programs,
)
from replayssm.policy import PrecisionPolicy

_COLUMNS = tl.constexpr(32)  # of keys that `_combine_many` takes at a time


@triton.jit
def combine_kernel(
    ring,  # Ring; with v and beta, u is solved for
    due,  # from `list_due`
    mixes,  # FP32, for each head of the rows that are due as `_combine` fills it, or None
    decayed,  # FP32, the same
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    SUMS: tl.constexpr,  # precision of sums of gates
    FULL: tl.constexpr,  # of FP32 times FP32
    BK: tl.constexpr,
    BL: tl.constexpr,
):
    """Grid of any size, of one warp each: what rows of a state have in common when it is folded.

    u is linear in v and S: with M = (I + A)^-1 diag(β), u = M v - M (K ⊙ e^G) Sᵀ for each row of v
    and S. `mixes` get M [BL, BL], transposed: [earlier, later], and M (K ⊙ e^G) [BL, BK]; `decayed`
    the decays of the state e^G_m [BK] and the keys to be folded, K ⊙ e^(G_m - G) [BL, BK].
    """
    end = tl.load(due).to(tl.int32) * HV
    first_work, programs = tl.program_id(0), tl.num_programs(0)
    for work in tl.range(bound(first_work), bound(end), bound(programs), disable_licm=True):
        ticket = load_ticket(due, work // HV)
        of_head = None
        if mixes is not None:
            of_head = mixes + work * mixes_size(BK, BL)
        of_keys = decayed + work * decayed_size(BK, BL)
        slot, head, count = ticket.slot, work % HV, ticket.pos
        if may_be_few(BL):
            if count <= FEW:
                _combine(ring, of_head, of_keys, slot, head, count, HK, HV, K, L, BK, FEW)
            else:
                _combine_many(
                    ring, of_head, of_keys, slot, head, count, HK, HV, K, L, SUMS, FULL, BK, BL
                )
        else:
            _combine(ring, of_head, of_keys, slot, head, count, HK, HV, K, L, BK, BL)


@triton.jit
def _combine(
    ring, mixes, decayed, slot, head, count,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    BK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """What `combine_kernel` leaves of a head with up to 16 records, each of which is a vector: a
    lane has all records of its channels, and no pair is computed that there is not."""
    RECORDS: tl.constexpr = L if L < BL else BL
    column, earlier = tl.arange(0, BK), tl.arange(0, BL)
    first = (slot * HV + head) * L  # this head's oldest record
    keys = ring.k + (slot * HK + head // (HV // HK)) * L * K + column
    gates = ring.g + first * K + column
    k, g, beta = (), (), ()
    for i in tl.static_range(RECORDS):  # Triton 3.9's interpreter wants a comparison here
        used = ((column < K) & (count > i)) != 0
        g = g + (tl.load(gates + i * K, mask=used, other=0.0),)
        k = k + (tl.load(keys + i * K, mask=used, other=0.0),)
        if mixes is not None:
            beta = beta + (tl.load(ring.beta + first + i, mask=count > i, other=0.0),)
    total = tl.zeros([BK], tl.float32)
    now = decayed + BK + column
    if mixes is None:
        for i in tl.static_range(BL - 1, -1, -1):
            if i < RECORDS:
                tl.store(now + i * BK, k[i].to(tl.float32) * tl.exp(total))
                total += g[i]
            else:
                tl.store(now + i * BK, total)  # zero
    else:
        # Decays are multiplied, as a state's are token by token: an exponential is five times the
        # work. Only that of the state, which is applied at every flush, is one of a sum.
        from_state = tl.full([BK], 1.0, tl.float32)
        past, combined, inverse = (), (), ()
        for i in tl.static_range(RECORDS):
            k_i, decay = k[i].to(tl.float32), tl.exp(g[i])
            total += g[i]
            from_state *= decay
            # Row i of the solution is final once the earlier ones are taken out of it.
            row, mix = k_i * from_state, tl.where(earlier == i, 1.0, 0.0)
            keys_now = ()
            for j in tl.static_range(i):
                key = past[j] * decay
                keys_now = keys_now + (key,)
                weight = tl.sum(key * k_i, 0)
                row -= combined[j] * weight
                mix -= inverse[j] * weight
            past = keys_now + (k_i,)
            combined = combined + (row * beta[i],)
            inverse = inverse + (mix * beta[i],)
        zero = tl.zeros([BK], tl.float32)
        for i in tl.static_range(BL):
            tl.store(now + i * BK, past[i] if i < RECORDS else zero)
            tl.store(mixes + BL * BL + i * BK + column, combined[i] if i < RECORDS else zero)
            mix = inverse[i] if i < RECORDS else tl.zeros([BL], tl.float32)
            tl.store(mixes + earlier * BL + i, mix)
    tl.store(decayed + column, tl.exp(total))


@triton.jit
def _combine_many(
    ring, mixes, decayed, slot, head, count,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    SUMS: tl.constexpr, FULL: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """`_combine` of more records, some of their columns at a time."""
    record = tl.arange(0, BL)
    first = (slot * HV + head) * L
    keys, gates = ring.k + (slot * HK + head // (HV // HK)) * L * K, ring.g + first * K
    past = record < count
    k_k = tl.zeros([BL, BL], tl.float32)
    for start in range(0, BK, _COLUMNS):
        column = start + tl.arange(0, _COLUMNS)
        in_k = column < K
        k = load_rows(keys, record, K, past, column, in_k)  # [BL, _COLUMNS]
        g = load_rows(gates, record, K, past, column, in_k)
        at = BK + record[:, None] * BK + column[None, :]
        in_row = column[None, :] < BK
        tl.store(decayed + column, tl.exp(tl.sum(g, 0)), mask=column < BK)
        tl.store(decayed + at, k * tl.exp(sums_after(g, SUMS)), mask=in_row)
        if mixes is not None:
            at = BL * BL + record[:, None] * BK + column[None, :]
            tl.store(mixes + at, k * tl.exp(sums_before(g, SUMS)), mask=in_row)
            k_k, _ = pair_weights(keys, K, None, 0, gates, K, ring.k, count, column, in_k, k_k, k_k)
    if mixes is not None:
        beta = tl.load(ring.beta + first + record, mask=past, other=0.0)
        scaled = tl.where(record[:, None] == record[None, :], beta[None, :], 0.0)
        mix = substitute(scaled, k_k * beta[None, :], L if L < BL else BL, BL)
        tl.store(mixes + record[:, None] * BL + record[None, :], mix)
        tl.debug_barrier()
        mix = tl.load(mixes + record[None, :] * BL + record[:, None])  # transposed
        for start in range(0, BK, _COLUMNS):
            column = start + tl.arange(0, _COLUMNS)
            at = mixes + BL * BL + record[:, None] * BK + column[None, :]
            in_row = column[None, :] < BK
            k = tl.load(at, mask=in_row, other=0.0)
            tl.debug_barrier()
            tl.store(at, exact_dot(mix, k, tl.zeros_like(k), FULL), mask=in_row)


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
) -> None:
    """Commit one record of every row, and `flush` the rows whose ring it filled."""
    flush_due(checkpoint, read_copy, ring, policy, cursors, layer, None, _RULE, commits=True)


def _combine_heads(
    ring: Ring, due: Tensor, heads: int, constants: Mapping[str, Any], fused: bool
) -> tuple[Tensor | None, Tensor]:
    """See `Rule`. Nothing is rounded here, so that `fused` needs not hold."""
    names = ("HK", "HV", "K", "L", "BK", "BL")
    constants = {name: constants[name] for name in names}

    def empty(size: int) -> Tensor:
        return torch.empty(heads * size, dtype=torch.float32, device=due.device)

    mixes = None if ring.v is None else empty(mixes_size(constants["BK"], constants["BL"]))
    decayed = empty(decayed_size(constants["BK"], constants["BL"]))
    # With 168 registers more programs share a multiprocessor; those for longer rings would spill.
    many = may_be_few(constants["BL"])
    resident = 8 if many else 16 if mixes is None else 12
    combine_kernel[(min(heads, resident_programs(due.device, resident)),)](
        ring,
        due,
        mixes,
        decayed,
        **constants,
        SUMS=precision_of(torch.float32, torch.bfloat16),
        FULL=halves_of(torch.float32, torch.float32),
        num_warps=1,
        maxnreg=None if many else 168,
    )
    return mixes, decayed


_RULE = Rule(default_launch, _combine_heads)
