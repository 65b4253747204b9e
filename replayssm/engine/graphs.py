"""Replaying a captured forward pass instead of launching its kernels one by one.

Owns when a pass is captured as a CUDA graph, which captured pass fits a step, and saying why none
is used. Must not know what the rows stand for.

A pass of a small model is a thousand launches of a few microseconds each, and takes the host ten
times as long as the GPU; a replay takes one launch. What may change from step to step lies on the
device where the graph reads it: tokens (copied in), every row's position, cursors of the rings,
counters of random bits. What a graph has fixed is part of the key under which it is kept: the
number of tokens, where the rings stand (it decides when they are flushed within a window), and how
many keys attention may look at, in steps of KEYS.

The first pass under a key is run as usual, which compiles what is not compiled yet, the second is
captured, and from then on it is replayed. Memory of captured passes is shared: results are
overwritten by the next step of any of them.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from replayssm.models.kv_cache import RowCursor, RowLayer
from replayssm.models.session import ReplaySession
from replayssm.state_update import StateUpdate

MODES = ("auto", "on", "off")
KEYS = 8192


@dataclass(kw_only=True)
class _Captured:
    """A graph with its inputs and outputs; without a graph, how often its key came up."""

    seen: int = 0
    graph: "torch.cuda.CUDAGraph | None" = None
    tokens: Tensor | None = None
    logits: Tensor | None = None


class StepGraphs:
    """Steps of one session, by graphs where that is possible.

    mode: "auto" (graphs where they are possible; why not, if not, `describe` says), "on" (an error
        where they are not possible) or "off".
    patience: steps under a key before a pass is captured, which takes as long as several.
    """

    def __init__(self, session: ReplaySession, *, mode: str = "auto", patience: int = 1):
        if mode not in MODES:
            raise ValueError(f"graphs {mode!r}: allowed are {', '.join(MODES)}")
        self._session, self._mode, self._patience = session, mode, patience
        self._kept: dict[tuple, _Captured] = {}
        self._pool = None
        self._obstacle = "switched off" if mode == "off" else ""

    def describe(self, cache: Cache) -> str:
        """What is in effect for steps on `cache`: "graphs", or "eager" with the reason."""
        obstacle = self._obstacle or self._look_for_obstacle(cache)
        return f"eager ({obstacle})" if obstacle else "graphs"

    def step(
        self,
        tokens: Tensor,
        cache: Cache,
        forward: Callable[[Tensor], Tensor],
        *,
        cursor: RowCursor | None,
        worthwhile: bool = True,
        place: int = 0,
    ) -> Tensor:
        """`forward(tokens)`, or the replay of an earlier one; tokens [B, T].

        forward: one pass over all rows that writes in place, and moves session and `cursor`.
        cursor: where the rows of `cache` stand, if it has attention. worthwhile: whether enough
        steps like this will follow for one to be captured. place: what else a graph fixes.

        Raises ValueError where graphs are "on" and impossible.
        """
        self._obstacle = self._obstacle or self._look_for_obstacle(cache)
        if self._obstacle and self._mode == "on":
            raise ValueError(f"graphs 'on' are not possible: {self._obstacle}")
        rings = None if self._obstacle else self._rings(tokens.shape[1])
        if rings is None:
            return forward(tokens)
        rooms = [layer.capacity for layer in cache.layers if isinstance(layer, RowLayer)]
        bound = room = 0
        if rooms:
            keys, room = cursor.tokens + tokens.shape[1], min(rooms)
            if room < keys:  # storage is about to grow
                return forward(tokens)
            bound = min(-(-keys // KEYS) * KEYS, room)
            cursor.bound = bound
        key = (bound, room, tokens.shape, rings, place)
        kept = self._kept.setdefault(key, _Captured())
        try:
            if kept.graph is None:
                kept.seen += 1
                wanted = kept.seen > self._patience and (worthwhile or self._mode == "on")
                if not (wanted and self._capture(key, tokens, forward)):
                    return forward(tokens)
            kept.tokens.copy_(tokens)
            kept.graph.replay()
        finally:
            if cursor is not None:
                cursor.bound = None
        self._session.replayed(tokens.shape[1])
        if cursor is not None:
            cursor.tokens += tokens.shape[1]
        return kept.logits

    def _look_for_obstacle(self, cache: Cache) -> str:
        device = self._session.adapter.device
        if device.type != "cuda":
            return f"the model is on {device.type}"
        if len(self._session.adapter.devices) > 1:
            return "the model is on several devices"
        others = [name for name in self._session.backends if name != "triton"]
        if others:
            return f"backend {', '.join(others)}"
        if any(
            isinstance(layer, DynamicLayer) and not isinstance(layer, RowLayer)
            for layer in cache.layers
        ):
            return "an attention layer whose length only the host knows"
        return ""

    def _rings(self, tokens: int) -> tuple | None:
        """What a graph of `tokens` tokens fixes about rings; None where rows differ."""
        session = self._session
        if session.reader is not StateUpdate.step:  # windows ask the cursors on the device
            return ()
        caches = [cache for _, cache in session.updates(session.layer_indices[0])]
        full = tuple(cache.may_be_full for cache in caches)
        if tokens == 1:  # one kernel, which asks the cursors on the device
            return full
        stands = tuple(cache.cursor for cache in caches)
        return None if any(isinstance(at, Tensor) for at in stands) else (*full, *stands)

    def _capture(self, key: tuple, tokens: Tensor, forward: Callable[[Tensor], Tensor]) -> bool:
        """Capture one pass under `key`; nothing moves. False if it turns out to be impossible."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, static = torch.cuda.CUDAGraph(), tokens.clone()
        try:
            # Other threads may use the GPU meanwhile, as a writer of records does.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = forward(static)
        except (RuntimeError, ValueError) as error:
            if self._mode == "on":
                raise
            self._obstacle = f"capture failed: {str(error).splitlines()[0]}"
            warnings.warn(f"no CUDA graphs: {self._obstacle}", stacklevel=2)
            return False
        kept = self._kept[key]
        kept.graph, kept.tokens, kept.logits = graph, static, logits
        # What looked at fewer keys, or at storage that has grown since, is not needed any more.
        # Only now: a pool of memory that the last graph has left cannot be captured into.
        for old in [old for old in self._kept if old[:2] < key[:2]]:
            del self._kept[old]
        return True
