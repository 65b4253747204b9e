"""Attention with lengths on the device: against float64, and bits that depend on a row only.

Runs in Triton's interpreter without a GPU, compiled with one (`pytest -m gpu`). Slots beyond a
row's keys hold NaN everywhere.
"""

import pytest
import torch
import triton
from interpreter import DEVICE, KERNEL_MARKS

from replayssm.ops.attention import triton_attention
from replayssm.ops.attention.triton_attention import append, attend

pytestmark = [*KERNEL_MARKS]
if DEVICE == "cpu" and triton.__version__.startswith("3.6"):
    pytestmark.append(pytest.mark.skip("this interpreter loops over constants only (NumPy 2.4)"))


def tensors(rows, shape, past, capacity, *, dtype=torch.float32, seed=0):
    """(query, keys, values, past): heads (HQ, HK), tokens, width, width of values = shape."""
    (query_heads, heads), tokens, width, value_width = shape
    draw = torch.Generator().manual_seed(seed)
    # As a model makes them: heads are split off the last axis, then swapped with tokens.
    query = torch.randn(rows, tokens, query_heads, width, generator=draw).transpose(1, 2)
    keys = torch.randn(rows, heads, capacity, width, generator=draw)
    values = torch.randn(rows, heads, capacity, value_width, generator=draw)
    for row, length in enumerate(past):
        keys[row, :, length + tokens :] = values[row, :, length + tokens :] = float("nan")
    tensors = [tensor.to(DEVICE, dtype) for tensor in (query, keys, values)]
    return *tensors, torch.tensor(past, device=DEVICE)


def naive(query, keys, values, past, scale):
    """Float64, row by row."""
    outputs = []
    for q, k, v, length in zip(query, keys, values, past.tolist(), strict=True):
        tokens = q.shape[1]
        k, v = (t[:, : length + tokens].double() for t in (k, v))
        k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], dim=0) for t in (k, v))
        scores = q.double() @ k.mT * scale
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(length)
        outputs.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.stack(outputs)


SHAPES = {
    "window": ((4, 1), 16, 64, 64),
    "token": ((4, 2), 1, 16, 16),
    "odd width": ((2, 2), 3, 80, 80),
    "two widths": ((2, 2), 4, 24, 8),
    "odd group": ((6, 2), 5, 32, 32),
    "long prompt": ((4, 2), 70, 16, 16),
}


@pytest.mark.parametrize("split", [64, 2048])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_float64_at_every_length(shape, split, monkeypatch):
    monkeypatch.setattr(triton_attention, "SPLIT", split)
    past = [0, 5, 63, 64, 130]
    given = tensors(5, shape, past, 210)
    got = attend(*given, scale=0.3, most_keys=201)
    assert got.shape == (5, shape[1], shape[0][0], shape[3]) and got.is_contiguous()
    assert torch.allclose(got.double(), naive(*given, 0.3), atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_tensors(dtype, monkeypatch):
    monkeypatch.setattr(triton_attention, "SPLIT", 64)
    given = tensors(2, SHAPES["window"], [100, 20], 120, dtype=dtype)
    got = attend(*given, scale=0.3, most_keys=116)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), naive(*given, 0.3), atol=2e-2)


@pytest.mark.parametrize("shape", [SHAPES["window"], SHAPES["token"]], ids=["window", "token"])
def test_a_row_depends_on_nothing_else(shape, monkeypatch):
    """Alone or among rows of other lengths, in storage of any size, however much is launched."""
    monkeypatch.setattr(triton_attention, "SPLIT", 64)
    query, keys, values, past = tensors(4, shape, [3, 180, 60, 44], 200)
    together = attend(query, keys, values, past, scale=0.2, most_keys=200)
    for row in range(4):
        need = int(past[row]) + shape[1]
        part = slice(row, row + 1)
        for storage in (need, 192 if need < 190 else 200):
            alone = attend(
                query[part],
                keys[part, :, :storage],
                values[part, :, :storage],
                past[part],
                scale=0.2,
                most_keys=storage,
            )
            assert torch.equal(alone, together[part])


def test_one_length_for_all_rows():
    query, keys, values, past = tensors(3, SHAPES["window"], [20, 20, 20], 40)
    each = attend(query, keys, values, past, scale=1.0, most_keys=36)
    assert torch.equal(each, attend(query, keys, values, past[:1], scale=1.0, most_keys=36))


@pytest.mark.parametrize("widths", [(64, 64), (80, 24), (24, 80)])
def test_append_writes_its_slots_only(widths):
    keys, values = (torch.zeros(3, 2, 20, width, device=DEVICE) for width in widths)
    new = [torch.randn(3, 5, 2, width, device=DEVICE).transpose(1, 2) for width in widths]
    append(keys, values, tuple(new), torch.tensor([0, 7, 15], device=DEVICE))
    for stored, fresh in zip((keys, values), new, strict=True):
        for row, at in enumerate((0, 7, 15)):
            assert torch.equal(stored[row, :, at : at + 5], fresh[row])
        assert int((stored == 0).sum()) == stored.numel() - fresh.numel()
    append(keys, values, tuple(new), torch.tensor([2], device=DEVICE))
    assert torch.equal(keys[:, :, 2:7], new[0]) and torch.equal(values[:, :, 2:7], new[1])


def test_what_it_does_not_compute_is_refused():
    query, keys, values, past = tensors(1, SHAPES["token"], [3], 8)
    with pytest.raises(ValueError, match="dtypes must be the same"):
        attend(query, keys.half(), values, past, scale=1.0, most_keys=4)
    with pytest.raises(ValueError, match="as wide as queries"):
        attend(query, keys[..., :8], values[..., :8], past, scale=1.0, most_keys=4)
