"""The library's cache of a model, less the recurrent state: attention and convolution inputs.

Owns cache layers that append without copying the past (the library concatenates, which for a long
text and many rows costs more than the model), and copying, repeating, saving and loading whole
caches. Must not know recurrences, sessions or policies. Sliding-window layers stay the library's
own.

Shapes: B rows, HA attention heads, S tokens so far, D attention head dimension.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

_FIRST_CAPACITY = 64


class AppendLayer(DynamicLayer):
    """Keys and values [B, HA, S, D] as views into storage that doubles when it is full."""

    def __init__(self, capacity: int = 0):
        super().__init__()
        self._capacity = capacity
        self._storage: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Append [B, HA, T, D]; returns views of all so far, valid until the next update."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.get_seq_length()
        total = past + key_states.shape[-2]
        if self._storage is None or total > self._storage[0].shape[-2]:
            self._grow(total, key_states, value_states)
        for stored, new in zip(self._storage, (key_states, value_states), strict=True):
            stored[..., past:total, :].copy_(new)
        self.keys, self.values = (stored[..., :total, :] for stored in self._storage)
        return self.keys, self.values

    def set(self, keys: Tensor, values: Tensor) -> None:
        """Replace the contents by copies of `keys` and `values` [B, HA, S, D]."""
        self._storage = None
        self.lazy_initialization(keys, values)
        self.update(keys, values)

    @property
    def storage(self) -> tuple[Tensor, ...]:
        """Keys and values [B, HA, capacity, D], by reference; empty before the first update."""
        return self._storage or ()

    def seek(self, tokens: int) -> None:
        """Take the first `tokens` of the storage for what is held, whatever they are."""
        assert tokens <= self._storage[0].shape[-2], "beyond the capacity"
        self.keys, self.values = (stored[..., :tokens, :] for stored in self._storage)

    def _grow(self, needed: int, key_states: Tensor, value_states: Tensor) -> None:
        held = 0 if self._storage is None else self._storage[0].shape[-2]
        capacity = max(needed, 2 * held, self._capacity, _FIRST_CAPACITY)
        past = self.get_seq_length()
        grown = []
        for old, new in ((self.keys, key_states), (self.values, value_states)):
            storage = new.new_empty(*new.shape[:-2], capacity, new.shape[-1])
            if past:
                storage[..., :past, :].copy_(old)
            grown.append(storage)
        self._storage = (grown[0], grown[1])


class HybridAppendLayer(LinearAttentionAndFullAttentionLayer, AppendLayer):
    """A layer with both a recurrence and full attention (falcon_h1, zamba2)."""

    def __init__(self, capacity: int = 0, number_of_states: int = 1):
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states=number_of_states)
        self._capacity = capacity
        self._storage = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        return AppendLayer.update(self, key_states, value_states)


def new_cache(config, *, capacity: int = 0) -> Cache:
    """An empty cache for this (text) configuration, `capacity` tokens preallocated."""
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = AppendLayer(capacity)
        elif type(layer) is LinearAttentionAndFullAttentionLayer:
            cache.layers[index] = HybridAppendLayer(capacity, layer.number_of_states)
    return cache


def cache_tensors(cache: Cache) -> dict[str, Tensor]:
    """What the cache holds, by name, as views ("3.keys", "0.conv.0"); empty slots left out."""
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer) and layer.get_seq_length() > 0:
            tensors[f"{index}.keys"], tensors[f"{index}.values"] = layer.keys, layer.values
            if isinstance(layer, DynamicSlidingWindowLayer):
                tensors[f"{index}.seen"] = torch.tensor(layer.cumulative_length)
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for slot, states in layer.conv_states.items():
                if layer.has_previous_state[slot]:
                    tensors[f"{index}.conv.{slot}"] = states
    return tensors


def filled_cache(
    config, tensors: dict[str, Tensor], *, rows: Sequence[int], capacity: int = 0
) -> Cache:
    """A cache whose row r holds copies of row `rows[r]` of `tensors` (from `cache_tensors`)."""
    cache = new_cache(config, capacity=capacity)
    for index, layer in enumerate(cache.layers):
        keys = tensors.get(f"{index}.keys")
        if keys is not None:
            values = tensors[f"{index}.values"]
            keys, values = (_pick_rows(t, rows) for t in (keys, values))
            if isinstance(layer, AppendLayer):
                layer.set(keys, values)
            else:
                _fill_sliding(layer, keys, values, tensors[f"{index}.seen"])
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for slot in layer.conv_states:
                states = tensors.get(f"{index}.conv.{slot}")
                if states is not None:
                    _fill_linear(layer, slot, _pick_rows(states, rows))
    return cache


def _pick_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    return tensor.index_select(0, torch.tensor(list(rows), device=tensor.device))


def _fill_sliding(
    layer: DynamicSlidingWindowLayer, keys: Tensor, values: Tensor, seen: Tensor
) -> None:
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    layer.cumulative_length = int(seen)


def _fill_linear(layer: LinearAttentionCacheLayerMixin, slot: int, states: Tensor) -> None:
    """Put back convolution inputs, and the placeholder that says there is a recurrent state."""
    layer.lazy_initialization(conv_states=states, state_idx=slot)
    layer.conv_states[slot].copy_(states)
    layer.lazy_initialization(
        recurrent_states=states.new_zeros(1, dtype=torch.float32), state_idx=slot
    )
    layer.has_previous_state[slot] = True
