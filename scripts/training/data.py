"""Training data of the built-in models: documents as token ids, packed into rows with loss weights.

Owns how documents become rows. Where documents come from is `training.sources`'s; their formats
and the rule that spreads recall facts over a stream are `replayssm.study.corpus`'s; models and
optimisation are not known here.

A row is `ROW` tokens and starts with a fresh document; every question asked in a row is about a
fact stated in it.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from replayssm.study import corpus
from training import sources

ROW = 16_384
WEIGHT_UNIT = 4  # loss weights are stored as integers, this many to 1.0
QUESTION_WEIGHT, PLAIN_WEIGHT, ANSWER_WEIGHT = 2, 4, 24

# --- documents as token ids ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Documents of one source, end to end: document i is tokens[starts[i]:starts[i + 1]], its
    end mark included."""

    tokens: np.ndarray  # uint16
    weights: np.ndarray  # uint8, in 1 / WEIGHT_UNIT
    starts: np.ndarray  # int64

    def __len__(self) -> int:
        return len(self.starts) - 1

    def document(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and weights of document i."""
        span = slice(self.starts[i], self.starts[i + 1])
        return self.tokens[span], self.weights[span]


def problem_pool(tokenizer: Tokenizer, rows: list[dict[str, str]]) -> Pool:
    """Tokenise worked problems; the question weighs less than the solution, which is what must
    be learnt."""
    texts = [
        corpus.solved_problem(r["question"], r["solution"]) + corpus.END_OF_DOCUMENT for r in rows
    ]
    encoded = tokenizer.encode_batch_fast(texts)
    tokens, weights, starts = [], [], [0]
    answer_mark = tokenizer.encode("\nAnswer:").ids
    for document in encoded:
        ids = np.asarray(document.ids, dtype=np.uint16)
        weight = np.full(len(ids), PLAIN_WEIGHT, dtype=np.uint8)
        weight[: _find(document.ids, answer_mark)] = QUESTION_WEIGHT
        tokens.append(ids)
        weights.append(weight)
        starts.append(starts[-1] + len(ids))
    return Pool(
        tokens=np.concatenate(tokens), weights=np.concatenate(weights), starts=np.asarray(starts)
    )


def plain_pool(tokenizer: Tokenizer, texts: list[str]) -> Pool:
    """Tokenise documents whose tokens all weigh the same."""
    encoded = tokenizer.encode_batch_fast([text + corpus.END_OF_DOCUMENT for text in texts])
    tokens = np.concatenate([np.asarray(e.ids, dtype=np.uint16) for e in encoded])
    starts = np.cumsum([0] + [len(e.ids) for e in encoded])
    return Pool(
        tokens=tokens, weights=np.full(len(tokens), PLAIN_WEIGHT, dtype=np.uint8), starts=starts
    )


def _find(ids: list[int], pattern: list[int]) -> int:
    """Position of the last occurrence of `pattern` in `ids`; 0 when there is none."""
    for start in range(len(ids) - len(pattern), -1, -1):
        if ids[start : start + len(pattern)] == pattern:
            return start
    return 0


class RecallLines:
    """Token ids and loss weights of recall documents, line by line from a cache."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._newline = tokenizer.encode("\n").ids
        self._end = tokenizer.encode(corpus.END_OF_DOCUMENT).ids
        self._cache: dict[tuple[str, corpus.Fact], tuple[list[int], list[int]]] = {}

    def _line(self, kind: str, fact: corpus.Fact) -> tuple[list[int], list[int]]:
        if (kind, fact) not in self._cache:
            if kind == "facts":
                ids = self._tokenizer.encode(fact.statement).ids
                weights = [PLAIN_WEIGHT] * len(ids)
            else:
                prompt = self._tokenizer.encode(fact.prompt).ids
                answer = self._tokenizer.encode(fact.answer).ids
                ids = self._tokenizer.encode(fact.question).ids
                assert ids[: len(prompt) + len(answer)] == prompt + answer, fact
                weights = [PLAIN_WEIGHT] * len(ids)
                weights[len(prompt) : len(prompt) + len(answer)] = [ANSWER_WEIGHT] * len(answer)
            self._cache[kind, fact] = ids, weights
        return self._cache[kind, fact]

    def document(self, document: corpus.Document) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (uint16) and weights (uint8) of a facts or questions document, its end mark
        included."""
        ids: list[int] = []
        weights: list[int] = []
        for fact in document.facts:
            line_ids, line_weights = self._line(document.kind, fact)
            if ids:
                ids += self._newline
                weights += [PLAIN_WEIGHT] * len(self._newline)
            ids += line_ids
            weights += line_weights
        return np.asarray(ids + self._end, dtype=np.uint16), np.asarray(
            weights + [PLAIN_WEIGHT] * len(self._end), dtype=np.uint8
        )


# --- rows ---------------------------------------------------------------------------------------

SHARES = {"gsm": 0.78, "gsm8k": 0.03, "english": 0.11, "drill": 0.08}  # of filler *documents*
MIN_DISTANCE, MAX_DISTANCE = (
    16,
    15_000,
)  # tokens between statement and question, once the curriculum is through
FACT_EVERY = 1200  # tokens between documents that state facts, likewise


def row_schedule(progress: float) -> corpus.RecallSchedule:
    """Recall schedule of a row `progress` of the way through training: near and frequent first,
    then far and rare.

    For the first 8 % all questions are within 256 tokens; then the farthest distance grows to
    MAX_DISTANCE and facts thin out to `FACT_EVERY`, both until 45 %.
    """
    reach = min(1.0, max(0.0, (progress - 0.08) / 0.37))
    return corpus.RecallSchedule(
        fact_every=100.0 * (FACT_EVERY / 100.0) ** reach,
        min_distance=MIN_DISTANCE,
        max_distance=256.0 * (MAX_DISTANCE / 256.0) ** reach,
        questions_per_fact=4,
    )


class RowBuilder:
    """Builds rows from pools of documents."""

    def __init__(self, tokenizer: Tokenizer, pools: dict[str, Pool], english: np.ndarray):
        self._recall = RecallLines(tokenizer)
        self._pools = pools
        self._english = english
        self._end = np.asarray([tokenizer.token_to_id(corpus.END_OF_DOCUMENT)], dtype=np.uint16)

    def row(self, seed: str, progress: float) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (uint16 [ROW + 1]) and weights (uint8 [ROW + 1]) of one row; a pure function
        of its arguments."""
        rng = Random(seed)
        names, shares = list(SHARES), list(SHARES.values())

        def filler() -> tuple[np.ndarray, np.ndarray]:
            name = rng.choices(names, shares)[0]
            if name == "english":
                length = int(np.exp(rng.uniform(np.log(24), np.log(600))))
                start = rng.randrange(len(self._english) - length)
                ids = np.concatenate([self._english[start : start + length], self._end])
                return ids, np.full(len(ids), PLAIN_WEIGHT, dtype=np.uint8)
            pool = self._pools[name]
            return pool.document(rng.randrange(len(pool)))

        made: dict[int, tuple[np.ndarray, np.ndarray]] = {}

        def arrays(document: corpus.Document) -> tuple[np.ndarray, np.ndarray]:
            if document.kind == "filler":
                return document.body
            if id(document) not in made:
                made[id(document)] = self._recall.document(document)
            return made[id(document)]

        tokens, weights, length, kept = [], [], 0, []
        for document in corpus.interleave(
            rng, filler, lambda d: len(arrays(d)[0]), row_schedule(progress)
        ):
            ids, weight = arrays(document)
            kept.append(document)  # keeps id(document) unique
            tokens.append(ids)
            weights.append(weight)
            length += len(ids)
            if length > ROW:
                break
        return np.concatenate(tokens)[: ROW + 1], np.concatenate(weights)[: ROW + 1]


def _generate(
    job: tuple[str, int], package_folder: str | None, banned: frozenset[str]
) -> list[dict[str, str]]:
    return [
        row
        for row in sources.gsm_symbolic_rows(job[0], job[1], package_folder)
        if row["question"] not in banned
    ]


def _encode(rows: list[dict[str, str]], tokenizer_json: str) -> Pool:
    return problem_pool(Tokenizer.from_str(tokenizer_json), rows)


def _generate_and_encode(
    job: tuple[str, int], package_folder: str | None, banned: frozenset[str], tokenizer_json: str
) -> Pool:
    return _encode(_generate(job, package_folder, banned), tokenizer_json)


_builder: RowBuilder | None = None


def _start_builder(tokenizer_json: str, pools: dict[str, Pool], english: np.ndarray) -> None:
    global _builder
    _builder = RowBuilder(Tokenizer.from_str(tokenizer_json), pools, english)


def _build_rows(job: tuple[str, int, int, int, float, float]) -> tuple[np.ndarray, np.ndarray]:
    seed, start, stop, total, first, last = job
    assert _builder is not None
    rows = [
        _builder.row(f"{seed} {i}", first + (last - first) * i / total) for i in range(start, stop)
    ]
    return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])


def concatenate(pools: list[Pool]) -> Pool:
    """One pool of several."""
    offsets = np.cumsum([0] + [len(p.tokens) for p in pools])
    starts = [p.starts[:-1] + o for p, o in zip(pools, offsets, strict=False)] + [offsets[-1:]]
    return Pool(
        tokens=np.concatenate([p.tokens for p in pools]),
        weights=np.concatenate([p.weights for p in pools]),
        starts=np.concatenate(starts),
    )


def prepare(
    *,
    text_folder: Path,
    tokenizer: Tokenizer,
    seed: str,
    n_problems: int,
    n_rows: int,
    progress: tuple[float, float],
    workers: int,
    gsm_symbolic: str | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Generate, tokenise and pack training rows in parallel: (tokens uint16 [n_rows, ROW + 1],
    weights uint8, same).

    `progress` is the range of the recall curriculum (0..1) that the rows run through in order.
    `text_folder` holds gsm8k_train.jsonl and the English texts. No held-out question is used.
    """
    banned = frozenset(row["question"] for row in corpus.heldout_problems())
    tokenizer_json = tokenizer.to_str()
    jobs = [(f"{seed} {i}", -(-n_problems // (4 * workers))) for i in range(4 * workers)]
    with ProcessPoolExecutor(workers) as executor:
        work = partial(
            _generate_and_encode,
            package_folder=gsm_symbolic,
            banned=banned,
            tokenizer_json=tokenizer_json,
        )
        gsm = concatenate(list(executor.map(work, jobs)))
    rng = Random(f"drill {seed}")
    pools = {
        "gsm": gsm,
        "gsm8k": problem_pool(tokenizer, sources.gsm8k_rows(text_folder / "gsm8k_train.jsonl")),
        "drill": plain_pool(
            tokenizer, [sources.drill(rng) for _ in range(max(200, n_problems // 20))]
        ),
    }
    english = plain_pool(
        tokenizer, list(sources.english_training_texts(text_folder).values())
    ).tokens
    step = max(1, n_rows // (8 * workers))
    row_jobs = [(seed, i, min(i + step, n_rows), n_rows, *progress) for i in range(0, n_rows, step)]
    with ProcessPoolExecutor(
        workers, initializer=_start_builder, initargs=(tokenizer_json, pools, english)
    ) as executor:
        parts = list(executor.map(_build_rows, row_jobs))
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
