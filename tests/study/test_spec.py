"""The study specification: strict reading, arms, identity; every mistake is one clear line."""

import json
from pathlib import Path

import numpy as np
import pytest

from replayssm.policy import parse_policy
from replayssm.study.config import find_experiment, from_mapping, load_spec
from replayssm.study.store import digest

MINIMAL = {"models": ["builtin/gdn"], "policies": ["fp32", "fp16-sr", "nvfp4"]}


def spec(**changes):
    return from_mapping(MINIMAL | changes, name="test", where="here")


def write(tmp_path, text):
    path = tmp_path / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"polices": []}, "unknown key polices; did you mean 'policies'?"),
        ({"colour": 1}, "unknown key colour; allowed: "),
        ({"controls": {"falt": 0.1}}, "unknown key controls.falt; did you mean 'fault'?"),
        ({"policies": ["fp61-sr"]}, "did you mean 'fp16-sr'?"),
        ({"policies": ["fp16", "fp16@16"]}, "policies lists fp16 twice"),
        ({"policies": []}, "policies is empty"),
        ({"policies": "fp16"}, "policies must be a list, is 'fp16'"),
        ({"policies": ["fp16@0"]}, "ring length 0 is not an integer of at least 1"),
        ({"ring_len": 0}, "ring"),
        ({"tokens": 0}, "tokens must be at least 1, is 0"),
        ({"tokens": 8}, "the text of 8 tokens is shorter than the ring of 32"),
        ({"tokens": 63, "policies": ["fp16@64"]}, "shorter than the ring of 64"),
        ({"tokens": 12.5}, "tokens must be a whole number, is 12.5"),
        ({"tokens": True}, "tokens must be a whole number, is True"),
        ({"stride": 1000, "tokens": 2048}, "stride 1000 leaves less than 4 of 2048"),
        ({"dtype": "fp16"}, "dtype 'fp16' is not one of float32, bfloat16"),
        ({"text": "wikitext"}, "text 'wikitext' is not one of builtin/mixed, generate, file:PATH"),
        ({"controls": {"other_ring_len": 16}}, "must differ from ring_len 16"),
        ({"controls": {"fault": 0}}, "controls.fault must be a finite number other than 0"),
        ({"generate": {"temperature": -1}}, "generate.temperature must be 0 or more, is -1"),
        ({"limits": {"kl_mean": "low"}}, "limits.kl_mean must be a number, is 'low'"),
        ({"models": ["a", "a"]}, "models lists a twice"),
        ({"name": "a/b"}, "name 'a/b' must be letters"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(changes, message):
    with pytest.raises(ValueError) as error:
        spec(**changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("here: ")


def test_missing_keys_are_named():
    with pytest.raises(ValueError, match="missing key policies"):
        from_mapping({"models": ["m"]}, name="test", where="here")


@pytest.mark.parametrize(
    "text, message",
    [
        ("models: [a\npolicies", "not valid YAML"),
        ("- a\n- b\n", "must be a mapping"),
        ("models: [a]\npolicies: [fp16]\nmodels: [b]\n", "key models is given twice"),
    ],
)
def test_broken_files(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as error:
        load_spec(write(tmp_path, text))
    assert "\n" not in str(error.value)


def test_unknown_experiments_name_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'quick'"):
        find_experiment("quik")


# -- reading ---------------------------------------------------------------------------------------


QUICK = "fp32 fp16 fp16-sr fp8 fp8-sr nvfp4 fp32+nvfp4 fp16-sr+nvfp4 fp8-sr+nvfp4".split()


@pytest.mark.parametrize("name", ["quick", "kl_drift"])
def test_packaged_experiments_are_valid(name):
    study = load_spec(name)
    assert study.models == ("builtin/gdn", "builtin/mamba2")
    policies = [p.label for p in study.policies]
    assert [label for label in policies if label in QUICK] == QUICK
    assert len(policies) == {"quick": 9, "kl_drift": 13}[name]
    assert study.prompts == {"quick": 4, "kl_drift": 8}[name]
    assert study.tokens == {"quick": 2048, "kl_drift": 131_072}[name]


def test_experiments_are_found_in_the_package_when_there_is_no_clone(tmp_path, monkeypatch):
    import replayssm

    packaged = tmp_path / "site" / "replayssm" / "_packaged" / "experiments"
    packaged.mkdir(parents=True)
    (packaged / "mine.yaml").write_text("models: [m]\npolicies: [fp16]\n")
    monkeypatch.setattr(replayssm, "__file__", str(packaged.parents[1] / "__init__.py"))
    assert load_spec("mine").models == ("m",)


def test_numbers_yaml_reads_as_text_are_numbers(tmp_path):
    text = "models: [m]\npolicies: [fp16]\nlimits: {kl_mean: 1e-4}\n"
    assert load_spec(write(tmp_path, text)).limits.kl_mean == 1e-4


def test_overrides_replace_keys(tmp_path):
    path = write(tmp_path, "models: [m]\npolicies: [fp16]\ntokens: 4096\n")
    assert load_spec(path, {"tokens": 64, "policies": ["nvfp4"]}).tokens == 64


def test_policies_as_mappings_spell_every_field():
    mapping = parse_policy("fp16-sr+nvfp4@32:update=read").to_dict()
    assert spec(policies=[mapping]).policies == (parse_policy("fp16-sr+nvfp4@32:update=read"),)


def test_ring_length_is_the_default_of_policies():
    study = spec(ring_len=8, policies=["fp16", "nvfp4@32", "fp8:operand=bf16"])
    assert [p.ring_len for p in study.policies] == [8, 32, 8]
    assert study.reference.ring_len == 8


# -- arms ------------------------------------------------------------------------------------------


def test_controls_are_always_there():
    arms = spec(policies=["fp16"]).arms()
    assert [arm.control for arm in arms] == [None, "second_fp32", "other_ring_len", "fault"]
    assert arms[2].policy == parse_policy("fp32@32")
    assert arms[3].fault == 0.01


def test_policy_fp32_is_the_second_fp32_row():
    arms = spec().arms()
    assert [arm.label for arm in arms if arm.control == "second_fp32"] == ["fp32"]
    assert len(arms) == 3 + 2


def test_seeds_multiply_stochastic_policies_only():
    labels = [arm.label for arm in spec(seeds=[0, 1]).arms()][:4]
    assert labels == ["fp32", "fp16-sr seed 0", "fp16-sr seed 1", "nvfp4"]


def test_windows_hold_whole_rings():
    assert [spec(ring_len=n, tokens=4096).window for n in (1, 6, 16, 32)] == [16, 12, 16, 32]


# -- identity --------------------------------------------------------------------------------------


def test_identity_follows_what_the_numbers_depend_on():
    key = digest(spec().identity("m"))
    assert digest(spec().identity("m")) == key
    for changes in (
        {"tokens": 1024},
        {"prompts": 5},
        {"seeds": [1]},
        {"stride": 3},
        {"policies": ["fp32", "fp16-sr"]},
        {"prompts_per_batch": 1},
        {"controls": {"fault": 0.02}},
        {"dtype": "bfloat16"},
    ):
        assert digest(spec(**changes).identity("m")) != key, changes
    for changes in (
        {"limits": {"kl_mean": 1.0}},
        {"question": "why?"},
        {"generate": {"temperature": 0.5}},  # without effect on a given text
    ):
        assert digest(spec(**changes).identity("m")) == key, changes
    json.dumps(spec().identity("m"))


def test_a_stride_that_shares_a_factor_with_the_ring_warns():
    (line,) = spec(stride=64, tokens=4096).warnings()
    assert "alias" in line and "only 1 of 16 ring phases" in line
    assert spec(stride=7).warnings() == []
    assert spec().warnings() == []


def test_readme_lists_every_experiment():
    folder = Path(__file__).parents[2] / "experiments"
    readme = (folder / "README.md").read_text(encoding="utf-8")
    for path in folder.glob("*.yaml"):
        assert f"`{path.name}`" in readme


# -- what later versions added ---------------------------------------------------------------------


def test_new_options_leave_old_run_ids_alone():
    identity = spec().identity("m")
    assert not {"positions", "states", "free_running"} & set(identity)
    assert all("refresh" not in arm for arm in identity["arms"])
    assert spec(positions="all", states="none").identity("m") == identity
    for changes in (
        {"positions": "log"},
        {"states": "log"},
        {"free_running": {}},
        {"controls": {"refresh": [64], "refresh_policies": ["nvfp4"]}},
    ):
        assert spec(**changes).identity("m") != identity, changes


def test_refresh_arms_come_last_and_say_what_they_refresh():
    controls = {"refresh": [64, 1024], "refresh_policies": ["nvfp4", "fp16-sr"]}
    study = spec(controls=controls, seeds=[3, 4])
    arms = study.arms()[-4:]
    assert [arm.label for arm in arms] == [
        "nvfp4, refresh 64",
        "nvfp4, refresh 1,024",
        "fp16-sr, refresh 64",
        "fp16-sr, refresh 1,024",
    ]
    assert {(arm.kind, arm.control, arm.seed) for arm in arms} == {("control", "refresh", 3)}
    assert arms[1].describe()["refresh"] == {"policy": "nvfp4", "every": 1024}
    assert len({arm.identity for arm in arms}) == 4
    assert study.free_arms() == study.arms()[:-4]


def test_state_positions_are_whole_rings_of_every_arm():
    assert spec().state_positions == ()
    assert spec(states="log", tokens=131072).state_positions == (
        *(32, 128, 512, 2048, 8192, 32768),
        131072,
    )
    assert spec(states="log", tokens=1000).state_positions == (32, 128, 512, 992)
    assert spec(states=[64, 96]).state_positions == (64, 96)


@pytest.mark.parametrize("rule, kept", [("all", 64), ("every 7", 10), ("log", 48)])
def test_kept_positions(rule, kept):
    found = spec(positions=rule).kept(np.arange(64))
    assert found.sum() == kept and found[0]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"states": [48]}, "states 48 is not one of none, log, or an ascending list of mult.* 32"),
        ({"states": [64, 32]}, r"states \(64, 32\) is not"),
        ({"states": []}, r"states \(\) is not"),
        ({"states": "lg"}, "states 'lg' is not"),
        ({"positions": "every x"}, "positions 'every x' is not one of all, log, every N"),
        ({"controls": {"refresh": [64]}}, "refresh and controls.refresh_policies go together"),
        (
            {"controls": {"refresh": [24], "refresh_policies": ["nvfp4"]}},
            "controls.refresh 24 is not a multiple of 32",
        ),
        ({"free_running": {"tokens": 0}}, "free_running.tokens must be at least 1, is 0"),
        ({"free_running": {"prefill": 9999}}, "free_running.prefill 9999 is longer than the text"),
        ({"free_running": {"temperature": -1}}, "free_running.temperature must be 0 or more"),
    ],
)
def test_mistakes_in_new_options(changes, message):
    with pytest.raises(ValueError, match=message):
        spec(**changes)


def test_thinning_that_sees_one_phase_is_an_alias():
    (line,) = [text for text in spec(positions="every 8").warnings() if "positions" in text]
    assert "keeps 2 of 16 ring phases" in line
    assert spec(positions="every 7").warnings() == []
