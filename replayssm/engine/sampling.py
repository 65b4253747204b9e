"""Choosing the next token: a pure function of the logits and of (seed, prompt, position).

Owns token choice only. No generator state exists, so a run resumed at any position chooses the same
tokens as an uninterrupted one, and a prompt's tokens do not depend on its neighbours in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.formats.philox import philox4x32

# Second word of the Philox key; state rounding uses (stream << 24) + layer, with small streams.
_SAMPLING_KEY = 0xFFFFFFFF

# What a draw decides: the next token, a draft, whether a draft is accepted, what replaces it.
CHOICE, DRAFT, ACCEPT, REPLACE = range(4)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """temperature 0 is greedy (smallest id on ties), else samples softmax(logits / temperature)."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed must be in [0, 2^32), got {self.seed}")

    def choose(self, logits: Tensor, *, prompts: Sequence[int], position: int | Tensor) -> Tensor:
        """Token ids [P] following position `position` (one, or [P]), from FP32 logits [P, V] there.

        prompts: the prompt id of each row.
        """
        if self.temperature == 0.0:
            return logits.argmax(dim=-1)
        return pick(self.probabilities(logits), self.uniform(prompts, position))

    def probabilities(self, logits: Tensor) -> Tensor:
        """softmax(logits / temperature) over the last axis, float64; not for temperature 0."""
        assert self.temperature > 0.0, "greedy choice has no probabilities"
        return torch.softmax(logits.double() / self.temperature, dim=-1)

    def uniform(
        self, prompts: Sequence[int], position: int | Tensor, *, purpose: int = CHOICE
    ) -> Tensor:
        """One float64 in [0, 1) with 53 random bits for each prompt, on the CPU.

        purpose: what it decides; draws for different purposes are independent.
        """
        ids = torch.tensor(list(prompts), dtype=torch.int64)
        high, low, _, _ = philox4x32((position, ids, purpose, 0), (self.seed, _SAMPLING_KEY))
        return ((high >> 5).double() * 67108864.0 + (low >> 6).double()) / 9007199254740992.0


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Ids [R], each drawn by its number in [0, 1), `uniform` [R], in proportion to `weights`
    [R, V].
    """
    # Summed in float64, so that 250k small terms do not lose the tail.
    mass = weights.double().cumsum(dim=-1)
    draw = uniform.to(mass.device)[:, None] * mass[:, -1:]
    return torch.searchsorted(mass, draw, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)
