"""Rows of a batch that share a policy, and what one recurrent layer keeps for them.

Owns, for a layer of a session, the FP32 state during prefill and one `StateUpdate` and cache per
row group afterwards: how they are made, filled, saved and read back. Must not know the model that
runs, nor when it does (`session`).

Shapes: B rows, H heads, P/V rows of a state, N/K its contracted axis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.cache.replay import ReplayCache
from replayssm.models.adapter import RecurrentLayer
from replayssm.models.families import Family
from replayssm.policy import PrecisionPolicy
from replayssm.state_update import StateUpdate


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """Consecutive batch rows that share a policy.

    sequences: one id per row, the sequence number in stochastic rounding: rows with the same seed
        and sequence draw the same bits.
    seeds: one seed per row for stochastic rounding.
    log_decay_factor: every log decay of these rows is multiplied by it; 1.01 is the deliberate
        fault of a study, anything but 1.0 is wrong on purpose.
    """

    policy: PrecisionPolicy
    sequences: tuple[int, ...]
    seeds: tuple[int, ...]
    log_decay_factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.sequences or len(self.sequences) != len(self.seeds):
            raise ValueError(
                "a row group needs one sequence and one seed per row, got "
                f"{len(self.sequences)} sequences and {len(self.seeds)} seeds"
            )

    @property
    def rows(self) -> int:
        return len(self.sequences)


class LayerState:
    """The recurrent state of one layer: FP32 during prefill, one cache per group afterwards.

    tokens: that the layer has read. prefill_state: [B, H, P, N], None before any token and after
    the hand-over.
    """

    def __init__(
        self, layer: RecurrentLayer, family: Family, groups: Sequence[RowGroup], *, backend: str
    ):
        self.layer = layer
        self.tokens = 0
        self.prefill_state: Tensor | None = None
        self.caches: list[ReplayCache] = []
        self.updates = [
            StateUpdate(
                recurrence=family.recurrence,
                policy=group.policy,
                backend=backend,
                device=next(layer.mixer.parameters()).device,
                layer=layer.index,
                **family.shapes(layer.mixer),
            )
            for group in groups
        ]
        self._family, self._groups = family, groups

    def _new_caches(self) -> list[ReplayCache]:
        return [
            update.new_cache(
                group.rows,
                sequence=torch.tensor(group.sequences),
                seed=torch.tensor(group.seeds),
                dtype=self._family.ring_dtype(self.layer.mixer),
            )
            for group, update in zip(self._groups, self.updates, strict=True)
        ]

    def hand_over(
        self, tokens: int, prefilled: Tensor | None, source: Sequence[Sequence[int]]
    ) -> None:
        """End prefill: each group continues its rows `source` of `prefilled`, rounded once."""
        self.caches = self._new_caches()
        self.tokens, self.prefill_state = tokens, None
        if prefilled is None:
            return
        for rows, update, cache in zip(source, self.updates, self.caches, strict=True):
            picked = torch.tensor(rows, device=prefilled.device)
            update.load(cache, prefilled.index_select(0, picked))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of every cache, "<group>.<name>", by reference."""
        return {
            f"{group}.{name}": tensor
            for group, cache in enumerate(self.caches)
            for name, tensor in cache.state_dict().items()
        }

    def load_tensors(self, tensors: Mapping[str, Tensor], *, tokens: int) -> None:
        """Go on from `tensors()` of such a layer, after `tokens`."""
        self.caches, self.tokens = self._new_caches(), tokens
        for group, cache in enumerate(self.caches):
            cache.load_state_dict(below(f"{group}.", tensors))

    def put_row(self, row: int, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite a row of the only group with tensors as in `tensors()`, without row axis."""
        self.caches[0].put_row(row, below("0.", tensors))

    def load_rows(
        self, rows: Tensor, states: Tensor, *, sequences: Sequence[int], seeds: Sequence[int]
    ) -> None:
        """Start new sequences from FP32 `states` in `rows` of the only group, in place."""
        part = self.caches[0].select(rows)
        part.restart(sequences=sequences, seeds=seeds)
        self.updates[0].load(part, states)
        self.caches[0].assign(rows, part)


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
