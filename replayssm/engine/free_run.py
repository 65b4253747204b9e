"""Every arm writes its own continuation: the same arms as in lockstep, each on its own tokens.

Owns the batch of a free run and its token loop. Must not know what is made of the tokens. All arms
are rows of one batch, as in lockstep, so two arms of the same policy write the same text; an arm
that samples draws the same number at the same position of the same prompt as every other.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from replayssm.engine.lockstep import ROW_MULTIPLE, Arm
from replayssm.engine.sampling import Sampler
from replayssm.engine.stream import Stream
from replayssm.models.adapter import Adapter


@torch.inference_mode()
def free_run(
    adapter: Adapter,
    arms: Sequence[Arm],
    prompts: Tensor,
    *,
    tokens: int,
    stop_tokens: Collection[int] = (),
    sampler: Sampler | None = None,
    prompt_ids: Sequence[int] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Token ids [arms, P, N <= tokens] that each arm writes after `prompts` [P, T >= 1] (int64).

    sampler: default greedy. prompt_ids: one id per prompt, for sampling and stochastic rounding
    (default 0, 1, ..). Ends early when every row has written a stop token; what a row writes after
    its own is to be ignored.
    """
    if prompts.dim() != 2 or prompts.shape[0] < 1 or prompts.shape[1] < 1:
        raise ValueError(f"prompts must be [prompts >= 1, tokens >= 1], got {tuple(prompts.shape)}")
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    count, length = prompts.shape
    ids = tuple(range(count)) if prompt_ids is None else tuple(prompt_ids)
    adapter.check_length(length + tokens)
    rows = len(arms) * count
    padding = -rows % ROW_MULTIPLE
    groups = [arm.rows(ids) for arm in arms]
    if padding:
        groups.append(arms[0].rows([ids[row % count] for row in range(padding)]))
    source = [row % count for row in range(rows)] + [row % count for row in range(padding)]
    stream = Stream(
        adapter,
        groups,
        source=source,
        capacity=length + tokens,
        backend=backend,
    )
    sampler = sampler or Sampler()
    of_row = [ids[index] for index in source]
    stop = torch.tensor(sorted(stop_tokens), dtype=torch.int64, device=adapter.device)
    logits = stream.prefill(prompts)[torch.tensor(source, device=adapter.device)]
    stream.hand_over()
    chosen: list[Tensor] = []
    stopped = torch.zeros(rows, dtype=torch.bool, device=adapter.device)
    while True:
        token = sampler.choose(logits, prompts=of_row, position=stream.position - 1)
        chosen.append(token)
        stopped |= torch.isin(token[:rows], stop)
        if len(chosen) == tokens or (stop_tokens and bool(stopped.all())):
            return torch.stack(chosen, dim=1)[:rows].unflatten(0, (len(arms), count))
        logits = stream.step(token[:, None])[:, -1]
