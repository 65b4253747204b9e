"""Speculative decoding: drafts are read in one window, the right ones are kept.

Owns the round (draft, verify, keep), which tokens of a row are the target's, when a row ends, and
what is counted. Must not know tasks or text. Greedy, a row's tokens are those of token-by-token
decoding; sampling, they have its distribution. That holds up to the order in which a window's sums
are made, and bit for bit with an adapter that fixes it (`models/invariance.py`). A row keeps its
last token unread until the next round, which reads it and the drafts after it: logits at the last
token it keeps choose the next.

With certain drafts (greedy, or prompt lookup) the target chooses at every position as it would
without drafts, with the same random numbers, and a draft is accepted if it was chosen: sampled
texts are the same, too. Drafts that were drawn from probabilities q are accepted with probability
min(1, p/q) under the target's p; in place of the first that is not, the next token is drawn from
what p has more than q (Leviathan et al. 2023, Chen et al. 2023).

A rejected draft costs what a round's window costs, and no state: see `rollback.py`, which also says
when rings are flushed.

Shapes: B rows, T tokens of a window, N = T - 1 drafts, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from replayssm.engine.decode import Generation
from replayssm.engine.drafters import Drafter, Drafts
from replayssm.engine.sampling import ACCEPT, REPLACE, Sampler, pick
from replayssm.engine.stream import FINITE_CHECK_TOKENS
from replayssm.engine.tentative import SavedRow, TentativeRows
from replayssm.models.adapter import Adapter
from replayssm.policy import PrecisionPolicy

MAX_DRAFTS = 16


@dataclass(kw_only=True)
class Acceptance:
    """What became of the drafts of a row.

    rounds: windows in which the row read. drafted, num_accepted: drafts, without the token that
    every round adds by itself (the correction of a rejected draft, or the bonus after the last).
    by_place: of every round with at least i + 1 drafts, how many had draft i accepted, and how many
    rounds those were.
    """

    rounds: int = 0
    drafted: int = 0
    num_accepted: int = 0
    by_place: list[list[int]] = field(default_factory=list)

    def count(self, drafted: int, accepted: int) -> None:
        """A round had `drafted` drafts, the first `accepted` of which are kept."""
        self.rounds += 1
        self.drafted += drafted
        self.num_accepted += accepted
        for place in range(drafted):
            if place == len(self.by_place):
                self.by_place.append([0, 0])
            self.by_place[place][0] += place < accepted
            self.by_place[place][1] += 1

    @property
    def rate(self) -> float | None:
        """Share of drafts that were accepted; None without drafts."""
        return self.num_accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        """Accepted drafts and the one token beside them, on average; None before a round."""
        return 1 + self.num_accepted / self.rounds if self.rounds else None


@dataclass(kw_only=True)
class RowProgress:
    """A row's text: `prompt`, and `tokens` after it, of which the last is not read yet.

    ended: a stop token came (it is not in `tokens`), or there are `max_new_tokens`.
    """

    id: int
    prompt: list[int]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)
    stopped: bool = False

    @property
    def ended(self) -> bool:
        return self.stopped or len(self.tokens) >= self.max_new_tokens

    @property
    def text(self) -> list[int]:
        return self.prompt + self.tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Preempted:
    """A row that was taken out of its batch, with all it needs to go on."""

    progress: RowProgress
    state: SavedRow
    drafter: Any


class SpeculativeDecoder:
    """Rows of one model under one policy, a round at a time.

    Args:
        drafts: most drafts of a round, 0 to MAX_DRAFTS; 0 decodes token by token.
        drafter: may be None with drafts 0.
        sampler: default greedy.
        seed: of stochastic rounding.
        schedule, undo: see `rollback.py`. graphs: see `graphs.py`.

    Raises ValueError for logits, and NonFiniteStateError for states, that are not finite.
    """

    def __init__(
        self,
        adapter: Adapter,
        policy: PrecisionPolicy,
        drafter: Drafter | None,
        *,
        drafts: int,
        stop_tokens: Collection[int] = (),
        sampler: Sampler | None = None,
        seed: int = 0,
        schedule: str = "aligned",
        undo: str = "cursor",
        backend: str = "auto",
        graphs: str = "auto",
    ):
        if not 0 <= drafts <= MAX_DRAFTS:
            raise ValueError(f"drafts must be 0 to {MAX_DRAFTS}, got {drafts}")
        if drafts and drafter is None:
            raise ValueError(f"{drafts} drafts a round need a drafter")
        self.adapter, self.policy, self.seed = adapter, policy, seed
        self.rows: list[RowProgress | None] = []
        self._drafts, self._drafter = drafts, drafter
        self._stops, self._sampler = frozenset(stop_tokens), sampler or Sampler()
        self._state = TentativeRows(
            adapter,
            policy,
            most_tokens=drafts + 1,
            schedule=schedule,
            undo=undo,
            backend=backend,
            graphs=graphs,
        )
        self._unchecked = 0
        # Called with (row, logits [kept, V]) of every round: those at the tokens that the row
        # keeps. They are valid until the next round.
        self.observer: Callable[[int, Tensor], None] | None = None

    @torch.inference_mode()
    def start(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        prompt_ids: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Read `prompts` (one token or more each, of any lengths); the first token of each row.

        prompt_ids: one a row, for sampling and stochastic rounding (default 0, 1, ..).
        """
        if not prompts or not all(prompts):
            raise ValueError("there must be prompts, of at least one token each")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        ids = list(range(len(prompts)) if prompt_ids is None else prompt_ids)
        if len(ids) != len(prompts):
            raise ValueError(f"{len(ids)} prompt ids for {len(prompts)} prompts")
        logits = self._state.start(
            prompts, sequences=ids, seeds=[self.seed] * len(ids), room=max_new_tokens
        )
        if self._drafts:
            self._drafter.start(
                prompts, drafts=self._drafts, room=max_new_tokens, ids=ids, sampler=self._sampler
            )
        self.rows = [
            RowProgress(id=id_, prompt=list(prompt), max_new_tokens=max_new_tokens)
            for id_, prompt in zip(ids, prompts, strict=True)
        ]
        last = torch.tensor(self._state.positions) - 1
        choices = self._sampler.choose(logits, prompts=ids, position=last)
        found = torch.stack([choices, logits.isfinite().all(-1)], dim=1).tolist()
        return self._extend([[token] for token, _ in found], [finite for _, finite in found])

    @property
    def running(self) -> bool:
        """Whether any row has not ended."""
        return any(row is not None and not row.ended for row in self.rows)

    @torch.inference_mode()
    def round(self) -> list[list[int]]:
        """Draft, verify, keep: the new tokens of each row (none for one that has ended)."""
        assert self.running, "every row has ended"
        active = [row is not None and not row.ended for row in self.rows]
        drafts = self._draft(active)
        pending = torch.tensor(
            [row.tokens[-1] if on else 0 for row, on in zip(self.rows, active, strict=True)]
        )
        device = self.adapter.device
        tokens = torch.cat([pending.to(device)[:, None], drafts.tokens.to(device)], dim=1)
        logits = self._state.read(tokens)
        accepted, following, finite = self._verify(logits, drafts)
        kept = [count + 1 if on else 0 for count, on in zip(accepted, active, strict=True)]
        self._state.keep(kept)
        if self._drafts:
            self._drafter.keep(kept)
        self._check_states(tokens.shape[1])
        proposed = tokens[:, 1:].tolist()
        new: list[list[int]] = []
        for i, row in enumerate(self.rows):
            if not active[i]:
                new.append([])
                continue
            row.acceptance.count(drafts.counts[i], accepted[i])
            if self.observer is not None:
                self.observer(i, logits[i, : kept[i]])
            new.append([*proposed[i][: accepted[i]], following[i]])
        return self._extend(new, finite)

    def _draft(self, active: Sequence[bool]) -> Drafts:
        """Drafts that no row would have to give back for lack of room."""
        texts, limits = [], []
        for row, on, fits in zip(self.rows, active, self._state.limits(), strict=True):
            texts.append(row.text if on else [0])
            left = row.max_new_tokens - len(row.tokens) if on else 1
            limits.append(min(self._drafts, left - 1, fits - 1))
        if not self._drafts:
            empty = torch.zeros(len(limits), 0, dtype=torch.int64)
            return Drafts(tokens=empty, counts=limits)
        drafts = self._drafter.draft(texts, limits)
        assert all(0 <= c <= limit for c, limit in zip(drafts.counts, limits, strict=True))
        return drafts

    def _verify(self, logits: Tensor, drafts: Drafts) -> tuple[list[int], list[int], list[bool]]:
        """For each row: drafts accepted, the token after them, whether all logits used are finite.

        logits: [B, T, V], those at the row's last token first.
        """
        rows, width, _ = logits.shape
        device = logits.device
        counts = torch.tensor(drafts.counts, device=device)
        place = torch.arange(width, device=device)
        meant = place[:-1] < counts[:, None]
        proposed = drafts.tokens.to(device)
        if drafts.probabilities is None:
            choices = self._sampler.choose(
                logits.flatten(0, 1),
                prompts=[id_ for id_ in self._ids for _ in range(width)],
                position=self._read_positions(width).flatten(),
            ).view(rows, width)
            accepted = ((choices[:, :-1] == proposed) & meant).cumprod(dim=1).sum(dim=1)
            following = choices.gather(1, accepted[:, None])[:, 0]
        else:
            accepted, following = self._sample(logits, proposed, drafts.probabilities, meant)
        finite = (logits.isfinite().all(dim=-1) | (place > accepted[:, None])).all(dim=1)
        # All at once: asking the device for a value is what a round waits for.
        found = torch.stack([accepted, following, finite]).tolist()
        return found[0], found[1], [bool(flag) for flag in found[2]]

    def _sample(
        self, logits: Tensor, proposed: Tensor, q: Tensor, meant: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rejection sampling: drafts `proposed` [B, N] were drawn from `q` [B, N, V]."""
        p = self._sampler.probabilities(logits)
        drafts = proposed.shape[1]
        at = self._read_positions(drafts)
        ids = [id_ for id_ in self._ids for _ in range(drafts)]
        uniform = self._sampler.uniform(ids, at.flatten(), purpose=ACCEPT).view(at.shape)
        chosen = proposed[..., None]
        p_draft, q_draft = p[:, :-1].gather(-1, chosen), q.gather(-1, chosen)
        passed = (uniform.to(p.device)[..., None] * q_draft < p_draft)[..., 0]
        accepted = (passed & meant).cumprod(dim=1).sum(dim=1)
        row = torch.arange(len(accepted), device=p.device)
        rejected = accepted < meant.sum(dim=1)  # otherwise the token after the last is p's own
        p_next = p[row, accepted]
        excess = p_next - q[row, accepted.clamp(max=drafts - 1)] * rejected[:, None]
        excess = excess.clamp_(min=0.0)
        excess = torch.where(excess.sum(-1, keepdim=True) > 0, excess, p_next)
        position = torch.tensor(self._state.positions) + accepted.cpu()
        draw = self._sampler.uniform(self._ids, position, purpose=REPLACE)
        return accepted, pick(excess, draw)

    @property
    def _ids(self) -> list[int]:
        return [0 if row is None else row.id for row in self.rows]

    def _read_positions(self, tokens: int) -> Tensor:
        """Place in the text of each row's next `tokens` tokens, [B, tokens], on the CPU."""
        return torch.tensor(self._state.positions)[:, None] + torch.arange(tokens)

    def _extend(self, new: list[list[int]], finite: Sequence[bool]) -> list[list[int]]:
        """Append new tokens to their rows, up to a stop token; what was appended."""
        appended = []
        for i, (row, tokens) in enumerate(zip(self.rows, new, strict=True)):
            if not tokens:
                appended.append([])
                continue
            if not finite[i]:
                raise ValueError(
                    f"logits are not finite under policy {self.policy.label}: row {i}, position "
                    f"{len(row.text) - 1}"
                )
            stop = next((at for at, token in enumerate(tokens) if token in self._stops), None)
            row.stopped = stop is not None
            row.tokens += tokens[:stop]
            appended.append(tokens[:stop])
        return appended

    def _check_states(self, tokens: int) -> None:
        self._unchecked += tokens
        if self._unchecked >= FINITE_CHECK_TOKENS:
            self._state.check_finite()
            self._unchecked = 0

    # -- rows that come and go ---------------------------------------------------------------------
    @torch.inference_mode()
    def preempt(self, row: int) -> Preempted:
        """Take `row` out of the batch; its place stays free until `resume`."""
        if self.rows[row] is None:
            raise ValueError(f"row {row} is free")
        progress, self.rows[row] = self.rows[row], None
        return Preempted(
            progress=progress,
            state=self._state.take(row),
            drafter=self._drafter.take(row) if self._drafts else None,
        )

    @torch.inference_mode()
    def resume(self, row: int, preempted: Preempted) -> None:
        """Go on with a row of a decoder of the same kind, in a free place."""
        if self.rows[row] is not None:
            raise ValueError(f"row {row} is not free")
        self._state.put(row, preempted.state)
        if self._drafts:
            self._drafter.put(row, preempted.drafter)
        self.rows[row] = preempted.progress

    def finish(self) -> None:
        """Raise NonFiniteStateError if a state was not finite; call it after the last round."""
        self._state.check_finite()

    def state_bytes(self) -> dict[str, int]:
        """Bytes of recurrent state of one sequence, see `TentativeRows.state_bytes`."""
        return self._state.state_bytes()

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends in effect, never "auto"; only after `start`."""
        return self._state.session.group_backends(0)


@dataclass(frozen=True, kw_only=True)
class Speculated:
    """What speculation made of a row: its tokens, and what became of its drafts."""

    generation: Generation
    acceptance: Acceptance


def speculate(
    adapter: Adapter,
    prompts: Sequence[Sequence[int]],
    policy: PrecisionPolicy,
    drafter: Drafter | None,
    *,
    drafts: int,
    max_new_tokens: int,
    prompt_ids: Sequence[int] | None = None,
    **options: Any,
) -> list[Speculated]:
    """Continue `prompts` to their ends; `options` are those of `SpeculativeDecoder`."""
    decoder = SpeculativeDecoder(adapter, policy, drafter, drafts=drafts, **options)
    decoder.start(prompts, max_new_tokens=max_new_tokens, prompt_ids=prompt_ids)
    while decoder.running:
        decoder.round()
    decoder.finish()
    return [
        Speculated(
            generation=Generation(tokens=tuple(row.tokens), stopped=row.stopped),
            acceptance=row.acceptance,
        )
        for row in decoder.rows
    ]
