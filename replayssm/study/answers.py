"""What a generated text says: number, letter or word; how it was found; and what became of it.

Owns answer extraction, the split into reasoning and answer, the detection of loops, and outcomes.
Pure functions of text and token ids: no torch, no model, no task. Every extraction says *how* the
answer was found, so that a change of format between policies shows up as such.

Numbers compare exactly as fractions: "$29.00" is 29, "1/2" is 0.5. What cannot be told apart from
its neighbours ("160 euros in 2024", unmarked) is ambiguous and counts as no answer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

KINDS = ("number", "letter", "word")
OUTCOMES = ("right", "wrong", "invalid", "truncated", "unfinished_reasoning", "loop")


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """answer: canonical text ("29", "1/2", "B", "lamp") or None.

    how: "hashes" (`#### N`), "boxed", "marked" ("the answer is N"), "last_number", "statement"
    ("(B) is correct"), "last_line", "first_word", "ambiguous" or "none".
    """

    answer: str | None
    how: str


_NONE = Extraction(answer=None, how="none")
_AMBIGUOUS = Extraction(answer=None, how="ambiguous")


def extract(kind: str, text: str, *, finished: bool = True, letters: str = "ABCD") -> Extraction:
    """The answer in `text` (reasoning removed).

    kind: one of KINDS. finished: the text ended by itself; a text that was cut counts only if it
    marks its answer. letters: the choices, for kind "letter".
    """
    if kind == "number":
        return extract_number(text, finished=finished)
    if kind == "letter":
        return extract_letter(text, letters=letters, finished=finished)
    if kind == "word":
        return extract_word(text)
    raise ValueError(f"answer kind {kind!r} is not one of {', '.join(KINDS)}")


def same_answer(kind: str, answer: str | None, gold: str) -> bool:
    """Whether an extracted answer equals the gold answer (numbers by value)."""
    if answer is None:
        return False
    if kind == "number":
        return Fraction(answer) == parse_number(gold)
    return answer == gold


# -- numbers ---------------------------------------------------------------------------------------
_MINUS = str.maketrans({"\u2212": "-", "\u2013": "-", "\ufe63": "-", "\uff0d": "-"})
_SPACES = str.maketrans({"\u00a0": " ", "\u202f": " ", "\u2009": " "})
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:\u202f\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>-)?\s?[$€£]?(?P<sign2>-)?(?P<value>{_DIGITS})"
    r"(?:(?P<exponent>[eE][+-]?\d+)|\s?[×x*]\s?10\^\{?(?P<power>-?\d+)\}?)?"
    r"(?:\s?/\s?(?P<below>\d+(?:\.\d+)?))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+(?:\.\d+)?)\s*\}\s*\{\s*(\d+(?:\.\d+)?)\s*\}")
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_SAYS = re.compile(r"\banswer(?:\s+\w+){0,3}?\s*(?:is|=|:)\s*:?\s*", re.IGNORECASE)
_NEXT_QUESTION = re.compile(r"(?:^|\n)\s*(?:Question|Q)\s*\d*\s*:")


def parse_number(text: str) -> Fraction:
    """The value of a text that is one number; ValueError if it is not."""
    found = _numbers(text)
    if len(found) != 1:
        raise ValueError(f"{text!r} is not one number")
    return found[0][0]


def extract_number(text: str, *, finished: bool = True) -> Extraction:
    """The final number of a worked solution; see `Extraction` for the ways it is looked for."""
    text = _own_part(text)
    for how, part in (
        ("hashes", _first_hashes(text)),
        ("boxed", last_boxed(text)),
        ("marked", _last_marked(text)),
    ):
        values = _numbers(part) if part is not None else []
        if values:
            return Extraction(answer=str(values[0][0]), how=how)
    if not finished:
        return _NONE
    return _last_number(text)


def _own_part(text: str) -> str:
    """Without questions a model recites before its answer, or goes on with after it."""
    questions = [match.start() for match in _NEXT_QUESTION.finditer(text)]
    mark = text.find("####")
    if mark >= 0 and questions and questions[0] < mark:
        return text[questions[-1] :]  # examples recited first: the last question is the asked one
    after = [at for at in questions if at > max(mark, 0)]
    return text[: after[0]] if after else text


def _first_hashes(text: str) -> str | None:
    match = _HASHES.search(text)
    return match[1] if match else None


def _last_marked(text: str) -> str | None:
    """What follows the last "answer is", up to the end of its line."""
    ends = [match.end() for match in _SAYS.finditer(text)]
    return text[ends[-1] :].strip().split("\n", 1)[0] if ends else None


def _last_number(text: str) -> Extraction:
    """The number of the last sentence with one: its result after "=", or the only one in it."""
    for sentence in reversed(re.split(r"\n|(?<=[.!?])\s+(?=\S)", text.strip())):
        values = _numbers(sentence)
        if not values:
            continue
        result = sentence.rfind("=")
        if result >= 0 and (after := _numbers(sentence[result + 1 :])):
            values = after
        if len({value for value, _ in values}) == 1:
            return Extraction(answer=str(values[0][0]), how="last_number")
        return _AMBIGUOUS
    return _NONE


def _numbers(text: str) -> list[tuple[Fraction, int]]:
    """(value, where it starts) of every number in `text`, in order."""
    for latex, plain in (("\\$", "$"), ("\\,", ""), ("\\!", ""), ("{,}", ",")):
        text = text.replace(latex, plain)
    text = _FRACTION.sub(r"\1/\2", text.translate(_MINUS).translate(_SPACES))
    found = []
    for match in _NUMBER.finditer(text):
        value = Fraction(match["value"].replace(",", "") + (match["exponent"] or ""))
        if match["power"]:
            value *= Fraction(10) ** int(match["power"])
        if match["below"]:
            if Fraction(match["below"]) == 0:
                continue
            value /= Fraction(match["below"])
        if match["sign"] or match["sign2"]:
            value = -value
        found.append((value, match.start()))
    return found


# -- letters ---------------------------------------------------------------------------------------
_CHOICE = r"[(\[]?\s*(?P<letter>[A-Za-z])(?:\s*[)\]])?"
_ANSWER_IS = re.compile(
    r"\b(?:answer|choice|option)\b(?:\s+(?!not\b)\w+){0,4}?\s*(?:is|:|=)\s*:?\s*"
    r"(?:(?:the\s+)?(?:option|choice|letter)\s+)?" + _CHOICE,
    re.IGNORECASE,
)
_CHOOSE = re.compile(
    r"\b(?:choose|choosing|pick|select|go\s+with)\s+(?:(?:option|choice|letter|answer)\s+)?"
    + _CHOICE,
    re.IGNORECASE,
)
_IS_RIGHT = re.compile(
    r"[(\[]\s*(?P<letter>[A-Za-z])\s*[)\]]\s+is\s+(?:the\s+)?(?:right|correct|best)\b",
    re.IGNORECASE,
)
_ALONE = re.compile(r"^" + _CHOICE + r"\s*[.:]?$")


def extract_letter(text: str, *, letters: str = "ABCD", finished: bool = True) -> Extraction:
    """The chosen letter of a multiple-choice answer; a letter that is no choice is no answer."""
    box = last_boxed(text)
    if box is not None:
        plain = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", box).strip()
        match = re.match(_CHOICE + r"(?![A-Za-z0-9])", plain)
        return _letter(match, letters, "boxed") if match else Extraction(answer=None, how="boxed")
    text = re.sub(r"[*_`$]+", "", text)
    marked = [m for p in (_ANSWER_IS, _CHOOSE) for m in p.finditer(text) if _is_letter(m, text)]
    if marked:
        last = max(marked, key=lambda match: match.start("letter"))
        if re.match(r"\s+or\s+\(?[A-Za-z]\b", text[last.end() :]):
            return _AMBIGUOUS
        return _letter(last, letters, "marked")
    said = list(_IS_RIGHT.finditer(text))
    if said:
        return _letter(said[-1], letters, "statement")
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if finished and lines and (match := _ALONE.match(lines[-1])):
        return _letter(match, letters, "last_line")
    return _NONE


def _is_letter(match: re.Match, text: str) -> bool:
    """A choice, not the first letter of a word and not the article in "the answer is a bit ..."."""
    end = match.end()
    if text[end : end + 1].isalnum() or text[end : end + 1] in ("'", "\u2019"):
        return False
    closed = match[0].rstrip()[-1:] in ")]"
    rest = text[end:].lstrip(" ")
    sure = closed or not rest or rest[0] in ".,;:)]!\n"
    return sure or match["letter"].isupper() and match["letter"] not in "AI" or _spells(match, rest)


def _spells(match: re.Match, rest: str) -> bool:
    """An upper-case "A" or "I" before a word: a choice only if the word explains the choice."""
    return match["letter"].isupper() and bool(re.match(r"(?:because|since|as|or|is)\b|[-–—]", rest))


def _letter(match: re.Match, letters: str, how: str) -> Extraction:
    letter = match["letter"].upper()
    return Extraction(answer=letter if letter in letters else None, how=how)


# -- words and boxes -------------------------------------------------------------------------------
def extract_word(text: str) -> Extraction:
    """The first word or number of a completion, without punctuation."""
    match = re.match(r"\W*(\w+)", text)
    return Extraction(answer=match[1], how="first_word") if match else _NONE


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` whose braces balance; None if there is none."""
    for start in reversed([m.end() for m in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for at in range(start, len(text)):
            depth += (text[at] == "{") - (text[at] == "}")
            if depth == 0:
                return text[start:at]
    return None


# -- reasoning, loops, outcomes --------------------------------------------------------------------
def split_reasoning(tokens: Sequence[int], think_end: int | None) -> tuple[int, bool]:
    """(tokens of reasoning with its end mark, whether reasoning ended).

    `think_end`: id of the mark, None for a model that does not reason. If the mark never came,
    everything is reasoning.
    """
    if think_end is None:
        return 0, True
    for at in range(len(tokens) - 1, -1, -1):
        if tokens[at] == think_end:
            return at + 1, True
    return len(tokens), False


def is_loop(tokens: Sequence[int], *, longest: int = 512, repeats: int = 4) -> bool:
    """Whether `tokens` end in one stretch of up to `longest` tokens, `repeats` times or more.

    At least 32 tokens must be covered, so that "0.0000" or a row of dashes is no loop.
    """
    for period in range(1, min(longest, len(tokens) // repeats) + 1):
        covered = max(period * repeats, 32)
        if covered > len(tokens):
            continue
        tail = tokens[-covered:]
        if all(tail[i] == tail[i + period] for i in range(covered - period)):
            return True
    return False


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What became of a sample. Only "right" counts as right; every other outcome is wrong.

    answer_in_reasoning: the answer found inside unfinished reasoning, for the record.
    """

    outcome: str
    answer: str | None
    how: str
    truncated: bool
    loop: bool
    answer_in_reasoning: str | None = None


def judge(
    kind: str,
    gold: str,
    *,
    answer_text: str,
    reasoning_text: str,
    reasoning_ended: bool,
    cut: bool,
    loop: bool,
    letters: str = "ABCD",
) -> Judgement:
    """Outcome of a sample. cut: the cap ended it; loop: it ended going round in circles."""
    if not reasoning_ended:
        inside = extract(kind, reasoning_text, finished=False, letters=letters)
        return Judgement(
            outcome="loop" if loop else "unfinished_reasoning",
            answer=None,
            how="none",
            truncated=cut,
            loop=loop,
            answer_in_reasoning=inside.answer,
        )
    found = extract(kind, answer_text, finished=not cut or kind == "word", letters=letters)
    if found.answer is not None:
        outcome = "right" if same_answer(kind, found.answer, gold) else "wrong"
    elif cut:
        outcome = "loop" if loop else "truncated"
    else:
        outcome = "invalid"
    return Judgement(outcome=outcome, answer=found.answer, how=found.how, truncated=cut, loop=loop)
