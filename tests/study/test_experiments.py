"""The packaged configurations load; those for real models run on tiny ones of their class."""

from functools import partial
from pathlib import Path

import pytest
import torch
from test_real_model import folder  # noqa: F401  (a fixture)
from tiny_models import spread

from replayssm import cli
from replayssm.engine.graphs import StepGraphs
from replayssm.study.attribution import needed_policies
from replayssm.study.config import from_mapping, load_spec
from replayssm.study.report import load_records
from replayssm.study.runner import run_study
from replayssm.study.spec import is_stochastic
from replayssm.study.store import read_json
from replayssm.study.subject import ModelSubject

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
DRIFT = sorted(p.stem for p in EXPERIMENTS.glob("*.yaml") if not p.stem.startswith("tasks"))
REAL = {"kl_drift_qwen3.5-4b": "qwen3_5", "kl_drift_nemotron-3-nano-4b": "nemotron_h"}


@pytest.mark.parametrize("name", DRIFT)
def test_every_drift_experiment_loads(name):
    spec = load_spec(name)
    assert spec.question and spec.reference in spec.policies  # the second FP32 row
    assert not spec.warnings()


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("device_map", [None, "auto"])
def test_a_real_models_experiment_runs_on_a_checkpoint_of_its_class(
    folder,  # noqa: F811
    tmp_path,
    capsys,
    name,
    device_map,
):
    """Random weights of the real configuration class, saved to disk and loaded as a user would."""
    if device_map:
        pytest.importorskip("accelerate")
    shorter = (EXPERIMENTS / f"{name}.yaml").read_text()
    for old, new in (
        ("refresh: [256, 4096]", "refresh: [64]"),
        ("tokens: 131072", "tokens: 96"),
        ("prompts: 8", "prompts: 2"),
    ):
        assert old in shorter
        shorter = shorter.replace(old, new)
    config = tmp_path / f"{name}.yaml"
    config.write_text(shorter)
    model = folder(REAL[name])
    options = ["--out", str(tmp_path / "out"), "--no-progress", "--device", "cpu"]
    options += ["--device-map", device_map] if device_map else []
    code = cli.main(["run", str(config), "--models", model, *options])
    assert code in (0, 1), capsys.readouterr().err  # 1: a control of a random model in bfloat16
    (record,) = load_records(tmp_path / "out" / "runs")
    labels = [arm["label"] for arm in record.summary["arms"] if arm["kind"] == "policy"]
    assert labels == [policy.label for policy in load_spec(str(config)).policies]
    assert record.summary["controls"]["second_fp32_kl_max"] == 0.0
    assert record.summary["refresh"] and record.summary["states"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("model", ["qwen3_5", "nemotron_h"])
def test_a_model_on_two_gpus_gives_the_records_of_one(
    folder,  # noqa: F811
    tiny_model,
    tmp_path,
    monkeypatch,
    model,
):
    """Eager on both; the same kernels on the same rows give the same numbers."""
    pytest.importorskip("accelerate")
    monkeypatch.setattr(StepGraphs, "_look_for_obstacle", lambda self, cache: "a test")
    halves = spread(tiny_model(model), ("layers.1", "layers.2"))
    study = {"policies": ["fp32", "fp16-sr+nvfp4"], "prompts": 2, "tokens": 96, "prefill": 24}
    study |= {"models": [folder(model)], "states": "log", "controls": {"refresh": [64]}}
    study["controls"]["refresh_policies"] = ["fp16-sr+nvfp4"]
    study = from_mapping(study, name="two", where="test")
    kl = []
    for device_map in (None, halves):
        open_subject = partial(ModelSubject, dtype="float32", device="cuda", device_map=device_map)
        out = tmp_path / str(len(kl))
        (result,) = run_study(study, out=out, open_subject=open_subject, progress=False)
        kl.append(read_json(result.folder.summary_path)["arms"])
    assert kl[0] == kl[1]


def test_the_attribution_experiment_holds_what_it_says():
    spec = load_spec("attribution")
    target = next(p for p in spec.policies if p.label == "fp16-sr+nvfp4:operand=bf16:ring=bf16")
    needed = needed_policies(target.to_dict(), spec.reference.to_dict(), delta_rule=True)
    missing = [policy for policy in needed if policy not in [p.to_dict() for p in spec.policies]]
    assert not missing and len(needed) == len(spec.policies)
    assert is_stochastic(target) and len(spec.seeds) == 3
