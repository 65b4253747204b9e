"""Block formats as data: only combinations that mean something can be made."""

from dataclasses import replace

import pytest

from replayssm.formats.block import BLOCK_FORMATS, MXFP4, MXFP8, NVFP4, NVFP4_46
from replayssm.formats.number import E2M1, E4M3, E5M2, E8M0, FP16, INT8


def test_named_formats():
    assert all(BLOCK_FORMATS[name].name == name for name in BLOCK_FORMATS)
    assert (NVFP4.element, NVFP4.block_size, NVFP4.scale_format) == (E2M1, 16, E4M3)
    assert (MXFP4.element, MXFP4.block_size, MXFP4.scale_format) == (E2M1, 32, E8M0)
    assert (MXFP8.element, MXFP8.block_size, MXFP8.scale_format) == (E4M3, 32, E8M0)
    assert NVFP4_46.four_over_six and NVFP4_46.scale_max == 256
    replace(MXFP8, element=E5M2, scale_rule="rceil", scale_axis="rows", block_size=16)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (NVFP4, dict(scale_axis="cols"), "scale_axis 'cols' is not one of contracted, rows"),
        (NVFP4, dict(scale_max=240), "scale_max 240 is not one of 448, 256"),
        (NVFP4, dict(tensor_scale_rule="both"), "tensor_scale_rule 'both'"),
        (NVFP4, dict(block_size=12), "block_size 12 is not a power of two"),
        (NVFP4, dict(block_size=1), "block_size 1 is not a power of two"),
        (NVFP4, dict(scale_floor=-1.0), "scale_floor -1.0 is not in"),
        (NVFP4, dict(element=E4M3), "element 'e4m3' is not e2m1"),
        (NVFP4, dict(element=INT8), "element 'int8' is not one of"),
        (NVFP4, dict(scale_format=FP16), "scale_format 'fp16' is not one of"),
        (NVFP4, dict(tensor_scale=False), "tensor_scale False is not true"),
        (NVFP4, dict(scale_rule="ceil"), "scale_rule 'ceil' is not 'floor', the only value here"),
        (NVFP4, dict(four_over_six_error="mae"), "four_over_six_error 'mae' is not 'mse'"),
        (MXFP4, dict(scale_rule="nearest"), "scale_rule 'nearest'"),
        (MXFP4, dict(tensor_scale=True), "tensor_scale True is not False, the only value here"),
        (MXFP4, dict(four_over_six=True), "four_over_six True"),
        (MXFP8, dict(scale_max=256), "scale_max 256 is not 448, the only value here"),
    ],
)
def test_meaningless_combinations_are_refused_by_name(base, change, message):
    with pytest.raises(ValueError, match=message):
        replace(base, **change)


def test_mapping_has_every_field():
    mapping = NVFP4.to_dict()
    assert mapping["element"] == "e2m1" and mapping["scale_format"] == "e4m3"
    assert set(mapping) == set(NVFP4.__dataclass_fields__)
    assert "blocks of 16" in NVFP4.describe() and "four-over-six" in NVFP4_46.describe()
