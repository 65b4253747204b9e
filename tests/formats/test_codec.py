"""`quantize` and `dequantize`: batch invariance, counts, refusals, inputs, all storages at once."""

import pytest
import torch

from replayssm.formats import codec
from replayssm.formats.block import MXFP8, NVFP4
from replayssm.formats.codec import NonFiniteStateError, dequantize, quantize
from replayssm.formats.number import E2M1, E4M3, FP16, FP32, INT8, NUMBER_FORMATS
from replayssm.formats.rounding import TOWARD_ZERO, round_to_format, stochastic
from replayssm.formats.storage import STORAGES

ELEMENTS = tuple(NUMBER_FORMATS.values())
EVERY = pytest.mark.parametrize("name", STORAGES)


def state(*shape, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    per_head = (*shape[:2], *(1,) * (len(shape) - 2))
    return x * torch.exp2(torch.randint(-6, 7, per_head, generator=generator).float())


def written(name: str, x: torch.Tensor, rows=None):
    """A write of batch rows `rows` (all), each with its own address in the random stream."""
    rows = torch.arange(len(x)) if rows is None else torch.tensor(rows)
    bits = STORAGES[name].draw_bits(
        x[rows].shape, seed=rows + 5, layer=3, stream=0, flush_index=rows * 7, sequence=rows
    )
    return STORAGES[name].write(x[rows], bits)


def same(a, b) -> bool:
    """Two stored tensors are equal byte for byte."""
    return a.shape == b.shape and all(
        mine.view(torch.uint8).equal(theirs.view(torch.uint8))
        for mine, theirs in zip(
            (*a.tensors().values(), a.saturated),
            (*b.tensors().values(), b.saturated),
            strict=True,
        )
    )


@EVERY
def test_rows_do_not_see_their_neighbours(name):
    """Any permutation, subset or repetition of the batch stores the same bytes per row."""
    x = state(5, 3, 8, 48)
    x[3, 1] *= 1e4
    together = written(name, x)
    for rows in ([4, 2, 0, 1, 3], [3], [1, 1, 4]):
        assert same(written(name, x, rows), together.select(torch.tensor(rows)))


@EVERY
def test_pieces_do_not_show(name, monkeypatch):
    x = state(3, 4, 8, 48)
    whole = written(name, x)
    values = dequantize(whole)
    for piece in (1, 1000, 2000):
        monkeypatch.setattr(codec, "_PIECE", piece)
        assert same(written(name, x), whole)
        assert dequantize(whole).equal(values)


@pytest.mark.parametrize("name", [n for n, s in STORAGES.items() if s.format in ELEMENTS])
def test_writing_what_was_read_changes_nothing(name):
    """Values on the grid stay there, but for the last bit of a re-derived row scale.

    Block formats are left out: a block whose maximum rounded down gets another scale.
    """
    once = dequantize(written(name, state(2, 3, 16, 64)))
    assert (dequantize(written(name, once)) - once).abs().max() <= 1e-6 * once.abs().max()


@EVERY
def test_stored_bytes_are_what_the_format_says(name):
    for shape in ((2, 3, 16, 64), (1, 2, 5, 24)):
        storage = STORAGES[name]
        q = written(name, state(*shape))
        assert q.nbytes == shape[0] * shape[1] * storage.bytes_per_matrix(*shape[2:])
        assert dequantize(q).shape == shape and dequantize(q).dtype == torch.float32


@EVERY
def test_source_and_stored_form_share_no_memory(name):
    x = state(1, 1, 4, 32)
    q = written(name, x)
    before = dequantize(q)
    x.zero_()
    values = dequantize(q)
    values += 1
    assert dequantize(q).equal(before)


def test_saturation_is_counted_per_batch_row():
    x = torch.zeros(3, 2, 4, 8)
    x[0, 1, 2] = 7e4
    x[2, 0, 0, 0] = -1e9
    assert quantize(x, FP16).saturated.tolist() == [8, 0, 1]
    assert quantize(x, E4M3).saturated.tolist() == [8, 0, 1]
    assert quantize(x, E4M3, scale="row").saturated.tolist() == [0, 0, 0]
    q = quantize(x, FP16, saturate=False)
    assert q.saturated.tolist() == [8, 0, 1] and dequantize(q).isinf().sum() == 9


def test_plain_storage_keeps_non_finite_values():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0]).view(1, 1, 1, 4)
    assert dequantize(quantize(x, FP16)).nan_to_num(7.0, 8.0, 9.0).tolist() == [[[[8, 9, 7, 1]]]]
    assert dequantize(quantize(x, E4M3)).isnan().flatten().tolist() == [True, True, True, False]


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize(
    ("fmt", "scale"), [(E4M3, "row"), (INT8, "row"), (NVFP4, "none"), (MXFP8, "none")]
)
def test_scaled_storage_refuses_non_finite_state_by_place(fmt, scale, bad, monkeypatch):
    x = torch.ones(4, 3, 2, 32)
    x[2, 1, 1, 31] = bad
    x[3, 0, 0, 0] = bad
    for piece in (1, 1 << 18):
        monkeypatch.setattr(codec, "_PIECE", piece)
        with pytest.raises(NonFiniteStateError, match=r"\[batch, head\] \[2, 1\]") as error:
            quantize(x, fmt, scale=scale)
        assert error.value.index == (2, 1)
    with pytest.raises(NonFiniteStateError, match=r"leading index \[11\]"):
        quantize(_one_bad(12, bad), fmt, scale=scale)


def _one_bad(count: int, bad: float) -> torch.Tensor:
    x = torch.ones(count, 2, 32)
    x[-1, 0, 3] = bad
    return x


def test_narrow_inputs_are_widened_exactly():
    x = state(2, 2, 4, 32)
    for dtype in (torch.float16, torch.bfloat16):
        narrow = x.to(dtype)
        for fmt, scale in ((FP32, "none"), (FP16, "none"), (E4M3, "row"), (NVFP4, "none")):
            q = quantize(narrow, fmt, scale=scale)
            assert same(q, quantize(narrow.float(), fmt, scale=scale))


def test_leading_axes_are_free():
    x = state(2, 3, 4, 32)
    for shape in ((6, 4, 32), (2, 1, 3, 4, 32)):
        q = quantize(x.view(shape), NVFP4)
        assert dequantize(q).equal(dequantize(quantize(x, NVFP4)).view(shape))
        assert q.saturated.shape == (shape[0],)


@EVERY
def test_empty_batch(name):
    q = written(name, torch.zeros(0, 2, 4, 32))
    assert dequantize(q).shape == (0, 2, 4, 32) and q.saturated.shape == (0,)


def test_stochastic_elements_in_scaled_formats_are_unbiased():
    """Mean over all 2^8 patterns of 8 bits, for each element of a row and of a block: exact."""
    x = state(1, 1, 1, 32, seed=4).abs() + 0.1
    r = torch.arange(256).view(256, 1, 1, 1).expand(-1, 1, 1, 32)
    many = x.expand(256, -1, -1, -1)
    for fmt, scale in ((E4M3, "row"), (INT8, "row")):
        q = quantize(many, fmt, scale=scale, rounding=stochastic(8), random_bits=r)
        units = x / q.scale[:1]
        mean = q.data.float().mean(0, keepdim=True)
        low, _ = round_to_format(units, fmt, TOWARD_ZERO)
        gap = torch.maximum(q.data.float().amax(0, keepdim=True) - low, torch.tensor(0.01))
        assert ((units - mean) / gap).abs().max() < 2.0**-8 + 1e-5


def test_transposed_input_is_fine():
    x = state(2, 3, 32, 16)
    for name in STORAGES:
        view = x.transpose(-1, -2)
        assert same(written(name, view), written(name, view.contiguous()))


def test_wrong_requests_are_named():
    x = torch.ones(1, 1, 2, 16)
    for call, message in (
        (lambda: quantize(x[0, 0], FP16), r"\[batch, ..., rows, cols\], not shape \[2, 16\]"),
        (lambda: quantize(x.double(), FP16), "float64"),
        (lambda: quantize(x, NVFP4, scale="row"), "nvfp4 has its own scales"),
        (lambda: quantize(x, NVFP4, saturate=False), "nvfp4 has its own scales"),
        (lambda: quantize(x, FP16, scale="row"), "not fp16"),
        (lambda: quantize(x, E2M1, scale="row"), "not e2m1"),
        (lambda: quantize(x, E4M3, scale="row", saturate=False), "not e4m3|saturation"),
        (lambda: quantize(x, E4M3, scale="block"), "scale 'block' is not one of none, row"),
        (lambda: quantize(x, FP16, rounding=stochastic()), "given none"),
        (lambda: quantize(x, NVFP4, random_bits=torch.zeros(1, 1, 2, 16)), "given some"),
        (
            lambda: quantize(x, FP16, rounding=stochastic(), random_bits=torch.zeros(2, 16)),
            r"random_bits \[2, 16\] for values \[1, 1, 2, 16\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
