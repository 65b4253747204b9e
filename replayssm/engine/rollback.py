"""Two ways to undo what the recurrent layers of a session have read: cursors, and snapshots.

Owns how a session reads tokens that may be rejected, and how it goes back. Must not know drafts,
attention or text.

`CursorRollback` is ours: tokens are read in windows that write nothing but ring records past the
cursor. Those that are kept are committed, the others are overwritten by the next window: no state
is copied, whatever the number of tokens. `SnapshotRollback` is the conventional way, for
comparison: token by token, with a copy of the recurrent state before each of them.

When a ring is flushed decides where a policy rounds, and so what it computes. With schedule
"aligned" every row is flushed after exactly as many tokens as in token-by-token decoding, L; the
ring has slots for more, so that a window fits wherever a row stands, and no row keeps tokens beyond
its L-th in the round that reads it. With "early" the ring has L slots, and a row whose ring cannot
take a window is flushed before it: what it has committed is folded, L tokens or fewer.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from replayssm.cache.replay import ReplayCache
from replayssm.models.session import ReplaySession
from replayssm.policy import PrecisionPolicy
from replayssm.state_update import Inputs, StateUpdate, select_tokens

SCHEDULES = ("aligned", "early")
UNDO = ("cursor", "snapshots")


def make_rollback(
    undo: str,
    policy: PrecisionPolicy,
    *,
    tokens: int,
    schedule: str,
    most_slots: int | None = None,
) -> "CursorRollback | SnapshotRollback":
    """The way called `undo` ("cursor" or "snapshots"), for up to `tokens` tokens at once.

    most_slots: of a ring; where it is too short for a window everywhere, some windows are shorter.
    """
    if undo not in UNDO:
        raise ValueError(f"undo {undo!r}: allowed are {', '.join(UNDO)}")
    if undo == "cursor":
        return CursorRollback(policy, tokens=tokens, schedule=schedule, most_slots=most_slots)
    if schedule != "aligned":
        raise ValueError(f"schedule {schedule!r}: with snapshots, only 'aligned' is possible")
    return SnapshotRollback(policy)


class CursorRollback:
    """Keep by committing, reject by not doing so (see module docstring).

    policy: what the session must be made with: the policy asked for, with slots for a window.
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        *,
        tokens: int,
        schedule: str,
        most_slots: int | None = None,
    ):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule {schedule!r}: allowed are {', '.join(SCHEDULES)}")
        if schedule == "early" and tokens > policy.ring_len:
            raise ValueError(
                f"{tokens} tokens at once do not fit a ring of {policy.ring_len} (schedule "
                "'early'): fewer drafts, a longer ring, or schedule 'aligned'"
            )
        self._tokens, self._aligned, self._ring_len = tokens, schedule == "aligned", policy.ring_len
        slots = policy.ring_len
        if self._aligned:
            slots += tokens - 1
            if most_slots is not None:
                slots = max(policy.ring_len, min(slots, most_slots))
        self.policy = replace(policy, ring_len=slots)
        self._session: ReplaySession | None = None
        self._read = self._windows = 0  # tokens, and windows they came in, since `keep`

    def attach(self, session: ReplaySession) -> None:
        """Make the decode passes of `session` (one group) read tentatively."""
        invariant = session.adapter.invariant
        self._session, session.reader = session, _read_singly if invariant else StateUpdate.window

    def limits(self) -> list[int]:
        """Of what is read next, how many tokens each row may keep."""
        if not self._aligned:
            return [self._tokens] * self._session.rows
        filled = [filled % self._ring_len for filled in self._filled()]
        room = self.policy.ring_len - max(filled)  # no window may be longer, whoever keeps it
        return [min(self._ring_len - mine, room) for mine in filled]

    def before(self, tokens: int) -> None:
        """A pass over `tokens` tokens follows. The first since `keep` flushes the rows that need
        it; a later one must see what the ones before it read, so that is committed for now.
        """
        if self._read:
            for update, cache in layers(self._session):
                update.commit(cache, cache.uncommitted)
        else:
            most = self._ring_len - (1 if self._aligned else self._tokens)
            due = torch.tensor(self._filled()) > most
            if bool(due.any()):
                for update, cache in layers(self._session):
                    update.flush(cache, due)
        self._read, self._windows = self._read + tokens, self._windows + 1

    def keep(self, counts: Tensor) -> None:
        """Row b keeps the first counts[b] tokens read since the last `keep`; counts [B], CPU."""
        for update, cache in layers(self._session):
            if self._windows > 1:
                update.commit(cache, cache.uncommitted)
                update.rollback(cache, self._read - counts)
            else:
                update.commit(cache, counts)
        self._read = self._windows = 0

    def _filled(self) -> list[int]:
        """Records in the ring of each row: the same in every layer."""
        _, cache = next(layers(self._session))
        return torch.as_tensor(cache.cursor).expand(self._session.rows).tolist()

    @property
    def bytes_per_draft(self) -> int:
        """Recurrent state that a draft token costs a sequence: none. (With schedule "aligned", the
        ring has a slot for it.)
        """
        return 0


def _read_singly(update: StateUpdate, cache: ReplayCache, inputs: Inputs) -> Tensor:
    """`StateUpdate.window`, in the order of sums of single tokens: each sees the records of those
    before it in the ring."""
    tokens, outputs = inputs[0].shape[1], []
    for token in range(tokens):
        outputs.append(update.window(cache, select_tokens(inputs, token, token + 1)))
        cache.advance(1)
    cache.advance(-tokens)
    cache.uncommitted = tokens
    return torch.cat(outputs, dim=1)


class SnapshotRollback:
    """Keep by going on, reject by putting back a copy (see module docstring).

    The copies are of everything that changes with a token: under a policy with ring length 1, the
    conventional state.
    """

    def __init__(self, policy: PrecisionPolicy):
        self.policy = policy
        self._session: ReplaySession | None = None
        self._copies: dict[int, list[ReplayCache]] = {}  # by layer: before each token

    def attach(self, session: ReplaySession) -> None:
        """Make the decode passes of `session` (one group) copy the state before each token."""
        self._session, session.reader = session, self._read

    def _read(self, update: StateUpdate, cache: ReplayCache, inputs: Inputs) -> Tensor:
        copies, outputs = self._copies.setdefault(update.layer, []), []
        for token in range(inputs[0].shape[1]):
            copies.append(cache.clone())
            outputs.append(update.step(cache, select_tokens(inputs, token, token + 1)))
        return torch.cat(outputs, dim=1)

    def limits(self) -> list[int]:
        """No row has a limit: rings are flushed on the way, and put back if need be."""
        return [1 << 30] * self._session.rows

    def before(self, tokens: int) -> None:
        """Nothing to be done."""

    def keep(self, counts: Tensor) -> None:
        """Row b keeps the first counts[b] tokens read since the last `keep`; counts [B], CPU."""
        for update, cache in layers(self._session):
            copies = self._copies.pop(update.layer)
            for count in set(counts.tolist()) - {len(copies)}:
                rows = (counts == count).nonzero()[:, 0]
                cache.assign(rows, copies[count].select(rows))

    @property
    def bytes_per_draft(self) -> int:
        """Recurrent state that a draft token costs a sequence: a copy, over all layers."""
        total = sum(sum(cache.bytes().values()) for _, cache in layers(self._session))
        return total // self._session.rows


def layers(session: ReplaySession) -> Iterator[tuple[StateUpdate, ReplayCache]]:
    """State update and cache of every recurrent layer of a session of one group, by reference."""
    for layer in session.layer_indices:
        ((update, cache),) = session.updates(layer)
        yield update, cache
