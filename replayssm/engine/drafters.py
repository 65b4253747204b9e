"""Where drafts come from: the text itself, a smaller model; and why not from a multi-token head.

Owns proposing tokens. Must not know the target model, its policy, or how drafts are verified. A
drafter follows the rows of a batch: it is told what each has read and what of its drafts was kept.

Shapes: B rows, N drafts, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from replayssm.engine.sampling import DRAFT, Sampler, pick
from replayssm.engine.tentative import TentativeRows
from replayssm.models.adapter import Adapter
from replayssm.models.errors import UnsupportedModelError
from replayssm.policy import PrecisionPolicy, parse_policy


@dataclass(frozen=True, kw_only=True, eq=False)
class Drafts:
    """What a drafter proposes to follow each row's last token.

    tokens: [B, N] int64. counts: how many of them are meant, a row. probabilities: [B, N, V]
    float64, what each was drawn from; None: each was certain.
    """

    tokens: Tensor
    counts: list[int]
    probabilities: Tensor | None = None


class Drafter(Protocol):
    """Proposes drafts for B rows."""

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        drafts: int,
        room: int,
        ids: Sequence[int],
        sampler: Sampler,
    ) -> None:
        """Follow these prompts. drafts: most a round. room: tokens after a prompt, at most. ids: of
        the prompts, in `sampler`, by which drafts are drawn.
        """

    def draft(self, texts: Sequence[Sequence[int]], limits: Sequence[int]) -> Drafts:
        """At most limits[b] drafts to follow texts[b], prompt and answer so far."""

    def keep(self, counts: Sequence[int]) -> None:
        """The last token of row b's text and counts[b] - 1 of its drafts are read; 0: nothing."""

    def take(self, row: int) -> Any:
        """What `put` needs to go on with `row` elsewhere."""

    def put(self, row: int, saved: Any) -> None:
        """Go on with `saved` in `row`."""


class NGramDrafter:
    """Prompt lookup: what followed the last time the text had the same last few tokens.

    longest, shortest: tokens that must agree; the longest match counts, of equal ones the latest.
    """

    def __init__(self, *, longest: int = 4, shortest: int = 2):
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams need 1 <= shortest <= longest, got {shortest} and {longest}")
        self._lengths = range(longest, shortest - 1, -1)
        self._followers: list[dict[tuple[int, ...], int]] = []
        self._indexed: list[int] = []

    def start(self, prompts: Sequence[Sequence[int]], **about: Any) -> None:
        del about
        self._followers = [{} for _ in prompts]
        self._indexed = [0] * len(prompts)

    def draft(self, texts: Sequence[Sequence[int]], limits: Sequence[int]) -> Drafts:
        found = [
            self._continuation(row, text, limit) if limit else []
            for row, (text, limit) in enumerate(zip(texts, limits, strict=True))
        ]
        width = max(map(len, found))
        tokens = [row + [0] * (width - len(row)) for row in found]
        return Drafts(
            tokens=torch.tensor(tokens, dtype=torch.int64).view(len(found), width),
            counts=[len(row) for row in found],
        )

    def _continuation(self, row: int, text: Sequence[int], limit: int) -> list[int]:
        followers = self._followers[row]
        for end in range(self._indexed[row], len(text)):  # what ends before `end` has a follower
            for length in self._lengths:
                if length <= end:
                    followers[tuple(text[end - length : end])] = end
        self._indexed[row] = len(text)
        for length in self._lengths:
            start = followers.get(tuple(text[-length:])) if length <= len(text) else None
            if start is not None:
                return list(text[start : start + limit])
        return []

    def keep(self, counts: Sequence[int]) -> None:
        """Nothing: drafts come from the text."""

    def take(self, row: int) -> Any:
        return dict(self._followers[row]), self._indexed[row]

    def put(self, row: int, saved: Any) -> None:
        followers, self._indexed[row] = saved
        self._followers[row] = dict(followers)


class ModelDrafter:
    """A smaller model, which writes ahead, and is wound back as the target is.

    policy: of its recurrent state; its rings are flushed early where drafts need the room. The
    model's vocabulary must be the target's, which is the caller's to see to (`check_vocabulary`).
    """

    def __init__(
        self,
        adapter: Adapter,
        *,
        policy: PrecisionPolicy | None = None,
        backend: str = "auto",
        graphs: str = "auto",
    ):
        self.adapter = adapter
        self._policy = policy or parse_policy("fp32@32")
        self._backend, self._graphs = backend, graphs

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        drafts: int,
        room: int,
        ids: Sequence[int],
        sampler: Sampler,
    ) -> None:
        self._ids, self._sampler = list(ids), sampler
        self._rows = TentativeRows(
            self.adapter,
            self._policy,
            most_tokens=drafts + 1,
            schedule="early",
            backend=self._backend,
            graphs=self._graphs,
        )
        self._rows.start(prompts, sequences=ids, seeds=[sampler.seed] * len(ids), room=room)

    def draft(self, texts: Sequence[Sequence[int]], limits: Sequence[int]) -> Drafts:
        token = torch.tensor([text[-1] for text in texts], device=self.adapter.device)
        tokens, probabilities = [], []
        first = torch.tensor(self._rows.positions)
        # One more than it proposes: if all are kept, the last one has been read, too.
        for ahead in range(max(limits) + 1):
            logits = self._rows.read(token[:, None])[:, -1]
            if ahead == max(limits):
                break
            if self._sampler.temperature == 0.0:
                token = logits.argmax(dim=-1)
            else:
                weights = self._sampler.probabilities(logits)
                token = pick(
                    weights, self._sampler.uniform(self._ids, first + ahead, purpose=DRAFT)
                )
                probabilities.append(weights)
            tokens.append(token)
        return Drafts(
            tokens=torch.stack(tokens, dim=1) if tokens else token.new_zeros(len(texts), 0),
            counts=list(limits),
            probabilities=torch.stack(probabilities, dim=1) if probabilities else None,
        )

    def keep(self, counts: Sequence[int]) -> None:
        self._rows.keep(counts)

    def take(self, row: int) -> Any:
        return self._rows.take(row), self._ids[row]

    def put(self, row: int, saved: Any) -> None:
        rows, self._ids[row] = saved
        self._rows.put(row, rows)


def check_vocabulary(target: Adapter, drafter: Adapter) -> None:
    """UnsupportedModelError unless both models have as many tokens (what those mean is not
    checked).
    """
    if target.vocab_size != drafter.vocab_size:
        raise UnsupportedModelError(
            f"{drafter.name!r} has {drafter.vocab_size} tokens, {target.name!r} has "
            f"{target.vocab_size}: a drafter needs the same vocabulary"
        )


def multi_token_head(adapter: Adapter) -> Drafter:
    """The drafter that a checkpoint's trained multi-token head makes: there is none yet.

    transformers 5.17 to 5.24 drops the weights of such heads (`mtp.*`) when it loads the supported
    architectures, and has no module that would run them. Always raises UnsupportedModelError.
    """
    config = adapter.config
    layers = next(
        (
            getattr(config, name)
            for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers")
            if getattr(config, name, None)
        ),
        0,
    )
    has = f"names a multi-token head of {layers} layers, but" if layers else "names none, and"
    raise UnsupportedModelError(
        f"drafter 'mtp': the configuration of {adapter.name!r} {has} transformers has no class "
        "that runs the multi-token head of a supported architecture; use 'ngram' or a smaller model"
    )
