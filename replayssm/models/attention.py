"""Attention of a few new tokens over long keys: no copies of keys, equal bits for equal rows.

Owns the attention function that models use while a session is active, and its registration with
transformers. Must not know recurrences, policies or sessions.

On a GPU it is our own kernel (`ops/attention`), which takes no mask: none is built there. That
covers plain causal attention; where a model asks for another mask (a sliding window), torch's
function gets it. Where rows have different numbers of keys, the cache layer says so when it hands
them out (`note_rows`), not with the keys: latent attention makes others of them in between.

The library's own function copies keys and values once per query head where heads share them (for
many rows of a long text, more memory than the model), and on the CPU its result depends on which
thread computes a row when a row has few queries: the kernel's scratch space is then not aligned,
and products are summed in another order. Here the query heads that share a key head become extra
queries of that head, and on the CPU queries are padded to a multiple of 16.

Shapes: B rows, HQ query heads, HK key heads, r = HQ/HK, T new tokens, S keys, D head dimension.
"""

import threading
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from replayssm.models.errors import UnsupportedInputError

NAME = "replayssm"
_REPLACED = "sdpa"  # a person who chose another attention function keeps it
_QUERY_MULTIPLE = 16  # floats in 64 bytes
_REFUSED = ("softcap", "s_aux", "position_bias")  # no supported architecture has them


class Rows(Protocol):
    """Where rows of different lengths stand; see `kv_cache.RowCursor`."""

    past: Tensor

    def on(self, device: torch.device) -> Tensor: ...

    def most_keys(self, tokens: int) -> int: ...


class _Noted(threading.local):
    rows: Rows | None = None


_noted = _Noted()


def note_rows(rows: Rows | None) -> None:
    """Called by a cache layer that hands out keys: of each row, the next `attend` uses its own part
    (None: all of them).
    """
    _noted.rows = rows


def runs_kernel(device: torch.device) -> bool:
    """Whether causal attention on this device is our kernel."""
    return device.type == "cuda"


def is_ours(config) -> bool:
    """Whether models with this configuration attend through `attend` under a session."""
    return config._attn_implementation in (_REPLACED, NAME)


@contextmanager
def shared_key_attention(config):
    """While active, models with this configuration attend through `attend`, if they used SDPA."""
    before = config._attn_implementation
    if before == _REPLACED:
        config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def attend(
    module: nn.Module,
    query: Tensor,  # [B, HQ, T, D]
    key: Tensor,  # [B, HK, S, D]
    value: Tensor,  # [B, HK, S, D]
    attention_mask: Tensor | None,  # bool [1, 1, T, S]; None: causal (on the CPU only for T = 1)
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, None]:
    """Softmax attention; returns [B, T, HQ, D] (contiguous), and no weights."""
    present = [name for name in _REFUSED if kwargs.get(name) is not None]
    if present:
        raise UnsupportedInputError(f"attention with {', '.join(present)} is not supported")
    assert dropout == 0.0, "a session runs in eval mode"
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows, _noted.rows = _noted.rows, None
    if attention_mask is None and runs_kernel(query.device):
        return _attend_by_kernel(query, key, value, rows, scaling), None
    if rows is not None:
        return _attend_row_by_row(query, key, value, rows, scaling), None
    return _attend_by_torch(query, key, value, attention_mask, scaling), None


def _attend_by_kernel(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows | None, scale: float
) -> Tensor:
    from replayssm.ops.attention.triton_attention import attend as kernel

    tokens, keys = query.shape[2], key.shape[2]
    if rows is not None:
        past, keys = rows.on(query.device), rows.most_keys(tokens)
    else:
        past = torch.full((1,), keys - tokens, dtype=torch.int64, device=key.device)
    with torch.cuda.device_of(query):  # of several, the one that this layer is on
        return kernel(query, key, value, past, scale=scale, most_keys=keys)


def _attend_row_by_row(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float
) -> Tensor:
    """Every row over exactly its own keys, as if it were alone."""
    tokens, outputs = query.shape[2], []
    for row, past in enumerate(rows.past.tolist()):
        q, k, v = (t[row : row + 1] for t in (query, key, value))
        k, v, mask = k[:, :, : past + tokens], v[:, :, : past + tokens], None
        if tokens > 1:
            mask = torch.ones(1, 1, tokens, past + tokens, dtype=torch.bool).tril(past)
        outputs.append(_attend_by_torch(q, k, v, mask, scale))
    return torch.cat(outputs)


def _attend_by_torch(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float
) -> Tensor:
    rows, query_heads, tokens, width = query.shape
    shared = query_heads // key.shape[1]
    queries = shared * tokens
    query = query.reshape(rows, key.shape[1], queries, width)
    if attention_mask is None:
        assert tokens == 1, "several tokens need a mask"
    else:
        attention_mask = attention_mask[:1].repeat(1, 1, shared, 1)
    padding = -queries % _QUERY_MULTIPLE if query.device.type == "cpu" else 0
    if padding:
        query = F.pad(query, (0, 0, 0, padding))
        if attention_mask is not None:
            attention_mask = F.pad(attention_mask, (0, 0, 0, padding), value=True)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    out = out[:, :, :queries].reshape(rows, query_heads, tokens, -1)
    return out.transpose(1, 2).contiguous()


def _one_mask(**kwargs) -> Tensor | None:
    """The library's mask for one row: all rows have the same length. None for our kernel."""
    plain = kwargs.get("mask_function") is causal_mask_function
    if plain and runs_kernel(torch.device(kwargs["device"])):
        return None
    return sdpa_mask(**kwargs | {"batch_size": 1, "allow_is_causal_skip": False})


# Under a name of our own, for good: nothing uses it unless a configuration names it.
ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _one_mask)
