"""Rows of one model that read tokens tentatively: keep some, forget the rest.

Owns that attention, convolutions and recurrence of every row go back together. Must not know where
tokens come from or why they are kept. Rows have lengths of their own (`models.lanes`): attention
goes back by a number, convolutions by a tape, recurrences by a cursor (`rollback.py`).

Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.engine.graphs import StepGraphs
from replayssm.engine.prefills import PrefillCache
from replayssm.engine.rollback import make_rollback
from replayssm.models.adapter import Adapter
from replayssm.models.convolution import ConvolutionTape
from replayssm.models.kv_cache import Cache
from replayssm.models.lanes import LaneCache
from replayssm.models.session import ReplaySession, RowGroup
from replayssm.ops.capability import MAX_RING_LEN
from replayssm.policy import PrecisionPolicy

# Passes of a kind before one is captured as a graph, which takes as long as several.
_PATIENCE = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedRow:
    """All that one row needs to go on elsewhere; tensors are copies.

    position: tokens it has read. room: tokens it may become long. state: recurrent tensors by name.
    """

    position: int
    room: int
    state: dict[str, Tensor]
    cache: Cache


class TentativeRows:
    """B rows under one policy; after `start`, `read` and `keep` take turns.

    Args:
        most_tokens: tokens that are read before `keep`, in one pass or several.
        schedule, undo: see `rollback.py`.
        graphs: whether passes are replayed from CUDA graphs, see `graphs.py`; with snapshots, none.

    `read` may be called several times before `keep`; a row that keeps nothing is as it was. Callers
    use inference mode.
    """

    def __init__(
        self,
        adapter: Adapter,
        policy: PrecisionPolicy,
        *,
        most_tokens: int,
        schedule: str = "aligned",
        undo: str = "cursor",
        backend: str = "auto",
        graphs: str = "auto",
    ):
        if most_tokens < 1:
            raise ValueError(f"most_tokens must be at least 1, got {most_tokens}")
        self.adapter, self.backend = adapter, backend
        self.positions: list[int] = []
        self._most = most_tokens
        self._rollback = make_rollback(
            undo,
            policy,
            tokens=most_tokens,
            schedule=schedule,
            most_slots=_most_slots(adapter, policy, backend),
        )
        self._read = 0
        self._mode = "off" if undo == "snapshots" else graphs

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sequences: Sequence[int],
        seeds: Sequence[int],
        room: int,
    ) -> Tensor:
        """Prefill every prompt (its state is rounded once); returns its last logits, FP32 [B, V].

        sequences, seeds: of random bits, one a row. room: tokens that follow a prompt, at most.
        """
        adapter, rows = self.adapter, len(prompts)
        for prompt in prompts:
            adapter.check_length(len(prompt) + room)
        prefills = PrefillCache(adapter)  # equal prompts are run once
        group = RowGroup(
            policy=self._rollback.policy, sequences=tuple(sequences), seeds=tuple(seeds)
        )
        self.session = ReplaySession(adapter, [group], backend=self.backend)
        self._rollback.attach(self.session)
        self._graphs = StepGraphs(self.session, mode=self._mode, patience=_PATIENCE)
        self._rooms = [len(prompt) + room for prompt in prompts]
        self.positions = [len(prompt) for prompt in prompts]
        logits, states = [], []
        for row, prompt in enumerate(prompts):
            stream, last = prefills.run(prompt)
            if row == 0:
                self.session.hand_over(stream.session.prefill_states(), source=[0] * rows)
                self._cache = LaneCache(adapter, stream.cache, rows, experts_by_row=False)
            self._cache.put(row, stream.cache, room=self._rooms[row] + self._most)
            states.append([state for _, state in stream.session.prefill_states()])
            logits.append(last)
        self.session.load_rows(range(rows), states, sequences=sequences, seeds=seeds)
        self._tape = ConvolutionTape(self._cache.cache, tokens=self._most)
        return torch.stack(logits)

    def limits(self) -> list[int]:
        """Of the tokens read next, how many each row may keep."""
        return self._rollback.limits()

    def read(self, tokens: Tensor) -> Tensor:
        """Read `tokens` [B, T] (int64); returns FP32 logits [B, T, V], valid until the next."""
        start, count = self._read, tokens.shape[1]
        self._rollback.before(count)
        self._cache.seek([position + start for position in self.positions])

        def forward(tokens: Tensor) -> Tensor:
            self._tape.before(start, count)
            with self.session:
                logits = self._cache.read(tokens)
            self._tape.after(start, count)
            return logits

        logits = self._graphs.step(
            tokens.to(self.adapter.device),
            self._cache.cache,
            forward,
            cursor=self._cache.cursor,
            place=start,
        )
        self._read += count
        return logits

    def keep(self, counts: Sequence[int]) -> None:
        """Row b keeps the first counts[b] of the tokens read since the last `keep`."""
        assert len(counts) == len(self.positions), "one count a row"
        if not all(0 <= count <= self._read for count in counts):
            raise ValueError(f"cannot keep {list(counts)} of {self._read} tokens")
        counted = torch.tensor(list(counts))
        self._rollback.keep(counted)
        self._tape.keep(counted)
        self.positions = [p + count for p, count in zip(self.positions, counts, strict=True)]
        self._read = 0

    def take(self, row: int) -> SavedRow:
        """A copy of `row`, for `put`; only after `keep`."""
        assert self._read == 0, "keep() first"
        return SavedRow(
            position=self.positions[row],
            room=self._rooms[row],
            state={name: tensor.clone() for name, tensor in self.session.row(row).items()},
            cache=self._cache.take(row, tokens=self.positions[row]),
        )

    def put(self, row: int, saved: SavedRow) -> None:
        """Continue `saved` in `row`, whatever was there; only after `keep`."""
        assert self._read == 0, "keep() first"
        self.session.put_row(row, saved.state)
        self._cache.put(row, saved.cache, room=saved.room + self._most)
        self.positions[row], self._rooms[row] = saved.position, saved.room

    def check_finite(self) -> None:
        """Raise NonFiniteStateError if a state was not finite when it was written."""
        self.session.check_finite()

    def state_bytes(self) -> dict[str, int]:
        """Bytes of recurrent state of one sequence by part, over all layers; "draft": what each
        draft token needs beside that.
        """
        return self.session.state_bytes() | {"draft": self._rollback.bytes_per_draft}


def _most_slots(adapter: Adapter, policy: PrecisionPolicy, backend: str) -> int | None:
    """Ring slots that kernels have, if kernels can be in use for `policy`."""
    kernels = backend == "triton" or (backend == "auto" and adapter.device.type == "cuda")
    most = MAX_RING_LEN.get(adapter.family.recurrence)
    return most if kernels and most is not None and policy.ring_len <= most else None
