"""Several policies of one layer in torch: rows are stored apart and computed together.

Owns `step_together`, which does to every cache what `StateUpdate.step` does, to the last bit: a
policy says how numbers are stored, and what is computed from them is the same for all, with bits
that depend on no other row (`ops/ring.py`). Where states are small, one operation over all rows
takes hardly longer than one over the rows of a single policy. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.cache.replay import ReplayCache
from replayssm.ops.ring import SLOT_MULTIPLE, append
from replayssm.state_update import StateUpdate
from replayssm.state_update.inputs import Inputs, select_tokens
from replayssm.state_update.reference import check_precision, store, surely_finite


def company(update: StateUpdate) -> tuple | None:
    """What updates of one layer must have in common for `step_together`; None: it goes alone."""
    _, rows, cols = update.geometry.state_shape
    # Other widths would move rows off the boundaries that keep their bits the same everywhere.
    aligned = rows % SLOT_MULTIPLE == 0 and cols % SLOT_MULTIPLE == 0
    if update.effective_backend != "reference" or not aligned:
        return None
    policy = update.policy
    records = update._ops.ring_layout(update.geometry, recompute=update._recompute)
    return policy.ring_len, policy.ring, policy.operand, *records


class _Member(NamedTuple):
    """One policy, its cache, and where the cache's rows are among all."""

    update: StateUpdate
    cache: ReplayCache
    rows: slice


@torch.no_grad()
def step_together(
    updates: Sequence[StateUpdate], caches: Sequence[ReplayCache], inputs: Inputs
) -> Tensor:
    """Outputs of any T tokens, FP32 [B, T, heads, rows]: `StateUpdate.step` of all `updates`.

    Args:
        updates: of one layer, with one `company`.
        caches: one each; all of their rows stand at the same slot.
        inputs: of B rows, those of one cache after those of another.
    """
    cursor = caches[0].cursor
    assert isinstance(cursor, int) and all(cache.cursor == cursor for cache in caches)
    check_precision(caches[0].seed.device)
    total = updates[0]._check(inputs, *caches)
    members, first = [], 0
    for update, cache in zip(updates, caches, strict=True):
        members.append(_Member(update, cache, slice(first, first + cache.batch)))
        first += cache.batch
    outputs, done = [], 0
    for tokens, (full,) in updates[0]._schedule(caches[0], total):
        if tokens:
            part = select_tokens(inputs, done, done + tokens)
            output, read = _window(members, part)
            outputs.append(output)
            done += tokens
        if full:
            _flush(members, read if tokens else None)
    for cache in caches:
        cache.uncommitted, cache.may_be_full = 0, False
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _window(members: Sequence[_Member], inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Outputs of a window that fits, and the values that they read, [B, heads, rows, cols].

    In place: the rings, and the cursors, which move past the window.
    """
    update, cache, _ = members[0]
    cursor, tokens = cache.cursor, inputs[0].shape[1]
    records = update._ops.records(inputs, recompute=update._recompute)
    for update, cache, rows in members:
        mine = {name: record[rows] for name, record in records.items()}
        update._reference.record(cache, cursor, mine)
    read = torch.cat([update._reference.read(cache) for update, cache, _ in members])
    outputs, computed = update._ops.window(
        read, _joined_ring(members), cursor, inputs, operand=update.policy.operand
    )
    for update, cache, rows in members:
        append(cache.ring, cursor, {name: record[rows] for name, record in computed.items()})
        cache.parameters = update._ops.parameters(inputs)
        cache.advance(tokens)
    return outputs, read


def _flush(members: Sequence[_Member], read: Tensor | None) -> None:
    """Folds the full rings of all members into their checkpoints and empties them, in place.

    `read` is what the last window read, where there was one; it is overwritten.
    """
    if read is None:
        state = torch.cat([u.policy.checkpoint.read(cache.checkpoint) for u, cache, _ in members])
    else:
        state = read
        for update, cache, rows in members:
            if cache.read_copy is not None:  # with one copy, what outputs read is the checkpoint
                state[rows] = update.policy.checkpoint.read(cache.checkpoint)
    update, cache, _ = members[0]
    state = update._ops.fold(
        state,
        _joined_ring(members),
        cache.cursor,
        cache.parameters,
        operand=update.policy.operand,
    )
    if not surely_finite(state):
        for update, cache, rows in members:
            update._reference.refuse_non_finite(cache, state[rows])
    store([(update.policy, cache) for update, cache, _ in members], state)


def _joined_ring(members: Sequence[_Member]) -> dict[str, Tensor]:
    """The decoded records of all rows, by name."""
    rings = [update._reference.decoded_ring(cache) for update, cache, _ in members]
    names = members[0].update._ops.ring_layout(
        members[0].update.geometry, recompute=members[0].update._recompute
    )
    return {name: torch.cat([ring[name] for ring in rings]) for name in names}
