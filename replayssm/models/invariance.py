"""The same bits for a token, whatever is computed beside it: rows of a batch, tokens of a window.

Owns the order of sums in what surrounds a recurrence while a session of an invariant adapter is
active (`Adapter(invariant=True)`). Must not know sessions, policies, or that windows are for
speculation. Slow, and for the CPU: it is there to compare two ways of decoding token for token.

Measured in FP32, windows of 2 to 9 tokens against single ones, 1 to 8 rows: convolutions give equal
bits as they are, and so does all else but

* products with a weight, for fewer than 8 rows or a rest of them: BLAS takes another inner loop.
  Here they are computed in blocks of ROWS rows;
* sigmoid, softplus, silu and gelu of the last elements of a tensor, those that fill no vector
  register: torch has another exponential for them. Here none are left over;
* sums over rows of a few vectors (of a head, not of a model's width), which torch may sum side by
  side. Here they always are;
* attention over the keys of a whole window, masked, where heads are narrow. Here every token is
  alone with exactly its own keys;
* experts that are computed together. Here the library computes them one after the other;
* the window of a recurrence, whose sums over the ring are matrix products. Tokens are read one by
  one instead (`engine/rollback.py`).

Shapes: N rows (of a batch times tokens), D width, Q queries of a head, S keys.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from replayssm.models.errors import UnsupportedInputError

ROWS = 16
_VECTORS = 64  # elements: a multiple of what any loop of torch takes at once


@contextmanager
def invariant_order(config, device: torch.device) -> Iterator[None]:
    """While active, the operations of the module docstring have one order of sums, for models with
    this configuration. UnsupportedInputError where `device` is not the CPU.
    """
    if device.type != "cpu":
        raise UnsupportedInputError(
            f"an invariant adapter's model is on {device.type}: sums have one order on the CPU only"
        )
    experts = config._experts_implementation
    config._experts_implementation = "eager"
    try:
        with _InOrder():
            yield
    finally:
        config._experts_implementation = experts


class _InOrder(TorchFunctionMode):
    def __torch_function__(self, func: Callable, types, args=(), kwargs=None):
        replacement = _REPLACED.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(func, *args, **(kwargs or {}))


def _blocks(rows: Tensor) -> list[Tensor]:
    """rows [N, D] in blocks of ROWS rows, the last filled up with zeros."""
    return list(F.pad(rows, (0, 0, 0, -len(rows) % ROWS)).split(ROWS))


def _product(func: Callable, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [.., D] times weight [M, D], and a bias [M]."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.cat([func(block, weight, bias) for block in _blocks(rows)])[: len(rows)]
    return out.view(*x.shape[:-1], -1)


def _elementwise(func: Callable, x: Tensor, *args, **kwargs) -> Tensor:
    flat = x.flatten()
    filled = F.pad(flat, (0, -len(flat) % _VECTORS))
    return func(filled, *args, **kwargs)[: len(flat)].view(x.shape)


def _over_rows(func: Callable, x: Tensor, *args, **kwargs) -> Tensor:
    """A sum or mean, side by side if it is one over the last axis alone."""
    dim = args[0] if args else kwargs.get("dim")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    if dim not in (-1, x.dim() - 1) or len(args) > 2 or kwargs.keys() - {"dim", "keepdim"}:
        return func(x, *args, **kwargs)
    rows = x.reshape(-1, x.shape[-1])
    columns = F.pad(rows.T, (0, -len(rows) % _VECTORS))
    out = func(columns.contiguous(), 0)[: len(rows)].view(x.shape[:-1])
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    return out[..., None] if keepdim else out


def _attention(
    func: Callable, query: Tensor, key: Tensor, value: Tensor, *, attn_mask=None, **kwargs
) -> Tensor:
    """query [B, H, Q, D] over key and value [B, H, S, ..]; attn_mask bool [1, 1, Q, S] or None.

    Queries that see the same keys stay together: they are the heads that share them.
    """
    assert not kwargs.get("is_causal") and (attn_mask is None or attn_mask.shape[:2] == (1, 1))
    if attn_mask is None:
        attn_mask = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)
    out = query.new_empty(*query.shape[:3], value.shape[3])
    seen, which = attn_mask[0, 0].unique(dim=0, return_inverse=True)
    for index, keys in enumerate(seen):
        mine, keys = which == index, keys.nonzero()[:, 0]
        some = query[:, :, mine]
        count = some.shape[2]
        some = F.pad(some, (0, 0, 0, -count % ROWS))
        for row in range(len(query)):
            one = slice(row, row + 1)
            k, v = (t[one].index_select(2, keys) for t in (key, value))
            out[one, :, mine] = func(some[one], k, v, **kwargs)[:, :, :count]
    return out


_REPLACED = {
    F.linear: _product,
    F.silu: _elementwise,
    F.gelu: _elementwise,
    F.softplus: _elementwise,
    torch.sigmoid: _elementwise,
    Tensor.sigmoid: _elementwise,
    torch.sum: _over_rows,
    torch.mean: _over_rows,
    Tensor.sum: _over_rows,
    Tensor.mean: _over_rows,
    F.scaled_dot_product_attention: _attention,
}
