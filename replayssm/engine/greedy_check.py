"""Where a greedy text is not what token-by-token decoding chooses: exact or near ties, or a fault.

Owns the comparison of a finished text with single-token decoding under the same policy. Must not
know how the text was made. Windows and single tokens sum in another order, so logits that agree to
FP32 rounding may rank differently, and two texts part there for good; decoding the *given* text
token by token finds every such place, not just the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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


@torch.inference_mode()
def find_ties(
    adapter: Adapter,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    policy: PrecisionPolicy,
    *,
    prompt_ids: Sequence[int] | None = None,
    seed: int = 0,
    backend: str = "auto",
) -> list[Tie]:
    """Every place of `answers` where greedy decoding of the text before it chooses another token.

    prompts, answers: token ids, of equal lengths each. prompt_ids, seed: as the answers were made.
    ValueError for unequal lengths.
    """
    lengths = {(len(p), len(a)) for p, a in zip(prompts, answers, strict=True)}
    if len(lengths) != 1 or 0 in next(iter(lengths)):
        raise ValueError(f"prompts and answers need equal lengths, not empty: got {lengths}")
    rows = len(prompts)
    ids = tuple(range(rows) if prompt_ids is None else prompt_ids)
    stream = Stream(
        adapter,
        [RowGroup(policy=policy, sequences=ids, seeds=(seed,) * rows)],
        source=range(rows),
        capacity=sum(next(iter(lengths))),
        backend=backend,
    )
    logits = stream.prefill(torch.tensor([list(prompt) for prompt in prompts]))
    stream.hand_over()
    ties: list[Tie] = []
    given = torch.tensor([list(answer) for answer in answers], device=logits.device)
    for place in range(given.shape[1]):
        chosen = given[:, place]
        best = logits.argmax(dim=-1)
        gaps = logits.gather(1, best[:, None]) - logits.gather(1, chosen[:, None])
        gaps = gaps[:, 0] / logits.std(dim=-1)
        ties += [
            Tie(
                row=row,
                place=place,
                chosen=int(chosen[row]),
                best=int(best[row]),
                gap=float(gaps[row]),
            )
            for row in (best != chosen).nonzero()[:, 0].tolist()
        ]
        if place + 1 < given.shape[1]:
            logits = stream.step(chosen[:, None])[:, -1]
    return ties
