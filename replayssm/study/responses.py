"""Answers of one model under one policy to prompts given as text.

Owns what lies between text and token ids: encoding, stop strings, the mark that ends reasoning, and
the checks that come before any generation. Must not know tasks, scores or lm-eval.

Reasoning is split on token ids, before special tokens are dropped, and stop strings act only after
it has ended.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from replayssm.engine.batching import Completion, Request, generate_many
from replayssm.engine.prefills import PrefillCache
from replayssm.engine.sampling import Sampler
from replayssm.models.loading import LoadedModel
from replayssm.policy import PrecisionPolicy
from replayssm.study.answers import is_loop, split_reasoning
from replayssm.study.config import nearest
from replayssm.study.samples import Sample, sequence_number
from replayssm.study.subject import stop_tokens

_CAPS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_NEUTRAL = {"top_p": (1, None), "top_k": (0, -1, None)}
# A chat template that closes the reasoning itself does so in the last tokens of the prompt.
_CLOSING_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How answers are generated: cap in new tokens, stop strings, temperature (0: greedy).

    prefill: tokens of the prompt that are prefilled with an exact state; on the others the policy
    acts as on generated ones. None: all.
    """

    max_new_tokens: int
    until: tuple[str, ...] = ()
    temperature: float = 0.0
    prefill: int | None = None

    @classmethod
    def from_kwargs(cls, values: Mapping, *, cap: int) -> "Settings":
        """From lm-eval's generation arguments; `cap` where they name none.

        Raises ValueError for an argument that would be ignored.
        """
        allowed = ["until", "do_sample", "temperature", *_CAPS, *_NEUTRAL]
        for key, value in values.items():
            if key not in allowed:
                raise ValueError(f"unknown generation argument {key!r}; {nearest(key, allowed)}")
            if key in _NEUTRAL and value not in _NEUTRAL[key]:
                raise ValueError(f"{key}={value!r} is not supported: only temperature sampling is")
        caps = {key: values[key] for key in _CAPS if values.get(key) is not None}
        if len(set(caps.values())) > 1:
            raise ValueError(f"different caps on new tokens: {caps}; give max_gen_toks only")
        until = values.get("until") or ()
        temperature = float(values.get("temperature") or 0.0)
        if values.get("do_sample") is False:
            temperature = 0.0
        elif values.get("do_sample") and temperature == 0.0:
            if values.get("temperature") is not None:
                raise ValueError("do_sample=True needs a temperature above 0, got 0")
            temperature = 1.0
        return cls(
            max_new_tokens=int(next(iter(caps.values()), cap)),
            until=(until,) if isinstance(until, str) else tuple(until),
            temperature=temperature,
        )


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One answer that is wanted: the whole prompt, its question's digest, and which sample.

    tokens: what `Responder.encode` makes of the text, where that is known already.
    """

    text: str
    question: str
    sample: int = 0
    tokens: Sequence[int] | None = None


class Responder:
    """A loaded model answering under `policy`.

    lanes: sequences decoded at once. seed: of sampling and stochastic rounding. think_end_token:
    the mark (text of one token, or its id) that ends reasoning; None for a model that does not
    reason. max_length: positions to use; default: all that the model has.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        policy: PrecisionPolicy,
        *,
        lanes: int = 8,
        seed: int = 0,
        backend: str = "auto",
        think_end_token: str | int | None = None,
        max_length: int | None = None,
    ):
        self.loaded, self.policy = loaded, policy
        self.lanes, self.seed, self.backend = lanes, seed, backend
        self.tokenizer = loaded.tokenizer
        self.max_length = max_length or loaded.adapter.max_positions
        self.think_end = find_token(loaded, think_end_token)
        self.stop_tokens = stop_tokens(loaded)
        self._pieces: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the tokenizer's own special tokens unless it starts so."""
        bos = getattr(self.tokenizer, "bos_token", None)
        if bos and text.startswith(bos):
            return self.tokenizer.encode(text, add_special_tokens=False)
        return self.tokenizer.encode(text)

    def check(self, prompts: Sequence[Prompt], settings: Settings) -> list[Sequence[int]]:
        """Token ids of all prompts; ValueError if one of them cannot be answered in full."""
        limit = self.max_length
        encoded = [self.encode(p.text) if p.tokens is None else p.tokens for p in prompts]
        for prompt, tokens in zip(prompts, encoded, strict=True):
            if not tokens:
                raise ValueError(f"the prompt of question {prompt.question} is empty")
            if limit is not None and len(tokens) + settings.max_new_tokens > limit:
                raise ValueError(
                    f"question {prompt.question} has a prompt of {len(tokens)} tokens; with up to "
                    f"{settings.max_new_tokens} new ones it exceeds the {limit} positions of "
                    f"{self.loaded.name!r}: lower max_gen_toks, or use fewer examples in the prompt"
                )
        return encoded

    def respond(
        self,
        prompts: Sequence[Prompt],
        settings: Settings,
        prefills: PrefillCache | None = None,
    ) -> Iterator[tuple[int, Sample]]:
        """(index into `prompts`, sample) of every prompt, in the order in which they end.

        All prompts are checked before the first token is generated. prefills: of this model,
        shared with other policies that answer the same prompts.
        """
        encoded = self.check(prompts, settings)
        asked = [
            Request(
                prompt=tokens,
                max_new_tokens=settings.max_new_tokens,
                sequence=sequence_number(prompt.question, prompt.sample),
                stop=self._stop(tokens, settings.until),
            )
            for prompt, tokens in zip(prompts, encoded, strict=True)
        ]
        done = generate_many(
            self.loaded.adapter,
            asked,
            self.policy,
            lanes=self.lanes,
            stop_tokens=self.stop_tokens,
            sampler=Sampler(temperature=settings.temperature, seed=self.seed),
            seed=self.seed,
            prefill=settings.prefill,
            prefills=prefills,
            backend=self.backend,
        )
        for completion in done:
            prompt = prompts[completion.index]
            tokens = encoded[completion.index]
            yield completion.index, self._sample(prompt, tokens, completion, settings)

    def _open_mark(self, prompt: Sequence[int]) -> int | None:
        """The mark to wait for; None if the prompt itself has closed the reasoning."""
        return None if self.think_end in prompt[-_CLOSING_TOKENS:] else self.think_end

    def _stop(
        self, prompt: Sequence[int], until: Sequence[str]
    ) -> Callable[[Sequence[int]], bool] | None:
        """A function that says, after each token, whether a stop string has just been completed."""
        if not until:
            return None
        mark = self._open_mark(prompt)
        # A token is at least one byte, so the string lies within this many tokens.
        reach = max(len(text.encode()) for text in until)
        ends = {text[-1] for text in until if text}
        start = 0 if mark is None else None

        def stop(tokens: Sequence[int]) -> bool:
            nonlocal start
            if mark is not None and tokens[-1] == mark:
                start = len(tokens)
            if start is None or start == len(tokens) or not self._may_add(tokens[-1], ends):
                return False
            tail = self.tokenizer.decode(tokens[max(start, len(tokens) - reach) :])
            return any(text in tail for text in until)

        return stop

    def _may_add(self, token: int, ends: set[str]) -> bool:
        """Whether text may have got one of the characters `ends` by `token`, going by the token
        alone.

        This spares most lanes the decoding of their tail after each token. A token that is part of
        a character decodes to a replacement character; one that is a space, to nothing with some
        tokenizers.
        """
        if token not in self._pieces:
            self._pieces[token] = self.tokenizer.decode([token])
        piece = self._pieces[token]
        return "\ufffd" in piece or any(end == " " or end in piece for end in ends)

    def _sample(
        self, prompt: Prompt, encoded: Sequence[int], done: Completion, settings: Settings
    ) -> Sample:
        tokens, decode = list(done.tokens), self.tokenizer.decode
        split, ended = split_reasoning(tokens, self._open_mark(encoded))
        answer = decode(tokens[split:], skip_special_tokens=True)
        if split:
            answer = answer.lstrip()
        for text in settings.until:
            answer = answer.split(text)[0] if text else answer
        return Sample(
            question=prompt.question,
            sample=prompt.sample,
            prompt_tokens=len(encoded),
            new_tokens=len(tokens),
            reasoning_tokens=split,
            finish=done.finish,
            reasoning_ended=ended,
            loop=done.finish == "length" and is_loop(tokens),
            reasoning=decode(tokens[:split]),
            raw_answer=decode(tokens[split:]),
            answer=answer if ended else "",
            filters={},
        )


def find_token(loaded: LoadedModel, token: str | int | None) -> int | None:
    """Id of the token that ends reasoning; ValueError if the tokenizer does not know it."""
    if token is None:
        return None
    vocabulary = loaded.tokenizer.get_vocab()
    known = token in vocabulary.values() if isinstance(token, int) else token in vocabulary
    if known:
        return token if isinstance(token, int) else vocabulary[token]
    raise ValueError(
        f"think_end_token {token!r} is not a token of {loaded.name!r}'s tokenizer, so the end of "
        "reasoning could never be found"
    )
