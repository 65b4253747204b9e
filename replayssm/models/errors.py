"""Errors a person can cause when choosing or loading a model; each message is one clear line.

Owns the exception types of `replayssm.models`. Must not import torch or transformers: the command
line catches these without paying for either.
"""


class ModelError(ValueError):
    """Base of everything that can be wrong with a model a person asked for."""


class UnsupportedModelError(ModelError):
    """The model has no recurrent layer, or recurrent layers of a family that is not supported."""


class WeightsError(ModelError):
    """The weights are missing, corrupt, incomplete, or not in safetensors format."""


class TokenizerError(ModelError):
    """The tokenizer is missing or cannot be read."""


class UnsupportedInputError(ModelError):
    """A supported model was used in an unsupported way (padding, packed rows, training mode)."""


class HookNotLiveError(RuntimeError):
    """A recurrent layer ran past our state update: the numbers would be the library's own."""
