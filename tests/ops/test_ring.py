"""Ring helpers: masked reads, appends at per-row cursors, decay exponents, products."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from replayssm.ops import ring as R


def test_append_at_one_slot_and_at_per_row_slots():
    ring = {"x": torch.full((2, 3, 6, 4), -1.0), "g": torch.full((2, 3, 6), -1.0)}
    new = {"x": torch.randn(2, 3, 2, 4), "g": torch.randn(2, 3, 2)}
    R.append(ring, 1, new)
    assert torch.equal(ring["x"][:, :, 1:3], new["x"]) and torch.equal(
        ring["g"][:, :, 1:3], new["g"]
    )
    assert (ring["x"][:, :, 0] == -1).all() and (ring["x"][:, :, 3:] == -1).all()

    R.append(ring, torch.tensor([0, 4]), new)
    for row, slot in ((0, 0), (1, 4)):
        assert torch.equal(ring["x"][row, :, slot : slot + 2], new["x"][row])
        assert torch.equal(ring["g"][row, :, slot : slot + 2], new["g"][row])
    assert (ring["g"][1, :, 3] == -1).all()


@pytest.mark.parametrize("end", [0, 3, 5, torch.tensor([0, 3, 5])])
@pytest.mark.parametrize("width", [(), (4,)])
def test_read_selects_valid_slots_and_pads_to_sixteen(end, width):
    record = torch.randn(3, 2, 5, *width).to(torch.bfloat16)
    ends = [end] * 3 if isinstance(end, int) else end.tolist()
    poisoned = record.clone()
    for row, stop in enumerate(ends):
        poisoned[row, :, stop:] = math.nan
    read = R.read_slots(poisoned, end, torch.float32)
    assert read.shape == (3, 2, 16, *width) and read.dtype == torch.float32
    for row, stop in enumerate(ends):
        assert torch.equal(read[row, :, :stop], record[row, :, :stop].float())
        assert (read[row, :, stop:] == 0).all()


def test_full_ring_of_sixteen_is_read_without_a_copy():
    record = torch.randn(2, 3, 16, 4)
    assert R.read_slots(record, 16, torch.float32).data_ptr() == record.data_ptr()


def test_per_row_cursors_agree_with_one_cursor():
    values = torch.randn(3, 2, 16, 4)
    pos = torch.tensor([5, 5, 5])
    assert torch.equal(R.at_tokens(values, pos, 4), R.at_tokens(values, 5, 4))
    for per_row, shared in zip(
        R.causal_mask(pos, 4, 16, "cpu"), R.causal_mask(5, 4, 16, "cpu"), strict=True
    ):
        assert torch.equal(per_row, shared.expand(3, 1, 4, 16))


def test_decay_is_clamped_to_one():
    """C1 of the fault list: a cumulative sum that is not monotone must not amplify or overflow."""
    cumulative = torch.tensor([[-1.0, -1.0 + 1e-6, -900.0]])
    decay = R.decay_between(cumulative, cumulative)
    assert decay.max() == 1.0 and decay.min() == 0.0
    assert torch.equal(decay[0].diagonal(), torch.ones(3))
    assert math.isclose(float(decay[0, 2, 2]), 1.0)
    assert math.isclose(
        float(R.decay_between(torch.tensor([-900.5]), cumulative[0])[0, 2]), 0.6065, rel_tol=1e-3
    )


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_product_has_the_same_bits_in_any_batch(batch):
    a, b = torch.randn(5, 3, 80, 16), torch.randn(5, 3, 16, 1)
    whole = R.product(a, b)
    assert torch.equal(R.product(a[:batch, :1], b[:batch, :1]), whole[:batch, :1])
    assert torch.allclose(whole, a @ b, rtol=1e-5, atol=1e-5)


def test_bf16_operands_round_like_ml_dtypes():
    x = torch.randn(4096) * torch.logspace(-30, 30, 4096)
    expected = x.numpy().astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(R.round_operand(x, "bf16").numpy(), expected)


def test_tf32_operands_keep_ten_bits_ties_to_even():
    ulp = 2.0**-10
    x = torch.tensor(
        [1 + ulp / 2, 1 + 1.5 * ulp, 1 + ulp / 2 + 2**-23, -(1 + 1.5 * ulp), 3e-39, 0.0]
    )
    rounded = R.round_operand(x, "tf32")
    assert rounded.tolist()[:4] == [1.0, 1 + 2 * ulp, 1 + ulp, -(1 + 2 * ulp)]
    assert abs(float(rounded[4]) - 3e-39) < 2.0**-136 and rounded[5] == 0
    y = torch.randn(1000)
    assert ((R.round_operand(y, "tf32") - y).abs() <= y.abs() * 2.0**-11).all()


def test_unknown_operand_is_refused():
    with pytest.raises(ValueError, match="'fp16'.*fp32, bf16, tf32"):
        R.round_operand(torch.ones(2), "fp16")
