"""Engine presets: the rounding each claims, checked on stored tensors and against an emulation."""

import re

import pytest
import torch
from recurrence_cases import PLAIN, make_cache, make_inputs, make_update, random_state, relative

from replayssm import cli
from replayssm.formats.storage import STORAGES
from replayssm.policy import PRESETS, parse_policy
from replayssm.presets import ENGINE_PRESETS, REFUSED_PRESETS, presets_of, spelled

EVERY = pytest.mark.parametrize("name", ENGINE_PRESETS)
TOKENS = 10  # of a ring of 16: nothing is flushed yet


def run(name, tokens=TOKENS):
    """(update, cache, the checkpoint it started from) after `tokens` tokens."""
    preset = ENGINE_PRESETS[name]
    update = make_update(preset.recurrence, name)
    inputs = make_inputs(preset.recurrence, PLAIN[preset.recurrence], 2, tokens)
    cache = make_cache(update, 2, state=random_state(update, 2))
    start = update.policy.checkpoint.read(cache.checkpoint).clone()
    update.step(cache, inputs)
    return update, cache, start


def fits(values, dtype):
    return bool((values.to(dtype).float() == values).all())


# -- what is stored --------------------------------------------------------------------------------


@EVERY
def test_the_checkpoint_is_in_the_format_the_preset_names(name):
    update, cache, _ = run(name, tokens=16)
    assert cache.pos.tolist() == [0, 0]  # flushed: the checkpoint was just written
    stored = update.policy.checkpoint.read(cache.checkpoint)
    (claim,) = [line for line in ENGINE_PRESETS[name].rounds if line.startswith("state ")]
    narrow = {"FP16": torch.float16, "BF16": torch.bfloat16}
    kind = re.match(r"state (?:to|in) (\w+)", claim)[1]
    if kind in narrow:
        assert fits(stored, narrow[kind])
    elif kind == "FP32":
        assert not fits(stored, torch.bfloat16) and not fits(stored, torch.float16)
    else:
        assert kind == {"e4m3": "E4M3", "int8": "INT8"}[cache.checkpoint.format.name]
        assert cache.checkpoint.scale.dtype == torch.float32  # one per row
        assert cache.checkpoint.scale.shape == (*stored.shape[:-1], 1)
    assert ("stochastically" in claim) == update.policy.checkpoint.needs_random_bits
    assert ("once a flush" in claim or "every flush" in claim) or kind == "FP32"


@EVERY
def test_ring_records_are_bf16_and_gates_fp32(name):
    _, cache, _ = run(name)
    names = {"mamba2": ("x", "B"), "gated_delta": ("k",)}[ENGINE_PRESETS[name].recurrence]
    gates = {"mamba2": ("dt",), "gated_delta": ("g", "u")}[ENGINE_PRESETS[name].recurrence]
    assert all(cache.ring[part].dtype == torch.bfloat16 for part in names)
    assert all(cache.ring[part].dtype == torch.float32 for part in gates)


@EVERY
def test_there_is_one_copy(name):
    """None of the engines keeps a read copy; every flush folds what was computed."""
    assert ENGINE_PRESETS[name].policy.count("+") == 0
    assert parse_policy(name).read_copy is None


# -- what is multiplied ----------------------------------------------------------------------------


def folded(update, cache, start, rounded):
    """The state before it is stored, in float64, with operands passed through `rounded`."""
    ring = {key: value.double()[:, :, :TOKENS] for key, value in cache.ring.items()}
    if update.recurrence == "mamba2":
        left, right, steps = ring["x"], ring["B"], ring["dt"]
        log_decay = cache.parameters["A"].double()[:, None] * steps
    else:
        left, right, steps = ring["u"], ring["k"], 1.0
        if left.shape[2] != TOKENS:  # u is [B, HV, L, V] or [B, HV, V, L]
            left = cache.ring["u"].double()[..., :TOKENS].transpose(-1, -2)
        log_decay = ring["g"]
    after = log_decay.flip(-1).cumsum(-1).flip(-1) - log_decay
    weighted = left * (after.exp() * steps)[..., None]
    right = right.repeat_interleave(left.shape[1] // right.shape[1], dim=1)
    increment = torch.einsum("bhtr,bhtc->bhrc", rounded(weighted), rounded(right))
    return start.double() * log_decay.sum(-1).exp()[..., None, None] + increment


@EVERY
def test_operands_of_a_fold_round_as_the_preset_says(name):
    update, cache, start = run(name)
    state = update.state(cache)
    exact = folded(update, cache, start, lambda operand: operand)
    bf16 = folded(update, cache, start, lambda operand: operand.float().bfloat16().double())
    lines = " ".join(ENGINE_PRESETS[name].rounds)
    if "to BF16 before the" in lines:
        # FP32 and float64 weights may round to neighbouring BF16 numbers, here and there.
        assert relative(state, bf16) < 1e-4 < relative(state, exact) < 5e-3
    elif "TF32" in lines:
        assert 1e-5 < relative(state, exact) < 1e-3
    else:
        assert relative(state, exact) < 1e-6


# -- names -----------------------------------------------------------------------------------------


@EVERY
def test_spelled_in_the_grammar_and_back(name):
    preset = ENGINE_PRESETS[name]
    policy = parse_policy(name)
    assert policy.label == preset.policy  # the grammar's own spelling
    assert parse_policy(f"{name}@32").label == parse_policy(spelled(f"{name}@32")).label
    assert parse_policy(f"{name}@32").ring_len == 32
    assert name in presets_of(policy.label) and name in presets_of(parse_policy(f"{name}@8").label)


@EVERY
def test_every_preset_says_where_it_was_read_and_what_differs(name):
    preset = ENGINE_PRESETS[name]
    assert re.fullmatch(r"[\w-]+/[\w-]+ [\w/.-]+\.py", preset.source)
    assert preset.recurrence in PLAIN and preset.rounds and preset.differs


def test_names_collide_with_no_storage_and_no_policy():
    names = {*ENGINE_PRESETS, *REFUSED_PRESETS}
    assert not names & ({*STORAGES} | {*PRESETS})
    assert len(names) == len(ENGINE_PRESETS) + len(REFUSED_PRESETS)
    assert presets_of("fp16") == {}


@pytest.mark.parametrize("name", REFUSED_PRESETS)
def test_what_cannot_be_expressed_is_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=re.escape(REFUSED_PRESETS[name])):
        parse_policy(name)


def test_options_may_follow_a_name_but_not_contradict_it():
    assert parse_policy("sglang-gdn-exact:operand=tf32").operand == "tf32"
    with pytest.raises(ValueError, match="'operand' is given twice"):
        parse_policy("vllm-gdn:operand=tf32")


def test_policies_lists_the_engines_with_what_differs(capsys):
    assert cli.main(["policies"]) == 0
    text = capsys.readouterr().out
    for name, preset in ENGINE_PRESETS.items():
        assert f"{name} = {preset.policy}" in text and preset.source in text
    assert cli.main(["policies", "vllm-gdn"]) == 0
    text = capsys.readouterr().out
    assert "differs: beta passes through BF16 there" in text and "sglang" not in text
