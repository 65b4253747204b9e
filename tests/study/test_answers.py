"""Answer extraction on reported inputs, outcomes, reasoning on token ids, loops."""

import re

import pytest

from replayssm.study import answers
from replayssm.study.answers import extract, is_loop, judge, same_answer, split_reasoning

ASK = "\n\nQuestion: A train has 3 cars.\nAnswer: 3 * 33 = 99\n#### 99"

NUMBERS = [
    # text, answer, how
    ("She makes $29.00.", "29", "last_number"),
    ("So the total is $29.00", "29", "last_number"),
    ("#### $29.00", "29", "hashes"),
    ("The answer is 42 (rounded to 2 decimals)", "42", "marked"),
    ("42 (rounded to 2 decimals)", None, "ambiguous"),
    ("3 * 4 = 12\n#### 12" + ASK, "12", "hashes"),
    ("3 * 4 = 12\n#### 12\n\nTom has 33 apples.\n#### 99", "12", "hashes"),
    ("1/2", "1/2", "last_number"),
    (r"\boxed{\frac{1}{2}}", "1/2", "boxed"),
    ("\u22127", "-7", "last_number"),
    ("#### \u22127", "-7", "hashes"),
    ("#### -$7", "-7", "hashes"),
    ("3.5e3", "3500", "last_number"),
    ("It is 3.5 \u00d7 10^3", "3500", "last_number"),
    ("160 euros in 2024", None, "ambiguous"),
    ("The answer is 160 euros in 2024", "160", "marked"),
    ("#### 160 euros in 2024", "160", "hashes"),
    ("The house is worth $70,000", "70000", "last_number"),
    ("#### 70,000", "70000", "hashes"),
    ("#### 1,234,567.50", "2469135/2", "hashes"),
    ("She sells 9 * 2 = $18 every day.", "18", "last_number"),
    ("First 5 + 3 = 8. Then 8 / 2 = 4 boxes.", "4", "last_number"),
    ("The answer is 3. Wait, the answer is 5.", "5", "marked"),
    ("The final answer is: 12 dollars", "12", "marked"),
    (r"so \boxed{11}, no: \boxed{12 \text{ eggs}}", "12", "boxed"),
    (r"\boxed{70{,}000}", "70000", "boxed"),
    ("I do not know.", None, "none"),
    ("", None, "none"),
    ("#### none", None, "none"),
    ("5/0", None, "none"),
    ("Version v2 of x3", None, "none"),
    # Few-shot examples recited first: the asked question is the last one.
    ("Question: 1 + 1?\nAnswer: 2\n#### 2\n\nQuestion: 2 + 2?\nAnswer: 4\n#### 4", "4", "hashes"),
]


@pytest.mark.parametrize("text, answer, how", NUMBERS)
def test_numbers(text, answer, how):
    found = extract("number", text)
    assert (found.answer, found.how) == (answer, how)


def test_numbers_compare_by_value():
    assert same_answer("number", extract("number", "$29.00.").answer, "29")
    assert same_answer("number", extract("number", "1/2").answer, "0.5")
    assert same_answer("number", extract("number", "3.5e3").answer, "3,500")
    assert same_answer("number", "-7", "\u22127")
    assert not same_answer("number", "29", "29.5")
    assert not same_answer("number", None, "29")
    with pytest.raises(ValueError, match="not one number"):
        same_answer("number", "3", "3 or 4")


def test_a_cut_text_counts_only_if_it_marks_its_answer():
    cut = {"finished": False}
    assert extract("number", "First, Tom buys 3", **cut).answer is None
    assert extract("number", "3 * 4 = 12\n#### 12\n\nNow Tom has 9", **cut).answer == "12"
    assert extract("letter", "So it must be\nB", **cut).answer is None


LETTERS = [
    ("The correct answer is **B**.", "B", "marked"),
    (r"\boxed{B}", "B", "boxed"),
    (r"The field H(A) is large, thus \boxed{\text{B}}", "B", "boxed"),
    (r"\boxed{\text{C}} and finally \boxed{B: the second}", "B", "boxed"),
    (r"\boxed{(D)}", "D", "boxed"),
    (r"\boxed{B}" + " then \\boxed{C", "B", "boxed"),
    (r"\boxed{\text{E}}", None, "boxed"),
    (r"\boxed{Benzene}", None, "boxed"),
    ("I choose B", "B", "marked"),
    ("answer is b)", "B", "marked"),
    ("(B) is right \u2026 see eq (D)", "B", "statement"),
    ("(B) is correct because of (D).", "B", "statement"),
    ("Answer: C", "C", "marked"),
    ("The answer is (A).", "A", "marked"),
    ("The answer is A because it glows", "A", "marked"),
    ("The correct option is D, as shown in (B)", "D", "marked"),
    ("The answer is a bit complicated.", None, "none"),
    ("The answer is A bit", None, "none"),
    ("The answer is not A", None, "none"),
    ("The answer is A or B", None, "ambiguous"),
    ("The answer is Benzene", None, "none"),
    ("Step 1\nB.", "B", "last_line"),
    ("Let us consider (C) and H(A)", None, "none"),
    ("", None, "none"),
]


@pytest.mark.parametrize("text, answer, how", LETTERS)
def test_letters(text, answer, how):
    found = extract("letter", text)
    assert (found.answer, found.how) == (answer, how)


def test_more_than_four_choices():
    assert extract("letter", r"\boxed{\text{E}}", letters="ABCDE").answer == "E"
    assert extract("letter", r"\boxed{E: option text}", letters="ABCDE").answer == "E"


def test_words():
    assert extract("word", " lamp.").answer == "lamp"
    assert extract("word", " 42.\nRecall").answer == "42"
    assert extract("word", " ...").answer is None
    with pytest.raises(ValueError, match="essay"):
        extract("essay", "")


# -- reasoning, loops ------------------------------------------------------------------------------
def test_reasoning_is_split_on_token_ids_at_the_last_mark():
    assert split_reasoning([5, 9, 6, 9, 7], 9) == (4, True)
    assert split_reasoning([5, 6, 7], 9) == (3, False)
    assert split_reasoning([], 9) == (0, False)
    assert split_reasoning([5, 9], None) == (0, True)


def test_loops():
    sentence = list(range(40))
    assert is_loop([7] * 3 + sentence * 4)
    assert not is_loop([7] * 3 + sentence * 3)
    assert is_loop([1] * 32) and not is_loop([1] * 31)
    assert is_loop([9, 9] + [1, 2] * 16) and not is_loop([1, 2] * 16 + [3])
    assert not is_loop([])


# -- outcomes --------------------------------------------------------------------------------------
def outcome(answer="", reasoning="", ended=True, cut=False, loop=False, kind="number", gold="12"):
    return judge(
        kind,
        gold,
        answer_text=answer,
        reasoning_text=reasoning,
        reasoning_ended=ended,
        cut=cut,
        loop=loop,
    )


def test_every_outcome():
    assert outcome("#### 12").outcome == "right"
    assert outcome("#### 13").outcome == "wrong"
    assert outcome("no idea").outcome == "invalid"
    assert outcome("160 euros in 2024").outcome == "invalid"
    assert outcome("Tom buys 12", cut=True).outcome == "truncated"
    assert outcome("so so so", cut=True, loop=True).outcome == "loop"
    assert outcome("#### 12\n#### 12", cut=True, loop=True).outcome == "right"
    unfinished = outcome(reasoning="hence \\boxed{12}, but", ended=False, cut=True)
    assert (unfinished.outcome, unfinished.answer) == ("unfinished_reasoning", None)
    assert unfinished.answer_in_reasoning == "12"
    loops = outcome(reasoning="finds \\boxed{460}", ended=False, cut=True, loop=True)
    assert (loops.outcome, loops.answer_in_reasoning) == ("loop", "460")
    seen = {outcome(a).outcome for a in ("#### 12", "#### 1", "")}
    assert seen < set(answers.OUTCOMES)


def test_a_letter_in_unfinished_reasoning_is_no_answer():
    said = "Perhaps (B) is right"
    judged = outcome(reasoning=said, ended=False, cut=True, kind="letter", gold="B")
    assert judged.outcome == "unfinished_reasoning" and judged.answer is None


def test_the_module_knows_no_model():
    source = open(answers.__file__).read()
    assert not re.search(r"import (torch|transformers|lm_eval)", source)
