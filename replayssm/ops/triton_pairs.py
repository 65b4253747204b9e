"""Vectors as kernels for few rows read them: BF16 in pairs, anything else as it lies.

Owns loads of vectors that wait in registers as they came, and what makes FP32 of them. Compilers
take a pair of BF16 numbers apart in three instructions, of which two suffice; where time is
latency, that is a tenth of an answer. Pairs stay apart: what they meet is split into even and odd
columns too. Knows no recurrence. Legend: K elements of a vector; PAIRED: whether `in_pairs` says
that all are BF16 and lie where pairs can be read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.ops.quantize.tiles import load_eighths


def in_pairs(vectors: Sequence[Tensor], *strides: int) -> bool:
    """Whether all are BF16, and two elements at a time lie at multiples of 4 bytes in rows that are
    `strides` elements apart."""
    aligned = all(x.dtype == torch.bfloat16 and x.data_ptr() % 4 == 0 for x in vectors)
    return aligned and not any(stride % 2 for stride in strides)


@triton.jit
def load_part(
    base, START: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr, PAIRED: tl.constexpr
):
    """Elements from START of a vector at `base`, [COUNT] or pairs [COUNT / 2]; 0 past K."""
    if PAIRED:
        pair = START // 2 + tl.arange(0, COUNT // 2)
        return tl.load(base.to(tl.pointer_type(tl.int32)) + pair, mask=pair < K // 2, other=0)
    else:
        column = START + tl.arange(0, COUNT)
        return tl.load(base + column, mask=column < K, other=0.0)


@triton.jit
def load_part_of_rows(
    base, row, in_rows,
    START: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """`load_part` of rows [R] of K elements: [R, COUNT] or [R, COUNT / 2]."""
    if PAIRED:
        pair = START // 2 + tl.arange(0, COUNT // 2)
        at = base.to(tl.pointer_type(tl.int32)) + row[:, None] * (K // 2) + pair[None, :]
        return tl.load(at, mask=in_rows[:, None] & (pair < K // 2)[None, :], other=0)
    else:
        column = START + tl.arange(0, COUNT)
        at = base + row[:, None] * K + column[None, :]
        return tl.load(at, mask=in_rows[:, None] & (column < K)[None, :], other=0.0)


@triton.jit
def load_in_parts(base, COLUMNS: tl.constexpr, K: tl.constexpr, PAIRED: tl.constexpr):
    """All of a vector, in parts of so many columns from `load_part`."""
    parts = ()
    for start in tl.static_range(0, K, COLUMNS):
        parts = parts + (load_part(base, start, COLUMNS, K, PAIRED),)
    return parts


@triton.jit
def load_rows_in_parts(
    base, row, in_rows, COLUMNS: tl.constexpr, K: tl.constexpr, PAIRED: tl.constexpr
):
    """All of rows, in parts of so many columns from `load_part_of_rows`."""
    parts = ()
    for start in tl.static_range(0, K, COLUMNS):
        parts = parts + (load_part_of_rows(base, row, in_rows, start, COLUMNS, K, PAIRED),)
    return parts


@triton.jit
def in_columns(x, PAIRED: tl.constexpr):
    """A tile [R, C] as it meets what `widen` returns."""
    if PAIRED:
        return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    else:
        return (x,)


@triton.jit
def all_columns(parts):
    """One tensor of the columns of 1, 2, 4 ... tensors [C] or [R, C] in turn: the tile of
    `in_columns`."""
    if len(parts) == 1:
        return parts[0]
    else:
        even, odd = (), ()
        for i in tl.static_range(0, len(parts), 2):
            even, odd = even + (parts[i],), odd + (parts[i + 1],)
        both = tl.join(all_columns(even), all_columns(odd))
        if len(both.shape) == 2:
            return tl.reshape(both, [2 * both.shape[0]])
        else:
            return tl.reshape(both, [both.shape[0], 2 * both.shape[1]])


@triton.jit
def all_parts(tiles, PARTS: tl.constexpr):
    """`all_columns` of so many parts, whose tiles follow each other."""
    EACH: tl.constexpr = len(tiles) // PARTS
    parts = ()
    for part in tl.static_range(PARTS):
        columns = ()
        for i in tl.static_range(EACH):
            columns = columns + (tiles[part * EACH + i],)
        parts = parts + (all_columns(columns),)
    return parts


@triton.jit
def load_for_words(base, K: tl.constexpr, BK: tl.constexpr, PAIRED: tl.constexpr):
    """A vector as words of eight codes meet it: two tensors of pairs [BK / 8, 2], or
    `load_eighths`."""
    if PAIRED:
        word = tl.arange(0, BK // 8)[:, None] * 4 + tl.arange(0, 2)[None, :]
        at, mask = base.to(tl.pointer_type(tl.int32)) + word, word < K // 2
        return tl.load(at, mask=mask, other=0), tl.load(at + 2, mask=mask, other=0)
    else:
        return load_eighths(base, K, BK // 8)


@triton.jit
def eighths_of_pairs(x):
    """The eight vectors of `load_eighths` of what `load_for_words` returned in pairs."""
    first, second = tl.split(x[0])
    third, fourth = tl.split(x[1])
    return halves(first) + halves(second) + halves(third) + halves(fourth)


@triton.jit
def halves(pair):
    """The even and the odd columns of pairs, FP32."""
    return _low(pair), _high(pair)


@triton.jit
def _low(pair):
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(pair):
    return (pair & -0x10000).to(tl.float32, bitcast=True)
