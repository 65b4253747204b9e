"""Which tokens a study reads: built-in held-out text or a file, as equal-length rows of token ids.

Owns text sources by name and the rule that cuts them into prompts. Knows no model: it is given a
function that encodes text.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from replayssm.study.corpus import mixed_text

# First guess of characters per token, generous; more text is generated when a tokenizer needs more.
_CHARACTERS_PER_TOKEN = 3


def read_tokens(
    source: str, *, encode: Callable[[str], list[int]], prompts: int, length: int
) -> np.ndarray:
    """Token ids [prompts, length], int64, of a text source.

    "builtin/mixed" (also the opening of "generate"): one held-out text per prompt. "file:PATH":
    UTF-8 text cut into consecutive pieces. Raises ValueError if the file is missing, not text, or
    too short.
    """
    if source.startswith("file:"):
        return _file_tokens(Path(source.removeprefix("file:")), encode, prompts, length)
    return np.stack([_mixed_tokens(seed, encode, length) for seed in range(prompts)])


def _mixed_tokens(seed: int, encode: Callable[[str], list[int]], length: int) -> np.ndarray:
    characters = _CHARACTERS_PER_TOKEN * length
    while True:
        ids = encode(mixed_text(seed, characters))
        if len(ids) >= length:
            return np.array(ids[:length], dtype=np.int64)
        characters *= 2


def _file_tokens(path: Path, encode, prompts: int, length: int) -> np.ndarray:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"text: there is no file {path}") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text: {path} is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    ids = encode(text)
    if len(ids) < prompts * length:
        raise ValueError(
            f"text: {path} has {len(ids)} tokens, {prompts} prompts of {length} tokens need "
            f"{prompts * length}"
        )
    return np.array(ids[: prompts * length], dtype=np.int64).reshape(prompts, length)
