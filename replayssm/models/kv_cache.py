"""The library's cache of a model, less the recurrent state: attention and convolution inputs.

Owns cache layers that append without copying the past (the library concatenates, which for a long
text and many rows costs more than the model), and copying, repeating, saving and loading whole
caches. Must not know recurrences, sessions or policies. Sliding-window layers stay the library's
own.

Two kinds of layers append: `AppendLayer`, all of whose rows have one length, which the host knows;
and `RowLayer`, whose rows have lengths of their own, which are numbers on the device (a
`RowCursor` shared by all layers of a cache). The second is what decoding uses on a GPU, and what
rows of different lengths need anywhere.

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

from replayssm.models import attention

_FIRST_CAPACITY = 64
_MULTIPLE = 16


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
        attention.note_rows(None)
        return self.keys, self.values

    def set(self, keys: Tensor, values: Tensor) -> None:
        """Replace the contents by copies of `keys` and `values` [B, HA, S, D]."""
        self._storage = None
        self.lazy_initialization(keys, values)
        self.update(keys, values)

    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values so far, [B, HA, S, D], as views."""
        return self.keys, self.values

    @property
    def storage(self) -> tuple[Tensor, ...]:
        """Keys and values [B, HA, capacity, D], by reference; empty before the first update."""
        return self._storage or ()

    @property
    def capacity(self) -> int:
        """Tokens that the storage has room for."""
        return self._storage[0].shape[-2] if self._storage else 0

    def seek(self, tokens: int) -> None:
        """Take the first `tokens` of the storage for what is held, whatever they are."""
        assert tokens <= self.capacity, "beyond the capacity"
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


class RowCursor:
    """How many keys each row holds: `past` [B] int64, on the device; the most, on the host.

    It stands still while a token is read by all layers, and moves after the last. Layers that are
    on another device than `past` get a copy of it (`on`).
    """

    def __init__(self, rows: int, device: torch.device):
        self.past = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tokens = 0
        self.bound: int | None = None

    def on(self, device: torch.device) -> Tensor:
        """`past` on `device`: itself, or where a model is spread over several, a copy as of now."""
        return self.past.to(device)

    def advance(self, tokens: int) -> None:
        """Every row has read `tokens` more. While a graph is captured, the host stays behind."""
        self.past.add_(tokens)
        if not (self.past.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.tokens += tokens

    def seek(self, tokens: int) -> None:
        """Every row holds `tokens`."""
        self.past.fill_(tokens)
        self.tokens = tokens

    def most_keys(self, tokens: int) -> int:
        """At least the keys of any row once `tokens` more are there: `bound`, if that is set, which
        a graph needs to serve later positions, too.
        """
        most = self.tokens + tokens
        assert self.bound is None or most <= self.bound, (most, self.bound)
        return self.bound or most


class RowLayer(AppendLayer):
    """Keys and values of rows that stand at `cursor`."""

    def __init__(self, capacity: int, cursor: RowCursor):
        super().__init__(capacity)
        self.cursor = cursor

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Append [B, HA, T, D] behind each row's own; returns views of as much storage as the
        longest row needs (or the cursor's bound), and notes for `attend` which part is whose.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[-2]
        self.reserve(self.cursor.tokens + tokens, (key_states, value_states))
        keys, values = self._storage
        past = self.cursor.on(keys.device)
        if attention.runs_kernel(keys.device):
            from replayssm.ops.attention.triton_attention import append

            with torch.cuda.device_of(keys):  # of several, the one that this layer is on
                append(keys, values, (key_states, value_states), past)
        else:
            row = torch.arange(len(past))[:, None]
            slot = past[:, None] + torch.arange(tokens)
            for stored, new in ((keys, key_states), (values, value_states)):
                stored[row, :, slot] = new.transpose(1, 2)
        attention.note_rows(self.cursor)
        # Latent attention projects what it is given: a multiple, for equal rows to get equal bits.
        most = -(-self.cursor.most_keys(tokens) // _MULTIPLE) * _MULTIPLE
        return keys[..., :most, :], values[..., :most, :]

    def reserve(self, tokens: int, like: tuple[Tensor, Tensor] | None = None) -> None:
        """Have room for `tokens` in every row; `like`: keys and values, where nothing is held."""
        held = self._storage
        if held is not None:
            if tokens <= self.capacity:
                return
            tokens, like = max(tokens, self.capacity * 3 // 2), held
        capacity = -(-max(tokens, self._capacity) // _MULTIPLE) * _MULTIPLE
        self._storage = tuple(t.new_empty(*t.shape[:-2], capacity, t.shape[-1]) for t in like)
        if held is not None:
            for old, storage in zip(held, self._storage, strict=True):
                storage[..., : old.shape[-2], :] = old

    def set(self, keys: Tensor, values: Tensor) -> None:
        """Replace the contents by copies of `keys` and `values` [B, HA, S, D]. (The cursor is the
        cache's to move.)
        """
        self.lazy_initialization(keys, values)
        self.reserve(keys.shape[-2], (keys, values))
        for storage, new in zip(self._storage, (keys, values), strict=True):
            storage[..., : new.shape[-2], :] = new

    def held(self) -> tuple[Tensor, Tensor]:
        keys, values = self._storage
        return keys[..., : self.cursor.tokens, :], values[..., : self.cursor.tokens, :]

    def get_seq_length(self) -> int:
        return 0 if self._storage is None else self.cursor.tokens

    def seek(self, tokens: int) -> None:
        assert tokens <= self.capacity, "beyond the capacity"
        self.cursor.seek(tokens)


class HybridAppendLayer(LinearAttentionAndFullAttentionLayer, AppendLayer):
    """A layer with both a recurrence and full attention (falcon_h1, zamba2)."""

    def __init__(self, capacity: int = 0, number_of_states: int = 1):
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states=number_of_states)
        self._capacity = capacity
        self._storage = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        return AppendLayer.update(self, key_states, value_states)


class HybridRowLayer(LinearAttentionAndFullAttentionLayer, RowLayer):
    """The same with a length for each row."""

    def __init__(self, capacity: int, cursor: RowCursor, number_of_states: int = 1):
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states=number_of_states)
        self._capacity, self._storage, self.cursor = capacity, None, cursor

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        return RowLayer.update(self, key_states, value_states)


def new_cache(config, *, capacity: int = 0, cursor: RowCursor | None = None) -> Cache:
    """An empty cache for this (text) configuration, `capacity` tokens preallocated.

    With `cursor`, its layers are `RowLayer`s, and it is the cache's attribute `row_cursor` (None
    otherwise, and where there is no attention).
    """
    cache = DynamicCache(config=config)
    cache.row_cursor = None
    for index, layer in enumerate(cache.layers):
        hybrid = type(layer) is LinearAttentionAndFullAttentionLayer
        if not hybrid and type(layer) is not DynamicLayer:
            continue
        states = (layer.number_of_states,) if hybrid else ()
        if cursor is None:
            kind = HybridAppendLayer if hybrid else AppendLayer
            cache.layers[index] = kind(capacity, *states)
        else:
            kind = HybridRowLayer if hybrid else RowLayer
            cache.layers[index] = kind(capacity, cursor, *states)
            cache.row_cursor = cursor
    return cache


def cache_tensors(cache: Cache) -> dict[str, Tensor]:
    """What the cache holds, by name, as views ("3.keys", "0.conv.0"); empty slots left out."""
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer) and layer.get_seq_length() > 0:
            appends = isinstance(layer, AppendLayer)
            keys, values = layer.held() if appends else (layer.keys, layer.values)
            tensors[f"{index}.keys"], tensors[f"{index}.values"] = keys, values
            if isinstance(layer, DynamicSlidingWindowLayer):
                tensors[f"{index}.seen"] = torch.tensor(layer.cumulative_length)
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for slot, states in layer.conv_states.items():
                if layer.has_previous_state[slot]:
                    tensors[f"{index}.conv.{slot}"] = states
    return tensors


def filled_cache(
    config,
    tensors: dict[str, Tensor],
    *,
    rows: Sequence[int],
    capacity: int = 0,
    cursor: RowCursor | None = None,
) -> Cache:
    """A cache whose row r holds copies of row `rows[r]` of `tensors` (from `cache_tensors`).

    Without `cursor` it makes one on a GPU, where rows may have lengths of their own, unless a
    person chose another attention function or spread the layers over several GPUs.
    """
    keys = [tensor for name, tensor in tensors.items() if name.endswith(".keys")]
    devices = {tensor.device for tensor in keys}
    if cursor is None and len(devices) == 1 and attention.is_ours(config):
        (device,) = devices
        if attention.runs_kernel(device):
            cursor = RowCursor(len(rows), device)
            cursor.seek(keys[0].shape[-2])
    cache = new_cache(config, capacity=capacity, cursor=cursor)
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
