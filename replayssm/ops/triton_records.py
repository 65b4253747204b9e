"""Records of a ring, dealt to the few lanes that share a row of the state.

Owns their order, and sums over what came after each. Kernels for few rows read what records hold
in the lanes that need it: a number that went through shared memory would make warps wait. Columns
are records, the last first, and so what came after a record stands before it, as a scan adds up.
Knows no recurrence and no launch. Legend: L records of a ring, BL columns for them, a multiple of
LANES; R rows of a tile.
"""

import triton
import triton.language as tl

from replayssm.ops.triton_pairs import all_columns
from replayssm.ops.triton_rows import LANES, lone_rows


@triton.jit
def last_first(BL: tl.constexpr):
    """Records in the order of columns here, [BL]: what is later stands before, as sums over what is
    later are then sums that a scan makes."""
    return BL - 1 - tl.arange(0, BL)


@triton.jit
def load_of_records(
    base, tile, ROWS: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BL: tl.constexpr
):
    """What all L records of a head, ROWS elements apart, hold for the rows of a tile, [R, BL], the
    last first; every eighth has a lane."""
    row, parts = lone_rows(tile, R), ()
    for i in tl.static_range(BL // LANES):
        record = _records_of_lanes(BL, i)
        at = base + record[:, None] * ROWS + row[None, :]
        x = tl.load(at, mask=(record < L)[:, None] & (row < ROWS)[None, :], other=0)
        parts = parts + (tl.trans(x),)
    return all_columns(parts)


@triton.jit
def load_numbers(base, L: tl.constexpr, BL: tl.constexpr):
    """A number of each of L records, FP32 0 where there is none, as `load_of_records` deals them to
    lanes: one tensor [LANES] for each column of a lane; `all_columns` makes one [BL] of them."""
    parts = ()
    for i in tl.static_range(BL // LANES):
        record = _records_of_lanes(BL, i)
        parts = parts + (tl.load(base + record, mask=record < L, other=0.0),)
    return parts


@triton.jit
def _records_of_lanes(BL: tl.constexpr, i: tl.constexpr):
    """Column i of every lane's."""
    return tl.arange(0, LANES) * -(BL // LANES) + (BL - 1 - i)


@triton.jit
def first_of(numbers, count):
    """`load_numbers` of the first `count` records, and 0 for the others."""
    kept, BL = (), len(numbers) * LANES
    for i in tl.static_range(len(numbers)):
        kept = kept + (tl.where(_records_of_lanes(BL, i) < count, numbers[i], 0.0),)
    return kept


@triton.jit
def sum_of(numbers):
    """Sum of what `load_numbers` has."""
    return tl.sum(_added(numbers), 0)


@triton.jit
def later_sums(numbers):
    """For each record of `load_numbers` the sum of all after it, as numbers again. No difference of
    sums: each is as exact as a sum of its own terms."""
    total = _added(numbers)
    _, later = tl.associative_scan((total, tl.zeros_like(total)), 0, _append)
    sums = (later,)
    for i in tl.static_range(len(numbers) - 1):
        later += numbers[i]
        sums = sums + (later,)
    return sums


@triton.jit
def _added(numbers):
    total = numbers[0]
    for i in tl.static_range(1, len(numbers)):
        total += numbers[i]
    return total


@triton.jit
def _append(total, before, next_total, next_before):
    """Sums of all, and of all but the last."""
    return total + next_total, total + next_before


@triton.jit
def of_record(x, j):
    """What x [R, BL], the last record first, holds of record j; the others may be anything."""
    return _of_column(x, x.shape[1] - 1 - j)


@triton.jit
def _of_column(x, column):
    if x.shape[1] > 2 * LANES:  # as wide as halves of pairs, which would change lanes else
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        return _of_column(tl.where(column % 2 == 0, even, odd), column // 2)
    else:
        return tl.sum(tl.where((tl.arange(0, x.shape[1]) == column)[None, :], x, 0.0), 1)
