"""Loading: what works, and one clear line for everything that does not."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from tiny_models import random_tokens, tiny_config, tiny_model

from replayssm import models
from replayssm.models import (
    ModelError,
    TokenizerError,
    UnsupportedModelError,
    WeightsError,
    list_architectures,
    load,
)
from replayssm.models.errors import UnsupportedInputError


def save_tokenizer(folder) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    tiny_model("mamba2").save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    copy = tmp_path / "tiny"
    shutil.copytree(saved, copy)
    return copy


def message(error: type[ModelError], name, **kwargs) -> str:
    with pytest.raises(error) as caught:
        load(str(name), **kwargs)
    text = str(caught.value)
    assert "\n" not in text and isinstance(caught.value, ValueError)
    return text


def test_a_local_folder_loads(saved):
    loaded = load(str(saved))
    tokens = random_tokens(1, 6)
    assert torch.equal(loaded.model(tokens).logits, tiny_model("mamba2")(tokens).logits)
    assert not loaded.model.training and loaded.dtype == torch.float32
    assert loaded.tokenizer("w5 w7").input_ids == [5, 7]
    assert loaded.adapter.architecture.name == "mamba2" and loaded.device.type == "cpu"


def test_digests_follow_the_contents(saved, folder):
    first, second = load(str(saved)), load(str(folder))
    assert first.weights_digest == second.weights_digest and len(first.weights_digest) == 64
    assert first.tokenizer_digest == second.tokenizer_digest
    with (folder / "model.safetensors").open("r+b") as handle:
        handle.seek(-1, 2)
        handle.write(b"\x01")
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text() + " ")
    changed = load(str(folder))
    assert changed.weights_digest != first.weights_digest
    assert changed.tokenizer_digest != first.tokenizer_digest


def test_bf16_and_sharded_weights_load(folder):
    tiny_model("mamba2").save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors").unlink()
    loaded = load(str(folder), dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
    assert loaded.model.get_input_embeddings().weight.dtype == torch.bfloat16
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.unlink()
    assert shard.name in message(WeightsError, folder)


def test_a_multimodal_checkpoint_loads_its_text_model(tmp_path):
    import transformers

    config = transformers.Qwen3_5Config(
        text_config=tiny_config("qwen3_5").to_dict(),
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 32,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
        },
    )
    whole = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    loaded = load(str(tmp_path))
    tokens = random_tokens(1, 6)
    assert loaded.adapter.architecture.name == "qwen3_5"
    assert torch.allclose(loaded.model(tokens).logits, whole(tokens).logits, atol=1e-6)


def test_names_that_lead_nowhere(tmp_path, saved):
    assert "builtin/nonesuch" in message(ModelError, "builtin/nonesuch")
    assert "neither a folder" in message(ModelError, tmp_path / "absent")
    assert "neither a folder" in message(ModelError, "./absent")
    assert "is a file" in message(ModelError, saved / "config.json")
    assert "config.json" in message(ModelError, tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "not JSON" in message(ModelError, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "model_type" in message(ModelError, tmp_path)


def test_an_unreachable_hub_is_one_line(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no network\nand a second line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    text = message(ModelError, "someone/some-model")
    assert "someone/some-model" in text and "no network" in text


def test_models_without_a_recurrence_we_run(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    for model_type, words in [
        ("llama", ["no recurrent layer", "llama", "qwen3_5", "zamba2"]),
        ("falcon_mamba", ["Mamba-1", "falcon_mamba", "mamba2"]),
        ("glm5_next", ["Kimi Delta", "kimi_linear"]),
    ]:
        (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
        text = message(UnsupportedModelError, folder)
        assert all(word in text for word in [*words, str(folder)])


def test_a_supported_type_with_attention_layers_only(tmp_path):
    import transformers

    config = tiny_config("granitemoehybrid")
    config.layer_types = ["full_attention"] * 3
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    text = message(UnsupportedModelError, tmp_path)
    assert "granitemoehybrid" in text and str(tmp_path) in text


def test_damaged_weights(folder):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "corrupt or cut short" in message(WeightsError, folder)
    weights.write_bytes(b"")
    assert "corrupt or cut short" in message(WeightsError, folder)
    weights.unlink()
    assert "missing" in message(WeightsError, folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    text = message(WeightsError, folder)
    assert "pytorch_model.bin" in text and "safetensors" in text


def test_weights_of_another_model(folder):
    from safetensors.torch import load_file, save_file

    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    lacking = {key: t for key, t in tensors.items() if "layers.1.mixer.A_log" not in key}
    save_file(lacking, weights, metadata={"format": "pt"})
    assert "layers.1.mixer.A_log" in message(WeightsError, folder)
    wrong = {key: (t[:4] if key.endswith("A_log") else t).clone() for key, t in tensors.items()}
    save_file(wrong, weights, metadata={"format": "pt"})
    assert "A_log" in message(WeightsError, folder)


def test_missing_and_damaged_tokenizers(folder):
    (folder / "tokenizer.json").write_text("{")
    assert "cannot be read" in message(TokenizerError, folder)
    for path in folder.glob("*tok*"):
        path.unlink()
    assert "no tokenizer" in message(TokenizerError, folder)


def test_a_device_map_spreads_the_model(saved):
    pytest.importorskip("accelerate")
    loaded = load(str(saved), device_map="auto")
    tokens = random_tokens(1, 6)
    logits = loaded.model(tokens.to(loaded.device)).logits.cpu()
    torch.testing.assert_close(logits, tiny_model("mamba2")(tokens).logits)


def test_another_package_s_class_does_not_take_over(saved, monkeypatch):
    """flash-linear-attention registers models of its own under transformers' model types."""
    from transformers import AutoConfig, AutoModelForCausalLM, Mamba2Config, Mamba2ForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    class OtherConfig(Mamba2Config):
        pass

    class OtherModel(Mamba2ForCausalLM):
        config_class = OtherConfig

    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {})
    monkeypatch.setattr(AutoModelForCausalLM._model_mapping, "_extra_content", {})
    AutoConfig.register("mamba2", OtherConfig, exist_ok=True)
    AutoModelForCausalLM.register(OtherConfig, OtherModel, exist_ok=True)
    assert type(AutoModelForCausalLM.from_pretrained(saved)) is OtherModel
    assert type(load(str(saved)).model) is Mamba2ForCausalLM


def test_device_maps_that_cannot_be(saved, monkeypatch):
    assert "'spread' is not one of auto, balanced" in message(
        ModelError, saved, device_map="spread"
    )
    from replayssm.models import loading

    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    text = message(ModelError, saved, device_map="auto")
    assert "accelerate, which is not installed" in text


def test_the_architecture_is_known_without_weights(folder):
    (folder / "model.safetensors").unlink()
    assert models.architecture_of(str(folder)).name == "mamba2"
    assert models.architecture_of("builtin/gdn").family == "gated_delta"


def test_bad_dtype_and_device(saved):
    assert "float64" in message(ModelError, saved, dtype="float64")
    assert "float64" in message(ModelError, saved, dtype=torch.float64)
    assert "gpu" in message(ModelError, saved, device="gpu")
    if not torch.cuda.is_available():
        assert "CUDA" in message(ModelError, saved, device="cuda")


def test_positions_limit_attention_only(saved, tiny_model):
    from replayssm.models import Adapter

    adapter = Adapter(tiny_model("qwen3_5"))
    adapter.check_length(4096)
    with pytest.raises(UnsupportedInputError, match="4097 tokens"):
        adapter.check_length(4097)
    assert load(str(saved)).adapter.max_positions is None


def test_list_of_architectures():
    assert [a.name for a in list_architectures()][:2] == ["qwen3_5", "qwen3_5_moe"]
    assert len(list_architectures()) == 11
    assert not hasattr(models, "nonesuch")


def test_listing_architectures_needs_no_torch():
    code = (
        "import sys; from replayssm import models; models.list_architectures(); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
