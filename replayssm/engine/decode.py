"""Autoregressive generation under one policy, for a batch of prompts of equal length.

Owns the decode loop and when a row stops. Must not know tasks, prompts as text, or scoring. Token
by token, as a server decodes: the state is flushed every ring length, and a policy's own tokens,
not the reference's, go into its state.
"""

from collections.abc import Collection, Iterator, Sequence
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
    ids = tuple(range(len(prompts))) if prompt_ids is None else tuple(prompt_ids)
    stream, logits = open_stream(
        adapter,
        prompts,
        policy,
        max_new_tokens=max_new_tokens,
        prompt_ids=ids,
        seed=seed,
        backend=backend,
    )
    chosen = decode(
        stream,
        logits,
        max_new_tokens=max_new_tokens,
        prompt_ids=ids,
        stop_tokens=stop_tokens,
        sampler=sampler or Sampler(),
    )
    rows = torch.stack(list(chosen), dim=1).tolist()
    return [_cut(row, set(stop_tokens)) for row in rows]


@torch.inference_mode()
def open_stream(
    adapter: Adapter,
    prompts: Tensor,
    policy: PrecisionPolicy,
    *,
    max_new_tokens: int,
    prompt_ids: Sequence[int],
    seed: int = 0,
    backend: str = "auto",
) -> tuple[Stream, Tensor]:
    """A stream that has read `prompts` and was handed over, and its last logits [P, V], for
    `decode`; arguments as in `generate`.
    """
    if prompts.dim() != 2 or prompts.shape[0] < 1 or prompts.shape[1] < 1:
        raise ValueError(f"prompts must be [prompts >= 1, tokens >= 1], got {tuple(prompts.shape)}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    rows, prompt_length = prompts.shape
    adapter.check_length(prompt_length + max_new_tokens)
    stream = Stream(
        adapter,
        [RowGroup(policy=policy, sequences=tuple(prompt_ids), seeds=(seed,) * rows)],
        source=range(rows),
        capacity=prompt_length + max_new_tokens,
        backend=backend,
    )
    logits = stream.prefill(prompts)
    stream.hand_over()
    return stream, logits


@torch.inference_mode()
def decode(
    stream: Stream,
    logits: Tensor,
    *,
    max_new_tokens: int,
    prompt_ids: Sequence[int],
    stop_tokens: Collection[int],
    sampler: Sampler,
) -> Iterator[Tensor]:
    """The next token of every row, [P], as it is chosen: at most `max_new_tokens` times, or until
    every row has a stop token.
    """
    stop = torch.tensor(sorted(stop_tokens), dtype=torch.int64, device=logits.device)
    stopped = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    token = None
    for count in range(1, max_new_tokens + 1):
        choice = sampler.choose(logits, prompts=prompt_ids, position=stream.position - 1)
        token = choice if token is None else torch.where(stopped, token, choice)
        yield token
        stopped = stopped | torch.isin(token, stop)
        if count == max_new_tokens or (stop_tokens and bool(stopped.all())):
            return
        logits = stream.step(token[:, None])[:, -1]


def _cut(tokens: list[int], stop_tokens: set[int]) -> Generation:
    for at, token in enumerate(tokens):
        if token in stop_tokens:
            return Generation(tokens=tuple(tokens[:at]), stopped=True)
    return Generation(tokens=tuple(tokens), stopped=False)
