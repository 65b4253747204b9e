"""Autoregressive generation under one policy, for a batch of prompts of equal length.

Owns the decode loop and when a row stops. Must not know tasks, prompts as text, or scoring. Token
by token, as a server decodes: the state is flushed every ring length, and a policy's own tokens,
not the reference's, go into its state.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.engine.sampling import Sampler
from replayssm.engine.stream import Stream
from replayssm.models.adapter import Adapter
from replayssm.models.session import RowGroup
from replayssm.policy import PrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What one row generated.

    tokens: the new ids, without the prompt and without the stop token.
    stopped: a stop token came; otherwise the row was cut at `max_new_tokens`.
    """

    tokens: tuple[int, ...]
    stopped: bool


@torch.inference_mode()
def generate(
    adapter: Adapter,
    prompts: Tensor,
    policy: PrecisionPolicy,
    *,
    max_new_tokens: int,
    stop_tokens: Collection[int] = (),
    sampler: Sampler | None = None,
    prompt_ids: Sequence[int] | None = None,
    seed: int = 0,
    backend: str = "auto",
) -> list[Generation]:
    """Continue `prompts` [P, T >= 1] (int64, equal lengths, no padding) under `policy`.

    Args: max_new_tokens: at most this many per row; the model's positions must hold prompt and
    tokens. stop_tokens: ids that end a row. sampler: default greedy. prompt_ids: one id per row,
    for sampling and stochastic rounding (default 0, 1, ..). A row's
            tokens depend on its id and not on its neighbours, up to FP32 rounding.
        seed: of stochastic rounding.

    Rows that have stopped keep their place, and read their stop token again, until all have.
    """
    if prompts.dim() != 2 or prompts.shape[0] < 1 or prompts.shape[1] < 1:
        raise ValueError(f"prompts must be [prompts >= 1, tokens >= 1], got {tuple(prompts.shape)}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    rows, prompt_length = prompts.shape
    ids = tuple(range(rows)) if prompt_ids is None else tuple(prompt_ids)
    adapter.check_length(prompt_length + max_new_tokens)
    stream = Stream(
        adapter,
        [RowGroup(policy=policy, sequences=ids, seeds=(seed,) * rows)],
        source=range(rows),
        capacity=prompt_length + max_new_tokens,
        backend=backend,
    )
    sampler = sampler or Sampler()
    stop = torch.tensor(sorted(stop_tokens), dtype=torch.int64, device=adapter.device)
    logits = stream.prefill(prompts)
    stream.hand_over()
    chosen: list[Tensor] = []
    stopped = torch.zeros(rows, dtype=torch.bool, device=adapter.device)
    while True:
        token = sampler.choose(logits, prompts=ids, position=stream.position - 1)
        token = torch.where(stopped, chosen[-1], token) if chosen else token
        chosen.append(token)
        stopped = stopped | torch.isin(token, stop)
        if len(chosen) == max_new_tokens or (stop_tokens and bool(stopped.all())):
            break
        logits = stream.step(token[:, None])[:, -1]
    return [_cut(row, set(stop_tokens)) for row in torch.stack(chosen, dim=1).tolist()]


def _cut(tokens: list[int], stop_tokens: set[int]) -> Generation:
    for at, token in enumerate(tokens):
        if token in stop_tokens:
            return Generation(tokens=tuple(tokens[:at]), stopped=True)
    return Generation(tokens=tuple(tokens), stopped=False)
