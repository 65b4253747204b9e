"""Convolution inputs of tokens that may be rejected: kept beside the library's, and wound back.

Owns a tape of the inputs that a cache's short convolutions have got since it was last wound back.
The library keeps the last W inputs only, in place; which W those are after a rejection depends on
how many tokens a row keeps. Must not know recurrences, policies or why tokens are rejected.

Shapes: B rows, C channels, W inputs that a convolution keeps, T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin


@dataclass(kw_only=True, eq=False)
class _Convolution:
    """One convolution: the library's inputs [B, C, W], and `tape` [B, C, W + most tokens]."""

    states: Tensor
    tape: Tensor
    noted: bool = False

    @property
    def width(self) -> int:
        return self.states.shape[-1]


class ConvolutionTape:
    """What the convolutions of `cache` have seen since `keep`, up to `tokens` tokens.

    The cache must have been filled, and its layers must not be replaced. Call `before` and `after`
    around every forward pass, so that both run in a captured graph, too.
    """

    def __init__(self, cache: Cache, *, tokens: int):
        self._tokens = tokens
        self._convolutions: list[_Convolution] = []
        for layer in cache.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                self._attach(layer)

    def _attach(self, layer: LinearAttentionCacheLayerMixin) -> None:
        slots: dict[int, _Convolution] = {}
        for slot, states in layer.conv_states.items():
            if layer.has_previous_state[slot]:
                tape = states.new_zeros(*states.shape[:-1], states.shape[-1] + self._tokens)
                slots[slot] = _Convolution(states=states, tape=tape)
        self._convolutions += slots.values()
        update = layer.update_conv_state

        def note(conv_states: Tensor, state_idx: int = 0) -> None:
            if state_idx in slots:
                self._note(slots[state_idx], conv_states, self._start)

        def wrapper(conv_states: Tensor, state_idx: int = 0, **kwargs) -> Tensor:
            note(conv_states, state_idx)
            return update(conv_states, state_idx=state_idx, **kwargs)

        # `note_conv_inputs` is for code of ours that updates `conv_states` itself.
        layer.update_conv_state, layer.note_conv_inputs = wrapper, note

    def _note(self, convolution: _Convolution, inputs: Tensor, start: int) -> None:
        start += convolution.width
        convolution.tape[..., start : start + inputs.shape[-1]] = inputs
        convolution.noted = True

    def before(self, start: int, tokens: int) -> None:
        """A forward pass over `tokens` tokens follows; `start` have been read since `keep`."""
        assert start + tokens <= self._tokens, "more tokens than the tape has room for"
        self._start = start
        for convolution in self._convolutions:
            convolution.noted = False
            if start == 0:
                convolution.tape[..., : convolution.width] = convolution.states

    def after(self, start: int, tokens: int) -> None:
        """That forward pass is done."""
        for convolution in self._convolutions:
            if not convolution.noted:  # single tokens go another way, straight into `states`
                assert tokens == 1, "several tokens did not pass through the cache"
                self._note(convolution, convolution.states[..., -1:], start)

    def keep(self, counts: Tensor) -> None:
        """Row b goes on as if only the first counts[b] tokens had been read; counts [B] int64, on
        the CPU.
        """
        indices: dict[tuple[torch.device, int], Tensor] = {}  # made once, for all layers
        for convolution in self._convolutions:
            states = convolution.states
            key = (states.device, convolution.width)
            if key not in indices:
                inputs = counts[:, None, None] + torch.arange(convolution.width)
                indices[key] = inputs.to(states.device)
            states.copy_(convolution.tape.gather(-1, indices[key].expand(states.shape)))
