"""Attention of a few new tokens over long keys: no copies of keys, equal bits for equal rows.

Owns the attention function that models use while a session is active, and its registration with
transformers. Must not know recurrences, policies or sessions.

The library's own function copies keys and values once per query head where heads share them (for
many rows of a long text, more memory than the model), and on the CPU its result depends on which
thread computes a row when a row has few queries: the kernel's scratch space is then not aligned,
and products are summed in another order. Here the query heads that share a key head become extra
queries of that head, and on the CPU queries are padded to a multiple of 16.

Shapes: B rows, HQ query heads, HK key heads, r = HQ/HK, T new tokens, S keys, D head dimension.
"""

from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from replayssm.models.errors import UnsupportedInputError

NAME = "replayssm"
_REPLACED = "sdpa"  # a person who chose another attention function keeps it
_QUERY_MULTIPLE = 16  # floats in 64 bytes
_REFUSED = ("softcap", "s_aux", "position_bias")  # no supported architecture has them


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
    attention_mask: Tensor | None,  # bool [1, 1, T, S]; None only where T = 1 sees everything
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, None]:
    """Softmax attention; returns [B, T, HQ, D] (contiguous), and no weights."""
    present = [name for name in _REFUSED if kwargs.get(name) is not None]
    if present:
        raise UnsupportedInputError(f"attention with {', '.join(present)} is not supported")
    assert dropout == 0.0, "a session runs in eval mode"
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
    return out.transpose(1, 2).contiguous(), None


def _one_mask(**kwargs) -> Tensor:
    """The library's mask for one row: all rows have the same length."""
    return sdpa_mask(**kwargs | {"batch_size": 1, "allow_is_causal_skip": False})


# Under a name of our own, for good: nothing uses it unless a configuration names it.
ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _one_mask)
