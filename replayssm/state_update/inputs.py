"""What a recurrence is given: which recurrences there are, their inputs, and what is refused.

Owns the table of recurrences, slices of inputs, and the checks that stand between a model and a
state update. Changes no tensor and knows no backend.
"""

from __future__ import annotations

from types import ModuleType

import torch

from replayssm.cache.replay import ReplayCache
from replayssm.ops.gated_delta import reference as gated_delta
from replayssm.ops.kimi_delta import reference as kimi_delta
from replayssm.ops.mamba2 import reference as mamba2

Inputs = mamba2.Mamba2Inputs | gated_delta.GatedDeltaInputs | kimi_delta.KimiDeltaInputs

RECURRENCES: dict[str, tuple[ModuleType, type]] = {
    "mamba2": (mamba2, mamba2.Mamba2Geometry),
    "gated_delta": (gated_delta, gated_delta.GatedDeltaGeometry),
    "kimi_delta": (kimi_delta, kimi_delta.KimiDeltaGeometry),
}


def select_tokens(inputs: Inputs, start: int, stop: int) -> Inputs:
    """Tokens start .. stop-1; layer constants (at most two axes) stay whole."""
    return type(inputs)(*(t if t is None or t.dim() < 3 else t[:, start:stop] for t in inputs))


class InputCheck:
    """Refuses inputs that a layer cannot take; the same shapes again cost one comparison.

    Args:
        ops: the recurrence, a `reference` module of `ops`.
        geometry: its sizes.
        stored_as_given: whether the ring keeps records in the dtype of the inputs.
        recompute: whether the ring keeps what a fold recomputes its corrections from.
        layer: index of the layer, for messages.
    """

    def __init__(
        self, ops: ModuleType, geometry, *, stored_as_given: bool, recompute: bool, layer: int
    ) -> None:
        self._ops, self._geometry, self._layer = ops, geometry, layer
        self._stored_as_given, self._recompute = stored_as_given, recompute
        self._passed: tuple | None = None

    def __call__(self, inputs: Inputs, *caches: ReplayCache) -> int:
        """Number of tokens. `caches` hold the rows of `inputs`, one cache after the other; none:
        any number of rows.

        Raises ValueError for other shapes, a narrow gate, or a ring that is narrower than inputs.
        """
        rings = [cache.ring for cache in caches]
        signature = (
            *((c.batch, *(tensor.dtype for tensor in c.ring.values())) for c in caches),
            *(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs),
        )
        batch, tokens = inputs[0].shape[:2]
        if signature == self._passed:
            return tokens
        held = sum(cache.batch for cache in caches)
        if caches and batch != held:
            raise ValueError(f"inputs have {batch} rows, the cache has {held}")
        if tokens == 0:
            raise ValueError("inputs hold no token")
        self._check_shapes(inputs, batch, tokens)
        for ring in rings:
            self._check_ring(inputs, ring)
        self._passed = signature
        return tokens

    def _check_shapes(self, inputs: Inputs, batch: int, tokens: int) -> None:
        for name, shape in self._geometry.input_shapes.items():
            value = getattr(inputs, name)
            if value.shape != (batch, tokens, *shape):
                raise ValueError(
                    f"layer {self._layer}: {name} has shape {list(value.shape)}, "
                    f"expected {[batch, tokens, *shape]}"
                )
        for name in self._ops.EXACT_INPUTS:
            dtype = getattr(inputs, name).dtype
            if dtype != torch.float32:
                raise ValueError(f"layer {self._layer}: {name} is {dtype}, must be torch.float32")

    def _check_ring(self, inputs: Inputs, ring: dict[str, torch.Tensor]) -> None:
        for name, record in self._ops.records(inputs, recompute=self._recompute).items():
            if name in self._ops.STORED and not self._stored_as_given:
                continue
            held = ring[name].dtype
            if torch.promote_types(record.dtype, held) != held:
                raise ValueError(
                    f"layer {self._layer}: {name} arrives as {record.dtype}, the ring holds "
                    f"{held}: give new_cache the dtype of the inputs"
                )
