"""The corpus generator: pure, endless, consistent, and unchanged since the models were trained."""

import hashlib
import itertools
import re
import subprocess
import sys
from collections import Counter
from random import Random

import pytest

from replayssm.study import corpus


def facts_in(text: str):
    """(verb, stem, value, position) of every recall line in a text."""
    for match in re.finditer(r"(Remember|Recall): (\w+ (?:keeps the|counts)) (\w+)\.", text):
        yield *match.groups(), match.start()


def test_text_is_a_pure_function_of_seed_and_length():
    text = corpus.mixed_text(3, 30_000)
    assert text == corpus.mixed_text(3, 30_000)
    assert corpus.mixed_text(3, 60_000).startswith(text)
    assert corpus.mixed_text(4, 30_000)[:200] != text[:200]
    assert len(text) >= 30_000 and text.endswith(corpus.END_OF_DOCUMENT)


def test_text_is_what_the_recorded_studies_read():
    """Results under results/ name their text by seed only: another text needs another name."""
    digest = hashlib.sha256(corpus.mixed_text(0, 50_000).encode()).hexdigest()
    assert digest[:16] == "88eb8be4f7699497"


def test_every_question_has_the_latest_stated_answer_and_distances_reach_far():
    stated, distances = {}, []
    for verb, stem, value, position in facts_in(corpus.mixed_text(1, 400_000)):
        if verb == "Remember":
            stated[stem] = value, position
        else:
            assert stated[stem][0] == value
            distances.append((position - stated[stem][1]) / corpus.CHARS_PER_TOKEN)
    assert len(distances) > 300
    assert min(distances) < 300 and max(distances) > 8000


def test_eight_long_texts_differ_and_do_not_repeat_themselves():
    texts = [corpus.mixed_text(seed, 390_000) for seed in range(8)]
    assert len({text[:1000] for text in texts}) == 8
    documents = Counter(texts[0].split(corpus.END_OF_DOCUMENT))
    problems = {d: n for d, n in documents.items() if d.startswith("Question:")}
    assert len(problems) > 400 and max(problems.values()) == 1
    assert 0.02 < sum(d.startswith("Re") for d in documents.elements()) / len(documents) < 0.5


def test_heldout_problems_are_well_formed():
    rows = corpus.heldout_problems()
    assert len(rows) == len({row["question"] for row in rows}) == 2000
    for row in rows:
        assert row["solution"].endswith(f"#### {row['answer']}")
        float(row["answer"])


@pytest.mark.parametrize("distance", [700, 25_000])
def test_recall_document(distance):
    made = corpus.recall_document(5, distance)
    assert made == corpus.recall_document(5, distance)
    assert made.context.endswith(made.prompt) and made.answer == f" {made.fact.value}"
    start = made.context.index(made.fact.statement)
    assert len(made.context) - len(made.prompt) - start == made.distance_chars >= distance
    assert made.distance_chars < distance + 3000
    lines = list(facts_in(made.context))
    assert len(lines) == 4 and len({stem for _, stem, _, _ in lines}) == 4


def test_facts_have_different_keys_and_questions_repeat_statements():
    facts = corpus.sample_facts(Random(0), 80)
    assert len({f.key for f in facts}) == 80
    for fact in facts:
        assert fact.question == fact.prompt + fact.answer + "."
        assert fact.question.removeprefix("Recall") == fact.statement.removeprefix("Remember")


def test_a_stream_can_be_measured_in_any_unit():
    schedule = corpus.RecallSchedule(
        fact_every=50, min_distance=10, max_distance=200, facts_per_document=(2, 2)
    )
    stream = corpus.interleave(Random(1), lambda: "x", lambda d: 5, schedule)
    documents = list(itertools.islice(stream, 400))
    kinds = Counter(d.kind for d in documents)
    assert set(kinds) == {"filler", "facts", "questions"}
    assert all(len(d.facts) == 2 for d in documents if d.kind == "facts")
    assert all(1 <= len(d.facts) <= 4 for d in documents if d.kind == "questions")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: corpus.mixed_text(0, 0), "n_chars must be positive, got 0"),
        (lambda: corpus.recall_document(0, -1), "distance_chars must be positive, got -1"),
        (lambda: corpus.sample_facts(Random(0), 81), "count must be in 1..80"),
        (
            lambda: corpus.RecallSchedule(fact_every=1, min_distance=5, max_distance=4),
            "got 5 and 4",
        ),
        (
            lambda: corpus.RecallSchedule(fact_every=0, min_distance=1, max_distance=4),
            "fact_every must be positive, got 0",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_needs_the_standard_library_only():
    code = (
        "import sys; import replayssm.study.corpus as c; c.mixed_text(0, 5000); "
        "assert not {'torch', 'numpy', 'transformers', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
