"""Prompts that are run once for many policies and samples, and many at a time.

Owns prefilled prompts, how many of them are kept, and which are run together. Must not know what
continues them. A prefill rounds nothing, so its state and logits are the same for every policy,
seed and sample.

Prompts have different lengths, and a recurrent state must not see padding. Those that are run
together read windows of WINDOW tokens side by side, from their first token on; each is taken out
at its last whole window and reads the rest on its own. So what it computes depends on its own
tokens, and on a GPU on `together`, which rows are filled up to: libraries choose how to multiply by
the number of rows. (On the CPU whole windows are enough for equal bits, see `lockstep.py`.)
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from replayssm.engine.stream import Stream
from replayssm.models.adapter import Adapter
from replayssm.models.kv_cache import cache_tensors
from replayssm.models.session import RowGroup
from replayssm.policy import parse_policy

WINDOW = 64
"""Tokens read at once by prompts that are run together."""

MOST_TOGETHER = 32
"""Prompts run together: a pass over so many takes a GPU about as long as one over a single one."""

_GIB = 1 << 30


def fills_rows(device: torch.device) -> bool:
    """Whether the number of rows decides how this device multiplies."""
    return device.type == "cuda"


class PrefillCache:
    """Prefilled prompts of one model, up to `max_bytes`; later ones are run each time.

    max_bytes: default 8 GiB on a GPU, 1 GiB elsewhere; 0 keeps nothing.

    Callers use inference mode. What they get is a stream that has read the prompt and was not
    handed over, and its last logits [V]: continue it with `Stream.continue_from`, which leaves it
    as it is.
    """

    def __init__(self, adapter: Adapter, *, max_bytes: int | None = None, backend: str = "auto"):
        if max_bytes is None:
            max_bytes = (8 if adapter.device.type == "cuda" else 1) * _GIB
        self._adapter, self._backend, self._room = adapter, backend, max_bytes
        self._kept: dict[tuple[int, ...], tuple[Stream, Tensor]] = {}

    def run(self, prompt: Sequence[int]) -> tuple[Stream, Tensor]:
        """One prompt, on its own."""
        return next(self.run_many([prompt], together=1))

    def run_many(
        self, prompts: Sequence[Sequence[int]], *, together: int
    ) -> Iterator[tuple[Stream, Tensor]]:
        """Each prompt in turn, up to `together` of them run at a time: best sorted by length.

        Layers of experts group the rows of an expert, and so would let a prompt's neighbours
        decide the order of its sums: such models run every prompt on its own.
        """
        if self._adapter.has_experts:
            together = 1
        for start in range(0, len(prompts), together):
            group = [tuple(prompt) for prompt in prompts[start : start + together]]
            begun = {} if together == 1 else self._begin(group, together)
            for key in group:
                if key not in self._kept:
                    done = self._finish(key, *begun.get(key, (None, None)))
                    if key in begun:
                        begun[key] = done  # for an equal prompt
                    self._keep(key, *done)
                    yield done
                else:
                    yield self._kept[key]

    def _stream(self, rows: int) -> Stream:
        # The policy is never used: nothing is handed over.
        group = RowGroup(policy=parse_policy("fp32"), sequences=(0,) * rows, seeds=(0,) * rows)
        return Stream(self._adapter, [group], source=range(rows), capacity=0, backend=self._backend)

    def _begin(
        self, group: Sequence[tuple[int, ...]], together: int
    ) -> dict[tuple[int, ...], tuple[Stream, Tensor]]:
        """Every prompt of `group` that is not kept and has a whole window, after its last one, with
        the logits there.
        """
        waiting = {key for key in group if key not in self._kept and len(key) >= WINDOW}
        if not waiting:
            return {}
        rows = sorted(waiting)
        count = together if fills_rows(self._adapter.device) else len(rows)
        longest = max(map(len, rows))
        padded = [[*key, *[0] * longest][:longest] for key in rows]
        padded += [padded[0]] * (count - len(rows))
        tokens = torch.tensor(padded, device=self._adapter.device)
        stream, begun = self._stream(count), {}
        while waiting:
            window = tokens[:, stream.position : stream.position + WINDOW]
            logits = stream.prefill(window)
            for row, key in enumerate(rows):
                if key in waiting and len(key) - stream.position < WINDOW:
                    waiting.remove(key)
                    # Of logits, too, a copy: not of all rows, as long as one is kept.
                    begun[key] = stream.fork(row, capacity=len(key)), logits[row].clone()
        return begun

    def _finish(
        self, key: tuple[int, ...], stream: Stream | None, logits: Tensor | None
    ) -> tuple[Stream, Tensor]:
        """`stream` (None: a new one) after the tokens of `key` that it has not read, and its last
        logits.
        """
        stream = stream or self._stream(1)
        rest = key[stream.position :]
        if rest:
            logits = stream.prefill(torch.tensor([rest]))[0]
        return stream, logits

    def _keep(self, key: tuple[int, ...], stream: Stream, logits: Tensor) -> None:
        tensors = [*cache_tensors(stream.cache).values()]
        tensors += [state for _, state in stream.session.prefill_states() if state is not None]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size <= self._room:
            self._room -= size
            self._kept[key] = stream, logits
