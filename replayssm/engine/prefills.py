"""Prompts that are run once for many policies and samples.

Owns prefilled prompts and how many of them are kept. Must not know what continues them. A prefill
rounds nothing, so its state and logits are the same for every policy, seed and sample.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm.engine.stream import Stream
from replayssm.models.adapter import Adapter
from replayssm.models.kv_cache import cache_tensors
from replayssm.models.session import RowGroup
from replayssm.policy import parse_policy

_GIB = 1 << 30


class PrefillCache:
    """Prefilled prompts of one model, up to `max_bytes`; later ones are run each time.

    max_bytes: default 8 GiB on a GPU, 1 GiB elsewhere; 0 keeps nothing.
    """

    def __init__(self, adapter: Adapter, *, max_bytes: int | None = None, backend: str = "auto"):
        if max_bytes is None:
            max_bytes = (8 if adapter.device.type == "cuda" else 1) * _GIB
        self._adapter, self._backend, self._room = adapter, backend, max_bytes
        self._kept: dict[tuple[int, ...], tuple[Stream, Tensor]] = {}

    def run(self, prompt: Sequence[int]) -> tuple[Stream, Tensor]:
        """A stream that has read `prompt` and was not handed over, and its last logits [V].

        Continue it with `Stream.continue_from`, which leaves it as it is. Callers use inference
        mode.
        """
        key = tuple(prompt)
        if key in self._kept:
            return self._kept[key]
        # The policy is never used: nothing is handed over.
        group = RowGroup(policy=parse_policy("fp32"), sequences=(0,), seeds=(0,))
        stream = Stream(
            self._adapter, [group], source=[0], capacity=len(key), backend=self._backend
        )
        logits = stream.prefill(torch.tensor([key]))[0]
        tensors = [*cache_tensors(stream.cache).values()]
        tensors += [state for _, state in stream.session.prefill_states() if state is not None]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size <= self._room:
            self._room -= size
            self._kept[key] = stream, logits
        return stream, logits
