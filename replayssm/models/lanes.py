"""Tokens for many rows of different lengths: a cache whose rows are refilled one by one.

Owns the attention side of a batch whose rows are at different positions. Keys lie in one storage
with a length for each row (`kv_cache.RowLayer`); attention runs every row over exactly its own: a
row's arithmetic depends on its own tokens only, so nothing has to be masked. The recurrent state is
a session's; convolution inputs are copied row by row. Must not know policies, prompts or when a row
ends.

Experts, too, are computed row by row, unless told otherwise: grouping the rows of one expert would
let a row's neighbours decide the order of its sums. (It gathers an expert's weights for every
token, which is for single tokens.)

Shapes: B lanes (rows), HKV key-value heads, S keys of one row, D head dimension.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from replayssm.models.adapter import Adapter
from replayssm.models.attention import is_ours, note_rows
from replayssm.models.errors import UnsupportedInputError
from replayssm.models.kv_cache import AppendLayer, RowCursor, cache_tensors, filled_cache

_ATTENTION_NAME = "replayssm_lanes"
_ROW_BY_ROW_EXPERTS = "batched_mm"  # the library's: gathers the weights of each row's experts


def reads_windows(adapter: Adapter) -> bool:
    """Whether lanes at different positions can read several tokens at once."""
    attends = {"full_attention", "hybrid"} & set(adapter.config.layer_types)
    return is_ours(adapter.config) or not attends


class LaneCache:
    """The library's cache for B lanes; `put` gives a lane the cache of a prefilled sequence.

    What a lane without a sequence computes means nothing, and reaches no other.
    """

    def __init__(self, adapter: Adapter, like: Cache, lanes: int, *, experts_by_row: bool = True):
        """`like`: the cache of any one prefilled sequence, of which every lane starts as a copy."""
        if any(isinstance(layer, DynamicSlidingWindowLayer) for layer in like.layers):
            raise UnsupportedInputError(
                f"{adapter.name!r} has sliding-window attention; rows of different lengths in one "
                "batch are not supported for it"
            )
        self._adapter, self._experts_by_row = adapter, experts_by_row
        self._cursor = RowCursor(lanes, adapter.device)
        self._cache = filled_cache(
            adapter.config, cache_tensors(like), rows=[0] * lanes, cursor=self._cursor
        )

    @property
    def cache(self) -> Cache:
        """The library's cache of all lanes, by reference."""
        return self._cache

    @property
    def cursor(self) -> RowCursor:
        """Where the lanes stand, by reference; `step` sets it."""
        return self._cursor

    def put(self, lane: int, cache: Cache, *, room: int) -> None:
        """Continue `cache`, of one sequence, in `lane`; it may become `room` tokens long."""
        for mine, theirs in zip(self._cache.layers, cache.layers, strict=True):
            if isinstance(mine, AppendLayer):
                mine.reserve(room)
                for storage, keys in zip(mine.storage, theirs.held(), strict=True):
                    storage[lane, :, : keys.shape[-2]] = keys[0]
            if isinstance(mine, LinearAttentionCacheLayerMixin):
                for slot, states in theirs.conv_states.items():
                    if theirs.has_previous_state[slot]:
                        mine.conv_states[slot][lane] = states[0]

    def take(self, lane: int, *, tokens: int) -> Cache:
        """A copy of the first `tokens` tokens of `lane`, for `put`; its convolution inputs are
        those of now.
        """
        tensors = {
            name: tensor[:, :, :tokens] if name.endswith((".keys", ".values")) else tensor
            for name, tensor in cache_tensors(self._cache).items()
        }
        return filled_cache(self._adapter.config, tensors, rows=[lane])

    def seek(self, positions: Sequence[int]) -> None:
        """Say how many tokens each lane holds (0 for one without a sequence)."""
        past = torch.tensor(positions, dtype=torch.int64)
        self._cursor.past.copy_(past, non_blocking=True)
        self._cursor.tokens = max(positions)

    def step(self, tokens: Tensor) -> Tensor:
        """Read one token a lane, `tokens` [B, 1] int64, at `seek`'s positions, which then move on
        by one; returns FP32 logits [B, V].
        """
        logits = self.read(tokens)[:, -1]
        self._cursor.advance(1)
        return logits

    def read(self, tokens: Tensor, *, last_only: bool = False) -> Tensor:
        """Read `tokens` [B, T] from `seek`'s positions on, which stay; returns FP32 logits
        [B, T, V], or [B, 1, V] with `last_only`.
        """
        adapter = self._adapter
        kwargs = {adapter._cache_keyword: self._cache, "use_cache": True}
        if adapter._takes_positions:
            following = torch.arange(tokens.shape[1], device=tokens.device)
            kwargs["position_ids"] = self._cursor.on(tokens.device)[:, None] + following
        if last_only and adapter._takes_last_only:
            kwargs["logits_to_keep"] = 1
        with self._row_by_row():
            logits = adapter.model(input_ids=tokens, **kwargs).logits
        return logits[:, -1:] if last_only else logits

    @contextmanager
    def _row_by_row(self) -> Iterator[None]:
        """Have experts, and an attention function that is not ours, run lane by lane; everything is
        restored on leaving.

        The library makes no mask for a function under this name, and needs none.
        """
        config = self._adapter.config
        before, experts = config._attn_implementation, config._experts_implementation

        def attend(module, query: Tensor, key: Tensor, value: Tensor, mask, **kwargs):
            note_rows(None)
            if query.shape[2] > 1:
                raise UnsupportedInputError(
                    f"rows of different lengths read several tokens at once through the attention "
                    f"function 'sdpa' only, not {before!r}"
                )
            run = _attention_function(before, module)
            outputs = []
            for i, past in enumerate(self._cursor.past.tolist()):
                q, k, v = (t[i : i + 1] for t in (query, key, value))
                k, v = k[:, :, : past + 1], v[:, :, : past + 1]
                outputs.append(run(module, q, k, v, None, **kwargs)[0])
            return torch.cat(outputs), None

        ALL_ATTENTION_FUNCTIONS[_ATTENTION_NAME] = attend
        if not is_ours(config):
            config._attn_implementation = _ATTENTION_NAME
        if self._experts_by_row:
            config._experts_implementation = _ROW_BY_ROW_EXPERTS
        try:
            yield
        finally:
            config._attn_implementation, config._experts_implementation = before, experts
            del ALL_ATTENTION_FUNCTIONS[_ATTENTION_NAME]


def _attention_function(name: str, module):
    """The attention function called `name`; eager attention is the one of the module's own file."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
