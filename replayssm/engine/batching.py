"""Generating for many requests at once: lanes that are refilled as soon as a sequence ends.

Owns the lanes of a batch, when a sequence ends, and in which lane the next one starts. Must not
know tasks, text or scoring. Sequences in a batch have different lengths, and no padding reaches
one: prompts are run together as far as whole windows go (`prefills`), attention runs each over its
own keys (`models.lanes`), and the recurrent state has one cursor a row. The number of lanes never
changes during a run, so a sequence's tokens do not depend on which others run beside it, in which
order, or where it stands; in FP32 on the CPU, nor on how many lanes there are (a multiple of 8:
rows in the tail of a matrix product would be summed in another order).

A prompt is prefilled with an FP32 state that is rounded once, as servers do. To see what a policy
does to a long text, all but its first tokens can be read as decoding would read them, in windows of
whole rings (`prefill`).

V: vocabulary.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby, islice

import torch
from torch import Tensor

from replayssm.engine.graphs import StepGraphs
from replayssm.engine.lockstep import ROW_MULTIPLE
from replayssm.engine.prefills import MOST_TOGETHER, PrefillCache
from replayssm.engine.requests import Completion, Lane, Request, Row
from replayssm.engine.sampling import Sampler
from replayssm.engine.stream import Stream
from replayssm.models.adapter import Adapter
from replayssm.models.kv_cache import cache_tensors, filled_cache
from replayssm.models.lanes import LaneCache
from replayssm.models.session import ReplaySession, RowGroup
from replayssm.policy import PrecisionPolicy

# Steps before one is captured as a graph: a few answers are done by then.
_PATIENCE = 4

# Prompts read under the policy side by side: with many more, most rows would wait for the longest.
_MOST_READ = 64

# A sixteenth of the lanes may stand free until they are refilled together.
_LANES_PER_REFILL = 16


@torch.inference_mode()
def generate_many(
    adapter: Adapter,
    requests: Iterable[Request],
    policy: PrecisionPolicy,
    *,
    lanes: int = 8,
    stop_tokens: Collection[int] = (),
    sampler: Sampler | None = None,
    seed: int = 0,
    prefill: int | None = None,
    prefills: PrefillCache | None = None,
    backend: str = "auto",
    graphs: str = "auto",
) -> Iterator[Completion]:
    """Yield a completion for every request as it ends, under `policy`.

    Args:
        lanes: sequences decoded at once, rounded up to a multiple of 8.
        stop_tokens: ids that end any sequence.
        sampler: default greedy.
        seed: of stochastic rounding.
        prefill: tokens of a prompt that are prefilled; the policy acts on the rest already.
            Default: all.
        prefills: prompts that were run already; default: none are kept.
        graphs: whether steps are replayed from CUDA graphs: "auto", "on" or "off" (`graphs.py`).

    Takes all requests at once. Raises ValueError if prompt and new tokens exceed the model's
    positions (check all requests first: some may be answered by then), or if logits or states
    (NonFiniteStateError) are not finite.
    """
    for name, value in (("lanes", lanes), ("prefill", 1 if prefill is None else prefill)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    lanes = -(-lanes // ROW_MULTIPLE) * ROW_MULTIPLE
    batch = _Batch(adapter, policy, lanes, seed=seed, backend=backend, graphs=graphs)
    if prefill is not None:
        waiting = batch.read(requests, prefill)
    else:
        prefills = prefills or PrefillCache(adapter, max_bytes=0)
        waiting = batch.prefilled(requests, prefills)
    sampler, stops = sampler or Sampler(), frozenset(stop_tokens)

    def advance(running: list[Lane], logits: Tensor) -> list[Completion]:
        return _advance(running, logits, sampler, stops, policy)

    more = True
    while True:
        free = batch.free()
        # Starting sequences costs about as much for many as for one.
        while more and free and (len(free) >= batch.refill or not batch.busy()):
            rows = list(islice(waiting, len(free)))
            more = len(rows) == len(free)
            chosen = [row for row in rows if row.logits is not None]
            done = {}
            if chosen:
                logits = torch.stack([row.logits for row in chosen])
                done = {c.index: c for c in advance([row.lane for row in chosen], logits)}
            batch.start([row for row in rows if row.lane.index not in done])
            yield from done.values()
            free = batch.free()
        if not batch.busy():
            return
        logits = batch.step()
        places = [p for p, lane in enumerate(batch.lanes) if lane is not None and not lane.unread]
        if not places:
            continue
        if len(places) < len(batch.lanes):
            logits = logits[places]
        running = [batch.lanes[place] for place in places]
        ended = advance(running, logits)
        if ended:  # no answer comes from a state that was not finite
            batch.check_finite()
        for completion in ended:
            batch.end(completion.index)
            yield completion


def _advance(
    running: list[Lane], logits: Tensor, sampler: Sampler, stops: frozenset[int], policy
) -> list[Completion]:
    """Append the next token, chosen from `logits` [lanes, V], to each lane; those that end."""
    chosen = sampler.choose(
        logits,
        prompts=[lane.request.sequence for lane in running],
        position=torch.tensor([lane.position - 1 for lane in running]),
    )
    # Both at once: asking the device for a value is what a step waits for.
    tokens, finite = torch.stack([chosen, logits.isfinite().all(dim=-1)]).tolist()
    if not all(finite):
        lane = running[finite.index(0)]
        raise ValueError(
            f"logits are not finite under policy {policy.label}: request {lane.index}, position "
            f"{lane.position - 1}"
        )
    done = []
    for lane, token in zip(running, tokens, strict=True):
        finish = None
        if token in stops:
            finish = "stop_token"
        else:
            lane.tokens.append(token)
            if lane.request.stop is not None and lane.request.stop(lane.tokens):
                finish = "stop"
            elif len(lane.tokens) == lane.request.max_new_tokens:
                finish = "length"
        if finish:
            done.append(Completion(index=lane.index, tokens=tuple(lane.tokens), finish=finish))
    return done


class _Batch:
    """The lanes, their recurrent state (one session) and attention (one cache)."""

    def __init__(
        self,
        adapter: Adapter,
        policy: PrecisionPolicy,
        lanes: int,
        *,
        seed: int,
        backend: str,
        graphs: str,
    ):
        self.lanes: list[Lane | None] = [None] * lanes
        self.refill = max(1, lanes // _LANES_PER_REFILL)
        self._adapter, self._policy, self._seed = adapter, policy, seed
        self._backend, self._mode = backend, graphs
        self._session: ReplaySession | None = None
        self._cache: LaneCache | None = None
        self._graphs: StepGraphs | None = None

    def free(self) -> list[int]:
        return [place for place, lane in enumerate(self.lanes) if lane is None]

    def busy(self) -> bool:
        return any(lane is not None for lane in self.lanes)

    # -- prompts -----------------------------------------------------------------------------------
    def prefilled(self, requests: Iterable[Request], prefills: PrefillCache) -> Iterator[Row]:
        """Each request after its whole prompt has been prefilled; those that may become longest
        first: storage for all is there when steps are captured as graphs.
        """
        ordered = sorted(enumerate(requests), key=lambda item: -item[1].room)
        for _, request in ordered:
            self._adapter.check_length(request.room)
        together = min(len(self.lanes), MOST_TOGETHER)
        run = prefills.run_many([request.prompt for _, request in ordered], together=together)
        for (index, request), (prompt, logits) in zip(ordered, run, strict=True):
            length = len(request.prompt)
            self._open(prompt)
            yield Row(
                lane=Lane(index=index, request=request, position=length),
                cache=prompt.cache,
                states=[state for _, state in prompt.session.prefill_states()],
                logits=logits,
            )

    def read(self, requests: Iterable[Request], prefill: int) -> Iterator[Row]:
        """Each request after its prompt has been read under the policy, as far as whole windows go.

        As many prompts as there are lanes are read together, but no more than _MOST_READ, longest
        last. They start together and a row is taken out at its last whole window, so what the
        shorter rows read beyond their end reaches nobody.
        """
        width = min(len(self.lanes), _MOST_READ)
        ordered = sorted(enumerate(requests), key=lambda item: len(item[1].prompt))
        # Rows start together, so a prompt that is shorter than `prefill` starts with its likes.
        for first, alike in groupby(ordered, lambda item: min(prefill, len(item[1].prompt) - 1)):
            if first < 1:
                raise ValueError("a prompt of which a part is read needs at least two tokens")
            together = list(alike)
            for start in range(0, len(together), width):
                yield from self._read_group(together[start : start + width], first, width)

    def _read_group(
        self, group: list[tuple[int, Request]], first: int, width: int
    ) -> Iterator[Row]:
        window = self._policy.ring_len * max(1, 16 // self._policy.ring_len)
        rows = [request for _, request in group]
        rows += [rows[0]] * (width - len(rows))
        longest = max(len(request.prompt) for request in rows)
        padded = [[*request.prompt, *[0] * longest][:longest] for request in rows]
        tokens = torch.tensor(padded, device=self._adapter.device)
        stream = self._stream(rows, longest)
        stream.prefill(tokens[:, :first])
        self._open(stream)
        stream.hand_over()
        left = list(enumerate(group))
        while left:
            for item in [x for x in left if len(x[1][1].prompt) - stream.position <= window]:
                left.remove(item)
                row, (index, request) = item
                yield self._taken(stream, row, index, request)
            if left:
                stream.step(tokens[:, stream.position : stream.position + window])

    def _taken(self, stream: Stream, row: int, index: int, request: Request) -> Row:
        """A copy of row `row` of `stream`, with the rest of its prompt unread."""
        at = stream.position
        cache = filled_cache(
            self._adapter.config,
            cache_tensors(stream.cache),
            rows=[row],
            capacity=request.room,
        )
        return Row(
            lane=Lane(index=index, request=request, position=at, unread=list(request.prompt[at:])),
            tensors={k: v.clone() for k, v in stream.session.row(row).items()},
            cache=cache,
            logits=None,
        )

    def _stream(self, requests: Sequence[Request], capacity: int) -> Stream:
        for request in requests:
            self._adapter.check_length(request.room)
        return Stream(
            self._adapter,
            [self._group([request.sequence for request in requests])],
            source=range(len(requests)),
            capacity=capacity,
            backend=self._backend,
            graphs=self._mode,
        )

    def _group(self, sequences: Sequence[int]) -> RowGroup:
        seeds = (self._seed,) * len(sequences)
        return RowGroup(policy=self._policy, sequences=tuple(sequences), seeds=seeds)

    def _open(self, prefilled: Stream) -> None:
        """Make the lanes, once, as copies of a prefilled sequence: storage of the right shapes."""
        if self._session is not None:
            return
        lanes = len(self.lanes)
        self._session = ReplaySession(
            self._adapter, [self._group([0] * lanes)], backend=self._backend
        )
        self._graphs = StepGraphs(self._session, mode=self._mode, patience=_PATIENCE)
        states = prefilled.session.prefill_states()
        self._session.hand_over(states, source=[0] * lanes)
        self._cache = LaneCache(self._adapter, prefilled.cache, lanes)

    # -- lanes -------------------------------------------------------------------------------------
    def start(self, rows: Sequence[Row]) -> None:
        """Put sequences into the first free lanes."""
        places = self.free()[: len(rows)]
        fresh = [(place, row) for place, row in zip(places, rows, strict=True) if row.states]
        if fresh:
            self._session.load_rows(
                [place for place, _ in fresh],
                [row.states for _, row in fresh],
                sequences=[row.lane.request.sequence for _, row in fresh],
                seeds=[self._seed] * len(fresh),
            )
        for place, row in zip(places, rows, strict=True):
            if row.tensors is not None:
                self._session.put_row(place, row.tensors)
            self._cache.put(place, row.cache, room=row.lane.request.room)
            self.lanes[place] = row.lane

    def end(self, index: int) -> None:
        """Free the lane of request `index`."""
        place = next(p for p, lane in enumerate(self.lanes) if lane and lane.index == index)
        self.lanes[place] = None

    def check_finite(self) -> None:
        """Raise NonFiniteStateError if a state was not finite when it was written."""
        self._session.check_finite()

    def step(self) -> Tensor:
        """Every lane reads its next token; logits [lanes, V], of free lanes meaningless.

        They are valid until the next step.
        """
        tokens = [0] * len(self.lanes)
        positions = [0] * len(self.lanes)
        for place, lane in enumerate(self.lanes):
            if lane is not None:
                tokens[place] = lane.unread.pop(0) if lane.unread else lane.tokens[-1]
                positions[place] = lane.position
                lane.position += 1
        self._cache.seek(positions)
        read = torch.tensor(tokens, device=self._adapter.device)[:, None]
        cache = self._cache
        return self._graphs.step(read, cache.cache, self._forward, cursor=cache.cursor)

    def _forward(self, tokens: Tensor) -> Tensor:
        with self._session:
            return self._cache.step(tokens)
