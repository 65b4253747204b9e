"""Task data: order of choices, archives, folders, and messages that say where data can be had."""

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from tiny_tasks import encrypted_zip, gpqa_csv, gpqa_rows, write_data

from replayssm.study import corpus, task_data
from replayssm.study.answers import extract
from replayssm.study.task_data import gpqa_diamond, gpqa_question, gsm8k, gsm_symbolic, state_recall

EVALS = task_data.evals_folder()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("DATA_DIR", "GPQA_ARCHIVE", "GPQA_PASSWORD"):
        monkeypatch.delenv(f"REPLAYSSM_{name}", raising=False)


# -- order of choices ------------------------------------------------------------------------------
def test_order_is_a_function_of_the_question_alone():
    rows = gpqa_rows(30)
    orders = []
    for seed in (0, 7, 11):
        random.seed(seed)
        shuffled = rows[:]
        random.shuffle(shuffled)
        made = {row["Question"]: gpqa_question(row) for row in shuffled}
        orders.append([made[row["Question"]] for row in rows])
    assert orders[0] == orders[1] == orders[2]


def test_order_is_the_same_in_another_process():
    code = (
        "import sys; sys.path[:0] = ['tests/study', 'tests', '.']\n"
        "from tiny_tasks import gpqa_rows; from replayssm.study.task_data import gpqa_question\n"
        "print(''.join(gpqa_question(row)['letter'] for row in gpqa_rows(20)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "".join(gpqa_question(r)["letter"] for r in gpqa_rows(20))


def test_right_letters_are_spread_and_choices_are_complete():
    made = [gpqa_question(row) for row in gpqa_rows(400)]
    counts = Counter(question["letter"] for question in made)
    assert set(counts) == set("ABCD") and all(70 <= n <= 130 for n in counts.values())
    for row, question in zip(gpqa_rows(400), made, strict=True):
        chosen = question[f"choice_{question['letter'].lower()}"]
        assert chosen == row["Correct Answer"]
        assert len({question[f"choice_{c}"] for c in "abcd"}) == 4


def test_a_row_without_its_columns():
    with pytest.raises(ValueError, match="no column 'Incorrect Answer 3'"):
        gpqa_question({k: v for k, v in gpqa_rows(1)[0].items() if k != "Incorrect Answer 3"})


# -- where data come from --------------------------------------------------------------------------
def test_gpqa_from_the_official_archive(tmp_path, monkeypatch):
    path = tmp_path / "dataset.zip"
    encrypted_zip(path, "dataset/gpqa_diamond.csv", gpqa_csv(5).encode(), "a-b-c")
    rows = gpqa_diamond(gpqa_archive=str(path), gpqa_password="a-b-c")["test"]
    assert list(rows) == [gpqa_question(row) for row in gpqa_rows(5)]
    monkeypatch.setenv("REPLAYSSM_GPQA_ARCHIVE", str(path))
    with pytest.raises(ValueError, match="is encrypted: give the password .*--gpqa-password"):
        gpqa_diamond()
    monkeypatch.setenv("REPLAYSSM_GPQA_PASSWORD", "wrong")
    with pytest.raises(ValueError, match="cannot be opened with this password"):
        gpqa_diamond()
    monkeypatch.setenv("REPLAYSSM_GPQA_PASSWORD", "a-b-c")
    assert list(gpqa_diamond()["test"]) == list(rows)


def test_bad_archives(tmp_path):
    with pytest.raises(ValueError, match=r"is missing. GPQA is gated.*huggingface.co"):
        gpqa_diamond(gpqa_archive=str(tmp_path / "no.zip"))
    (tmp_path / "text.zip").write_text("hello")
    with pytest.raises(ValueError, match="not a zip archive"):
        gpqa_diamond(gpqa_archive=str(tmp_path / "text.zip"))
    other = encrypted_zip(tmp_path / "other.zip", "readme.txt", b"x", "a")
    with pytest.raises(ValueError, match="holds no gpqa_diamond.csv"):
        gpqa_diamond(gpqa_archive=str(other))


def test_data_from_a_folder(tmp_path, monkeypatch):
    folder = str(write_data(tmp_path))
    assert gsm8k(data_dir=folder)["test"][3]["answer"].endswith("#### 7")
    assert len(gsm_symbolic(data_dir=folder)["test"]) == 12
    assert gpqa_diamond(data_dir=folder)["test"][0]["letter"] in "ABCD"
    monkeypatch.setenv("REPLAYSSM_DATA_DIR", folder)
    assert len(gsm8k(pretrained="ignored", version=3.0)["train"]) == 12


def test_generated_problems_come_with_the_package(tmp_path):
    rows = gsm_symbolic()["test"]
    assert len(rows) >= 500 and set(rows[0]) == {"question", "answer"}
    assert list(gsm_symbolic(data_dir=str(tmp_path))["test"]) == list(rows)
    assert all(extract("number", row["answer"]).answer for row in rows)


def test_missing_data_say_where_to_get_them(tmp_path):
    with pytest.raises(ValueError, match=r"--data-dir\) has no gsm8k/train.jsonl"):
        gsm8k(data_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"has no gpqa/gpqa_diamond.csv. GPQA is gated"):
        gpqa_diamond(data_dir=str(tmp_path))
    (tmp_path / "gsm_symbolic.jsonl").write_text('{"question": "no answer"}\n')
    with pytest.raises(ValueError, match="every line must be a JSON object with question and"):
        gsm_symbolic(data_dir=str(tmp_path))


@pytest.mark.parametrize(
    "load, message",
    [
        (gpqa_diamond, "Idavidrein/gpqa could not be loaded.*accept its terms.*--gpqa-archive"),
        (gsm8k, "openai/gsm8k could not be loaded.*--data-dir"),
    ],
)
def test_the_hub_refuses(monkeypatch, load, message):
    import datasets

    def refuse(*args):
        raise PermissionError("gated dataset, no token")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match=message):
        load()


def test_recall_asks_over_every_distance(monkeypatch):
    monkeypatch.setattr(task_data, "RECALL_DISTANCES", (256, 1024))
    monkeypatch.setattr(task_data, "RECALL_QUESTIONS", 3)
    rows = list(state_recall()["test"])
    assert [row["group"] for row in rows] == ["256", "1024"] * 3
    for row in rows:
        far = int(int(row["group"]) * corpus.CHARS_PER_TOKEN)
        prompt = row["context"].rsplit(corpus.END_OF_DOCUMENT, 1)[1]
        fact = f"{prompt.replace('Recall', 'Remember')} {row['answer']}."
        assert len(row["context"]) - row["context"].rindex(fact) >= far
    assert list(state_recall()["test"]) == rows


# -- task files ------------------------------------------------------------------------------------
class Loader(yaml.SafeLoader):
    """Reads the files of lm-eval without calling its functions."""


Loader.add_constructor("!function", lambda loader, node: node.value)


def read(path: Path) -> dict:
    return yaml.load(path.read_text(), Loader)


def test_gsm8k_is_lm_evals_own_task_with_one_filter_more():
    import lm_eval

    theirs = read(Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml")
    mine = read(EVALS / "gsm8k.yaml")
    for key in ("doc_to_text", "doc_to_target", "num_fewshot", "generation_kwargs", "metric_list"):
        assert mine[key] == theirs[key], key
    assert mine["filter_list"][:2] == theirs["filter_list"]
    assert mine["fewshot_split"] == theirs["fewshot_split"] == "train"


def test_gsm_symbolic_asks_as_the_built_in_models_were_trained():
    text = read(EVALS / "gsm_symbolic.yaml")["doc_to_text"]
    assert text.replace("{{question}}", "Q?") == corpus.problem_prompt("Q?")


def test_filters_read_answers():
    assert task_data.numbers([["so #### 70,000"], ["none"]], []) == [["70000"], ["[invalid]"]]
    assert task_data.letters([[r"\boxed{\text{B}}"]], []) == [["B"]]
    assert task_data.words([[" lamp."]], []) == [["lamp"]]
