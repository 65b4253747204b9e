"""Generating for many requests at once: lanes that are refilled as soon as a sequence ends.

Owns the lanes of a batch, when a sequence ends, and in which lane the next one starts. Must not
know tasks, text or scoring. Sequences in a batch have different lengths and are never padded: the
prompt of each is run on its own, attention runs each over its own keys (`models.lanes`), and the
recurrent state has one cursor a row. The number of lanes never changes during a run, so a
sequence's tokens do not depend on which others run beside it, in which order, or where it stands;
in FP32 on the CPU, nor on how many lanes there are (a multiple of 8: rows in the tail of a matrix
product would be summed in another order).

V: vocabulary.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replayssm.engine.lockstep import ROW_MULTIPLE
from replayssm.engine.sampling import Sampler
from replayssm.engine.stream import Stream
from replayssm.models.adapter import Adapter
from replayssm.models.lanes import LaneCache
from replayssm.models.session import ReplaySession, RowGroup
from replayssm.policy import PrecisionPolicy


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One sequence to be continued.

    prompt: token ids, at least one.
    max_new_tokens: it is cut after that many.
    sequence: its number in random bits, of sampling and of stochastic rounding, in [0, 2^32).
    stop: called with the new tokens after each of them (stop tokens excepted); true ends it.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sequence: int = 0
    stop: Callable[[Sequence[int]], bool] | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt needs at least one token")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.sequence < 1 << 32:
            raise ValueError(f"sequence must be in [0, 2^32), got {self.sequence}")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a request generated: its place among the requests, the new ids, and why it ended.

    tokens: without the stop token. finish: "stop_token", "stop" (the request's own `stop`), or
    "length".
    """

    index: int
    tokens: tuple[int, ...]
    finish: str


@dataclass(kw_only=True)
class _Lane:
    index: int
    request: Request
    position: int  # tokens read so far, prompt included
    tokens: list[int] = field(default_factory=list)


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
    backend: str = "auto",
) -> Iterator[Completion]:
    """Yield a completion for every request as it ends, under `policy`.

    Args: lanes: sequences decoded at once, rounded up to a multiple of 8. stop_tokens: ids that end
    any sequence. sampler: default greedy. seed: of stochastic rounding.

    Raises ValueError if prompt and new tokens exceed the model's positions (when the request is
    reached: check all of them first), or if logits are not finite.
    """
    if lanes < 1:
        raise ValueError(f"lanes must be at least 1, got {lanes}")
    batch = _Batch(adapter, policy, -(-lanes // ROW_MULTIPLE) * ROW_MULTIPLE, seed, backend)
    sampler, stops = sampler or Sampler(), frozenset(stop_tokens)
    waiting = enumerate(requests)
    while True:
        for place in batch.free():
            for index, request in waiting:
                lane, logits = batch.start(place, index, request)
                done = _advance([lane], logits[None], sampler, stops, policy)
                if not done:
                    break
                batch.end(place)
                yield done[0]
        if not batch.busy():
            return
        logits = batch.step()
        for place, completion in _ended(batch, logits, sampler, stops, policy):
            batch.end(place)
            yield completion


def _ended(batch, logits, sampler, stops, policy) -> list[tuple[int, Completion]]:
    places = batch.busy()
    running = [batch.lanes[place] for place in places]
    done = _advance(running, logits[places], sampler, stops, policy)
    where = {lane.index: place for place, lane in zip(places, running, strict=True)}
    return [(where[completion.index], completion) for completion in done]


def _advance(
    running: list[_Lane], logits: Tensor, sampler: Sampler, stops: frozenset[int], policy
) -> list[Completion]:
    """Append the next token, chosen from `logits` [lanes, V], to each lane; those that end."""
    finite = logits.isfinite().all(dim=-1)
    if not bool(finite.all()):
        lane = running[int((~finite).nonzero()[0])]
        raise ValueError(
            f"logits are not finite under policy {policy.label}: request {lane.index}, position "
            f"{lane.position - 1}"
        )
    chosen = sampler.choose(
        logits,
        prompts=[lane.request.sequence for lane in running],
        position=torch.tensor([lane.position - 1 for lane in running]),
    )
    done = []
    for lane, token in zip(running, chosen.tolist(), strict=True):
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

    def __init__(self, adapter: Adapter, policy: PrecisionPolicy, lanes: int, seed, backend):
        self.lanes: list[_Lane | None] = [None] * lanes
        self._adapter, self._policy, self._seed, self._backend = adapter, policy, seed, backend
        self._session: ReplaySession | None = None
        self._cache: LaneCache | None = None

    def free(self) -> list[int]:
        return [place for place, lane in enumerate(self.lanes) if lane is None]

    def busy(self) -> list[int]:
        return [place for place, lane in enumerate(self.lanes) if lane is not None]

    def start(self, place: int, index: int, request: Request) -> tuple[_Lane, Tensor]:
        """Run the prompt of `request` and put it into lane `place`; its last logits [V]."""
        length = len(request.prompt)
        self._adapter.check_length(length + request.max_new_tokens)
        alone = Stream(
            self._adapter,
            [self._group([request.sequence])],
            source=[0],
            capacity=length + request.max_new_tokens,
            backend=self._backend,
        )
        logits = alone.prefill(torch.tensor([list(request.prompt)]))[0]
        if self._session is None:
            self._open(alone)
        alone.hand_over()
        mine, theirs = self._session.tensors(), alone.session.tensors()
        for name, tensor in theirs.items():
            if tensor.dim():  # what has no row axis is equal in both
                mine[name][place] = tensor[0]
        self._cache.put(place, alone._cache)
        lane = _Lane(index=index, request=request, position=length)
        self.lanes[place] = lane
        return lane, logits

    def end(self, place: int) -> None:
        self.lanes[place] = None
        self._cache.clear(place)

    def step(self) -> Tensor:
        """Every lane reads its newest token; logits [lanes, V], of free lanes meaningless."""
        tokens = [0 if lane is None else lane.tokens[-1] for lane in self.lanes]
        positions = [0 if lane is None else lane.position for lane in self.lanes]
        device = self._adapter.device
        with self._session:
            logits = self._cache.step(
                torch.tensor(tokens, device=device), torch.tensor(positions, device=device)
            )
        for lane in self.lanes:
            if lane is not None:
                lane.position += 1
        return logits

    def _group(self, sequences: Sequence[int]) -> RowGroup:
        seeds = (self._seed,) * len(sequences)
        return RowGroup(policy=self._policy, sequences=tuple(sequences), seeds=seeds)

    def _open(self, prefilled: Stream) -> None:
        """Fill all lanes with copies of a prefilled sequence: storage of the right shapes."""
        lanes = len(self.lanes)
        self._session = ReplaySession(
            self._adapter, [self._group([0] * lanes)], backend=self._backend
        )
        states = prefilled.session.prefill_states()
        self._session.hand_over(states, source=[0] * lanes)
        self._cache = LaneCache(self._adapter, prefilled._cache, lanes)
