"""Hugging Face models with a recurrence we can run: loading, and policies under their layers.

Owns the table of architectures, the replacement of their recurrence functions, and loading. Must
not know lockstep, studies or the command line. Only this package and `engine` may import
transformers.

Start with `architectures.py` (what is supported), then `session.py` (how a policy gets under a
model). Nothing here imports torch or transformers until it is needed, so that the command line
answers at once.
"""

from replayssm.models.architectures import ARCHITECTURES, Architecture
from replayssm.models.errors import (
    HookNotLiveError,
    ModelError,
    TokenizerError,
    UnsupportedInputError,
    UnsupportedModelError,
    WeightsError,
)

__all__ = [
    "ARCHITECTURES",
    "Adapter",
    "Architecture",
    "HookNotLiveError",
    "LoadedModel",
    "ModelError",
    "ReplaySession",
    "RowGroup",
    "TokenizerError",
    "UnsupportedInputError",
    "UnsupportedModelError",
    "WeightsError",
    "architecture_of",
    "list_architectures",
    "load",
]

_LAZY = {
    "Adapter": "adapter",
    "LoadedModel": "loading",
    "ReplaySession": "session",
    "RowGroup": "session",
    "architecture_of": "loading",
    "load": "loading",
}


def list_architectures() -> tuple[Architecture, ...]:
    """Every supported architecture, in the order of `replayssm models`."""
    return ARCHITECTURES


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
