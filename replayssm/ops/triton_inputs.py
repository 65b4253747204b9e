"""Inputs of a launch as the kernels of every recurrence take them.

Owns which strides a kernel is given. Knows no kernel and no recurrence.

The arguments of a launch lie in constant memory, of which a multiprocessor fetches 64 bytes at a
time, and a warp waits for each: with few rows, for as long as for a trip to the state. So a kernel
takes first what it needs before its first loads, in 112 bytes if they will do (16 more are the
compiler's), and nothing that it does not need: an integer that is 1 is compiled in. One row keeps
its stride all the same: of a multiple of 16 the compiler knows that vectors of 16 bytes begin
there. Kernels for few rows have all strides compiled in (`compiled_in`), which are a model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import triton.language as tl
from torch import Tensor

Argument = TypeVar("Argument", bound=NamedTuple)


def dense_heads(tensor: Tensor) -> Tensor:
    """`tensor` [B, T, ...]; copied where a token's heads are not dense in memory."""
    return tensor if tensor[:1, :1].is_contiguous() else tensor.contiguous()


def strides(tensors: Sequence[Tensor]) -> list[int]:
    """Elements from row to row of each tensor [B, T, ...], then from token to token of each, 1
    where there is one token, and nobody asks."""
    tokens = [tensor.stride(1) if tensor.shape[1] > 1 else 1 for tensor in tensors]
    return [tensor.stride(0) for tensor in tensors] + tokens


def compiled_in(argument: Argument) -> Argument:
    """A kernel argument whose integers are constants: a kernel is compiled for them."""
    integers = {
        name: tl.constexpr(value)
        for name, value in argument._asdict().items()
        if isinstance(value, int)
    }
    return argument._replace(**integers)
