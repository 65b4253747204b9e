"""A model at a batch size and a context, and the ways to keep its recurrent state: the arms.

Owns that all arms run the same model over the same attention cache, and differ in the recurrent
layers alone; and the two things that are timed, a decode step and a verification. Takes no times.

    conventional   the state is read and written for every token; to verify drafts it is read once
                   and written after every token, so that it can go back to any
    replay         a policy: checkpoint, ring, read copy; drafts are verified in a window

No text of the context's length is read: attention storage is filled with random numbers and the
rows are said to hold so many tokens.

Legend: B rows, T tokens of a verification (drafts and the token before them), L ring slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from replayssm.cache.replay import ReplayCache
from replayssm.engine.decode import decode
from replayssm.engine.rollback import layers, make_rollback
from replayssm.engine.sampling import Sampler
from replayssm.engine.stream import Stream
from replayssm.models.kv_cache import AppendLayer, Cache, cache_tensors, filled_cache
from replayssm.models.session import ReplaySession, RowGroup
from replayssm.ops.capability import MAX_RING_LEN
from replayssm.policy import PrecisionPolicy, parse_policy
from replayssm.state_update import StateUpdate
from replayssm.study.bench_layer import Probe, Read
from replayssm.study.bench_step_records import CONVENTIONAL

REPLAY = "replay"
STATES = ("fp32", "fp16", "bf16")  # of a conventional state


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way: its kind, its policy, and the policy's label without a ring length."""

    kind: str
    label: str
    policy: PrecisionPolicy

    def verifying(self, recurrence: str, tokens: int) -> PrecisionPolicy:
        """The policy with ring slots for a window of `tokens` wherever a row stands."""
        if self.kind == CONVENTIONAL:
            return self.policy
        most = MAX_RING_LEN[recurrence]
        rollback = make_rollback(
            "cursor", self.policy, tokens=tokens, schedule="aligned", most_slots=most
        )
        return rollback.policy


def conventional_arm(state: str) -> Arm:
    """The conventional way with a state in the format `state`."""
    return Arm(kind=CONVENTIONAL, label=state, policy=parse_policy(f"{state}@1"))


def replay_arm(label: str, ring_len: int) -> Arm:
    """The policy `label`, which says no ring length, with a ring of `ring_len`."""
    return Arm(kind=REPLAY, label=label, policy=parse_policy(f"{label}@{ring_len}"))


def conventional_reader(launch, snapshots: Tensor | None = None) -> Read:
    """A session's reader; `snapshots` [B, T, heads, rows, cols] are written by every layer in turn.

    One layer's snapshots are all that is kept: those of a whole model at a large batch would leave
    no memory for the model. The traffic is the same.
    """
    from replayssm.state_update.triton_conventional import ConventionalReader

    def kept(update: StateUpdate, cache: ReplayCache, tokens: int) -> Tensor:
        return snapshots

    return ConventionalReader(launch, snapshots=None if snapshots is None else kept)


def new_snapshots(update: StateUpdate, cache: ReplayCache, tokens: int) -> Tensor:
    """Room for the states of one layer after each of `tokens` tokens."""
    shape = (cache.batch, tokens, *update.geometry.state_shape)
    return torch.empty(shape, dtype=cache.checkpoint.data.dtype, device=cache.pos.device)


class Stage:
    """B rows of a model that hold `context` tokens: an attention cache, which its arms share.

    room: tokens that an arm may read after that.
    """

    def __init__(self, probe: Probe, *, batch: int, context: int, room: int, backend: str):
        self.probe, self.batch, self.context = probe, batch, context
        self._room, self._backend = room, backend
        prefilled = probe.prefilled
        distinct = len(prefilled.source)
        self._source = [row % distinct for row in range(batch)]
        self.cache = filled_cache(
            prefilled.adapter.config,
            cache_tensors(prefilled.cache),
            rows=self._source,
            capacity=context + room,
        )
        fill_attention(self.cache)

    def open(self, policy: PrecisionPolicy, read: Read) -> Stream:
        """A stream of the rows whose recurrent layers read by `read`, under `policy`."""
        group = RowGroup(policy=policy, sequences=tuple(range(self.batch)), seeds=(0,) * self.batch)
        stream = Stream(
            self.probe.adapter,
            [group],
            source=self._source,
            capacity=self.context + self._room,
            backend=self._backend,
        )
        prefilled = self.probe.prefilled
        stream.session.hand_over(prefilled.session.prefill_states(), source=self._source)
        stream.session.reader, stream.cache = read, self.cache
        seek(stream, self.context)
        return stream

    def sequence_bytes(self, stream: Stream) -> int:
        """Bytes of attention and convolution inputs of one sequence of `stream` at this context, to
        which it is put back.
        """
        seek(stream, self.context)
        return sum(t[:1].nbytes for t in cache_tensors(self.cache).values() if t.dim() > 1)


def state_bytes(arm: Arm, session: ReplaySession, drafts: int = 0) -> tuple[int, int]:
    """Bytes of recurrent state of one sequence for decoding, and what verifying `drafts` drafts
    needs beside that: ring slots beyond L of a session made for it, or a state for each draft. (A
    conventional state has neither ring nor cursor.)
    """
    parts = session.state_bytes()
    if arm.kind == CONVENTIONAL:
        return parts["checkpoint"], drafts * parts["checkpoint"]
    slots = session.groups[0].policy.ring_len
    more = parts["ring"] * (slots - arm.policy.ring_len) // slots
    return sum(parts.values()) - more, more


def fill_attention(cache: Cache) -> None:
    """Random numbers in all attention storage of `cache`, whatever it holds, in place."""
    # A fraction at a time: random numbers are made in FP32, and storage may fill the device.
    for layer in cache.layers:
        if isinstance(layer, AppendLayer):
            for storage in layer.storage:
                for row in storage:
                    row.normal_()


def seek(stream: Stream, length: int) -> None:
    """Pretend that `length` tokens have been read: what a cache holds of them is as it is."""
    for layer in stream.cache.layers:
        if isinstance(layer, AppendLayer):
            layer.seek(length)
    stream.position = length


# -- what is timed ---------------------------------------------------------------------------------
def decoding(stream: Stream, steps: int) -> Iterator[Tensor]:
    """Greedy decoding of `stream`, a step at a time: the engine's own loop."""
    rows = len(stream.source)
    logits = torch.zeros(rows, stream.adapter.vocab_size, device=stream.adapter.device)
    return decode(
        stream,
        logits,
        max_new_tokens=steps + 1,
        prompt_ids=range(rows),
        stop_tokens=(),
        sampler=Sampler(),
    )


def kept_in_a_cycle(arm: Arm, tokens: int) -> list[int]:
    """Tokens kept by each verification between two flushes when every draft is right: as many as
    the ring still takes. A conventional state has no cycle.
    """
    if arm.kind == CONVENTIONAL:
        return [tokens]
    left, kept = arm.policy.ring_len, []
    while left:
        kept.append(min(tokens, left))
        left -= kept[-1]
    return kept


def verification(stream: Stream, tokens: Tensor) -> Callable[[], None]:
    """Read `tokens` [B, T] and choose the token after each; nothing is kept of them yet.

    Winding back attention and convolutions, a gather a layer, is not part of it: all but the last
    of a cycle keep all they read.
    """
    session, adapter, cursor = stream.session, stream.adapter, stream.cache.row_cursor
    if cursor is not None:  # as a graph needs it that is replayed at later positions
        cursor.bound = stream.capacity

    def call() -> None:
        with session:
            logits = adapter.forward(tokens, stream.cache, start=stream.position)
        logits.argmax(dim=-1)

    return call


def committing(session: ReplaySession, tokens: int, keep: int) -> Callable[[], None]:
    """Keep the first `keep` of the `tokens` that a verification has read."""

    def call() -> None:
        for update, cache in layers(session):
            cache.uncommitted = tokens  # a replayed verification does not say so
            update.commit(cache, keep)

    return call


def flushing(session: ReplaySession) -> Callable[[], None]:
    """Fold every layer's ring into its checkpoint."""

    def call() -> None:
        for update, cache in layers(session):
            update.flush(cache)

    return call


def recurrence_alone(
    session: ReplaySession, inputs, keep: int, *, most_layers: int | None = None
) -> Callable[[], None]:
    """What the recurrent layers, or the first `most_layers` of them, do of a step, or of a
    verification that keeps `keep` tokens.
    """

    def call() -> None:
        for update, cache in islice(layers(session), most_layers):
            session.reader(update, cache, inputs)
            if session.reader is StateUpdate.window:
                update.commit(cache, keep)

    return call
