"""Attribution: which policies are derived, and shares with intervals on made-up records."""

import numpy as np
import pytest
from test_stats import make_positions

from replayssm.policy import PrecisionPolicy, parse_policy
from replayssm.study.attribution import attribute, axes, needed_policies
from replayssm.study.bootstrap import Bootstrap
from replayssm.study.config import from_mapping
from replayssm.study.spec import Arm

EXACT = parse_policy("fp32").to_dict()


def derived(text):
    """axis -> (label of FP32 with it alone, label of the policy without it)."""

    def label(policy):
        return None if policy is None else PrecisionPolicy.from_dict(policy).label

    found = axes(parse_policy(text).to_dict(), EXACT)
    return {axis.name: (label(axis.alone), label(axis.without)) for axis in found}


def describe(text, control=None, seed=0):
    kind = "control" if control else "policy"
    label = text + (f" seed {seed}" if seed else "")
    arm = Arm(label=label, kind=kind, control=control, policy=parse_policy(text), seed=seed)
    return arm.describe()


FLOOR = describe("fp32@32", "other_ring_len")


def attributed(kls, *, length=400, prompts=12, arms=None):
    """Attribution of arms with given KL levels (text -> mean), noise shared between the arms."""
    rng = np.random.default_rng(0)
    noise = rng.gamma(4.0, 0.25, size=(prompts, length))
    arms = arms or [describe(text) for text in kls]
    values = np.stack([noise * level for level in (*kls.values(), 1e-12)])
    positions = make_positions(values)
    inside = np.ones(length, bool)
    bootstrap = Bootstrap(prompts, block=16)
    return attribute(positions, [*arms, FLOOR], inside, bootstrap, ring_len=16)


# -- axes ------------------------------------------------------------------------------------------


def test_every_axis_of_a_policy_that_uses_all():
    everything = "fp16-sr+nvfp4@32:update=read:operand=bf16:ring=bf16"
    rest = "@32:update=read:operand=bf16:ring=bf16"
    assert derived(everything) == {
        "checkpoint": ("fp16-sr@32", "fp32+nvfp4" + rest),
        "read copy": ("fp32+nvfp4@32", "fp16-sr@32:operand=bf16:ring=bf16"),
        "ring": ("fp32@32:ring=bf16", "fp16-sr+nvfp4@32:update=read:operand=bf16"),
        "operands": ("fp32@32:operand=bf16", "fp16-sr+nvfp4@32:update=read:ring=bf16"),
        "update source": (None, "fp16-sr+nvfp4@32:operand=bf16:ring=bf16"),
        "ring length": (None, "fp16-sr+nvfp4:update=read:operand=bf16:ring=bf16"),
        "rounding": (None, "fp16+nvfp4" + rest),
    }


def test_fp32_has_no_axes_and_a_simple_policy_one():
    assert derived("fp32") == {}
    assert derived("fp8") == {"checkpoint": ("fp8", "fp32")}


def test_rounding_of_both_copies_is_one_axis():
    assert derived("fp8-sr+nvfp4-sr")["rounding"] == (None, "fp8+nvfp4")


def labels(text, **options):
    policies = needed_policies(parse_policy(text).to_dict(), EXACT, **options)
    return [PrecisionPolicy.from_dict(policy).label for policy in policies]


def test_needed_policies_come_once_and_without_a_second_fp32():
    assert labels("fp16-sr+nvfp4", delta_rule=True) == [
        *("fp32", "fp16-sr+nvfp4", "fp16-sr", "fp32+nvfp4", "fp16+nvfp4"),
    ]
    assert labels("fp8@32", delta_rule=True) == ["fp32", "fp8@32", "fp8"]  # no fp32@32
    assert "fp16+nvfp4" in labels("fp16+nvfp4:operand=bf16", delta_rule=True)  # the 2 x 2 proper


def test_the_update_source_is_an_axis_of_delta_rules_only():
    leaky = "fp32+nvfp4:update=read"
    assert labels(leaky, delta_rule=True) == ["fp32", leaky, "fp32+nvfp4"]
    assert labels(leaky, delta_rule=False) == ["fp32", "fp32+nvfp4"]


def test_needed_policies_make_a_study():
    """No two of them are labelled alike or ask for the same computation."""
    text = "fp16-sr+nvfp4@32:update=read:operand=bf16:ring=bf16"
    policies = needed_policies(parse_policy(text).to_dict(), EXACT, delta_rule=True)
    values = {"models": ["m"], "policies": policies}
    spec = from_mapping(values, name="attribution", where="test")
    assert len({arm.identity for arm in spec.arms() if arm.kind == "policy"}) == len(policies)


# -- shares ----------------------------------------------------------------------------------------


def test_independent_errors_add_up():
    kls = {"fp32": 0.0, "fp16+nvfp4": 4e-3, "fp16": 1e-3, "fp32+nvfp4": 3e-3}
    (row,) = attributed(kls)
    assert (row["policy"], row["ring_len"]) == ("fp16+nvfp4", 16)
    assert row["kl"] == pytest.approx(4e-3, rel=0.02)
    assert row["interaction_share"] == pytest.approx(0.0, abs=1e-6)
    checkpoint, read_copy = row["axes"]
    assert (checkpoint["axis"], checkpoint["choice"]) == ("checkpoint", "fp16")
    assert (read_copy["axis"], read_copy["choice"]) == ("read copy", "nvfp4")
    assert checkpoint["alone_share"] == pytest.approx(0.25, rel=1e-6)
    assert read_copy["removed_share"] == pytest.approx(0.75, rel=1e-6)
    # Paired: the noise is common, so shares are sharp although means are not.
    assert row["kl_high"] - row["kl_low"] > 1e-5
    assert checkpoint["alone_share_high"] - checkpoint["alone_share_low"] < 1e-6


def test_an_interaction_is_stated():
    kls = {"fp16+nvfp4": 9e-3, "fp16": 1e-3, "fp32+nvfp4": 3e-3}
    (row,) = attributed(kls)
    assert row["interaction_share"] == pytest.approx(5 / 9, rel=1e-6)
    assert row["interaction_low"] > 0.0
    assert row["sum_alone"] + row["interaction"] == pytest.approx(row["kl"])
    # Taking one away gains what it does alone, and the interaction.
    assert row["axes"][0]["removed_share"] == pytest.approx(6 / 9, rel=1e-6)


def test_what_was_not_measured_is_missing_not_zero():
    kls = {"fp16-sr+nvfp4": 4e-3, "fp16-sr": 1e-3, "fp32+nvfp4": 3e-3}
    (row,) = attributed(kls)
    rounding = row["axes"][-1]
    assert rounding["axis"] == "rounding" and rounding["removed_kl"] is None
    assert attributed({"fp16+nvfp4": 4e-3, "fp16": 1e-3}) == []  # an axis alone is missing
    assert attributed({"fp8": 1e-3, "fp16": 1e-4}) == []  # one axis: nothing to attribute


def test_ring_lengths_are_not_mixed_up():
    kls = {"fp16+nvfp4@32": 4e-3, "fp16": 1e-3, "fp32+nvfp4": 3e-3}
    assert attributed(kls) == []
    kls = {"fp16+nvfp4@32": 4e-3, "fp16@32": 1e-3, "fp32+nvfp4@32": 2e-3, "fp16+nvfp4": 3e-3}
    row = attributed(kls)[0]
    (ring_len,) = [axis for axis in row["axes"] if axis["axis"] == "ring length"]
    assert ring_len["choice"] == "32 instead of 16"
    assert ring_len["removed_share"] == pytest.approx(0.25, rel=1e-6)


def test_seeds_of_a_policy_are_averaged():
    arms = [describe("fp16-sr+nvfp4", seed=s) for s in (1, 2)]
    arms += [describe("fp16-sr", seed=s) for s in (1, 2)] + [describe("fp32+nvfp4")]
    kls = dict(zip("abcde", (3e-3, 5e-3, 0.5e-3, 1.5e-3, 3e-3), strict=True))
    (row,) = attributed(kls, arms=arms)
    assert row["policy"] == "fp16-sr+nvfp4"
    assert row["axes"][0]["alone_share"] == pytest.approx(0.25, rel=1e-6)


def test_a_policy_without_any_drift_has_no_shares():
    (row,) = attributed({"fp16+nvfp4": 0.0, "fp16": 0.0, "fp32+nvfp4": 0.0})
    assert row["kl"] == 0.0 and row["interaction_share"] is None
