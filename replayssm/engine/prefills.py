"""Prompts that are run once for many policies and samples, and many at a time.

Owns prefilled prompts, how many of them are kept, and how many are run together. Must not know what
continues them. A prefill rounds nothing, so its state and logits are the same for every policy,
seed and sample.

Prompts have different lengths, and a recurrent state must not see padding. Those that are run
together stand at positions of their own (`models.lanes`). A prompt reads its first tokens in
windows of 1, 2, 4 .. as the bits of its length say, and the others in whole windows; a row that
does not take part in a window is put back to where it was. So what a prompt computes depends on its
own tokens, and on a GPU on `together`, which rows are filled up to: libraries choose how to
multiply by the number of rows. (On the CPU a multiple of 8 is enough, see `lockstep.py`.)
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from replayssm.engine.lockstep import ROW_MULTIPLE
from replayssm.engine.stream import Stream
from replayssm.models.adapter import Adapter
from replayssm.models.kv_cache import cache_tensors
from replayssm.models.lanes import LaneCache, reads_windows
from replayssm.models.session import RowGroup
from replayssm.policy import parse_policy

WINDOW = 64
"""Tokens of a whole window; a power of two."""

MOST_TOGETHER = 128
"""Prompts run together: a pass over so many takes a GPU about as long as one over a single one."""

_GIB = 1 << 30

_Key = tuple[int, ...]
_Done = tuple[Stream, Tensor]


class PrefillCache:
    """Prefilled prompts of one model, up to `max_bytes`; later ones are run each time.

    max_bytes: default 8 GiB on a GPU, 1 GiB elsewhere; 0 keeps nothing.

    Callers use inference mode. What they get is a stream that has read the prompt and was not
    handed over, and its last logits [V]: continue it with `Stream.continue_from`, which leaves it
    as it is.
    """

    def __init__(self, adapter: Adapter, *, max_bytes: int | None = None):
        if max_bytes is None:
            max_bytes = (8 if adapter.device.type == "cuda" else 1) * _GIB
        self._adapter, self._room = adapter, max_bytes
        self._kept: dict[_Key, _Done] = {}

    def run(self, prompt: Sequence[int]) -> tuple[Stream, Tensor]:
        """One prompt, on its own."""
        return next(self.run_many([prompt], together=1))

    def run_many(
        self, prompts: Sequence[Sequence[int]], *, together: int
    ) -> Iterator[tuple[Stream, Tensor]]:
        """Each prompt in turn, up to `together` (1, or a multiple of 8) of them run at a time: best
        sorted by length.

        A prompt is run on its own where layers of experts group the rows of an expert, and so would
        let its neighbours decide the order of its sums, and where a person chose an attention
        function that takes no rows of different lengths.
        """
        if self._adapter.has_experts or not reads_windows(self._adapter):
            together = 1
        assert together == 1 or together % ROW_MULTIPLE == 0
        sides: dict[int, _Rows] = {}
        for group in _groups([tuple(prompt) for prompt in prompts], together):
            waiting = list(dict.fromkeys(key for key in group if key not in self._kept))
            if together == 1 or not waiting:
                done = {key: self._run_alone(key) for key in waiting}
            else:
                count = _count(self._adapter, waiting, together)
                if count not in sides:
                    sides[count] = _Rows(self._adapter, count)
                done = sides[count].run(waiting)
            for key in group:
                if key in done:
                    self._keep(key, *done[key])
                yield done[key] if key in done else self._kept[key]

    def _run_alone(self, key: _Key) -> _Done:
        stream = _stream(self._adapter, 1)
        return stream, stream.prefill(torch.tensor([key]))[0]

    def _keep(self, key: _Key, stream: Stream, logits: Tensor) -> None:
        if key in self._kept:
            return
        tensors = [*cache_tensors(stream.cache).values()]
        tensors += [state for _, state in stream.session.prefill_states() if state is not None]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size <= self._room:
            self._room -= size
            self._kept[key] = stream, logits


class _Rows:
    """Rows that read prompts side by side, `count` at most at a time."""

    def __init__(self, adapter: Adapter, count: int):
        self._adapter, self._count = adapter, count
        like = _stream(adapter, 1)
        like.prefill(torch.zeros(1, 1, dtype=torch.int64))
        self._lanes = LaneCache(adapter, like.cache, count, experts_by_row=False)
        self._session = _stream(adapter, count).session
        self._start = like.session.prefill_states()

    def run(self, keys: Sequence[_Key]) -> dict[_Key, _Done]:
        """Every prompt of `keys`, at most as many as there are rows, after its last token."""
        self._session.load_prefill(
            [(n, s.new_zeros(self._count, *s.shape[1:])) for n, s in self._start]
        )
        for states in self._convolutions():
            states.zero_()
        at = torch.zeros(self._count, dtype=torch.int64)
        ends = torch.tensor([*map(len, keys), *[0] * (self._count - len(keys))])
        text = torch.zeros(self._count, int(ends.max()) + WINDOW, dtype=torch.int64)
        for row, key in enumerate(keys):
            text[row, : len(key)] = torch.tensor(key)
        done: dict[_Key, _Done] = {}
        window = 1
        while len(done) < len(keys):
            whole = window == WINDOW
            takes_part = ends - at >= WINDOW if whole else ends & window > 0
            if takes_part.any():
                tokens = text.gather(1, at[:, None] + torch.arange(window))
                logits = self._read(tokens, at, takes_part)
                at = torch.where(takes_part, at + window, at)
                self._lanes.seek(at.tolist())
                for row in (takes_part & (at == ends)).nonzero()[:, 0].tolist():
                    done[keys[row]] = self._take(row, int(at[row])), logits[row].clone()
            window = min(2 * window, WINDOW)
        return done

    def _read(self, tokens: Tensor, at: Tensor, takes_part: Tensor) -> Tensor:
        """Read `tokens` [rows, T] at `at`; rows that take no part are left as they were. Logits of
        the last token, [rows, V].
        """
        self._lanes.seek(at.tolist())
        before = self._session.prefill_states()
        convolutions = [states.clone() for states in self._convolutions()]
        with self._session:
            tokens = tokens.to(self._adapter.device)
            logits = self._lanes.read(tokens, last_only=True)[:, -1]
        if not takes_part.all():  # keys beyond where a row stands are overwritten by its next
            after = self._session.prefill_states()
            self._session.load_prefill(
                [
                    (n, _chosen(takes_part, s, b))
                    for (n, s), (_, b) in zip(after, before, strict=True)
                ]
            )
            for states, old in zip(self._convolutions(), convolutions, strict=True):
                states.copy_(_chosen(takes_part, states, old))
        return logits

    def _convolutions(self) -> list[Tensor]:
        tensors = cache_tensors(self._lanes.cache)
        return [tensor for name, tensor in tensors.items() if ".conv." in name]

    def _take(self, row: int, position: int) -> Stream:
        stream = _stream(self._adapter, 1)
        stream.adopt(
            self._lanes.take(row, tokens=position),
            [(position, s[row : row + 1].clone()) for _, s in self._session.prefill_states()],
        )
        return stream


def fills_rows(device: torch.device) -> bool:
    """Whether the number of rows decides how this device multiplies."""
    return device.type == "cuda"


def _groups(prompts: Sequence[_Key], together: int) -> Iterator[list[_Key]]:
    """`prompts` in order, up to `together` at a time, none much shorter than another: all rows
    compute until the longest has ended.
    """
    group: list[_Key] = []
    for prompt in prompts:
        sizes = [1 + len(key) // WINDOW for key in (*group[:1], *group[-1:], prompt)]
        if group and (len(group) == together or max(sizes) > 2 * min(sizes)):
            yield group
            group = []
        group.append(prompt)
    if group:
        yield group


def _count(adapter: Adapter, keys: Sequence[_Key], together: int) -> int:
    """Rows for `keys`."""
    if fills_rows(adapter.device):
        return together
    return -(-len(keys) // ROW_MULTIPLE) * ROW_MULTIPLE


def _stream(adapter: Adapter, rows: int) -> Stream:
    # Neither policy nor backend is ever used: nothing is handed over, and others continue it.
    group = RowGroup(policy=parse_policy("fp32"), sequences=(0,) * rows, seeds=(0,) * rows)
    return Stream(adapter, [group], source=range(rows), capacity=0, backend="reference")


def _chosen(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Rows of `new` where `rows` (bool [B], on the CPU) says so, else of `old`."""
    return torch.where(rows.to(new.device).view(-1, *[1] * (new.dim() - 1)), new, old)
