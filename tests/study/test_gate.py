"""gate and recommend: evidence from drift and task runs, limits, exit codes, Pareto fronts."""

import subprocess
import sys

import pytest

from replayssm import cli
from replayssm.study import store
from replayssm.study.gate import Evidence, GateLimits, collect, gate
from replayssm.study.recommend import pareto_front, recommend, recommendation_text

LIMITS = {"kl_mean": 1e-3, "top1_agreement_mean": 0.995}


def arm(label, kl, top1=1.0, cost=100.0, **more):
    kind = more.pop("kind", "policy")
    return {
        "label": label,
        "kind": kind,
        "bytes_per_state_element": cost / 100,
        "bytes_per_token": cost,
        "last_quarter": {"kl_mean": kl, "top1_agreement_mean": top1},
        "whole": {"nonfinite_count": 0, "kl_infinite_count": 0} | more,
    }


def write_run(folder, arms, *, model="m/one", status="complete", failures=()):
    """A drift run's folder as `store` reads it, with made-up numbers."""
    folder.mkdir(parents=True)
    document = {
        "metric_version": store.METRIC_VERSION,
        "identity": {"experiment": "e", "model": model},
        "display": {"limits": LIMITS},
    }
    store.write_json(folder / "spec.json", document)
    store.write_json(folder / "status.json", {"status": status})
    store.write_json(folder / "provenance.json", {"environments": []})
    summary = {"arms": arms, "controls": {"failures": list(failures)}}
    store.write_json(folder / "summary.json", summary)


def write_tasks(folder, arms, *, model="m/one", status="complete"):
    """A task run's folder; `arms`: label -> (kind, difference, its lower bound)."""
    from replayssm.study.task_results import TASK_METRIC_VERSION

    folder.mkdir(parents=True)
    identity = {"experiment": "t", "model": model}
    document = {"task_metric_version": TASK_METRIC_VERSION, "identity": identity, "display": {}}
    rows = [
        {"label": label, "kind": kind, "difference": value, "difference_low": low}
        for label, (kind, value, low) in arms.items()
    ]
    store.write_json(folder / "evaluation.json", document)
    store.write_json(folder / "status.json", {"status": status})
    store.write_json(folder / "provenance.json", {"environments": []})
    store.write_json(folder / "summary.json", {"tasks": [{"task": "quiz", "arms": rows}]})


@pytest.fixture
def results(tmp_path):
    """Three policies on one model, with a drift run and a task run."""
    arms = [
        arm("fp32", 0.0, cost=400.0),
        arm("fp16", 1e-8, 0.999, cost=200.0),
        arm("nvfp4", 0.1, 0.93, cost=60.0),
        arm("fault, log decay +1.00%", 5.0, 0.1, kind="control"),
    ]
    write_run(tmp_path / "runs" / "e" / "aaa", arms)
    scores = {
        "fp32": ("reference", 0.0, None),
        "fp16": ("policy", 0.01, -0.01),
        "nvfp4": ("policy", -0.2, -0.25),
        "fp32@32": ("control", 0.0, -0.01),
    }
    write_tasks(tmp_path / "tasks" / "t" / "bbb", scores)
    return tmp_path


def run(*argv):
    return cli.main([str(a) for a in argv])


# -- gate ------------------------------------------------------------------------------------------


def test_one_line_a_policy_with_the_number_and_the_limit_that_failed(results):
    limits = GateLimits(max_mean_kl=1e-3, min_top1=0.99, max_accuracy_drop=0.02)
    lines, good = gate(results, limits)
    assert not good and len(lines) == 3  # controls are not policies
    assert lines[1] == (
        "PASS m/one fp16: mean KL 1.00e-08 <= 0.001; top-1 agreement 99.90 % >= 99.00 %; accuracy "
        "of quiz +1.00 points, lower bound -1.00 >= -2.00"
    )
    assert lines[2] == (
        "FAIL m/one nvfp4: mean KL 0.1 > 0.001; top-1 agreement 93.00 % < 99.00 %; accuracy of "
        "quiz -20.00 points, lower bound -25.00 < -2.00"
    )


def test_only_the_limits_that_are_given_count(results):
    lines, good = gate(results, GateLimits(max_mean_kl=0.5))
    assert good and lines[2] == "PASS m/one nvfp4: mean KL 0.1 <= 0.5"


def test_a_limit_itself_is_kept(results):
    assert gate(results, GateLimits(max_mean_kl=0.1, min_top1=0.93))[1]


def test_a_missing_number_fails(results):
    lines, good = gate(results / "runs", GateLimits(max_mean_kl=1.0, max_accuracy_drop=0.1))
    assert not good
    assert lines[0] == "FAIL m/one fp32: accuracy not measured (limit: drop of 10 points)"
    lines, good = gate(results / "tasks", GateLimits(max_mean_kl=1.0))
    assert not good and "mean KL not measured (limit: <= 1)" in lines[1]


def test_a_statistic_without_any_value_fails(results):
    write_run(results / "runs" / "e" / "ccc", [arm("x", None, None)], model="m/two")
    lines, _ = gate(results / "runs" / "e" / "ccc", GateLimits(max_mean_kl=1.0, min_top1=0.5))
    assert "mean KL not measured" in lines[0] and "top-1 agreement not measured" in lines[0]


def test_the_worst_run_and_seed_count(results):
    arms = [arm("fp16 seed 0", 1e-5, 0.99), arm("fp16 seed 1", 2e-2, 0.98)]
    write_run(results / "runs" / "e" / "ccc", arms)
    (found,) = [e for e in collect(results).evidence if e.policy == "fp16"]
    assert (found.kl, found.top1) == (2e-2, 0.98)


@pytest.mark.parametrize(
    "broken, message",
    [
        ({"failures": ["hook not live: x"]}, "run ccc: hook not live: x"),
        ({"arms": [arm("fp16", 1e-9, nonfinite_count=3)]}, "3 logit rows were not finite"),
        ({"arms": [arm("fp16", 1e-9, kl_infinite_count=2)]}, "2 divergences were infinite"),
    ],
)
def test_numbers_that_must_not_be_used_fail_whatever_the_limit(results, broken, message):
    given = {"arms": [arm("fp16", 1e-9)]} | broken
    write_run(results / "runs" / "e" / "ccc", given.pop("arms"), **given)
    lines, good = gate(results, GateLimits(max_mean_kl=10.0))
    assert not good and message in next(line for line in lines if " fp16:" in line)


@pytest.mark.parametrize("write, where", [(write_run, "runs/e/ccc"), (write_tasks, "tasks/t/ccc")])
def test_an_unfinished_run_fails(results, write, where):
    write(results / where, {} if write is write_tasks else [], status="started")
    lines, good = gate(results, GateLimits(max_mean_kl=10.0))
    assert not good and lines[-1].startswith("FAIL run ") and "status: started" in lines[-1]


def test_limits_out_of_range_and_no_limit(results):
    with pytest.raises(ValueError, match="max-mean-kl must be 0 or more, is -1"):
        GateLimits(max_mean_kl=-1.0)
    with pytest.raises(ValueError, match="min-top1 must be from 0 to 1, is 99.5"):
        GateLimits(min_top1=99.5)
    with pytest.raises(ValueError, match="max-accuracy-drop"):
        GateLimits(max_accuracy_drop=2.0)
    with pytest.raises(ValueError, match="max-mean-kl"):
        GateLimits(max_mean_kl=float("nan"))
    with pytest.raises(ValueError, match="no limit is given"):
        gate(results, GateLimits())


def test_exit_codes(results, tmp_path, capsys):
    assert run("gate", results, "--max-mean-kl", 1) == 0
    assert run("gate", results, "--max-mean-kl", 1e-3) == 1
    assert run("gate", results) == 2
    assert run("gate", tmp_path / "absent", "--max-mean-kl", 1) == 2
    assert run("recommend", results) == 0
    assert run("recommend", results / "tasks") == 2
    assert run("recommend", results, "--max-mean-kl", 0, "--max-accuracy-drop", 0) == 0  # fp32
    out, err = capsys.readouterr()
    assert "no limit is given" in err and "no results folder" in err and "Traceback" not in err


# -- recommend -------------------------------------------------------------------------------------


def test_the_cheapest_policy_inside_the_limits(results):
    (answer,) = recommend(results, GateLimits(max_mean_kl=1e-3))
    assert [e.policy for e in answer.policies] == ["nvfp4", "fp16", "fp32"]
    assert answer.best.policy == "fp16"
    text = recommendation_text(answer)
    assert "Recommended: fp16, 0.2 kB per token, 50 % of the dearest policy here" in text
    assert "| * fp16 " in text
    (answer,) = recommend(results, GateLimits(max_mean_kl=0.2, min_top1=0.9))
    assert answer.best.policy == "nvfp4"


def test_without_limits_those_of_the_configuration(results):
    (answer,) = recommend(results, GateLimits())
    assert answer.limits == GateLimits(max_mean_kl=1e-3, min_top1=0.995)
    assert answer.best.policy == "fp16"


def test_no_policy_inside_the_limits(results, capsys):
    write_run(results / "runs" / "e" / "ccc", [arm("nvfp4", 0.1)], model="m/two")
    assert run("recommend", results / "runs" / "e" / "ccc", "--max-mean-kl", 1e-9) == 1
    assert "No policy is inside the limits (mean KL <= 1e-09)" in capsys.readouterr().out


def test_ties_in_bytes_go_to_the_lower_kl(results):
    write_run(results / "runs" / "e" / "ccc", [arm("a", 2e-4), arm("b", 1e-4)], model="m/two")
    answer = recommend(results, GateLimits(max_mean_kl=1e-3))[-1]
    assert answer.model == "m/two" and answer.best.policy == "b"


def test_pareto_front():
    costs, badness = [1, 2, 2, 3, 4], [0.5, 0.4, 0.3, 0.3, None]
    assert pareto_front(costs, badness) == [True, False, True, False, False]
    assert pareto_front([1, 1], [0.0, 0.0]) == [True, True]  # equal points are both on it


def test_broken_policies_are_on_no_front(results):
    write_run(results / "runs" / "e" / "ccc", [arm("x", 0.0, cost=1.0, nonfinite_count=1)])
    (answer,) = recommend(results, GateLimits(max_mean_kl=1e-3))
    assert answer.policies[0].policy == "x" and answer.fronts[0] == ()
    assert answer.best.policy == "fp16"


def test_evidence_without_a_limit_passes():
    assert Evidence(model="m", policy="p").failures(GateLimits()) == []


def test_gate_and_recommend_need_no_torch(results):
    code = (
        "import sys; from replayssm.cli import main; "
        f"code = main(['gate', {str(results)!r}, '--max-mean-kl', '1']) or "
        f"main(['recommend', {str(results)!r}]); "
        "loaded = {'torch', 'transformers', 'matplotlib'} & set(sys.modules); "
        "sys.exit(f'loaded {loaded}' if loaded else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
