"""Deterministic text for studies: worked arithmetic, English, and facts asked again far away.

Owns the *format* of every kind of document the built-in models were trained on (arithmetic
problem, recall fact, recall question, end-of-document mark), the rule that spreads facts and
questions over a stream of documents, and the held-out material packaged under
``replayssm/assets/text``. ``scripts/train_builtin.py`` imports the formats and the rule from
here, so that what a study reads and what a model was trained on cannot diverge.

Standard library only: it must not know torch, a tokenizer or a model. Lengths here are in
characters unless the caller of `interleave` measures its documents in something else (training
measures tokens).
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from random import Random

END_OF_DOCUMENT = "<|endoftext|>"

NAMES = (
    "Abel Bram Cora Dorn Edda Finn Gwen Hugo Iris Jonas Kira Lars Mira Nora Otto Petra Quinn "
    "Rosa Sven Tess Ulla Viktor Wanda Xenia Yara Zeno Anton Berta Cyrus Dora Emil Frida Greta "
    "Hanna Ivo Jutta Klara Leif Magda Nils"
).split()
ITEMS = (
    "lamp rope drum coin harp boot crown spoon ring sword kite flute mirror candle basket "
    "ladder hammer needle violin anchor saddle barrel blanket helmet feather whistle shovel "
    "teapot carpet bell glove map key axe mask clock shell pearl cup book"
).split()
NUMBERS = tuple(str(n) for n in range(10, 100))
KINDS = ("item", "number")


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One binding of a name: ``kind`` "item" (a word of ITEMS) or "number" (two digits, of
    NUMBERS).

    A later fact with the same `key` replaces an earlier one. Statement and question repeat the
    same words up to the value, so that recalling is finding the last place where these words
    stood.
    """

    name: str
    kind: str
    value: str

    @property
    def key(self) -> tuple[str, str]:
        """What a question asks for: (name, kind)."""
        return self.name, self.kind

    @property
    def _stem(self) -> str:
        return f"{self.name} keeps the" if self.kind == "item" else f"{self.name} counts"

    @property
    def statement(self) -> str:
        """The line that states the fact."""
        return f"Remember: {self._stem} {self.value}."

    @property
    def prompt(self) -> str:
        """The question up to, but without, the answer (and without the space before it)."""
        return f"Recall: {self._stem}"

    @property
    def answer(self) -> str:
        """What must follow `prompt`: a space and the value."""
        return f" {self.value}"

    @property
    def question(self) -> str:
        """The whole question line with its answer."""
        return f"{self.prompt}{self.answer}."


def sample_facts(
    rng: Random, count: int, exclude: frozenset[tuple[str, str]] = frozenset()
) -> tuple[Fact, ...]:
    """Draw `count` facts with different keys, none of them in `exclude`.

    Raises ValueError when fewer than `count` keys are left.
    """
    free = [(name, kind) for name in NAMES for kind in KINDS if (name, kind) not in exclude]
    if not 0 < count <= len(free):
        raise ValueError(
            f"count must be in 1..{len(free)} ({len(exclude)} keys excluded), got {count}"
        )
    return tuple(
        Fact(name=name, kind=kind, value=rng.choice(ITEMS if kind == "item" else NUMBERS))
        for name, kind in rng.sample(free, count)
    )


def solved_problem(question: str, solution: str) -> str:
    """A worked arithmetic document; `solution` ends in ``#### N``. Up to ``Answer:`` it is the
    prompt of an evaluation."""
    return f"{problem_prompt(question)} {solution.strip()}"


def problem_prompt(question: str) -> str:
    """The part of `solved_problem` that a model is given when it has to solve the problem."""
    return f"Question: {question.strip()}\nAnswer:"


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document of a stream: kind "filler" (then `body` is whatever the filler source gave),
    "facts" or "questions".

    A recall document holds one line for each of `facts`; `text` gives these lines.
    """

    kind: str
    body: object = None
    facts: tuple[Fact, ...] = ()

    @property
    def text(self) -> str:
        """The text of the document, without the end mark."""
        if self.kind == "filler":
            return str(self.body)
        return "\n".join(f.statement if self.kind == "facts" else f.question for f in self.facts)


@dataclass(frozen=True, kw_only=True)
class RecallSchedule:
    """How facts and questions are spread over a stream. Lengths are in the unit that the stream
    is measured in.

    fact_every: mean length between two documents that state facts (exponentially distributed).
    facts_per_document: inclusive range of facts stated together.
    questions_per_fact: how often each fact is asked, unless it is replaced before.
    min_distance, max_distance: length between statement and question, log-uniform.
    """

    fact_every: float
    min_distance: float
    max_distance: float
    facts_per_document: tuple[int, int] = (1, 4)
    questions_per_fact: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.min_distance <= self.max_distance:
            raise ValueError(
                "distances need 0 < min_distance <= max_distance, got "
                f"{self.min_distance} and {self.max_distance}"
            )
        if self.fact_every <= 0:
            raise ValueError(f"fact_every must be positive, got {self.fact_every}")


QUESTIONS_PER_DOCUMENT = 4


def interleave(
    rng: Random,
    filler: Callable[[], object],
    size: Callable[[Document], int],
    schedule: RecallSchedule,
) -> Iterator[Document]:
    """Endless stream of documents: fillers, facts, and questions about facts stated `schedule`
    distances ago.

    A question is asked at the first document boundary after its time has come; a fact that has
    been replaced since is not asked any more. `size` gives a document's length including its end
    mark.
    """
    position = 0
    next_facts = rng.random() * schedule.fact_every
    current: dict[tuple[str, str], Fact] = {}
    due: list[tuple[float, int, Fact]] = []
    serial = 0
    while True:
        ready = []
        while due and due[0][0] <= position and len(ready) < QUESTIONS_PER_DOCUMENT:
            fact = heapq.heappop(due)[2]
            if current[fact.key] is fact and fact not in ready:
                ready.append(fact)
        if ready:
            document = Document(kind="questions", facts=tuple(ready))
        elif position >= next_facts:
            facts = sample_facts(rng, rng.randint(*schedule.facts_per_document))
            document = Document(kind="facts", facts=facts)
            next_facts = position + rng.expovariate(1.0 / schedule.fact_every)
            low, high = math.log(schedule.min_distance), math.log(schedule.max_distance)
            for fact in facts:
                current[fact.key] = fact
                for _ in range(schedule.questions_per_fact):
                    heapq.heappush(due, (position + math.exp(rng.uniform(low, high)), serial, fact))
                    serial += 1
        else:
            document = Document(kind="filler", body=filler())
        yield document
        position += size(document)


# --- held-out material --------------------------------------------------------------------------

CHARS_PER_TOKEN = (
    2.9  # of the built-in tokenizer on this text, roughly; only sets distances, never a limit
)
ARITHMETIC_SHARE = 0.8  # of the filler documents; the rest is English
ENGLISH_CHARS = (80, 1000)  # length of an English document, before it is completed to a whole line

STUDY_SCHEDULE = RecallSchedule(
    fact_every=1200 * CHARS_PER_TOKEN,
    min_distance=32 * CHARS_PER_TOKEN,
    max_distance=15_000 * CHARS_PER_TOKEN,
    questions_per_fact=4,
)


@cache
def heldout_problems() -> tuple[dict[str, str], ...]:
    """Held-out gsm_symbolic rows: ``question``, ``solution`` (ends in ``#### N``) and ``answer``
    (N), in packaged order."""
    data = files("replayssm").joinpath("assets/text/gsm_symbolic_heldout.jsonl.gz").read_bytes()
    return tuple(json.loads(line) for line in gzip.decompress(data).decode().splitlines())


@cache
def heldout_english() -> str:
    """The tail of tiny Shakespeare that no built-in model was trained on."""
    data = files("replayssm").joinpath("assets/text/shakespeare_heldout.txt.gz").read_bytes()
    return gzip.decompress(data).decode()


def english_excerpt(
    rng: Random, text: str, low: int = ENGLISH_CHARS[0], high: int = ENGLISH_CHARS[1]
) -> str:
    """Whole lines of `text` from a random line start on, log-uniformly `low`..`high` characters
    and the rest of a line."""
    length = int(math.exp(rng.uniform(math.log(low), math.log(high))))
    start = text.rfind("\n", 0, rng.randrange(max(1, len(text) - length))) + 1
    end = text.find("\n", start + length)
    return text[start : end if end >= 0 else len(text)].strip()


def heldout_filler(rng: Random) -> Callable[[], str]:
    """Source of held-out filler documents: problems without repetition until all were used,
    mixed with English."""
    problems, english = heldout_problems(), heldout_english()
    order: list[int] = []

    def draw() -> str:
        if rng.random() >= ARITHMETIC_SHARE:
            return english_excerpt(rng, english)
        if not order:
            order.extend(rng.sample(range(len(problems)), len(problems)))
        row = problems[order.pop()]
        return solved_problem(row["question"], row["solution"])

    return draw


def document_chars(document: Document) -> int:
    """Length of a document in characters, counting its end mark as one."""
    return len(document.text) + 1


def mixed_documents(seed: int, schedule: RecallSchedule = STUDY_SCHEDULE) -> Iterator[Document]:
    """Endless stream of held-out documents with recall facts and questions; a pure function of
    its arguments."""
    rng = Random(f"replayssm mixed {seed}")
    return interleave(rng, heldout_filler(rng), document_chars, schedule)


def mixed_text(seed: int, n_chars: int, schedule: RecallSchedule = STUDY_SCHEDULE) -> str:
    """Held-out mixed text of at least `n_chars` characters, cut at a document's end mark.

    Documents are joined by END_OF_DOCUMENT, which the built-in tokenizer reads as one token.
    About 2.9 characters make a
    token: 131,072 tokens need some 390,000 characters; generate more and cut after tokenizing.
    Raises ValueError if `n_chars` is not positive.
    """
    if n_chars <= 0:
        raise ValueError(f"n_chars must be positive, got {n_chars}")
    parts, length = [], 0
    for document in mixed_documents(seed, schedule):
        parts.append(document.text + END_OF_DOCUMENT)
        length += len(parts[-1])
        if length >= n_chars:
            return "".join(parts)
    raise AssertionError("the stream of documents is endless")


@dataclass(frozen=True, kw_only=True)
class RecallDocument:
    """One recall test: `context` states the fact and ends in the question's `prompt`; `answer`
    must follow."""

    context: str
    prompt: str
    answer: str
    fact: Fact
    distance_chars: int


def recall_document(
    seed: int, distance_chars: int, n_facts: int = 4, lead_chars: int = 500
) -> RecallDocument:
    """Build one recall test over held-out filler.

    `lead_chars` of filler, one document of `n_facts` facts, filler until the statement asked for
    is at least `distance_chars` characters ago, then the question. `distance_chars` of the
    result is the true distance from the statement's start to the question's start. Pure function
    of its arguments. Raises ValueError for a distance that is not positive or an impossible
    number of facts.
    """
    if distance_chars <= 0:
        raise ValueError(f"distance_chars must be positive, got {distance_chars}")
    rng = Random(f"replayssm recall {seed} {distance_chars} {n_facts}")
    facts = sample_facts(rng, n_facts)
    asked = rng.choice(facts)
    filler = heldout_filler(rng)
    context = ""
    while len(context) < lead_chars:
        context += filler() + END_OF_DOCUMENT
    stated = Document(kind="facts", facts=facts).text
    start = len(context) + stated.index(asked.statement)
    context += stated + END_OF_DOCUMENT
    while len(context) - start < distance_chars:
        context += filler() + END_OF_DOCUMENT
    distance = len(context) - start
    return RecallDocument(
        context=context + asked.prompt,
        prompt=asked.prompt,
        answer=asked.answer,
        fact=asked,
        distance_chars=distance,
    )
