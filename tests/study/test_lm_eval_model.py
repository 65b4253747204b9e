"""The plug-in: equal to lm-eval's own Hugging Face model in FP32; stops, reasoning, refusals."""

import functools
import random
import tempfile
from pathlib import Path

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tiny_tasks import CHARACTERS, save_checkpoint

from replayssm import models
from replayssm.models.loading import builtin_models
from replayssm.study import corpus
from replayssm.study.lm_eval_model import ReplayLM
from replayssm.study.responses import Settings

LETTERS = CHARACTERS[40:]
FAMILIES = ("qwen3_5", "mamba2")  # the architectures of the built-in models


@functools.cache
def checkpoint(name: str = "qwen3_5", chat: bool = False) -> str:
    return str(save_checkpoint(Path(tempfile.mkdtemp()), name, chat=chat))


@functools.cache
def loaded(name: str = "qwen3_5", chat: bool = False) -> models.LoadedModel:
    return models.load(checkpoint(name, chat))


def plugin(name: str = "qwen3_5", chat: bool = False, **arguments) -> ReplayLM:
    return ReplayLM(loaded(name, chat), **arguments)


def asked(kind: str, *arguments: tuple) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=args, idx=0, metadata=("task", i, 1))
        for i, args in enumerate(arguments)
    ]


def prompts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(LETTERS, k=draw.randint(3, 30))) for _ in range(count)]


def generate(lm, texts, **kwargs):
    return lm.generate_until(asked("generate_until", *[(t, dict(kwargs)) for t in texts]), True)


# -- equality with lm-eval's own -------------------------------------------------------------------
@pytest.mark.parametrize("name", FAMILIES)
def test_fp32_answers_are_those_of_hf(name):
    texts = prompts(8)
    theirs = HFLM(pretrained=checkpoint(name), device="cpu", dtype="float32", batch_size=1)
    for kwargs in ({"max_gen_toks": 24}, {"max_gen_toks": 24, "until": ["a", "Qx", "ee"]}):
        want = generate(theirs, texts, do_sample=False, **kwargs)
        assert generate(plugin(name), texts, do_sample=False, **kwargs) == want
        assert any(want)


@pytest.mark.parametrize("name", FAMILIES)
def test_fp32_likelihoods_are_those_of_hf(name):
    pairs = [(a, b) for a, b in zip(prompts(6), prompts(6, seed=1), strict=True)]
    pairs += [("", "abc"), ("word ", "next")]
    theirs = HFLM(pretrained=checkpoint(name), device="cpu", dtype="float32", batch_size=1)
    mine = plugin(name, ring_len=8)
    for (a, x), (b, y) in zip(
        mine.loglikelihood(asked("loglikelihood", *pairs), True),
        theirs.loglikelihood(asked("loglikelihood", *pairs), True),
        strict=True,
    ):
        assert (a, x) == (pytest.approx(b, abs=5e-3), y)
    texts = [(text,) for text in prompts(3, seed=2)]
    got = mine.loglikelihood_rolling(asked("loglikelihood_rolling", *texts), True)
    want = theirs.loglikelihood_rolling(asked("loglikelihood_rolling", *texts), True)
    assert got == pytest.approx(want, abs=5e-3)


def test_rolling_windows_of_a_short_model():
    text = [(prompts(1, seed=3)[0] * 3,)]
    theirs = HFLM(
        pretrained=checkpoint(), device="cpu", dtype="float32", batch_size=1, max_length=20
    )
    mine = plugin(max_length=20)
    (got,) = mine.loglikelihood_rolling(asked("loglikelihood_rolling", *text), True)
    (want,) = theirs.loglikelihood_rolling(asked("loglikelihood_rolling", *text), True)
    assert got != pytest.approx(
        plugin().loglikelihood_rolling(asked("loglikelihood_rolling", *text), True)[0], abs=1e-3
    )
    assert got == pytest.approx(want, rel=0.05)


def test_the_policy_changes_answers_and_order_does_not():
    texts = prompts(9)
    exact = generate(plugin(), texts, max_gen_toks=24)
    rough = generate(plugin(policy="nvfp4", ring_len=4), texts, max_gen_toks=24)
    assert exact != rough
    again = generate(plugin(policy="nvfp4@4"), texts[::-1], max_gen_toks=24)
    assert again[::-1] == rough


# -- sampling --------------------------------------------------------------------------------------
def test_samples_of_a_question_differ_and_are_reproducible():
    texts = [prompts(1)[0]] * 3 + prompts(2)
    kwargs = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 16}
    first = generate(plugin(seed=1), texts, **kwargs)
    assert len(set(first[:3])) == 3
    assert generate(plugin(seed=1), texts, **kwargs) == first
    assert generate(plugin(seed=2), texts, **kwargs) != first
    # The fourth prompt equals the first three: it is the fourth sample of that question.
    assert first[3] not in first[:3]


def test_generation_arguments():
    read = functools.partial(Settings.from_kwargs, cap=7)
    assert read({}) == Settings(max_new_tokens=7)
    assert read({"until": "x", "max_gen_toks": 3}) == Settings(max_new_tokens=3, until=("x",))
    assert read({"temperature": 0.6}).temperature == 0.6
    assert read({"do_sample": False, "temperature": 0.6}).temperature == 0.0
    assert read({"do_sample": True}).temperature == 1.0
    assert read({"top_p": 1.0, "top_k": 0}) == Settings(max_new_tokens=7)
    assert read({"max_tokens": 9}).max_new_tokens == 9
    for values, message in (
        ({"max_gen_tokens": 5}, "did you mean 'max_gen_toks'"),
        ({"top_p": 0.9}, "top_p=0.9 is not supported"),
        ({"max_gen_toks": 5, "max_tokens": 6}, "different caps"),
        ({"do_sample": True, "temperature": 0.0}, "temperature above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            read(values)


# -- reasoning -------------------------------------------------------------------------------------
def reasoner(monkeypatch, tokens, **arguments):
    """A plug-in whose model "generates" `tokens` (ids or characters)."""
    from replayssm.engine.batching import Completion
    from replayssm.study import responses

    lm = plugin(chat=True, **arguments)
    vocabulary = lm.tokenizer.get_vocab()
    ids = [vocabulary[token] for token in tokens]

    def fake(adapter, requests, policy, **kwargs):
        for index, request in enumerate(requests):
            done, finish = [], "length"
            for token in ids[: request.max_new_tokens]:
                done.append(token)
                if request.stop and request.stop(done):
                    finish = "stop"
                    break
            yield Completion(index=index, tokens=tuple(done), finish=finish)

    monkeypatch.setattr(responses, "generate_many", fake)
    return lm


def sample_of(lm, prompt="ab", **settings):
    from replayssm.study.responses import Prompt

    asked_for = [Prompt(text=prompt, question="q")]
    values = {"max_new_tokens": 100} | settings
    ((_, sample),) = lm.responder.respond(asked_for, Settings(**values))
    return sample


THINKS = [*"so\n\nB?", "</think>", *"\n42\n\nQ"]


def test_stop_strings_act_after_reasoning_only(monkeypatch):
    lm = reasoner(monkeypatch, THINKS, think_end_token="</think>")
    sample = sample_of(lm, until=("\n\n",))
    assert (sample.reasoning, sample.answer) == ("so\n\nB?</think>", "42")
    assert (sample.finish, sample.reasoning_tokens, sample.new_tokens) == ("stop", 7, 12)
    assert sample.raw_answer == "\n42\n\n"
    assert generate(lm, ["ab"], until=["\n\n"]) == ["42"]
    plain = reasoner(monkeypatch, THINKS)
    assert sample_of(plain, until=("\n\n",)).answer == "so"


def test_the_mark_may_be_an_id_and_is_found_although_it_is_special(monkeypatch):
    lm = reasoner(monkeypatch, THINKS, think_end_token=3)
    assert sample_of(lm).answer == "42\n\nQ"


def test_unfinished_reasoning_gives_no_answer(monkeypatch):
    lm = reasoner(monkeypatch, [*"is it (B)?"], think_end_token="</think>")
    sample = sample_of(lm)
    assert not sample.reasoning_ended and sample.answer == sample.raw_answer == ""
    assert sample.reasoning == "is it (B)?"


def test_a_template_that_closes_the_reasoning_needs_no_mark(monkeypatch):
    lm = reasoner(monkeypatch, [*"42"], think_end_token="</think>")
    sample = sample_of(lm, prompt="ab</think>\n\n")
    assert sample.reasoning_ended and sample.answer == "42"


def test_loops_are_noticed(monkeypatch):
    sentence = [*"it is 460, so "]
    lm = reasoner(monkeypatch, sentence * 8)
    assert sample_of(lm, max_new_tokens=112).loop
    assert not sample_of(lm, max_new_tokens=20).loop


def test_a_stop_string_of_several_tokens_ends_generation(monkeypatch):
    lm = reasoner(monkeypatch, [*"12 Question: more"])
    sample = sample_of(lm, until=("Question:",))
    assert (sample.answer, sample.new_tokens) == ("12 ", 12)


def test_stop_strings_are_looked_for_after_every_token_that_may_complete_one(monkeypatch):
    """Sparing most tokens the look changes nothing: stops come where they came with all looks."""
    from replayssm.study.responses import Responder

    for text, until in (("12 Question: more", "Question:"), ("a b  c", "  "), ("x\n\ny", "\n\n")):
        lm = reasoner(monkeypatch, [*text])
        spared = sample_of(lm, until=(until,))
        with monkeypatch.context() as patch:
            patch.setattr(Responder, "_may_add", lambda *_: True)
            assert sample_of(lm, until=(until,)) == spared
        assert spared.finish == "stop"


# -- templates -------------------------------------------------------------------------------------
def test_chat_template():
    chat = [{"role": "user", "content": "hi"}]
    assert plugin(chat=True).apply_chat_template(chat) == "[user]hi\n[assistant]"
    with pytest.raises(ValueError, match="no chat template"):
        plugin().apply_chat_template(chat)
    with pytest.raises(ValueError, match="gen_prefix"):
        plugin(chat=True, think_end_token="</think>").apply_chat_template(chat, False)


# -- refusals, before anything runs ----------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"polcy": "fp16"}, "unknown model argument 'polcy'; did you mean 'policy'"),
        ({"max_gen_tokens": 5}, "did you mean 'max_gen_toks'"),
        ({"policy": "fp61"}, "did you mean 'fp16'"),
        ({"policy": "fp16@8", "ring_len": 16}, "contradicts"),
        ({"think_end_token": "</thunk>"}, "'</thunk>' is not a token"),
        ({"think_end_token": 4000}, "4000 is not a token"),
        ({"enable_thinking": True}, "enable_thinking needs think_end_token"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"max_gen_toks": "many"}, "max_gen_toks"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        plugin(**arguments)


def test_cap_and_prompt_beyond_the_model_are_refused_before_generation(monkeypatch):
    from replayssm.study import responses

    monkeypatch.setattr(responses, "generate_many", None)
    texts = [*prompts(3), "x" * 50]
    with pytest.raises(ValueError, match="prompt of 50 tokens.*4050 new ones.*4096 positions"):
        generate(plugin(), texts, max_gen_toks=4050)
    with pytest.raises(ValueError, match="unknown generation argument 'top_q'"):
        generate(plugin(), texts, top_q=1)


def test_likelihoods_with_reasoning_are_refused():
    lm = plugin(think_end_token="</think>")
    with pytest.raises(ValueError, match="no meaning for log-likelihoods"):
        lm.loglikelihood(asked("loglikelihood", ("a", "b")), True)


def test_lm_evals_cache_is_refused(tmp_path):
    from lm_eval.api.model import CachingLM

    with pytest.raises(ValueError, match="use_cache would give one policy the answers of another"):
        CachingLM(plugin(), str(tmp_path / "cache.db"))


def test_arguments_of_the_model_win_over_the_command_lines():
    line = {"batch_size": 1, "max_batch_size": None, "device": "cpu"}
    lm = ReplayLM.create_from_arg_obj({"pretrained": checkpoint(), "batch_size": 16}, line)
    assert lm.responder.lanes == 16
    text = f"pretrained={checkpoint()},policy=fp8"
    lm = ReplayLM.create_from_arg_string(text, line)
    assert lm.responder.lanes == 1 and lm.responder.policy.label == "fp8"


def test_lm_eval_knows_the_name():
    from lm_eval.api.registry import get_model

    assert get_model("replayssm") is ReplayLM


# -- the built-in models ---------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name", ["builtin/gdn", "builtin/mamba2"])
def test_a_built_in_model_answers_as_hf_does(name):
    if name not in builtin_models():
        pytest.skip(f"{name} is not in this build")
    built_in = models.load(name)
    problems = corpus.heldout_problems()[:100]
    texts = [corpus.problem_prompt(problem["question"]) for problem in problems]
    kwargs = {"max_gen_toks": 160, "until": ["Question:"], "do_sample": False}
    theirs = HFLM(pretrained=str(built_in.folder), device="cpu", dtype="float32", batch_size=1)
    want = generate(theirs, texts, **kwargs)
    assert generate(ReplayLM(built_in), texts, **kwargs) == want
    assert sum("####" in answer for answer in want) > 50
