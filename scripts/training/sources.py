"""Where the training text of the built-in models comes from, and their tokenizer.

Owns generators and readers of documents: worked problems, plain sums, English, and which of it is
held out. Formats of documents are `replayssm.study.corpus`'s; token ids and rows are
`training.data`'s.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from replayssm.study import corpus

# gsm_symbolic templates that reasoning-gym itself marks as needing a fix and does not use.
BROKEN_TEMPLATES = {32, 35, 37, 61, 63, 65, 74, 76, 77, 79, 86, 87, 90, 97, 98}
VOCAB_SIZE = 2048
TINY_SHAKESPEARE = "tinyshakespeare.txt"
SHAKESPEARE_HELDOUT_CHARS = 110_000


# --- sources ------------------------------------------------------------------------------------


def gsm_symbolic_rows(
    seed: str, count: int, package_folder: str | None = None
) -> list[dict[str, str]]:
    """`count` gsm_symbolic problems: question, solution (ends in ``#### answer``), answer. Pure
    function of `seed`.

    Uses the template functions of the package ``reasoning-gym`` (Apache-2.0), installed or lying
    in `package_folder`.
    """
    if package_folder and package_folder not in sys.path:
        sys.path.insert(0, package_folder)
    from reasoning_gym.arithmetic.gsm_symbolic import generators_00_49, generators_50_99

    templates = [
        getattr(module, f"generate_{n}")
        for n in range(100)
        if n not in BROKEN_TEMPLATES
        for module in (generators_00_49, generators_50_99)
        if hasattr(module, f"generate_{n}")
    ]
    rng = Random(f"gsm_symbolic {seed}")
    rows = []
    while len(rows) < count:
        item = rng.choice(templates)(rng, 1.0)
        steps = item["metadata"]["answer_cot"].strip().split("\n")
        assert steps[-1].startswith("####"), steps[-1]
        solution = "\n".join([*steps[:-1], f"#### {item['answer']}"])
        rows.append(
            {"question": item["question"].strip(), "solution": solution, "answer": item["answer"]}
        )
    return rows


def heldout_rows(count: int, package_folder: str | None = None) -> list[dict[str, str]]:
    """The held-out problems: `count` rows with different questions."""
    rows = {row["question"]: row for row in gsm_symbolic_rows("heldout", 2 * count, package_folder)}
    return list(rows.values())[:count]


def gsm8k_rows(path: Path) -> list[dict[str, str]]:
    """GSM8K rows in the same form, without the calculator marks ``<<...>>``."""
    rows = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        solution = re.sub(r"<<.*?>>", "", row["answer"])
        rows.append(
            {
                "question": row["question"],
                "solution": solution,
                "answer": solution.split("####")[1].strip(),
            }
        )
    return rows


def split_shakespeare(text: str) -> tuple[str, str]:
    """(training text, held-out tail), cut at a blank line so that no speech is in both."""
    cut = text.index("\n\n", len(text) - SHAKESPEARE_HELDOUT_CHARS) + 2
    return text[:cut], text[cut:]


def drill(rng: Random) -> str:
    """A document of plain sums, in the ways that the worked problems write them."""
    lines = []
    for _ in range(rng.randint(3, 10)):
        form = rng.randrange(9)
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        if form == 0:
            a, b = rng.randint(2, 999), rng.randint(2, 12)
            lines.append(f"{a} * {b} = {a * b}")
        elif form == 1:
            lines.append(f"{a} x {b} = {a * b}")
        elif form == 2:
            a, b = rng.randint(2, 999), rng.randint(2, 999)
            lines.append(f"{a} + {b} = {a + b}")
        elif form == 3:
            a, b = sorted((rng.randint(2, 2000), rng.randint(2, 2000)), reverse=True)
            lines.append(f"{a} - {b} = {a - b}")
        elif form == 4:
            lines.append(f"{a * b} / {b} = {a}")
        elif form == 5:
            percent, whole = 5 * rng.randint(1, 19), 20 * rng.randint(1, 60)
            lines.append(f"{whole} * {percent}/100 = {whole * percent // 100}")
        elif form == 6:
            percent, whole = 5 * rng.randint(1, 19), 20 * rng.randint(1, 60)
            value = f"{percent / 100:g}"
            lines.append(f"{value} * {whole} = {whole * percent // 100}")
        elif form == 7:
            c = rng.randint(2, 99)
            lines.append(f"{a} + {b} + {c} = {a + b + c}")
        else:
            parts = rng.randint(2, 8)
            whole = parts * rng.randint(2, 200)
            lines.append(f"1/{parts} * {whole} = {whole // parts}")
    return "\n".join(lines)


# --- tokenizer ----------------------------------------------------------------------------------


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE of VOCAB_SIZE entries; every digit is its own token; entry 0 is the
    end-of-document mark."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[corpus.END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json as Hugging Face's AutoTokenizer reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": corpus.END_OF_DOCUMENT,
        "pad_token": corpus.END_OF_DOCUMENT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def tokenizer_corpus(
    gsm: list[dict[str, str]], gsm8k: list[dict[str, str]], english: str
) -> list[str]:
    """Texts the tokenizer is trained on; names and items of recall facts often enough to become
    single tokens."""
    rng = Random("tokenizer")
    recall = []
    for _ in range(60_000):
        recall += [
            line for fact in corpus.sample_facts(rng, 2) for line in (fact.statement, fact.question)
        ]
    problems = [corpus.solved_problem(r["question"], r["solution"]) for r in gsm + gsm8k]
    return recall + problems + english.split("\n\n") + [drill(rng) for _ in range(2000)]


def english_training_texts(text_folder: Path) -> dict[str, str]:
    """File name -> training text of every .txt file: tiny Shakespeare without its held-out tail,
    the others whole, and from all of them no line (of 24 characters or more) that stands in the
    tail."""
    texts = {path.name: path.read_text() for path in sorted(text_folder.glob("*.txt"))}
    texts[TINY_SHAKESPEARE], held_out = split_shakespeare(texts[TINY_SHAKESPEARE])
    tail = {line.strip() for line in held_out.splitlines() if len(line.strip()) >= 24}
    return {
        name: "\n".join(line for line in text.split("\n") if line.strip() not in tail)
        for name, text in texts.items()
    }


def write_heldout(text_folder: Path, out: Path, count: int, package_folder: str | None) -> None:
    """Write the held-out problems and English that the package carries (replayssm/assets/text)."""
    rows = heldout_rows(count, package_folder)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    tail = split_shakespeare((text_folder / TINY_SHAKESPEARE).read_text())[1]
    for name, text in (("gsm_symbolic_heldout.jsonl", lines), ("shakespeare_heldout.txt", tail)):
        (out / f"{name}.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
