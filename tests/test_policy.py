"""Policies: grammar, YAML mapping, labels, digests, bytes, and one clear line for every mistake."""

from dataclasses import replace

import pytest

from replayssm.formats.block import NVFP4
from replayssm.formats.number import FP16
from replayssm.formats.rounding import stochastic
from replayssm.formats.storage import STORAGES, Storage
from replayssm.policy import PRESETS, PrecisionPolicy, StateGeometry, parse_policy

MAMBA2 = StateGeometry(recurrence="mamba2", heads=128, rows=64, cols=128, key_groups=8)
DELTA = StateGeometry(recurrence="gated_delta", heads=32, rows=128, cols=128, key_groups=16)

UNNAMED = PrecisionPolicy(
    checkpoint=Storage(format=FP16, rounding=stochastic(13, 5)),
    read_copy=Storage(format=replace(NVFP4, scale_axis="rows")),
    ring=STORAGES["fp8"],
    update_source="read",
    operand="tf32",
    ring_len=7,
)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_come_back_from_label_and_mapping(name):
    policy = PRESETS[name]
    assert policy.label == name
    assert parse_policy(policy.label) == policy
    assert PrecisionPolicy.from_dict(policy.to_dict()) == policy


@pytest.mark.parametrize(
    "label",
    [
        "fp16-sr+nvfp4@32",
        "fp32@1",
        "bf16+bf16",
        "fp8-e5m2-sr@3:operand=bf16",
        "fp32+nvfp4-46@8:update=read:operand=tf32:ring=bf16",
        "fp16:ring=fp8",
    ],
)
def test_labels_come_back(label):
    policy = parse_policy(label)
    assert policy.label == label
    assert PrecisionPolicy.from_dict(policy.to_dict()) == policy


def test_defaults_are_left_out_of_the_label():
    assert parse_policy("fp16@16:update=checkpoint:operand=fp32:ring=input").label == "fp16"


def test_grammar_means_what_it_says():
    policy = parse_policy("fp16-sr+nvfp4@32:update=read:operand=bf16:ring=bf16")
    assert policy == PrecisionPolicy(
        checkpoint=STORAGES["fp16-sr"],
        read_copy=STORAGES["nvfp4"],
        ring=STORAGES["bf16"],
        update_source="read",
        operand="bf16",
        ring_len=32,
    )
    shared = parse_policy("nvfp4")
    assert shared.read_copy is None and shared.read_storage == shared.checkpoint
    assert shared.ring == "input" and shared.ring_len == 16 and shared.operand == "fp32"
    assert shared.update_source == "checkpoint"


def test_unnamed_storages_are_told_apart_but_not_parsed():
    assert UNNAMED.label.startswith("fp16~") and "+nvfp4~" in UNNAMED.label
    assert PrecisionPolicy.from_dict(UNNAMED.to_dict()) == UNNAMED
    with pytest.raises(ValueError, match="spell it out as a YAML mapping"):
        parse_policy(UNNAMED.label)


def test_digest_follows_every_field():
    variants = [
        UNNAMED,
        replace(UNNAMED, checkpoint=STORAGES["fp16-sr"]),
        replace(UNNAMED, read_copy=STORAGES["nvfp4"]),
        replace(UNNAMED, ring="input"),
        replace(UNNAMED, update_source="checkpoint"),
        replace(UNNAMED, operand="fp32"),
        replace(UNNAMED, ring_len=8),
    ]
    assert len({p.digest for p in variants}) == len({p.label for p in variants}) == len(variants)
    assert PrecisionPolicy.from_dict(UNNAMED.to_dict()).digest == UNNAMED.digest
    assert len(UNNAMED.digest) == 12


def test_mapping_names_every_field_and_takes_storage_names():
    assert set(UNNAMED.to_dict()) == set(PrecisionPolicy.__dataclass_fields__)
    assert PrecisionPolicy.from_dict(
        {"checkpoint": "fp16-sr", "read_copy": "nvfp4", "ring": "input", "ring_len": 32}
    ) == parse_policy("fp16-sr+nvfp4@32")
    assert PrecisionPolicy.from_dict({"checkpoint": "fp16", "read_copy": None}) == PRESETS["fp16"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp17", "policy 'fp17': unknown storage 'fp17'; did you mean 'fp16'"),
        ("fp16sr", "did you mean 'fp16-sr'"),
        ("NVFP4", "did you mean 'nvfp4'"),
        ("", "unknown storage ''"),
        ("fp16+", r"policy 'fp16\+': unknown storage ''"),
        ("fp32+fp16+nvfp4", "more than one"),
        ("fp16@0", "ring length 0 is not an integer of at least 1"),
        ("fp16@", "ring length '' is not"),
        ("fp16@-1", "ring length '-1' is not"),
        ("fp16@1.5", "ring length '1.5' is not"),
        ("fp16@x", "ring length 'x' is not"),
        ("fp16:update=read", "update source 'read' needs a read copy"),
        ("fp16+fp16:update=both", "update source 'both' is not one of checkpoint, read"),
        ("fp16:operand=fp8", "operand 'fp8' is not one of fp32, bf16, tf32"),
        ("fp16:operands=bf16", "option 'operands' is not one of update, operand, ring"),
        ("fp16:operand=bf16:operand=tf32", "option 'operand' is given twice"),
        ("fp16:ring=nvfp4", "ring 'nvfp4' is not possible"),
        ("fp16:ring=bf16-sr", "ring 'bf16-sr' is not possible"),
        ("fp16:ring=fp9", "unknown storage 'fp9'"),
    ],
)
def test_bad_policies_are_refused_in_one_clear_line(text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_policy(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"checkpoint": "fp16", "ringlen": 4}, "unknown policy key 'ringlen'; allowed: checkpoint"),
        ({"ring_len": 4}, "policy needs a checkpoint"),
        ("fp16", "policy 'fp16' is neither a name nor a mapping"),
        ({"checkpoint": "fp16", "ring_len": "4"}, "ring length '4' is not an integer"),
        ({"checkpoint": "fp16", "ring_len": True}, "ring length True is not an integer"),
        ({"checkpoint": {"format": "fp16", "bit": 3}}, "unknown storage key 'bit'"),
        ({"checkpoint": "fp16", "ring": "inputs"}, "unknown storage 'inputs'"),
        ({"checkpoint": "fp16", "operand": None}, "operand None is not one of"),
    ],
)
def test_bad_mappings_are_refused_in_one_clear_line(mapping, message):
    with pytest.raises(ValueError, match=message):
        PrecisionPolicy.from_dict(mapping)


# ---- bytes ------------------------------------------------------------------------------------


def test_bytes_per_state_element():
    expected = {
        "fp32": 4,
        "fp16-sr": 2,
        "fp8": 1 + 4 / 128,
        "nvfp4": 0.5 + 1 / 16 + 4 / (64 * 128),
        "fp32+nvfp4": 4.5 + 1 / 16 + 4 / (64 * 128),
        "fp8-sr+nvfp4": 1.5 + 4 / 128 + 1 / 16 + 4 / (64 * 128),
    }
    for name, value in expected.items():
        assert PRESETS[name].bytes_per_state_element(MAMBA2) == value


def test_bytes_per_token_of_mamba2_written_out():
    state = 128 * 64 * 128 * 4
    record = 128 * 64 * 2 + 8 * 128 * 2 + 128 * 4  # x, B in bf16, dt in fp32
    expected = state + 7.5 * record + record + state / 16
    assert PRESETS["fp32"].bytes_per_token(MAMBA2) == expected
    # One token a flush: the state is read and written, as in the conventional recurrence.
    assert PRESETS["fp32"].bytes_per_token(MAMBA2, 1) == 2 * state + record
    copy = 128 * (64 * 128 // 2 + 64 * 128 // 16 + 4)
    expected = copy + 8.5 * record + (2 * state + copy) / 16
    assert PRESETS["fp32+nvfp4"].bytes_per_token(MAMBA2) == expected


def test_bytes_per_token_of_the_delta_rule_written_out():
    state = 32 * 128 * 128 * 4
    record = 16 * 128 * 2 + 32 * 4 + 32 * 128 * 4  # k in bf16, g and u in fp32
    raw = 32 * 128 * 2 + 32 * 4  # v in bf16, beta in fp32: written, and read once by the flush
    assert PRESETS["fp32"].bytes_per_token(DELTA) == state + 8.5 * record + state / 16
    copy = 32 * (128 * 128 // 2 + 128 * 128 // 16 + 4)
    folded_from_read = copy + 8.5 * record + (2 * state + copy) / 16
    assert PRESETS["fp32+nvfp4:update=read"].bytes_per_token(DELTA) == folded_from_read
    assert PRESETS["fp32+nvfp4"].bytes_per_token(DELTA) == folded_from_read + 2 * raw


def test_ring_format_and_length_count():
    wide, narrow = parse_policy("fp16"), parse_policy("fp16:ring=fp8")
    assert narrow.bytes_per_token(MAMBA2) < wide.bytes_per_token(MAMBA2)
    assert parse_policy("fp16@32").bytes_per_token(MAMBA2) == wide.bytes_per_token(MAMBA2, 32)


def test_geometry_refuses_an_unknown_recurrence():
    with pytest.raises(ValueError, match="recurrence 'rwkv' is not one of mamba2, gated_delta"):
        StateGeometry(recurrence="rwkv", heads=1, rows=1, cols=1, key_groups=1)


def test_description_says_what_is_rounded_where():
    lines = UNNAMED.describe()
    assert lines[0].startswith("checkpoint: fp16, stochastic (13 bits, Philox 5)")
    assert "every 7 tokens" in lines[0]
    assert any(line.startswith("outputs read: a copy") for line in lines)
    assert any("enters the state" in line for line in lines)
    assert "tf32 operands" in lines[-1]
    assert "outputs read: the checkpoint" in PRESETS["nvfp4"].describe()
