"""The whole path on tiny random models: load, lockstep, drift, controls, resume inside a prompt."""

import os
import random
import signal
import time

import numpy as np
import pytest
import torch
from test_runner import contents

from replayssm.engine.lockstep import Lockstep
from replayssm.study import runner
from replayssm.study.config import from_mapping
from replayssm.study.records import load_positions
from replayssm.study.runner import run_study
from replayssm.study.store import read_json
from replayssm.study.subject import ModelSubject

POLICIES = ["fp32", "fp16-sr", "nvfp4", "fp32+nvfp4"]
TINY = ["qwen3_5", "mamba2"]


@pytest.fixture
def folder(tiny_model, tmp_path):
    """Function name -> folder with a tiny model; its tokenizer makes a token of each character."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(name):
        path = tmp_path / name
        tiny_model(name).save_pretrained(path)
        words = {chr(code): code for code in range(128)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="\x00"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="\x00").save_pretrained(path)
        return str(path)

    return make


def spec(model, **changes):
    values = {"models": [model], "policies": POLICIES, "prompts": 2, "tokens": 96, "prefill": 24}
    return from_mapping(values | changes, name="tiny", where="test")


def open_subject(name):
    return ModelSubject(name, dtype="float32", device="cpu")


def run(study, out, **options):
    (result,) = run_study(study, out=out, open_subject=open_subject, progress=False, **options)
    return result


@pytest.mark.parametrize("name", TINY)
def test_a_study_of_a_tiny_model(folder, tmp_path, name):
    study = spec(folder(name))
    result = run(study, tmp_path / "out")
    assert result.failures == [] and result.nonfinite == []
    summary = read_json(result.folder.summary_path)
    arms = {arm["label"]: arm for arm in summary["arms"]}
    assert summary["controls"]["second_fp32_kl_max"] == 0.0
    assert 0 < summary["controls"]["floor_kl_mean"] < 1e-9
    assert summary["controls"]["fault_kl_mean"] > 1e-6
    kl = {label: arm["whole"]["kl_mean"] for label, arm in arms.items()}
    assert kl["nvfp4"] > 10 * kl["fp16-sr"] > 0
    assert arms["fp32"]["bytes_per_state_element"] == 4.0
    assert arms["nvfp4"]["bytes_per_token"] < arms["fp32"]["bytes_per_token"]


@pytest.mark.parametrize("name", TINY)
def test_provenance_says_what_is_stored_not_what_was_asked(folder, tmp_path, name):
    result = run(spec(folder(name), tokens=32), tmp_path / "out")
    provenance = read_json(result.folder.provenance_path)
    stored = provenance["effective"]["stored"]
    assert stored["fp32"]["checkpoint.data"] == "float32"
    assert stored["fp16-sr"]["checkpoint.data"] == "float16"
    assert stored["nvfp4"]["checkpoint.data"] == "uint8"
    assert stored["nvfp4"]["checkpoint.scale"] == "float8_e4m3fn"
    assert stored["fp32+nvfp4"]["checkpoint.data"] == "float32"
    assert stored["fp32+nvfp4"]["read_copy.data"] == "uint8"
    assert all(any(part.startswith("ring.") for part in parts) for parts in stored.values())
    assert provenance["effective"]["backends"] == ["reference"], "never 'auto'"
    assert "Philox" in " ".join(provenance["requested"]["fp16-sr"]["policy"])
    (environment,) = provenance["environments"]
    assert environment["packages"]["torch"] == torch.__version__
    assert set(provenance["inputs"]) == {"weights", "config", "tokenizer", "tokens"}


def test_seeds_change_stochastic_arms_only(folder, tmp_path):
    model = folder("mamba2")
    found = []
    for seeds in ([0], [1]):
        study = spec(model, seeds=seeds, tokens=32)
        result = run(study, tmp_path / "out")
        labels = [arm.label for arm in study.arms()]
        found.append(load_positions(result.folder.positions_path, labels, prompts=2).kl)
    differs = [bool((a != b).any()) for a, b in zip(*found, strict=True)]
    assert differs == [False, True, False, False, False, False]


def test_the_reference_can_write_the_text(folder, tmp_path):
    study = spec(folder("mamba2"), text="generate", tokens=32)
    result = run(study, tmp_path / "out")
    assert result.failures == []
    labels = [arm.label for arm in study.arms()]
    assert load_positions(result.folder.positions_path, labels, prompts=2).token.min() >= 0


@pytest.mark.parametrize("text", ["builtin/mixed", "generate"])
@pytest.mark.parametrize("name", TINY)
def test_resuming_inside_a_prompt_changes_no_byte(folder, tmp_path, monkeypatch, name, text):
    monkeypatch.setattr(runner, "_LARGEST_SAVING_SHARE", float("inf"))
    study = spec(folder(name), text=text)
    whole = run(study, tmp_path / "whole")
    method = "read" if text == "builtin/mixed" else "generate"
    original = getattr(Lockstep, method)

    def interrupted(self, *args):
        for count, window in enumerate(original(self, *args)):
            if count == 4:
                raise KeyboardInterrupt
            yield window

    monkeypatch.setattr(Lockstep, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(study, tmp_path / "cut", chunk_tokens=48)
    monkeypatch.setattr(Lockstep, method, original)
    result = run(study, tmp_path / "cut", chunk_tokens=48)
    assert contents(result.folder.path) == contents(whole.folder.path)


def test_the_same_prompt_before_and_after_another_gives_the_same_logits(folder):
    study = spec(folder("qwen3_5"))
    subject = open_subject(study.models[0])
    engine = subject.lockstep(study)
    a, b = (
        torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(s)) for s in (1, 2)
    )

    def logits(text):
        engine.start(text[:, :8], tokens=32, prompt_ids=[0])
        return torch.cat([window.logits.clone() for window in engine.read(text[:, 8:])], 2).numpy()

    first = logits(a)
    other = logits(b)
    np.testing.assert_array_equal(logits(a), first)
    assert (other != first).any()


@pytest.mark.slow
def test_kill_minus_nine_on_a_real_model(folder, tmp_path):
    study = spec(folder("qwen3_5"), tokens=512, prompts_per_batch=1)

    def fork(out):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            runner._LARGEST_SAVING_SHARE = float("inf")
            run(study, out, chunk_tokens=64)
            os._exit(0)
        return child

    began = time.monotonic()
    assert os.waitpid(fork(tmp_path / "whole"), 0)[1] == 0
    whole = time.monotonic() - began
    rng, hit = random.Random(), 0
    for _ in range(10):
        child = fork(tmp_path / "cut")
        time.sleep(rng.random() * 0.3 * whole)
        os.kill(child, signal.SIGKILL)
        hit += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert os.waitpid(fork(tmp_path / "cut"), 0)[1] == 0
    assert hit >= 5
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
