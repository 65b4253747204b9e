"""For tests of tasks: a tiny checkpoint with a tokenizer of characters, and made-up data."""

import csv
import functools
import io
import json
import struct
import zlib
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


# -- task data -------------------------------------------------------------------------------------
GPQA_COLUMNS = ("Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))


def gpqa_rows(count: int) -> list[dict[str, str]]:
    """Made-up rows with the columns of the real table."""
    return [
        {
            "Record ID": f"rec{i}",
            "Question": f"Which number is {i} plus one?",
            "Correct Answer": f"{i + 1}",
            "Incorrect Answer 1": f"{i}",
            "Incorrect Answer 2": f"{i + 2}",
            "Incorrect Answer 3": f"{i + 3}\n",
        }
        for i in range(count)
    ]


def gpqa_csv(count: int) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=["Record ID", *GPQA_COLUMNS])
    writer.writeheader()
    writer.writerows(gpqa_rows(count))
    return out.getvalue()


def write_data(folder: Path, *, rows: int = 12) -> Path:
    """A data folder with made-up rows for gsm8k, gsm_symbolic and gpqa_diamond."""
    (folder / "gsm8k").mkdir(parents=True)
    sums = [
        {"question": f"What is {i} + {i + 1}?", "answer": f"{i} + {i + 1} = x\n#### {2 * i + 1}"}
        for i in range(rows)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in sums)
    for path in ("gsm8k/train.jsonl", "gsm8k/test.jsonl", "gsm_symbolic.jsonl"):
        (folder / path).write_text(lines)
    (folder / "gpqa_diamond.csv").write_text(gpqa_csv(rows))
    return folder


def encrypted_zip(path: Path, name: str, content: bytes, password: str) -> Path:
    """Write a zip archive encrypted in the traditional way, which zipfile can read, not write."""
    keys = [0x12345678, 0x23456789, 0x34567890]
    table = [
        functools.reduce(lambda c, _: c >> 1 ^ 0xEDB88320 * (c & 1), range(8), i)
        for i in range(256)
    ]

    def crc(value: int, byte: int) -> int:
        return value >> 8 ^ table[(value ^ byte) & 255]

    def update(byte: int) -> None:
        keys[0] = crc(keys[0], byte)
        keys[1] = ((keys[1] + (keys[0] & 255)) * 134775813 + 1) & 0xFFFFFFFF
        keys[2] = crc(keys[2], keys[1] >> 24)

    def encrypt(data: bytes) -> bytes:
        out = bytearray()
        for byte in data:
            mixed = keys[2] | 2
            out.append(byte ^ (mixed * (mixed ^ 1) >> 8 & 255))
            update(byte)
        return bytes(out)

    for byte in password.encode():
        update(byte)
    checksum = zlib.crc32(content)
    data = encrypt(bytes(11) + bytes([checksum >> 24]) + content)
    sizes = struct.pack("<III", checksum, len(data), len(content))
    encoded = name.encode()
    local = struct.pack("<IHHHHH", 0x04034B50, 20, 1, 0, 0, 0x21) + sizes
    local += struct.pack("<HH", len(encoded), 0) + encoded
    central = struct.pack("<IHHHHHH", 0x02014B50, 20, 20, 1, 0, 0, 0x21) + sizes
    central += struct.pack("<HHHHHII", len(encoded), 0, 0, 0, 0, 0, 0) + encoded
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1, 1, len(central), len(local) + len(data), 0)
    path.write_bytes(local + data + central + end)
    return path
