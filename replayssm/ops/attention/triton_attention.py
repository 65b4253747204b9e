"""Appending keys and attending over them, with every row's length on the device.

Owns two operations of a full-attention layer: writing new keys and values behind the ones that a
row holds, and softmax attention of the new tokens over all of them. Knows no model and no cache.

A row's length is a number on the device, so a step needs no host synchronisation and no mask (of
131,072 keys, a mask is read as often as the keys), rows of different lengths go in one launch, and
a captured graph replays at any length. Keys are read in blocks from the first on, in stretches of
`SPLIT` keys whose results are joined in order; where a row's keys end decides nothing about the
others. So a row's bits depend on its own keys only: not on the batch, its neighbours' lengths, or
`most_keys`.

Scores, softmax and sums are FP32. Products of FP32 tensors have FP32 accuracy ("tf32x3": two TF32
terms for each operand); of 16-bit tensors, the probabilities are rounded to their dtype, as the
usual kernels do.

Legend: B rows, HQ query heads, HK key heads, r = HQ/HK (SHARED), T new tokens, S keys that fit,
D dimension of queries and keys, DV of values. Query i of a key head is token i % T of its query
head i // T.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.ops.triton_common import interpreted

# Keys of a stretch: long enough to be worth a launch's while, short enough to fill a GPU with few
# rows. Many queries (a prefill) fill it without being split.
SPLIT = 2048
_MOST_QUERIES_SPLIT = 128
MAX_WIDTH = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def append(keys: Tensor, values: Tensor, new: tuple[Tensor, Tensor], past: Tensor) -> None:
    """Writes `new` keys [B, HK, T, D] and values [B, HK, T, DV] at slots past .. past+T-1 of each
    row, in place.

    keys, values: [B, HK, S, D or DV], contiguous. past: [B] or [1], integers on the device;
    past + T <= S is the caller's to see to.
    """
    new_keys, new_values = map(_dense, new)
    rows, heads, tokens, width = new_keys.shape
    value_width = new_values.shape[3]
    assert keys.is_contiguous() and values.is_contiguous()
    _append_kernel[(rows * heads, tokens)](
        *(keys, values, new_keys, new_values, past),
        *new_keys.stride()[:3],
        *new_values.stride()[:3],
        _row_stride(past, rows),
        heads,
        keys.shape[2],
        D=width,
        DV=value_width,
        BLOCK=triton.next_power_of_2(max(width, value_width)),
        num_warps=1,
    )


def attend(
    query: Tensor, keys: Tensor, values: Tensor, past: Tensor, *, scale: float, most_keys: int
) -> Tensor:
    """Token t of row b attends over its first past[b] + t + 1 keys; returns [B, T, HQ, DV].

    Args:
        query: [B, HQ, T, D].
        keys: [B, HK, S, D]. values: [B, HK, S, DV]. Slots from past + T on may hold anything.
        past: [B] or [1], integers on the device.
        scale: factor on the products of queries and keys.
        most_keys: at least every past + T, at most S: how much work is launched.
    """
    query, keys, values = map(_dense, (query, keys, values))
    rows, query_heads, tokens, width = query.shape
    heads, value_width = keys.shape[1], values.shape[3]
    if query.dtype not in DTYPES or keys.dtype != query.dtype or values.dtype != query.dtype:
        raise ValueError(
            f"attention of {query.dtype} over {keys.dtype} and {values.dtype}: dtypes must be the "
            f"same, one of {', '.join(map(str, DTYPES))}"
        )
    if keys.shape[:3] != values.shape[:3] or keys.shape[3] != width:
        raise ValueError(
            f"queries {list(query.shape)}, keys {list(keys.shape)}, values {list(values.shape)}: "
            "there must be a value for every key, and keys as wide as queries"
        )
    if max(width, value_width) > MAX_WIDTH:
        raise ValueError(f"heads of {width} and {value_width}: at most {MAX_WIDTH} wide")
    assert tokens <= most_keys <= keys.shape[2], (tokens, most_keys, keys.shape[2])
    queries = query_heads // heads * tokens
    split = SPLIT if queries <= _MOST_QUERIES_SPLIT else most_keys
    splits = triton.cdiv(most_keys, split)
    out = query.new_empty(rows, tokens, query_heads, value_width)
    partial, sums = out, out
    if splits > 1:
        partial = out.new_empty(rows * heads, splits, queries, value_width, dtype=torch.float32)
        sums = partial.new_empty(rows * heads, splits, queries)
    blocks = [max(16, triton.next_power_of_2(n)) for n in (width, value_width)]
    values_of = dict(SHARED=query_heads // heads, DV=value_width, BDV=blocks[1])
    block, options = _launch(queries, max(blocks), query.dtype)
    # Blocks of queries side by side: they read the same keys.
    grid = (rows * heads * triton.cdiv(queries, block["BQ"]), splits)
    _attend_kernel[grid](
        *(query, keys, values, past, partial, sums),
        scale * math.log2(math.e),
        *query.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        _row_stride(past, rows),
        *(heads, tokens, split),
        WHOLE=splits == 1,
        PRECISION=_precision(query.dtype),
        D=width,
        BD=blocks[0],
        **values_of,
        **block,
        **options,
    )
    if splits > 1:
        grid = (rows * heads, triton.cdiv(queries, 16))
        _join_kernel[grid](partial, sums, out, heads, tokens, splits, BQ=16, **values_of)
    return out


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, its last axis contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _row_stride(past: Tensor, rows: int) -> int:
    assert past.shape in ((rows,), (1,)) and not past.is_floating_point()
    return past.stride(0) if past.shape[0] > 1 else 0


def _precision(dtype: torch.dtype) -> str:
    if interpreted():
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "half"


# Queries and keys of a block, warps, stages; by bytes of an element and (padded) width. What fits
# the registers of compute capability 9.0 nearly without spilling.
_TABLE = {
    (4, 64): (64, 32, 4, 3),
    (4, 128): (32, 32, 4, 2),
    (4, 256): (16, 32, 8, 2),
    (2, 64): (64, 64, 4, 3),
    (2, 128): (64, 64, 4, 3),
    (2, 256): (64, 64, 8, 2),
}


def _launch(queries: int, width: int, dtype: torch.dtype) -> tuple[dict, dict]:
    """Block sizes and compiler options: they change speed, and the bits of every row alike."""
    block_queries, block_keys, warps, stages = _TABLE[dtype.itemsize, max(64, width)]
    block_queries = min(block_queries, max(16, triton.next_power_of_2(queries)))
    return {"BQ": block_queries, "BN": block_keys}, {"num_warps": warps, "num_stages": stages}


@triton.jit(do_not_specialize=["past_row"])
def _append_kernel(
    keys, values, new_keys, new_values, past,
    k_row, k_head, k_token, v_row, v_head, v_token, past_row, heads, slots,
    D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    row, head, token = pair // heads, pair % heads, tl.program_id(1)
    d = tl.arange(0, BLOCK)
    to = pair * slots + tl.load(past + row * past_row) + token
    k = tl.load(new_keys + row * k_row + head * k_head + token * k_token + d, mask=d < D)
    v = tl.load(new_values + row * v_row + head * v_head + token * v_token + d, mask=d < DV)
    tl.store(keys + to * D + d, k, mask=d < D)
    tl.store(values + to * DV + d, v, mask=d < DV)


# Numbers that differ from prompt to prompt: a kernel for each kind of them takes long to compile.
@triton.jit(do_not_specialize=["past_row", "tokens", "split_keys"])
def _attend_kernel(
    query, keys, values, past, out, sums, scale,
    q_row, q_head, q_token, k_row, k_head, k_key, v_row, v_head, v_key, past_row,
    heads, tokens, split_keys,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(SHARED * tokens, BQ)
    pair, split = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(1)
    row, head = pair // heads, pair % heads
    i, d = tl.program_id(0) % blocks * BQ + tl.arange(0, BQ), tl.arange(0, BD)
    token, shared = i % tokens, i // tokens
    valid = (i < SHARED * tokens)[:, None]
    head_of = head * SHARED + shared
    before = tl.load(past + row * past_row).to(tl.int32)
    q = tl.load(
        query + row * q_row + head_of[:, None] * q_head + token[:, None] * q_token + d[None, :],
        mask=valid & (d < D)[None, :],
        other=0.0,
    )
    keys += row * k_row + head * k_head
    values += row * v_row + head * v_head
    seen = before + 1 + token  # keys that a query sees
    first = split * split_keys
    end = tl.minimum(first + split_keys, before + tokens)
    # Blocks before `part` are seen by every query.
    part = first + tl.maximum(tl.minimum(end, before + 1) - first, 0) // BN * BN
    top = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    mean = tl.zeros((BQ, BDV), tl.float32)
    for start in range(first, part, BN):
        top, total, mean = _fold(
            q, keys, values, start, seen, end, top, total, mean, scale, k_key, v_key,
            D, DV, BD, BDV, BN, False, PRECISION,
        )  # fmt: skip
    for start in range(part, end, BN):
        top, total, mean = _fold(
            q, keys, values, start, seen, end, top, total, mean, scale, k_key, v_key,
            D, DV, BD, BDV, BN, True, PRECISION,
        )  # fmt: skip
    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
    if WHOLE:
        to = ((row * tokens + token) * heads * SHARED + head_of) * DV
    else:
        at = (pair * tl.num_programs(1) + split) * SHARED * tokens + i
        # Nothing seen: log2(0) = -inf, and the stretch has no weight.
        tl.store(sums + at, top + tl.log2(total), mask=i < SHARED * tokens)
        to = at * DV
    dv = tl.arange(0, BDV)
    valid &= (dv < DV)[None, :]
    tl.store(out + to[:, None] + dv[None, :], mean.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _fold(
    q, keys, values, start, seen, end, top, total, mean, scale, k_key, v_key,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys into the running maximum [Q], sum of weights [Q] and sum of values."""
    key = start + tl.arange(0, BN)
    k = _block(keys, key, k_key, end, D, BD, MASKED)
    v = _block(values, key, v_key, end, DV, BDV, MASKED)
    score = tl.zeros((q.shape[0], BN), tl.float32)
    score = _product(q, tl.trans(k), score, PRECISION) * scale
    if MASKED:
        score = tl.where(key[None, :] < seen[:, None], score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    shift = new_top
    if MASKED:  # of a query that sees none of the keys so far
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - shift[:, None])
    old = tl.exp2(top - shift)
    total = total * old + tl.sum(weight, 1)
    return new_top, total, _product(weight, v, mean * old[:, None], PRECISION)


@triton.jit
def _block(
    tensor, key, stride, end, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Rows `key` [N] of a stored tensor, [N, BD]; zeros from `end` on and beyond D."""
    d = tl.arange(0, BD)
    at = tensor + key[:, None] * stride + d[None, :]
    if MASKED:
        return tl.load(at, mask=(key < end)[:, None] & (d < D)[None, :], other=0.0)
    elif BD > D:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _product(a, b, accumulator, PRECISION: tl.constexpr):
    """accumulator + a @ b; "half" rounds a to the 16-bit dtype of b."""
    if PRECISION == "half":
        return tl.dot(a.to(b.dtype), b, accumulator)
    else:
        a, b = a.to(tl.float32), b.to(tl.float32)
        return tl.dot(a, b, accumulator, input_precision=PRECISION)


@triton.jit(do_not_specialize=["tokens", "splits"])
def _join_kernel(
    partial, sums, out, heads, tokens, splits,
    SHARED: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Stretches in order; one that has no weight changes no bit of the others' mean."""
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // heads, pair % heads
    i, d = tl.program_id(1) * BQ + tl.arange(0, BQ), tl.arange(0, BDV)
    queries = SHARED * tokens
    valid = (i < queries)[:, None] & (d < DV)[None, :]
    top = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    mean = tl.zeros((BQ, BDV), tl.float32)
    for split in range(splits):
        at = (pair * splits + split) * queries + i
        x = tl.load(sums + at, mask=i < queries, other=float("-inf"))
        value = tl.load(partial + at[:, None] * DV + d[None, :], mask=valid, other=0.0)
        new_top = tl.maximum(top, x)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        old, new = tl.exp2(top - shift), tl.exp2(x - shift)
        total = total * old + new
        mean = mean * old[:, None] + value * new[:, None]
        top = new_top
    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
    to = ((row * tokens + i % tokens) * heads * SHARED + head * SHARED + i // tokens) * DV
    tl.store(out + to[:, None] + d[None, :], mean.to(out.dtype.element_ty), mask=valid)
