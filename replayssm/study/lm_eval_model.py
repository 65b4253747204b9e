"""The model that lm-eval knows as `replayssm`: any supported model under any policy.

Owns lm-eval's model interface. Must not know how answers are scored or stored. Generation decodes
token by token with the state written back after every ring, and log-likelihoods are read in windows
of rings, so the policy acts in both.

    lm_eval run --model replayssm --model_args pretrained=builtin/gdn,policy=fp16-sr+nvfp4 ...
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from replayssm import models
from replayssm.engine.scoring import ScoredText, score_texts
from replayssm.policy import parse_policy
from replayssm.study.config import nearest
from replayssm.study.responses import Prompt, Responder, Settings
from replayssm.study.samples import question_digest, sequence_number

ARGUMENTS = (
    "pretrained", "policy", "ring_len", "backend", "dtype", "seed", "batch_size", "max_gen_toks",
    "prefill", "think_end_token", "enable_thinking", "device", "max_length", "trust_remote_code",
)  # fmt: skip
DEFAULT_MAX_GEN_TOKS = 1024
_LM_EVAL_DEVICE = "cuda:0"
# Windows of rolling log-likelihoods, for a model without a limit of its own.
_UNLIMITED = 1 << 20


@register_model("replayssm")
class ReplayLM(TemplateLM):
    """A model whose recurrent state is kept as `policy` says.

    Args (all but the first optional):
        pretrained: built-in model, folder or hub id, or a `LoadedModel`.
        policy: by name, see `replayssm policies`; ring_len: L, for a policy that does not say @L.
        backend: of the state update; dtype: of weights and activations; device: default cuda if
            there is one.
        seed: of sampling and stochastic rounding.
        batch_size: sequences decoded at once, rounded up to a multiple of 8 ("auto": 64).
        max_gen_toks: cap on new tokens where a task names none.
        prefill: tokens of a prompt that are prefilled with an exact state (default: all); on the
            others the policy acts as on generated ones.
        think_end_token: the token (or its id) that ends reasoning. enable_thinking: passed to the
            chat template.
        max_length: positions to use, if fewer than the model has.

    Raises ValueError (one line) for an argument that is unknown or cannot be honoured.
    """

    def __init__(
        self,
        pretrained: str | models.LoadedModel,
        policy: str = "fp32",
        ring_len: int | None = None,
        backend: str = "auto",
        dtype: str = "float32",
        seed: int = 0,
        batch_size: int | str = 8,
        max_gen_toks: int = DEFAULT_MAX_GEN_TOKS,
        prefill: int | None = None,
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        device: str | None = None,
        max_length: int | None = None,
        trust_remote_code: bool = False,
        **unknown: Any,
    ) -> None:
        super().__init__()
        for key in unknown:
            raise ValueError(f"unknown model argument {key!r}; {nearest(key, list(ARGUMENTS))}")
        if enable_thinking and think_end_token is None:
            raise ValueError(
                "enable_thinking needs think_end_token: without it the reasoning is taken for the "
                "answer; give the token that ends it, e.g. think_end_token=</think>"
            )
        precision = parse_policy(str(policy))
        if ring_len is not None:
            if "@" in str(policy) and precision.ring_len != ring_len:
                raise ValueError(f"ring_len={ring_len} contradicts policy {policy!r}")
            precision = replace(precision, ring_len=_whole("ring_len", ring_len))
        if isinstance(pretrained, str):
            self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
            pretrained = models.load(
                pretrained,
                dtype=dtype,
                device=self._device,
                trust_remote_code=trust_remote_code,
            )
        self.loaded = pretrained
        self.tokenizer = pretrained.tokenizer
        limit = pretrained.adapter.max_positions or _UNLIMITED
        asked = limit if max_length is None else _whole("max_length", max_length)
        self.max_length = min(limit, asked)
        self.responder = Responder(
            pretrained,
            precision,
            max_length=self.max_length,
            lanes=64 if batch_size == "auto" else _whole("batch_size", batch_size),
            seed=_whole("seed", seed, least=0),
            backend=backend,
            think_end_token=think_end_token,
        )
        self.max_gen_toks = _whole("max_gen_toks", max_gen_toks)
        self.prefill = None if prefill is None else _whole("prefill", prefill)
        self._template_args: dict = {}
        if enable_thinking is not None:
            self._template_args["enable_thinking"] = enable_thinking

    # Arguments of the command line come beside those of --model_args; the latter win.
    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict, additional_config: dict | None = None):
        given = {k: v for k, v in (additional_config or {}).items() if v is not None}
        given.pop("max_batch_size", None)
        if given.get("device") == _LM_EVAL_DEVICE and not torch.cuda.is_available():
            # What its command line says where nothing was asked for.
            print(f"replayssm: torch sees no {_LM_EVAL_DEVICE} device: runs on the CPU", flush=True)
            del given["device"]
        return cls(**given | arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None):
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def set_cache_hook(self, cache_hook) -> None:
        """Refuse lm-eval's response cache: its key names neither model nor policy nor seed."""
        if cache_hook.dbdict is not None:
            raise ValueError(
                "use_cache would give one policy the answers of another: its key does not name the "
                "model; leave it off (`replayssm eval` resumes by sample)"
            )

    # -- text ----------------------------------------------------------------------------------
    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What a text without context begins with: the start token, or else the end token."""
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else start

    @property
    def tokenizer_name(self) -> str:
        return self.loaded.name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs
    ) -> list[int]:
        del kwargs
        if add_special_tokens is None:
            return self.responder.encode(string)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict], add_generation_prompt: bool = True
    ) -> str:
        """The chat as one prompt; ValueError if the tokenizer has no template."""
        if not self.tokenizer.chat_template:
            raise ValueError(f"{self.loaded.name!r} has no chat template: leave it off")
        if not add_generation_prompt and self.responder.think_end is not None:
            raise ValueError(
                "a task that begins the answer (gen_prefix) leaves no room for reasoning; drop "
                "think_end_token, or use a task without gen_prefix"
            )
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._template_args,
        )

    # -- requests ------------------------------------------------------------------------------
    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Answers, without reasoning and stop strings, in the order of the requests.

        A request that occurs again is another sample of the same question.
        """
        groups: dict[Settings, list[tuple[int, Prompt]]] = defaultdict(list)
        times: dict[str, int] = defaultdict(int)
        for index, request in enumerate(requests):
            text, kwargs = request.args
            settings = Settings.from_kwargs(kwargs, cap=self.max_gen_toks)
            settings = replace(settings, prefill=self.prefill)
            question = question_digest(request.task_name or "", text)
            prompt = Prompt(text=text, question=question, sample=times[question])
            times[question] += 1
            groups[settings].append((index, prompt))
        for settings, members in groups.items():
            self.responder.check([prompt for _, prompt in members], settings)
        answers = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="replayssm generates") as bar:
            for settings, members in groups.items():
                prompts = [prompt for _, prompt in members]
                for done, sample in self.responder.respond(prompts, settings):
                    answers[members[done][0]] = sample.answer
                    bar.update()
        return answers

    def _loglikelihood_tokens(
        self, requests: list, disable_tqdm: bool = False, **kwargs
    ) -> list[tuple[float, bool]]:
        del disable_tqdm, kwargs
        if self.responder.think_end is not None:
            raise ValueError(
                "think_end_token has no meaning for log-likelihoods: a choice is scored without "
                "any reasoning; drop think_end_token, or use a generative task"
            )
        texts = []
        for _, context, continuation in requests:
            tokens = [*context, *continuation]
            if len(tokens) > self.max_length:
                raise ValueError(
                    f"a text of {len(tokens)} tokens exceeds the {self.max_length} positions of "
                    f"{self.loaded.name!r}"
                )
            number = sequence_number(question_digest("", str(tokens)), 0)
            texts.append(ScoredText(tokens=tokens, scored=len(continuation), sequence=number))
        return score_texts(
            self.loaded.adapter,
            texts,
            self.responder.policy,
            rows=self.responder.lanes,
            seed=self.responder.seed,
            backend=self.responder.backend,
        )

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in the longest windows the model has positions for."""
        pieces, owners = [], []
        for index, (text,) in enumerate(request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, windows):
                pieces.append((("", text), context, continuation))
                owners.append(index)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(pieces, disable_tqdm=disable_tqdm)
        for index, (score, _) in zip(owners, scores, strict=True):
            totals[index] += score
        return totals


def run_command_line(arguments: Sequence[str]) -> None:
    """lm-eval's own command line with `arguments`; this module has registered the model."""
    from lm_eval.__main__ import cli_evaluate

    before, sys.argv = sys.argv, ["lm-eval", *arguments]  # it reads nothing else
    try:
        cli_evaluate()
    finally:
        sys.argv = before


def _whole(name: str, value: object, least: int = 1) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number
