"""`replayssm generate`: text on stdout, numbers on stderr, refusals in one line."""

import pytest

from replayssm import cli
from replayssm.cli_generate import text_pieces
from replayssm.models.loading import load
from replayssm.ops import capability

GIVEN = ["generate", "--model", "builtin/gdn", "--device", "cpu", "--max-new-tokens", "12"]


def run(*argv):
    return cli.main([*GIVEN, *map(str, argv)])


def test_speculation_writes_the_same_text(capsys):
    texts, numbers = [], []
    options = (
        [],
        ["--speculate", 3],
        ["--speculate", 3, "--undo", "snapshots"],
        ["--speculate", 2, "--drafter", "builtin/mamba2"],
    )
    for more in options:
        policy = ["--policy", "fp16-sr+nvfp4", "--prompt", "one two three one two three one"]
        assert run(*policy, *more) == 0
        out, err = capsys.readouterr()
        texts.append(out)
        numbers.append(err.strip().splitlines()[-1])
    assert len(set(texts)) == 1 and len(texts[0].strip()) > 5
    assert all("policy fp16-sr+nvfp4 on cpu (reference)" in line for line in numbers)
    assert all("tokens/s" in line and "state of a sequence" in line for line in numbers)
    assert "accepted" not in numbers[0] and "drafts" in numbers[1]
    assert "; 0 bytes of state more for each draft" in numbers[1]
    assert "; 0 bytes" not in numbers[2] and "bytes of state more for each draft" in numbers[2]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_conventional_state_writes_the_same_text(capsys):
    """By the interpreter, if there is no GPU, so only a few tokens."""
    texts = []
    for more in (["--policy", "fp32"], ["--policy", "fp32@1", "--conventional"]):
        assert run("--prompt", "one two three", "--max-new-tokens", 3, *more) == 0
        out, err = capsys.readouterr()
        texts.append(out)
    assert texts[0] == texts[1] and "policy fp32@1 on cpu (conventional)" in err


def test_a_conventional_state_is_refused_before_any_text(capsys, monkeypatch):
    monkeypatch.setattr(capability, "_interpreted", lambda: False)
    for policy, message in (("fp32", "fp32@1, fp16@1 or bf16@1"), ("fp32@1", "device is 'cpu'")):
        assert run("--prompt", "It was", "--conventional", "--policy", policy) == 2
        out, err = capsys.readouterr()
        assert out == "" and message in err and err.count("\n") == 1


def test_a_fast_model_writes_the_same_text(capsys):
    texts = []
    for more in ([], ["--fast"]):
        assert run("--prompt", "one two three", "--max-new-tokens", 3, *more) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_sampling_depends_on_the_seed(capsys):
    texts = []
    for seed in (1, 1, 2):
        assert run("--prompt", "It was", "--temperature", 1.0, "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_a_prompt_from_a_file(tmp_path, capsys):
    path = tmp_path / "prompt.txt"
    path.write_text("It was", encoding="utf-8")
    assert run("--prompt-file", path) == 0
    from_file = capsys.readouterr().out
    assert run("--prompt", "It was") == 0
    assert capsys.readouterr().out == from_file


@pytest.mark.parametrize(
    "more, message",
    [
        (["--speculate", "-1"], "0 to 16"),
        (["--conventional", "--speculate", "2"], "leave out --speculate"),
        (["--speculate", "17"], "0 to 16, got 17"),
        (["--speculate", "2", "--drafter", "mtp"], "no class that runs the multi-token head"),
        (["--speculate", "2", "--undo", "magic"], "allowed are cursor, snapshots"),
        (["--speculate", "2", "--flush", "late"], "allowed are aligned, early"),
        (["--policy", "fp17"], "fp17"),
        (["--max-new-tokens", "0"], "at least 1"),
        (["--prompt", ""], "the prompt is empty"),
    ],
)
def test_refusals(more, message, capsys):
    assert run("--prompt", "It was", *more) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("replayssm: ") and message in error


def test_text_comes_in_whole_characters():
    tokenizer = load("builtin/gdn").tokenizer
    for text in ("Ünïcödé — “quotes” and 日本語.", " two  spaces\n\nand lines", "plain"):
        tokens = tokenizer(text)["input_ids"]
        pieces = list(text_pieces(iter(tokens), tokenizer))
        assert "".join(pieces) == tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert all("\ufffd" not in piece for piece in pieces)
    assert list(text_pieces(iter([]), tokenizer)) == []
