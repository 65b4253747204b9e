"""`replayssm eval` on a tiny model: stores, resuming, scoring again, refusals. Offline."""

import json
import tempfile
from functools import cache
from pathlib import Path

import pytest
from tiny_tasks import save_checkpoint, write_data

from replayssm import models
from replayssm.study import task_results, tasks
from replayssm.study.samples import read_samples
from replayssm.study.task_results import (
    Question,
    check_gold_letters,
    compute,
    find_task_runs,
    rescore,
)
from replayssm.study.task_spec import TaskRequest, TaskSpec, load_task_spec
from replayssm.study.tasks import load_task, run_tasks


@cache
def data() -> str:
    return str(write_data(Path(tempfile.mkdtemp())))


@cache
def loaded(name: str = "qwen3_5") -> models.LoadedModel:
    return models.load(str(save_checkpoint(Path(tempfile.mkdtemp()), name, chat=True)))


def spec(tmp_path: Path, **changes) -> TaskSpec:
    values = {
        "models": ["tiny"],
        "policies": ["fp16-sr", "nvfp4"],
        "tasks": ["gsm_symbolic"],
        "limit": 5,
        "max_gen_toks": 12,
        "ring_len": 4,
        "batch_size": 8,
    }
    path = tmp_path / "evaluation.yaml"
    path.write_text(json.dumps(values | changes))
    return load_task_spec(str(path))


def run(asked: TaskSpec, out: Path, **changes):
    options = {"data_dir": data()}
    arguments = {"open_model": lambda name: loaded(), "options": options, "progress": False}
    (result,) = run_tasks(asked, out=out, **arguments | changes)
    return result


@pytest.fixture(autouse=True, scope="module")
def same_environment():
    """Commits while the tests run must not count as another environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "environment", lambda device, backend: {"summary": "here"})
        yield


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


THREE = ["gsm_symbolic", {"name": "gsm8k", "limit": 3}, {"name": "gpqa_diamond", "limit": 4}]


# -- a whole run -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return run(spec(folder, tasks=THREE), folder / "results"), folder / "results"


def test_a_run_holds_everything_but_questions(whole):
    result, out = whole
    assert result.generated == 4 * (5 + 3 + 4)
    names = {path.name for path in result.run.path.iterdir()}
    assert names == {
        "evaluation.json", "questions.jsonl", "provenance.json", "status.json", "outcomes.csv",
        "summary.json",
    }  # fmt: skip
    text = b"".join(tree(out).values()).decode()
    assert "plus one" not in text and "What is" not in text
    provenance = json.loads((result.run.path / "provenance.json").read_text())
    assert provenance["caps"] == {"gsm_symbolic": 12, "gsm8k": 12, "gpqa_diamond": 12}
    stored = provenance["effective"]["dtypes"]["fp16-sr@4"]
    assert stored["checkpoint.data"] == "float16"
    assert provenance["effective"]["replaced"]


def test_the_summary(whole):
    result, _ = whole
    assert [task["task"] for task in result.summary["tasks"]] == [
        "gsm_symbolic", "gsm8k", "gpqa_diamond",
    ]  # fmt: skip
    for task in result.summary["tasks"]:
        labels = [(arm["label"], arm["kind"]) for arm in task["arms"]]
        assert labels == [
            ("fp32", "reference"), ("fp16-sr@4", "policy"), ("nvfp4@4", "policy"),
            ("fp32, L = 8", "control"),
        ]  # fmt: skip
        for arm in task["arms"]:
            assert sum(arm["outcomes"].values()) == arm["questions"]
        assert "p_holm" in task["arms"][1] and "p_holm" not in task["arms"][3]
    gpqa = result.summary["tasks"][2]
    assert sum(gpqa["gold_letters"].values()) == 4
    assert set(result.summary["tasks"][1]["arms"][0]["filters"]) == {
        "strict-match", "flexible-extract", "numeric",
    }  # fmt: skip


def test_policies_have_their_own_answers(whole):
    result, out = whole
    arms = result.run.document()["identity"]["arms"]
    files = [out / "samples" / arm["samples"]["gsm_symbolic"] for arm in arms]
    assert len(set(files)) == 4 and all(path.exists() for path in files)
    answers = [[s.raw_answer for s in read_samples(path)[1]] for path in files]
    assert answers[0] == answers[3] != answers[2]


def test_asking_again_generates_nothing_and_changes_no_byte(whole):
    result, out = whole
    before = tree(out)
    again = run(spec(out.parent, tasks=THREE), out)
    assert again.generated == 0 and tree(out) == before


def test_another_policy_reuses_what_is_stored(tmp_path):
    run(spec(tmp_path), tmp_path / "r")
    more = run(spec(tmp_path, policies=["nvfp4", "fp8", "fp16-sr"]), tmp_path / "r")
    assert more.generated == 5
    longer = run(spec(tmp_path, limit=6), tmp_path / "r")
    assert longer.generated == 4
    assert len(find_task_runs(tmp_path / "r")) == 3


class Killed(BaseException):
    """Stands for a signal: nothing in between may catch it."""


@pytest.mark.parametrize("after", [0, 1, 7, 19])
def test_killed_and_restarted_gives_the_same_files(tmp_path, monkeypatch, after):
    asked = spec(tmp_path)
    run(asked, tmp_path / "whole")
    real, count = tasks.SampleStore.add, 0

    def add(self, sample):
        nonlocal count
        if count == after:
            raise Killed
        count += 1
        real(self, sample)

    monkeypatch.setattr(tasks.SampleStore, "add", add)
    with pytest.raises(Killed):
        run(asked, tmp_path / "cut")
    monkeypatch.undo()
    assert run(asked, tmp_path / "cut").generated == 20 - after
    assert tree(tmp_path / "cut") == tree(tmp_path / "whole")


def test_killed_between_the_last_answer_and_the_end(tmp_path, monkeypatch):
    asked = spec(tmp_path)
    run(asked, tmp_path / "whole")

    def finish(self):
        raise Killed

    monkeypatch.setattr(tasks.SampleStore, "finish", finish)
    for _ in range(2):
        with pytest.raises(Killed):
            run(asked, tmp_path / "cut")
    monkeypatch.undo()
    assert run(asked, tmp_path / "cut").generated == 15
    assert tree(tmp_path / "cut") == tree(tmp_path / "whole")


def test_several_samples_a_question(tmp_path):
    asked = spec(
        tmp_path, temperature=1.0, tasks=[{"name": "gsm_symbolic", "samples": 3, "limit": 4}]
    )
    result = run(asked, tmp_path / "r")
    arm = result.summary["tasks"][0]["arms"][1]
    assert (arm["questions"], arm["samples"], arm["test"]) == (4, 3, "paired sign flip")
    assert result.generated == 4 * 12


def test_chat_template_changes_the_questions(tmp_path):
    plain = load_task(TaskRequest(name="gsm8k"), limit=2, options={"data_dir": data()})
    result = run(spec(tmp_path, chat_template=True, tasks=["gsm8k"], limit=2), tmp_path / "r")
    asked = result.run.questions()["gsm8k"]
    assert {q.question for q in asked}.isdisjoint(q.question for q in plain.questions)


def test_a_prompt_can_be_read_under_the_policy(tmp_path):
    read = {"name": "gsm_symbolic", "prefill": 2}
    result = run(spec(tmp_path, tasks=[read]), tmp_path / "r")
    assert result.run.document()["identity"]["tasks"][0]["prefill"] == 2
    prefilled = run(spec(tmp_path), tmp_path / "r")
    assert prefilled.generated == 20
    assert load_task(TaskRequest(name="state_recall"), limit=1, options={}).prefill == 64


# -- scoring again ---------------------------------------------------------------------------------
def test_scoring_again_needs_no_model(whole):
    result, _ = whole
    (found,) = find_task_runs(result.run.path)
    before = tree(found.path)
    assert rescore(found) == result.summary and tree(found.path) == before


def test_scoring_again_follows_the_stored_answers(tmp_path):
    result = run(spec(tmp_path), tmp_path / "r")
    arm = result.run.document()["identity"]["arms"][0]
    path = tmp_path / "r" / "samples" / arm["samples"]["gsm_symbolic"]
    header, *lines = path.read_text().splitlines()
    gold = {q.question: q.gold for q in result.run.questions()["gsm_symbolic"]}
    told = []
    for line in lines:
        sample = json.loads(line)
        sample |= {"answer": f"#### {gold[sample['question']]}", "finish": "stop", "loop": False}
        told.append(json.dumps(sample))
    path.write_text("\n".join([header, *told]) + "\n")
    _, summary = compute(result.run)
    task = summary["tasks"][0]
    assert task["arms"][0]["accuracy"] == 1.0 and task["arms"][0]["how"] == {"hashes": 5}
    assert task["arms"][1]["lost"] == 5 and task["arms"][1]["difference"] == -1.0
    assert any("cannot tell the policies apart" in line for line in task["warnings"])
    path.write_text("\n".join([header, *told[1:]]) + "\n")
    with pytest.raises(ValueError, match="sample 0 of question .* is not there"):
        compute(result.run)


def test_warnings(tmp_path):
    arm = {
        "label": "nvfp4",
        "outcomes": {"right": 3, "wrong": 1, "invalid": 4, "truncated": 2},
        "filters": {"strict-match": 0.0, "flexible-extract": 0.545},
        "truncated_rate": 0.2,
        "accuracy": 0.3,
    }
    lines = list(task_results._warnings({"max_new_tokens": 256}, [arm]))
    assert "the strict filter finds no right answer at all, another one finds 54.5 %" in lines[0]
    assert "20.0 % of the answers were cut at 256 tokens" in lines[1]
    assert "no answer could be read in 4 of 10" in lines[2]
    fine = {**arm, "outcomes": {"right": 9, "invalid": 1}, "truncated_rate": 0.0, "filters": {}}
    assert list(task_results._warnings({"max_new_tokens": 256}, [fine])) == []


def test_letters_on_one_side_are_refused():
    asked = [Question(question=str(i), document=i, gold="D" if i % 3 else "A") for i in range(30)]
    with pytest.raises(ValueError, match="D is the right letter of 20 of 30"):
        check_gold_letters("gpqa_diamond", asked)
    check_gold_letters("gpqa_diamond", asked[:10])


# -- refusals: one line, before anything is written or generated -----------------------------------
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tasks": ["gsm9k"]}, "unknown task 'gsm9k'; did you mean 'gsm8k'"),
        ({"max_gen_toks": 4090}, "exceeds the 4096 positions"),
        ({"think_end_token": "</thunk>"}, "'</thunk>' is not a token"),
    ],
)
def test_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(spec(tmp_path, **changes), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_missing_data_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"\(--data-dir\) has no gsm8k/train.jsonl"):
        run(spec(tmp_path, tasks=["gsm8k"]), tmp_path / "r", options={"data_dir": str(tmp_path)})
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": ["x"]}, "unknown key model; did you mean 'models'"),
        ({"tasks": [{"name": "gsm8k", "limits": 3}]}, "unknown key tasks: limits; did you mean"),
        ({"tasks": [{"limit": 3}]}, "needs the key name"),
        ({"tasks": ["gsm8k", "gsm8k"]}, "tasks lists gsm8k twice"),
        ({"samples": 4}, "samples above 1 need a temperature"),
        ({"policies": ["fp61"]}, "did you mean 'fp16'"),
        ({"margin": 2}, "margin must be between 0 and 1"),
        ({"enable_thinking": True}, "set chat_template"),
        ({"enable_thinking": True, "chat_template": True}, "enable_thinking needs think_end_token"),
        ({"chat_template": "yes"}, "chat_template must be true or false"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"other_ring_len": 4}, "other_ring_len must differ"),
        ({"temperature": -1}, "temperature must be 0"),
    ],
)
def test_bad_configurations(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        spec(tmp_path, **changes)


def test_fp32_is_the_reference_whether_named_or_not(tmp_path):
    named = spec(tmp_path, policies=["fp32", "nvfp4", "fp32@8"])
    assert [arm.label for arm in named.arms()] == ["fp32", "nvfp4@4", "fp32, L = 8"]
