"""The questions of the tasks in `evals/`: where each data set comes from, and in which form.

Owns reading task data from the hub, from disk (`data_dir`), from the official GPQA archive and from
the package, and the order of multiple choices. Called by the task files through lm-eval; knows
neither lm-eval nor a model. Every failure says where the data can be had.

Options come from lm-eval's metadata (`--metadata data_dir=...`) or from the environment:
REPLAYSSM_DATA_DIR, REPLAYSSM_GPQA_ARCHIVE, REPLAYSSM_GPQA_PASSWORD.
"""

import csv
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import replayssm
from replayssm.study import corpus
from replayssm.study.answers import extract

RECALL_DISTANCES = (256, 512, 1024, 2048, 4096, 8192, 16384)
RECALL_QUESTIONS = 64  # for each distance

_GPQA_COLUMNS = ("Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))
_GPQA_HELP = (
    "GPQA is gated. Either accept its terms at huggingface.co/datasets/Idavidrein/gpqa and log in "
    "(`hf auth login` or HF_TOKEN), or download dataset.zip from github.com/idavidrein/gpqa and "
    "pass --gpqa-archive with the password given there (--gpqa-password)"
)


def evals_folder() -> Path:
    """The folder of task files: of the clone, or packed into the wheel."""
    package = Path(replayssm.__file__).parent
    if (package.parent / "pyproject.toml").exists():
        return package.parent / "evals"
    return package / "_packaged" / "evals"


# -- data sets, as lm-eval calls them --------------------------------------------------------------
def gsm8k(**options) -> dict:
    """GSM8K: `question` and `answer` (ends in `#### N`), splits train and test."""
    folder = _option(options, "data_dir")
    if folder is None:
        rows = _from_hub(
            "openai/gsm8k",
            "main",
            "GSM8K comes from the hub (openai/gsm8k), or from disk: --data-dir DIR with "
            "DIR/gsm8k/train.jsonl and test.jsonl of github.com/openai/grade-school-math",
        )
        return {"train": rows["train"], "test": rows["test"]}
    return {
        split: _as_dataset(_read_jsonl(_find(folder, f"gsm8k/{split}.jsonl", f"{split}.jsonl")))
        for split in ("train", "test")
    }


def gsm_symbolic(**options) -> dict:
    """Generated word problems in the form of GSM8K, held out from the built-in models.

    The packaged ones, unless `data_dir` holds others (gsm_symbolic.jsonl).
    """
    folder = _option(options, "data_dir")
    path = None if folder is None else Path(folder) / "gsm_symbolic.jsonl"
    if path is not None and path.is_file():
        return {"test": _as_dataset(_read_jsonl(path))}
    rows = corpus.heldout_problems()
    return {"test": _as_dataset([{"question": r["question"], "answer": r["answer"]} for r in rows])}


def gpqa_diamond(**options) -> dict:
    """GPQA-Diamond with its choices in an order that depends on the question alone.

    Rows: question, choice_a .. choice_d, letter (of the right choice).
    """
    archive, folder = _option(options, "gpqa_archive"), _option(options, "data_dir")
    if archive is not None:
        rows = _read_archive(Path(archive), _option(options, "gpqa_password"))
    elif folder is not None:
        path = _find(folder, "gpqa/gpqa_diamond.csv", "gpqa_diamond.csv", help=_GPQA_HELP)
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"))))
    else:
        rows = list(_from_hub("Idavidrein/gpqa", "gpqa_diamond", _GPQA_HELP)["train"])
    return {"test": _as_dataset([gpqa_question(row) for row in rows])}


def state_recall(**options) -> dict:
    """Facts asked again after 256 to 16,384 tokens of other text; `group` is that distance.

    Distances are in tokens of the built-in models' tokenizer, roughly.
    """
    del options
    rows = []
    for seed in range(RECALL_QUESTIONS):  # the first questions cover all distances
        for distance in RECALL_DISTANCES:
            made = corpus.recall_document(seed, int(distance * corpus.CHARS_PER_TOKEN))
            rows.append(
                {"context": made.context, "answer": made.answer.strip(), "group": str(distance)}
            )
    return {"test": _as_dataset(rows)}


def gpqa_question(row: dict) -> dict:
    """A row of the official table as a question with four choices and the right letter.

    The choices are sorted by a digest of question and choice: no generator, no seed and no cache
    can change the order, and the right letter is spread evenly over questions.
    """
    missing = [name for name in _GPQA_COLUMNS if not isinstance(row.get(name), str)]
    if missing:
        raise ValueError(f"GPQA: a row has no column {missing[0]!r}; columns: {sorted(row)[:8]}")
    question, *choices = (row[name].strip() for name in _GPQA_COLUMNS)

    def key(index: int) -> str:
        return hashlib.sha256(f"{question}\0{choices[index]}\0{index}".encode()).hexdigest()

    order = sorted(range(4), key=key)
    named = {f"choice_{'abcd'[i]}": choices[index] for i, index in enumerate(order)}
    return {"question": question, **named, "letter": "ABCD"[order.index(0)]}


# -- answers, as lm-eval's filters call them -------------------------------------------------------
def _filter(kind: str) -> Callable[[Iterable, Iterable], list[list[str]]]:
    def apply(responses: Iterable, documents: Iterable) -> list[list[str]]:
        """The extracted answer of every response, "[invalid]" where there is none."""
        del documents
        return [[extract(kind, text).answer or "[invalid]" for text in one] for one in responses]

    return apply


numbers, letters, words = _filter("number"), _filter("letter"), _filter("word")


# -- reading ---------------------------------------------------------------------------------------
def _option(options: dict, name: str) -> str | None:
    return options.get(name) or os.environ.get(f"REPLAYSSM_{name.upper()}") or None


def _find(folder: str, *names: str, help: str = "") -> Path:
    for name in names:
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    raise ValueError(f"{folder} (--data-dir) has no {names[0]}" + (f". {help}" if help else ""))


def _read_jsonl(path: Path) -> list[dict]:
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        rows = [json.loads(line) for line in lines if line.strip()]
        return [{"question": row["question"], "answer": row["answer"]} for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: every line must be a JSON object with question and answer ({error})"
        ) from None


def _read_archive(path: Path, password: str | None) -> list[dict]:
    """Rows of gpqa_diamond.csv inside the official archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.endswith("gpqa_diamond.csv")]
            if not names:
                raise ValueError(f"{path} holds no gpqa_diamond.csv")
            if archive.getinfo(names[0]).flag_bits & 1 and password is None:
                raise ValueError(
                    f"{path} is encrypted: give the password that stands beside the archive with "
                    "--gpqa-password or REPLAYSSM_GPQA_PASSWORD"
                )
            content = archive.read(names[0], pwd=password.encode() if password else None)
    except FileNotFoundError:
        raise ValueError(f"{path} (--gpqa-archive) is missing. {_GPQA_HELP}") from None
    except zipfile.BadZipFile:
        raise ValueError(f"{path} is not a zip archive, or it is damaged") from None
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{path} cannot be opened with this password: {error}") from None
    return list(csv.DictReader(io.StringIO(content.decode("utf-8-sig"))))


def _from_hub(name: str, subset: str, help: str):
    import datasets

    try:
        return datasets.load_dataset(name, subset)
    except Exception as error:  # the hub client raises a dozen unrelated types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{name} could not be loaded ({reason}). {help}") from None


def _as_dataset(rows: list[dict]):
    import datasets

    return datasets.Dataset.from_list(rows)
