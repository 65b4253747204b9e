"""The stored container: row operations, bytes, mismatches."""

from dataclasses import replace

import pytest
import torch

from replayssm.formats.block import MXFP4, NVFP4, NVFP4_TORCHAO
from replayssm.formats.codec import dequantize, quantize
from replayssm.formats.number import E4M3, FP16

CASES = pytest.mark.parametrize(
    ("fmt", "scale"),
    [(FP16, "none"), (E4M3, "row"), (NVFP4, "none"), (NVFP4_TORCHAO, "none"), (MXFP4, "none")],
    ids=lambda v: getattr(v, "name", ""),
)


def stored(fmt, scale, seed=0):
    x = torch.randn(4, 2, 3, 32, generator=torch.Generator().manual_seed(seed))
    return quantize(x, fmt, scale=scale)


@CASES
def test_row_operations(fmt, scale):
    q, other = stored(fmt, scale), stored(fmt, scale, seed=1)
    other = replace(other, saturated=torch.arange(4) + 7)
    before = q.saturated.tolist()
    values, others = dequantize(q), dequantize(other)
    copy = q.clone()
    picked = q.select(torch.tensor([2, 0, 2]))
    assert dequantize(picked).equal(values[[2, 0, 2]]) and picked.saturated.shape == (3,)
    assert dequantize(q.select(slice(1, 3))).equal(values[1:3])
    assert dequantize(q.select(torch.tensor([True, False, False, True]))).equal(values[[0, 3]])
    q.put_(torch.tensor([3, 1]), other.select(torch.tensor([0, 2])))
    assert dequantize(q).equal(torch.stack([values[0], others[2], values[2], others[0]]))
    assert q.saturated.tolist() == [before[0], 9, before[2], 7]
    assert dequantize(copy).equal(values), "a clone shares no memory"
    view = copy.select(slice(0, 1))
    view.put_(slice(0, 1), other.select(slice(3, 4)))
    assert dequantize(copy)[0].equal(others[3]), "a slice is a view"


@CASES
def test_names_and_bytes(fmt, scale):
    q = stored(fmt, scale)
    assert list(q.tensors()) == ["data", "scale", "tensor_scale"][: len(q.tensors())]
    assert q.nbytes == sum(t.numel() * t.element_size() for t in q.tensors().values())
    assert type(q.clone().tensor_scale) is type(q.tensor_scale)


def test_rows_of_another_format_are_refused():
    with pytest.raises(ValueError, match="cannot put fp16 .* into nvfp4"):
        stored(NVFP4, "none").put_(slice(0, 4), stored(FP16, "none"))
