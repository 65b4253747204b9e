"""Records of a ring as kernels for few rows deal them to lanes, and sums over what came later.

Runs in Triton's interpreter without a GPU, compiled with one (`pytest -m gpu`).
"""

import pytest
import torch
import triton
import triton.language as tl
from interpreter import DEVICE, KERNEL_MARKS

from replayssm.ops.triton_pairs import all_columns
from replayssm.ops.triton_records import (
    first_of,
    last_first,
    later_sums,
    load_numbers,
    load_of_records,
    of_record,
    sum_of,
)

pytestmark = KERNEL_MARKS

ROWS, TILE = 20, 16


@triton.jit
def numbers_kernel(later, total, g, count, L: tl.constexpr, BL: tl.constexpr):
    """Sums over what comes after each of the first `count` of L records, and over all of them."""
    numbers = first_of(load_numbers(g, L, BL), count)
    tl.store(later + last_first(BL), all_columns(later_sums(numbers)), mask=last_first(BL) < L)
    tl.store(total, sum_of(numbers))


@triton.jit
def values_kernel(
    out, again, x, L: tl.constexpr, BL: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr
):
    """Grid (tiles): x [L, ROWS] as all columns, and record by record."""
    tile = tl.program_id(0)
    row = tile * R + tl.arange(0, R)
    values = load_of_records(x, tile, ROWS, L, R, BL)
    at = last_first(BL)[None, :] * ROWS + row[:, None]
    tl.store(out + at, values, mask=(last_first(BL) < L)[None, :] & (row < ROWS)[:, None])
    for j in tl.range(L):
        tl.store(again + j * ROWS + row, of_record(values, j), mask=row < ROWS)


def block(length):
    return max(16, triton.next_power_of_2(length))


@pytest.mark.parametrize("length", [1, 5, 8, 16, 31, 32, 48])
def test_sums_over_later_records_are_as_exact_as_their_terms(length):
    """Also where a record far below the others comes last: no sum is a difference of two."""
    g = -torch.rand(length, dtype=torch.float64) * 40
    g[-1] = -1e-6
    g = g.float().to(DEVICE)
    for count in {0, 1, length // 2, length - 1, length}:
        later, total = torch.full([length], torch.nan, device=DEVICE), g.new_empty(1)
        numbers_kernel[(1,)](later, total, g, count, length, block(length))
        counted = torch.where(torch.arange(length, device=DEVICE) < count, g, 0).double()
        want = counted.flip(0).cumsum(0).flip(0)
        assert total.item() == pytest.approx(want[0].item(), rel=1e-6)
        want = torch.cat([want[1:], want.new_zeros(1)])
        torch.testing.assert_close(later.double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("length", [1, 5, 16, 31, 32, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_record_is_found_where_it_was_all_columns(length, dtype):
    x = torch.randn(length, ROWS).to(DEVICE, dtype)
    out, again = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    grid = (triton.cdiv(ROWS, TILE),)
    values_kernel[grid](out, again, x, length, block(length), TILE, ROWS)
    assert torch.equal(out, x) and torch.equal(again, x)


def test_a_record_is_found_beside_what_is_not_a_number():
    x = torch.randn(32, ROWS, device=DEVICE)
    x[7] = torch.nan
    out, again = torch.empty_like(x), torch.empty_like(x)
    values_kernel[(triton.cdiv(ROWS, TILE),)](out, again, x, 32, 32, TILE, ROWS)
    others = torch.arange(32) != 7
    assert torch.equal(again[others], x[others]) and again[7].isnan().all()
