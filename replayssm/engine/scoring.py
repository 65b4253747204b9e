"""Log-likelihood of given texts under a policy, in windows of the ring length.

Owns the batching of texts of different lengths for teacher forcing. Must not know tasks or text as
characters. Every token after the first is read as decoding would read it: from the stored state,
which is written back after every ring. Texts are padded on the right, to whole windows: what comes
later changes nothing before it, in attention or recurrence, so no mask is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from replayssm.engine.lockstep import ROW_MULTIPLE
from replayssm.engine.stream import Stream
from replayssm.models.adapter import Adapter
from replayssm.models.session import RowGroup
from replayssm.policy import PrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class ScoredText:
    """A text whose end is scored.

    tokens: ids, at least two; the last `scored` of them (fewer than all) are scored.
    sequence: number in the random bits of stochastic rounding, in [0, 2^32).
    """

    tokens: Sequence[int]
    scored: int
    sequence: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.scored < len(self.tokens):
            raise ValueError(
                f"of {len(self.tokens)} tokens 1 to {len(self.tokens) - 1} can be scored, "
                f"got {self.scored}"
            )


@torch.inference_mode()
def score_texts(
    adapter: Adapter,
    texts: Sequence[ScoredText],
    policy: PrecisionPolicy,
    *,
    rows: int = 8,
    seed: int = 0,
    backend: str = "auto",
) -> list[tuple[float, bool]]:
    """(sum of log-probabilities in nats, every scored token was the likeliest) of each text.

    rows: texts in a batch, rounded up to a multiple of 8. seed: of stochastic rounding. A text's
    score does not depend on the others.

    Raises ValueError before anything runs if a text exceeds the model's positions.
    """
    for text in texts:
        adapter.check_length(len(text.tokens))
    rows = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i].tokens))
    scores: list[tuple[float, bool]] = [(0.0, True)] * len(texts)
    for start in range(0, len(order), rows):
        batch = order[start : start + rows]
        results = _score_batch(adapter, [texts[i] for i in batch], policy, rows, seed, backend)
        for index, result in zip(batch, results, strict=True):
            scores[index] = result
    return scores


def _score_batch(adapter, texts, policy, rows, seed, backend) -> list[tuple[float, bool]]:
    window = policy.ring_len * max(1, 16 // policy.ring_len)
    read = max(len(text.tokens) for text in texts) - 1  # the last token predicts nothing scored
    width = 1 + -(-(read - 1) // window) * window
    filled = [*texts, *[texts[0]] * (rows - len(texts))]
    padded = [[*text.tokens, *[0] * width][:width] for text in filled]
    tokens = torch.tensor(padded, device=adapter.device)
    group = RowGroup(
        policy=policy, sequences=tuple(t.sequence for t in filled), seeds=(seed,) * rows
    )
    stream = Stream(adapter, [group], source=range(rows), capacity=width, backend=backend)
    # Positions whose next token is scored, begin <= position < end; none in rows that only fill up.
    ends = [len(text.tokens) - 1 for text in texts] + [0] * (rows - len(texts))
    begins = [end - text.scored for end, text in zip(ends, filled, strict=True)]
    begins[len(texts) :] = [0] * (rows - len(texts))
    begin, end = (torch.tensor(n, device=tokens.device)[:, None] for n in (begins, ends))
    following = [[*text.tokens[1:], *[0] * width][:width] for text in filled]
    targets = torch.tensor(following, device=tokens.device)
    sums = torch.zeros(rows, dtype=torch.float64, device=tokens.device)
    greedy = torch.ones(rows, dtype=torch.bool, device=tokens.device)

    def collect(logits: torch.Tensor, first: int) -> None:
        """Add what logits [rows, T, V] at positions first .. say about the tokens after them."""
        nonlocal sums, greedy
        last = first + logits.shape[1]
        if not any(b < last and first < e for b, e in zip(begins, ends, strict=True)):
            return
        position = torch.arange(first, last, device=logits.device)
        scored = (begin <= position) & (position < end)
        target = targets[:, first:last]
        logp = torch.log_softmax(logits.double(), dim=-1).gather(-1, target[..., None])[..., 0]
        sums = sums + logp.where(scored, 0.0).sum(1)
        greedy = greedy & ((logits.argmax(dim=-1) == target) | ~scored).all(1)

    collect(stream.prefill(tokens[:, :1])[:, None], 0)
    stream.hand_over()
    for at in range(1, width, window):
        collect(stream.step(tokens[:, at : at + window]), at)
    return list(zip(sums.tolist(), greedy.tolist(), strict=True))[: len(texts)]
