"""A tiny checkpoint with a tokenizer of single characters, on disk, for tests of tasks."""

from pathlib import Path

from tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "</think>"]
CHARACTERS = (
    "\n !\"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_abcdefghijklmnopqrstuvwxyz|"
)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def save_checkpoint(folder: Path, name: str = "qwen3_5", *, chat: bool = False) -> Path:
    """Write the tiny model `name` (see tiny_models) with its tokenizer into `folder`."""
    words = SPECIAL + list(CHARACTERS)
    words += [f"<{i}>" for i in range(len(words), 128)]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="!"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["</think>"],
        clean_up_tokenization_spaces=False,
    )
    if chat:
        tokenizer.chat_template = TEMPLATE
    tiny_model(name).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
