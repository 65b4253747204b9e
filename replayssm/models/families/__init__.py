"""How the recurrence functions of a family are called, and what our operator gets from a call.

Owns the `Family` interface. A family knows argument layouts of Hugging Face functions and nothing
about sessions, policies or caches: it turns one call into the inputs of the operator, hands them to
`execute`, and gives the result back in the shape and dtype the layer expects. Read `gated_delta.py`
or `mamba2.py` next, then `../patching.py`.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from replayssm.models.errors import UnsupportedInputError


class Execute(Protocol):
    """Runs the operator on one layer call; returns FP32 outputs [B, T, heads, head_dim].

    `continued` says whether the layer passed a recurrent state, i.e. believes it has seen tokens.
    """

    def __call__(self, inputs: Any, *, continued: bool) -> Tensor: ...


class Family(Protocol):
    """What `patching.py` and `session.py` need to know about a family."""

    recurrence: str
    functions: tuple[str, ...]

    def shapes(self, mixer: nn.Module) -> dict[str, int]:
        """Sizes of the layer's state, as keyword arguments of `StateUpdate`."""

    def ring_dtype(self, mixer: nn.Module) -> torch.dtype:
        """Dtype in which this family's inputs reach the ring."""

    def call(self, name: str, mixer: nn.Module, execute: Execute, args: tuple, kwargs: dict) -> Any:
        """Stand in for module function `name`, with its arguments and its kind of result."""

    def select_rows(self, inputs: Any, rows: slice) -> Any:
        """The inputs of some batch rows (views)."""

    def scale_log_decay(self, inputs: Any, factor: float) -> Any:
        """The inputs with every log decay times `factor` (the deliberate fault of a study)."""

    def log_decay(self, inputs: Any) -> Tensor:
        """Log decay of every token and head, FP32 [B, T, H], <= 0."""


def get_family(name: str, *, fast: bool = False) -> Family:
    """The family called `name` ("gated_delta", "kimi_delta" or "mamba2").

    fast: whether it prepares inputs by kernels (`ops/glue`), in another order of sums.
    """
    from replayssm.models.families import gated_delta, kimi_delta, mamba2

    families = {
        "gated_delta": gated_delta.GatedDelta,
        "kimi_delta": kimi_delta.KimiDelta,
        "mamba2": mamba2.Mamba2,
    }
    if name not in families:
        raise ValueError(f"unknown family {name!r}; known families: {sorted(families)}")
    return families[name](fast=fast)


def state_placeholder(like: Tensor) -> Tensor:
    """What goes into the library's recurrent-state slot: one number.

    The state itself lives in our caches; the library only asks whether the slot is filled.
    """
    return torch.zeros(1, dtype=torch.float32, device=like.device)


def refuse_packing(kwargs: dict) -> None:
    """Refuse several sequences in one row: the recurrent state would run across them."""
    for key in ("cu_seqlens", "seq_idx"):
        if kwargs.get(key) is not None:
            raise UnsupportedInputError(
                f"packed rows ({key}) are not supported: give one sequence per row"
            )
