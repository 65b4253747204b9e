"""The arithmetic of `drift.py` as two kernels: no copies in float64, no waiting for the GPU.

Owns the reduction of logits to drift on a GPU. Same definitions and conventions as `drift.py`,
which says why; the last digits of float64 differ, because sums have another order.

A program walks over the vocabulary of one row of one arm, so that logits are read once (a second
time for the few rows whose differences are beyond what the quick form allows), and memory does not
grow with the vocabulary.

Legend: R reference rows, A arms, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def drift_of_rows(z: Tensor, zc: Tensor, tokens: Tensor, largest: float) -> tuple[Tensor, ...]:
    """Drift of logits `zc` [A, R, V] from `z` [R, V], FP32, V >= 2.

    tokens: [R] int64; where one is not in the vocabulary, delta_logp is NaN.
    largest: difference of logits from which on a row takes the exact form.

    Returns kl, kl_reverse, delta_logp [A, R] float64, match, nonfinite [A, R] bool; and of the
    reference entropy, top-1 probability, margin [R] float64, finite [R] bool.
    """
    arms, rows, vocabulary = zc.shape
    z, zc, tokens = z.contiguous(), zc.contiguous(), tokens.contiguous()
    terms = z.new_empty(4, rows, dtype=torch.float64)  # entropy, sum of exp, margin, log of the sum
    best = z.new_empty(rows)
    where = torch.empty(rows, dtype=torch.int64, device=z.device)
    finite = torch.empty(rows, dtype=torch.bool, device=z.device)
    found = z.new_empty(3, arms, rows, dtype=torch.float64)
    flags = torch.empty(2, arms, rows, dtype=torch.bool, device=z.device)
    with torch.cuda.device_of(z):
        _reference_kernel[(rows,)](z, terms, best, where, finite, rows, V=vocabulary, BLOCK=BLOCK)
        _arm_kernel[(arms * rows,)](
            *(z, zc, tokens, terms, best, where, finite, found, flags),
            *(rows, arms * rows, largest),
            V=vocabulary,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return *found.unbind(), *flags.unbind(), terms[0], 1.0 / terms[1], terms[2], finite


@triton.jit
def _reference_kernel(z, terms, best, where, finite, rows, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    z += row.to(tl.int64) * V
    lane = tl.arange(0, BLOCK)
    # The two largest of each lane, where the first largest is, and whether there was a NaN.
    first = tl.full((BLOCK,), float("-inf"), tl.float32)
    second, at = first, lane
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        x = tl.load(z + start + lane, mask=start + lane < V, other=float("-inf"))
        bad |= (x != x).to(tl.int32)
        larger = x > first
        second = tl.where(larger, first, tl.where(x > second, x, second))
        at = tl.where(larger, start + lane, at)
        first = tl.where(larger, x, first)
    top = tl.max(first, 0)
    index = tl.min(tl.where(first == top, at, V), 0)
    runner_up = tl.max(tl.where((first == top) & (at == index), second, first), 0)
    usable = (tl.sum(bad, 0) == 0) & (tl.abs(top) < float("inf"))
    total = tl.zeros((BLOCK,), tl.float64)
    weighted = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, V, BLOCK):
        x = tl.load(z + start + lane, mask=start + lane < V, other=float("-inf"))
        shifted = x.to(tl.float64) - top.to(tl.float64)
        e = tl.exp(shifted)
        total += e
        weighted += tl.where(e > 0.0, e * shifted, 0.0)
    sum_e = tl.sum(total, 0)
    log_sum = tl.log(sum_e)
    tl.store(terms + row, log_sum - tl.sum(weighted, 0) / sum_e)
    tl.store(terms + rows + row, sum_e)
    tl.store(terms + 2 * rows + row, top.to(tl.float64) - runner_up.to(tl.float64))
    tl.store(terms + 3 * rows + row, log_sum)
    tl.store(best + row, top)
    tl.store(where + row, index.to(tl.int64))
    tl.store(finite + row, usable)


@triton.jit
def _arm_kernel(
    z, zc, tokens, terms, best, where, finite, found, flags, rows, cells, largest,
    V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(0)
    row = cell % rows
    z += row.to(tl.int64) * V
    zc += cell.to(tl.int64) * V
    lane = tl.arange(0, BLOCK)
    top = tl.load(best + row).to(tl.float64)
    sum_e = tl.load(terms + rows + row)
    log_sum = tl.load(terms + 3 * rows + row)
    mean_d = tl.zeros((BLOCK,), tl.float64)
    mean_e = tl.zeros((BLOCK,), tl.float64)
    mean_ed = tl.zeros((BLOCK,), tl.float64)
    # What is not below `largest` is counted: a NaN, too.
    beyond = tl.zeros((BLOCK,), tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        inside = start + lane < V
        x = tl.load(z + start + lane, mask=inside, other=0.0)
        y = tl.load(zc + start + lane, mask=inside, other=0.0)
        bad |= (y != y).to(tl.int32)
        most = tl.where(inside & (y > most), y, most)
        d = y.to(tl.float64) - x.to(tl.float64)
        beyond |= 1 - (tl.abs(d) < largest).to(tl.int32)
        p = tl.where(inside, tl.exp(x.to(tl.float64) - top) / sum_e, 0.0)
        e = _expm1(d)
        mean_d += p * d
        mean_e += p * e
        mean_ed += p * (e * d)
    most_c = tl.max(most, 0)
    usable = (tl.sum(bad, 0) == 0) & (tl.abs(most_c) < float("inf")) & tl.load(finite + row)
    token = tl.load(tokens + row)
    known = (token >= 0) & (token < V)
    x_token = tl.load(z + token, mask=known, other=float("nan")).to(tl.float64)
    y_token = tl.load(zc + token, mask=known, other=float("nan")).to(tl.float64)
    s = tl.sum(mean_e, 0)
    log_s = _log1p(s)
    kl = log_s - tl.sum(mean_d, 0)
    reverse = (tl.sum(mean_d, 0) + tl.sum(mean_ed, 0)) / (1.0 + s) - log_s
    delta = y_token - x_token - log_s
    if usable & (tl.sum(beyond, 0) > 0):
        top_c = most_c.to(tl.float64)
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, V, BLOCK):
            y = tl.load(zc + start + lane, mask=start + lane < V, other=float("-inf"))
            total += tl.exp(y.to(tl.float64) - top_c)
        log_sum_c = tl.log(tl.sum(total, 0))
        forward = tl.zeros((BLOCK,), tl.float64)
        backward = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, V, BLOCK):
            x = tl.load(z + start + lane, mask=start + lane < V, other=float("-inf"))
            y = tl.load(zc + start + lane, mask=start + lane < V, other=float("-inf"))
            log_p = x.to(tl.float64) - top - log_sum
            log_q = y.to(tl.float64) - top_c - log_sum_c
            forward += _terms(log_p, log_q)
            backward += _terms(log_q, log_p)
        kl = tl.sum(forward, 0)
        reverse = tl.sum(backward, 0)
        delta = y_token - top_c - log_sum_c - (x_token - top - log_sum)
    nan = float("nan")
    tl.store(found + cell, tl.where(usable, kl, nan))
    tl.store(found + cells + cell, tl.where(usable, reverse, nan))
    tl.store(found + 2 * cells + cell, tl.where(usable, delta, nan))
    same = tl.load(zc + tl.load(where + row)) == most_c
    tl.store(flags + cell, same & usable)
    tl.store(flags + cells + cell, usable == 0)


@triton.jit
def _expm1(x):
    """e^x - 1 to a few units of the last place: the error of e^x - 1 is divided out again."""
    e = tl.exp(x)
    small = e - 1.0
    safe = tl.where((e == 1.0) | (e == 0.0), 2.0, e)  # of which the logarithm is not 0
    return tl.where(e == 1.0, x, tl.where(e == 0.0, -1.0, small * (x / tl.log(safe))))


@triton.jit
def _log1p(x):
    """log(1 + x), likewise."""
    sum_ = 1.0 + x
    safe = tl.where(sum_ == 1.0, 2.0, sum_)
    return tl.where(sum_ == 1.0, x, tl.log(safe) * (x / (safe - 1.0)))


@triton.jit
def _terms(log_p, log_q):
    """p log(p / q), with 0 log 0 = 0 and p log(p / 0) = inf."""
    ratio = tl.where(log_p > float("-inf"), log_p - log_q, 0.0)
    return tl.where(ratio == float("inf"), float("inf"), tl.exp(log_p) * ratio)
