"""Storage: names, YAML mapping, bytes, and refusals that say what is allowed."""

from dataclasses import replace

import pytest
import torch

from replayssm.formats.block import MXFP8, NVFP4, NVFP4_TORCHAO
from replayssm.formats.number import E2M1, E4M3, E5M2, E8M0, FP16, FP32, INT8
from replayssm.formats.rounding import TOWARD_ZERO, stochastic
from replayssm.formats.storage import STORAGES, Storage, storage_from

UNNAMED = [
    Storage(format=FP16, rounding=stochastic(13, 5)),
    Storage(format=FP16, saturate=False),
    Storage(format=E4M3),
    Storage(format=E5M2, scale="row", rounding=TOWARD_ZERO),
    Storage(format=NVFP4_TORCHAO),
    Storage(format=replace(NVFP4, scale_axis="rows")),
    Storage(format=replace(MXFP8, name="mine", element=E5M2, scale_rule="even", block_size=16)),
]


@pytest.mark.parametrize("name", STORAGES)
def test_names_and_mappings_come_back(name):
    storage = STORAGES[name]
    assert storage.label == name
    assert storage_from(name) == storage_from(storage.to_dict()) == storage_from(storage) == storage
    assert storage.needs_random_bits == name.endswith("-sr")


@pytest.mark.parametrize("storage", UNNAMED, ids=lambda s: s.label)
def test_unnamed_storages_have_distinct_labels_and_mappings(storage):
    assert storage_from(storage.to_dict()) == storage
    assert storage.label.startswith(f"{storage.format.name}~")
    labels = [s.label for s in (*UNNAMED, *STORAGES.values())]
    assert len(set(labels)) == len(labels)


def test_mapping_defaults_and_partial_block_formats():
    assert storage_from({"format": "fp16"}) == STORAGES["fp16"]
    assert storage_from({"format": "fp16", "rounding": "stochastic"}) == STORAGES["fp16-sr"]
    rows = storage_from({"format": {"name": "nvfp4", "scale_axis": "rows"}})
    assert rows.format == replace(NVFP4, scale_axis="rows")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fp17", "unknown storage 'fp17'; did you mean 'fp16'.*known: fp32, fp16"),
        ("", "unknown storage ''"),
        (7, "storage 7 is neither a name nor a mapping"),
        ({}, "storage needs a format"),
        ({"format": "fp9"}, "unknown format 'fp9'"),
        ({"format": "fp16", "round": "nearest_even"}, "unknown storage key 'round'; allowed: form"),
        ({"format": "fp16", "rounding": "nearest"}, "rounding mode 'nearest' is not one of"),
        ({"format": "fp16", "bits": 4}, "neither bits nor philox_rounds"),
        ({"format": "fp16", "rounding": "stochastic", "bits": "16"}, "bits from 1 to 32, not '16'"),
        ({"format": "fp16", "saturate": "no"}, "saturate 'no' is not one of true, false"),
        ({"format": "fp16", "scale": "row"}, "row scales go with e4m3, e5m2 and int8, not fp16"),
        ({"format": "e4m3", "scale": "block"}, "scale 'block' is not one of none, row"),
        ({"format": "e2m1"}, "e2m1 stores no state by itself"),
        ({"format": {"name": "x"}}, "block format 'x' needs element, block_size, scale_format"),
        ({"format": {"name": "nvfp4", "size": 8}}, "unknown block format key 'size'"),
        ({"format": {"name": "nvfp4", "element": "e3m0"}}, "unknown element 'e3m0'"),
    ],
)
def test_bad_mappings_are_refused_by_name(value, message):
    with pytest.raises(ValueError, match=message):
        storage_from(value)


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(format=E2M1),
        dict(format=E8M0),
        dict(format=FP16, scale="row"),
        dict(format=NVFP4, scale="row"),
        dict(format=NVFP4, saturate=False),
        dict(format=INT8, saturate=False),
        dict(format=E4M3, scale="row", saturate=False),
        dict(format=FP32, rounding=stochastic()),
    ],
)
def test_storages_that_cannot_be_are_not_made(kwargs):
    with pytest.raises(ValueError):
        Storage(**kwargs)


def test_bytes_per_element():
    expected = {
        "fp32": 4,
        "fp16-sr": 2,
        "bf16": 2,
        "fp8": 1 + 4 / 128,
        "int8-sr": 1 + 4 / 128,
        "nvfp4": 0.5 + 1 / 16 + 4 / (64 * 128),
        "mxfp4": 0.5 + 1 / 32,
        "mxfp8": 1 + 1 / 32,
    }
    for name, value in expected.items():
        assert STORAGES[name].bytes_per_element(64, 128) == value
    rows = Storage(format=replace(NVFP4, scale_axis="rows"))
    assert rows.bytes_per_matrix(24, 10) == 10 * (12 + 2) + 4


def test_write_reads_back_and_draws_only_what_it_needs():
    x = torch.randn(2, 3, 4, 32, generator=torch.Generator().manual_seed(0))
    row = torch.arange(2)
    address = dict(seed=row, layer=1, stream=0, flush_index=row, sequence=row)
    assert STORAGES["fp16"].draw_bits(x.shape, **address) is None
    for name in ("fp16-sr", "fp8-sr", "nvfp4-sr"):
        storage = STORAGES[name]
        bits = storage.draw_bits(x.shape, **address)
        assert (storage.read(storage.write(x, bits)) - x).norm() / x.norm() < 0.2
    few = Storage(format=FP16, rounding=stochastic(5, 7))
    assert few.draw_bits(x.shape, **address).max() < 32
    with pytest.raises(ValueError, match="given none"):
        STORAGES["fp16-sr"].write(x)


def test_descriptions_say_what_rounds():
    assert STORAGES["fp32"].describe() == "fp32, exact"
    assert "stochastic (16 bits, Philox 10)" in STORAGES["fp16-sr"].describe()
    assert "fp32 scale per row" in STORAGES["int8"].describe()
    assert "e4m3 scale per block" in STORAGES["nvfp4"].describe()
    assert "overflowing" in Storage(format=FP16, saturate=False).describe()
