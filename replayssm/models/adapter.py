"""A model with a recurrence we can run: its layers, and one way to call it in every version.

Owns finding the recurrent layers of a model instance and the differences between versions in how a
model is called (name of the cache argument, explicit positions, which logits are computed). Must
not know policies; `session.py` puts policies under the layers found here.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from replayssm.models.architectures import Architecture, find_architecture
from replayssm.models.errors import UnsupportedInputError, UnsupportedModelError
from replayssm.models.families import Family, get_family
from replayssm.models.glue_layers import lay_side_by_side
from replayssm.models.kv_cache import new_cache

# The name changed between versions, and a wrong one is silently ignored by some models.
_CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")


@dataclass(frozen=True, kw_only=True)
class RecurrentLayer:
    """One recurrent layer; `index` is its place in the model (the layer number in random bits)."""

    index: int
    name: str
    mixer: nn.Module


class Adapter:
    """Uniform access to one model instance (see module docstring). Holds no state between calls.

    fast: whether sessions compute what surrounds the recurrences as servers do: norms, convolutions
        and gates in one kernel each (`glue.py`), projections of the same input in one product
        (`glue_layers.py`, which moves their weights side by side, in place; values stay), and the
        last projection in the model's dtype instead of FP32 (its sums and results are FP32 either
        way); rings of a delta rule hold keys in that dtype, too. Otherwise it is the library's own
        code, as a study needs.
    invariant: whether sessions compute every token in the same order of sums, whatever is computed
        beside it: slow, to compare ways of decoding token for token (`invariance.py`).

    Attribute devices: those that weights are on, several where the model is spread over them.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str | None = None,
        fast: bool = False,
        invariant: bool = False,
    ):
        config = model.config.get_text_config()
        self.name = name or getattr(model, "name_or_path", "") or type(model).__name__
        self.model = model
        if fast and invariant:
            raise ValueError("an adapter is fast or invariant, not both")
        self.fast, self.invariant = fast, invariant
        self.config = config
        self.architecture: Architecture = find_architecture(
            config.model_type, where=repr(self.name)
        )
        self.family: Family = get_family(self.architecture.family, fast=fast)
        self.layers = self._find_layers()
        parameters = inspect.signature(model.forward).parameters
        keywords = [key for key in _CACHE_KEYWORDS if key in parameters]
        if not keywords:
            raise UnsupportedModelError(
                f"{self.name!r}: forward takes none of {_CACHE_KEYWORDS}; is it a causal "
                "language model?"
            )
        self._cache_keyword = keywords[0]
        self._takes_positions = "position_ids" in parameters
        self._takes_last_only = "logits_to_keep" in parameters
        self.head: nn.Module = model.get_output_embeddings()
        # Looked up once: to go through the modules of a model takes as long as a decode step.
        self.devices = tuple(dict.fromkeys(parameter.device for parameter in model.parameters()))
        if any(device.type == "meta" for device in self.devices):
            raise UnsupportedInputError(
                f"{self.name!r}: some weights are offloaded; the model must fit on its devices"
            )
        if fast:
            lay_side_by_side(model)
        weight, bias = self.head.weight.detach(), self.head.bias
        self._head_weight = weight if fast else weight.float()
        self._head_bias = None if bias is None else bias.detach().float()

    def _find_layers(self) -> tuple[RecurrentLayer, ...]:
        wanted = self.architecture.mixer
        layers = [
            RecurrentLayer(index=module.layer_idx, name=name, mixer=module)
            for name, module in self.model.named_modules()
            if type(module).__name__ == wanted
        ]
        if not layers:
            raise UnsupportedModelError(
                f"{self.name!r} ({self.architecture.name}) has no recurrent layer: there is no "
                "state to keep in another format"
            )
        assert len({layer.index for layer in layers}) == len(layers), "two layers share an index"
        return tuple(sorted(layers, key=lambda layer: layer.index))

    @property
    def module_name(self) -> str:
        """The modeling module whose functions the layers look up when they run."""
        return type(self.layers[0].mixer).__module__

    @property
    def device(self) -> torch.device:
        """Device of the embedding: where token ids go."""
        return self.model.get_input_embeddings().weight.device

    @property
    def vocab_size(self) -> int:
        """Rows of the last projection (may exceed the tokenizer's vocabulary)."""
        return self.head.weight.shape[0]

    @property
    def has_experts(self) -> bool:
        """Whether some layer sends each token to a few experts."""
        return any(type(module).__name__.endswith("Experts") for module in self.model.modules())

    @property
    def max_positions(self) -> int | None:
        """Tokens the position encoding was made for; None when the model has no such limit."""
        if not any(kind in ("full_attention", "hybrid") for kind in self.config.layer_types):
            return None
        return getattr(self.config, "max_position_embeddings", None)

    def check_length(self, tokens: int) -> None:
        """Raise ValueError if a text of `tokens` tokens does not fit the model's positions."""
        if self.max_positions is not None and tokens > self.max_positions:
            raise UnsupportedInputError(
                f"prompt and text have {tokens} tokens, {self.name!r} has {self.max_positions} "
                "positions"
            )

    def new_cache(self, *, capacity: int = 0):
        """An empty cache for this model, `capacity` tokens of attention preallocated."""
        return new_cache(self.config, capacity=capacity)

    def forward(self, tokens: Tensor, cache, *, start: int, last_only: bool = False) -> Tensor:
        """Run `tokens` [B, T] (int64) at positions start .. start+T-1, continuing `cache` in place.

        Returns logits [B, T, vocabulary], or [B, 1, vocabulary] with `last_only`. All rows must
        hold T real tokens: there is no padding mask.
        """
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise UnsupportedInputError(f"tokens must be [rows, T >= 1], got {tuple(tokens.shape)}")
        kwargs = {self._cache_keyword: cache, "use_cache": True}
        cursor = getattr(cache, "row_cursor", None)
        if self._takes_positions:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            # With a cursor, from the device: a captured graph is replayed at other positions.
            first = start if cursor is None else cursor.on(tokens.device)[:1]
            kwargs["position_ids"] = (positions + first)[None]
        if last_only and self._takes_last_only:
            kwargs["logits_to_keep"] = 1
        logits = self.model(input_ids=tokens, **kwargs).logits
        if cursor is not None:
            cursor.advance(tokens.shape[1])
        return logits[:, -1:] if last_only else logits

    def fp32_head(self, forward) -> Callable[[Tensor], Tensor]:
        """A forward for the last projection that delivers FP32 whatever the model's dtype.

        Logits stored in bf16 alone would fake a KL of 5e-4. What the model does to them afterwards
        (scaling, capping) is the model's own and stays.
        """
        del forward

        def project(hidden: Tensor) -> Tensor:
            weight, bias = self._head_weight, self._head_bias
            hidden = hidden.to(weight.device, weight.dtype)
            if weight.dtype == torch.float32:
                return linear(hidden, weight, bias)
            if weight.device.type == "cpu":  # has no product of narrow numbers with a wide result
                return linear(hidden.float(), weight.float(), bias)
            logits = torch.mm(hidden.flatten(0, -2), weight.t(), out_dtype=torch.float32)
            logits = logits.view(*hidden.shape[:-1], -1)
            return logits if bias is None else logits + bias

        return project
