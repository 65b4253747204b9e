"""The packaged models: complete, small, loadable, honest about themselves, and able to recall."""

import json
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from replayssm.study import corpus

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from training import evaluate, export  # noqa: E402

ASSETS = Path(str(files("replayssm") / "assets"))
MODELS = ("gdn", "mamba2")


@pytest.mark.parametrize("name", MODELS)
def test_folder_is_complete_and_small(name):
    folder = ASSETS / name
    present = {path.name for path in folder.iterdir()}
    assert present == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    assert (folder / "model.safetensors").stat().st_size <= 16_000_000
    with safe_open(folder / "model.safetensors", "pt") as weights:
        tensors = {key: weights.get_tensor(key) for key in weights.keys()}
    assert all(t.dtype == torch.bfloat16 and t.isfinite().all() for t in tensors.values())
    config = json.loads((folder / "config.json").read_text())
    assert config == export.build(name).config.hugging_face()


def test_both_models_share_one_tokenizer():
    first, second = ((ASSETS / name / "tokenizer.json").read_bytes() for name in MODELS)
    assert first == second
    tokenizer = Tokenizer.from_file(str(ASSETS / "gdn" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 2048
    assert tokenizer.token_to_id(corpus.END_OF_DOCUMENT) == 0
    assert len(tokenizer.encode("90817").ids) == 5
    for word in corpus.NAMES + corpus.ITEMS:
        assert len(tokenizer.encode(f" {word}").ids) == 1, word
    text = corpus.mixed_text(7, 3000)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert 2.5 < len(text) / len(tokenizer.encode(text).ids) < 3.3


@pytest.mark.parametrize("name", MODELS)
def test_loads_in_transformers_and_equals_the_training_code(name):
    folder = ASSETS / name
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == other.config.eos_token_id == 0
    ids = tokenizer(corpus.mixed_text(8, 1000), return_tensors="pt").input_ids[:, :256]
    ours = export.build(name)
    export.load_weights(ours, folder)
    with torch.no_grad():
        theirs = other(ids, use_cache=False).logits
    assert (evaluate.forward_logits(ours, ids) - theirs).abs().max() <= 1e-3
    loss = torch.nn.functional.cross_entropy(theirs[0, :-1], ids[0, 1:])
    assert loss < 2.0  # 7.6 untrained


@pytest.mark.parametrize("name", MODELS)
def test_recalls_and_solves(name):
    tokenizer = Tokenizer.from_file(str(ASSETS / name / "tokenizer.json"))
    model = export.build(name)
    export.load_weights(model, ASSETS / name)
    table = evaluate.recall_by_distance(model, tokenizer, [256], 3)
    assert table[256]["recalled"] == 1.0
    recorded = json.loads((ASSETS / name / "training.json").read_text())["right"]
    rows = corpus.heldout_problems()
    short = sorted(
        range(len(recorded)), key=lambda i: len(rows[i]["question"] + rows[i]["solution"])
    )
    solved = evaluate.solve(model, tokenizer, [rows[i] for i in short[:2]], 64)
    assert solved["right"] == [recorded[i] == "1" for i in short[:2]]


@pytest.mark.parametrize(("name", "accuracy"), [("gdn", 0.60), ("mamba2", 0.60)])
def test_recorded_quality_and_its_card(name, accuracy):
    facts = json.loads((ASSETS / name / "training.json").read_text())
    assert facts["accuracy"] >= accuracy and facts["problems"] >= 1000
    assert facts["right"].count("1") == round(facts["accuracy"] * facts["problems"])
    for distance in ("256", "512", "1024", "2048", "4096", "8192", "16384"):
        assert facts["recall"][distance]["recalled"] >= 0.90, distance
    memories = [m for layer in facts["memory"].values() for m in layer]
    assert sum(m >= 1000 for m in memories) >= len(memories) // 3
    losses = facts["long_stream"]["loss_by_position"]
    assert max(losses) < 2 * min(losses)  # does not grow beyond the trained length
    card = (ASSETS / name / "README.md").read_text()
    assert f"**{facts['accuracy']:.1%}** right" in card and f"{facts['parameters']:,}" in card
