"""Where a greedy text is not what token-by-token decoding chooses: ties, or a fault.

Owns the comparison of a finished text with single-token decoding under the same policy. Must not
know how the text was made. Windows and single tokens sum in another order, so logits that agree to
rounding may rank differently, and two texts part there for good; decoding the *given* text token by
token finds every such place, not just the first.

How far apart rounding may drive two runs is the policy's: where a state lies near the middle of two
codes, another order of sums gives it the other code, and from there on the two runs differ by
rounding errors of that format. A narrow state as checkpoint amplifies this from flush to flush. So
the same text is also read in windows of whole rings, which is single-token decoding in another
order of sums and nothing else: what that changes is no fault of speculation.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.engine.stream import Stream
from replayssm.models.adapter import Adapter
from replayssm.models.session import RowGroup
from replayssm.policy import PrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class Tie:
    """A token that single-token decoding would not have chosen.

    place: in the answer, from 0. gap: logit of the best token less that of the chosen one, in
    units of the standard deviation of the logits there.
    """

    row: int
    place: int
    chosen: int
    best: int
    gap: float


@dataclass(frozen=True, kw_only=True)
class GreedyCheck:
    """What `check_greedy` found.

    tokens: of all answers.
    ties: every token of the answers that decoding would not have chosen.
    reordered: the same, if the answers are read in windows instead: what rounding alone does.
    spread: the largest difference of a logit between the two readings, in standard deviations of
        the logits there.
    """

    tokens: int
    ties: list[Tie]
    reordered: list[Tie]
    spread: float

    def faults(self, *, near: float = 1e-4) -> list[Tie]:
        """Ties that rounding does not explain: wider than `near` and than twice the spread; all of
        them, if there are many more than reordering has.

        If both come from rounding, they are two counts of rare events with about the same mean m,
        and their difference has a standard deviation of sqrt(2 m). Three of these are allowed, with
        `reordered` for m, or 1 where there are none: 4 ties then pass, 5 do not. (The ties' own
        number in m would allow more.) The means are not quite the same, as the text was made in
        shorter windows than those of a ring: hence one in 500 tokens more.

        What passes is not proved right: a fault that moves logits by less than the spread and
        seldom swaps two of them is not seen here, and under a policy that rounds coarsely the
        spread is wide. Bit for bit, speculation is compared by an invariant adapter
        (`models/invariance.py`).
        """
        wide = [tie for tie in self.ties if tie.gap > max(near, 2 * self.spread)]
        others = len(self.reordered)
        allowed = others + 3 * math.sqrt(2 * max(others, 1)) + self.tokens / 500
        return wide or (self.ties if len(self.ties) > allowed else [])


@torch.inference_mode()
def check_greedy(
    adapter: Adapter,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    policy: PrecisionPolicy,
    *,
    prompt_ids: Sequence[int] | None = None,
    seed: int = 0,
    backend: str = "auto",
) -> GreedyCheck:
    """Compare `answers` with what greedy decoding chooses after the same text.

    prompts, answers: token ids, of equal lengths each. prompt_ids, seed: as the answers were made.
    ValueError for unequal lengths.
    """
    lengths = {(len(p), len(a)) for p, a in zip(prompts, answers, strict=True)}
    if len(lengths) != 1 or 0 in next(iter(lengths)):
        raise ValueError(f"prompts and answers need equal lengths, not empty: got {lengths}")
    rows = len(prompts)
    ids = tuple(range(rows) if prompt_ids is None else prompt_ids)
    group = RowGroup(policy=policy, sequences=ids, seeds=(seed,) * rows)

    def read(window: int) -> Iterator[Tensor]:
        """Logits [rows, V] that choose each token of the answers."""
        stream = Stream(
            adapter,
            [group],
            source=range(rows),
            capacity=sum(next(iter(lengths))),
            backend=backend,
        )
        yield stream.prefill(torch.tensor([list(prompt) for prompt in prompts]))
        stream.hand_over()
        for start in range(0, given.shape[1] - 1, window):
            logits = stream.step(given[:, start : min(start + window, given.shape[1] - 1)])
            yield from logits.clone().unbind(1)

    given = torch.tensor([list(answer) for answer in answers], device=adapter.device)
    ties: list[Tie] = []
    reordered: list[Tie] = []
    spread = torch.zeros((), device=adapter.device)
    both = zip(read(1), read(policy.ring_len), strict=True)
    for place, (single, window) in enumerate(both):
        ties += _ties(single, given[:, place], place)
        reordered += _ties(window, given[:, place], place)
        spread = torch.maximum(spread, ((single - window).abs().amax(-1) / single.std(-1)).max())
    return GreedyCheck(ties=ties, reordered=reordered, spread=float(spread), tokens=given.numel())


def _ties(logits: Tensor, chosen: Tensor, place: int) -> list[Tie]:
    best = logits.argmax(dim=-1)
    gaps = logits.gather(1, best[:, None]) - logits.gather(1, chosen[:, None])
    gaps = gaps[:, 0] / logits.std(dim=-1)
    return [
        Tie(
            row=row,
            place=place,
            chosen=int(chosen[row]),
            best=int(best[row]),
            gap=float(gaps[row]),
        )
        for row in (best != chosen).nonzero()[:, 0].tolist()
    ]
