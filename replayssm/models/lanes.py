"""One token for many rows of different lengths: each row has its own attention cache.

Owns the attention side of a batch whose rows are at different positions: a cache whose attention
layers hold one cache a row, and an attention function that runs every row over exactly its own
keys. No padding exists, so nothing has to be masked: a row's arithmetic depends on its own tokens
only. The recurrent state is a session's; convolution inputs are copied row by row. Must not know
policies, prompts or when a row ends.

Experts, too, are computed row by row: grouping the rows of one expert would let a row's neighbours
decide the order of its sums.

Shapes: B lanes (rows), HKV key-value heads, S keys of one row, D head dimension.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from replayssm.models.adapter import Adapter
from replayssm.models.errors import UnsupportedInputError
from replayssm.models.kv_cache import (
    AppendLayer,
    HybridAppendLayer,
    cache_tensors,
    filled_cache,
)

_ATTENTION_NAME = "replayssm_lanes"
_ROW_BY_ROW_EXPERTS = "batched_mm"  # the library's: gathers the weights of each row's experts


class LaneCache:
    """The library's cache for B lanes; `put` gives a lane the cache of a prefilled sequence.

    A lane without a sequence computes nothing in attention (its output is zero) and stores nothing.
    """

    def __init__(self, adapter: Adapter, like: Cache, lanes: int):
        """`like`: the cache of any one prefilled sequence; convolution inputs start as copies."""
        if any(isinstance(layer, DynamicSlidingWindowLayer) for layer in like.layers):
            raise UnsupportedInputError(
                f"{adapter.name!r} has sliding-window attention; rows of different lengths in one "
                "batch are not supported for it"
            )
        self._adapter = adapter
        self._current: list[AppendLayer | None] | None = None
        convolutions = {k: v for k, v in cache_tensors(like).items() if ".conv." in k}
        self._cache = filled_cache(adapter.config, convolutions, rows=[0] * lanes)
        self._rows: dict[int, list[AppendLayer | None]] = {}
        for index, layer in enumerate(self._cache.layers):
            if isinstance(layer, DynamicLayer):
                self._rows[index] = [None] * lanes
                kind = _HybridLaneLayer if isinstance(layer, HybridAppendLayer) else _LaneLayer
                self._cache.layers[index] = kind(layer, self, self._rows[index])

    def put(self, lane: int, cache: Cache) -> None:
        """Continue `cache`, of one sequence, in `lane`; its attention storage is taken over."""
        for index, rows in self._rows.items():
            rows[lane] = cache.layers[index]
        for mine, theirs in zip(self._cache.layers, cache.layers, strict=True):
            if isinstance(mine, LinearAttentionCacheLayerMixin):
                for slot, states in theirs.conv_states.items():
                    if theirs.has_previous_state[slot]:
                        mine.conv_states[slot][lane] = states[0]

    def clear(self, lane: int) -> None:
        """Forget the sequence of `lane`."""
        for rows in self._rows.values():
            rows[lane] = None

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Read one token a lane: `tokens` and `positions` [B] int64; returns FP32 logits [B, V]."""
        adapter = self._adapter
        kwargs = {adapter._cache_keyword: self._cache, "use_cache": True}
        if adapter._takes_positions:
            kwargs["position_ids"] = positions[:, None]
        with self._row_by_row():
            return adapter.model(input_ids=tokens[:, None], **kwargs).logits[:, -1]

    @contextmanager
    def _row_by_row(self) -> Iterator[None]:
        """Have attention and experts run lane by lane; everything is restored on leaving.

        The library makes no mask for an attention function of ours, and needs none.
        """
        config = self._adapter.config
        before, experts = config._attn_implementation, config._experts_implementation

        def attend(module, query: Tensor, key: Tensor, value: Tensor, mask, **kwargs):
            del key, value, mask  # of the new token only: `update` has appended them to the lanes
            rows, self._current = self._current, None
            assert rows is not None, "attention without an update of the cache"
            run = _attention_function(before, module)
            outputs: list[Tensor | None] = [
                None
                if row is None
                else run(module, query[i : i + 1], *_attended(module, row), None, **kwargs)[0]
                for i, row in enumerate(rows)
            ]
            # Every lane has a shape; if none has a sequence, nobody steps.
            empty = torch.zeros_like(next(out for out in outputs if out is not None))
            return torch.cat([empty if out is None else out for out in outputs]), None

        ALL_ATTENTION_FUNCTIONS[_ATTENTION_NAME] = attend
        config._attn_implementation = _ATTENTION_NAME
        config._experts_implementation = _ROW_BY_ROW_EXPERTS
        try:
            yield
        finally:
            config._attn_implementation, config._experts_implementation = before, experts
            del ALL_ATTENTION_FUNCTIONS[_ATTENTION_NAME]


class _LaneLayer(AppendLayer):
    """An attention layer that appends each lane's new key and value to the lane's own cache."""

    def __init__(self, layer: AppendLayer, owner: LaneCache, rows: list[AppendLayer | None]):
        vars(self).update(vars(layer))  # takes over what the layer holds (convolution inputs)
        self._owner, self._lanes = owner, rows

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Append [B, HKV, 1, D]; returns the arguments (the lanes' own are read in `attend`)."""
        assert key_states.shape[-2] == 1, "lanes read one token at a time"
        for lane, row in enumerate(self._lanes):
            if row is not None:
                row.update(key_states[lane : lane + 1], value_states[lane : lane + 1])
        self._owner._current = self._lanes
        return key_states, value_states


class _HybridLaneLayer(_LaneLayer, HybridAppendLayer):
    """The same beside a recurrence (falcon_h1, zamba2)."""


def _attended(module, row: AppendLayer) -> tuple[Tensor, Tensor]:
    """Keys and values of a lane; latent attention caches what both are expanded from."""
    expand = getattr(module, "expand_kv", None)
    return (row.keys, row.values) if expand is None else expand(row.keys, row.values)


def _attention_function(name: str, module):
    """The attention function called `name`; eager attention is the one of the module's own file."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
