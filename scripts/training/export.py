"""Built-in model folders: writing and reading Hugging Face config and bf16 safetensors.

Knows the two architectures by name; does not know how they are trained.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from training.gated_delta import GatedDeltaConfig
from training.hybrid import GatedDeltaLM
from training.mamba2 import Mamba2Config, Mamba2LM

ARCHITECTURES = {"gdn": (GatedDeltaConfig, GatedDeltaLM), "mamba2": (Mamba2Config, Mamba2LM)}


def build(name: str, **sizes) -> nn.Module:
    """A freshly initialised model; `sizes` override the configuration's defaults."""
    if name not in ARCHITECTURES:
        raise ValueError(f"model must be one of {sorted(ARCHITECTURES)}, got {name!r}")
    config, model = ARCHITECTURES[name]
    return model(config(**sizes))


def save(model: nn.Module, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors (weights rounded to `dtype`)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.hugging_face() | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 0, "pad_token_id": 0, "do_sample": False}, indent=2) + "\n"
    )
    weights = {
        k: v.detach().to("cpu", dtype).contiguous().clone() for k, v in model.state_dict().items()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def load_weights(model: nn.Module, folder: Path) -> None:
    """Read model.safetensors into `model`, in place, keeping the model's own dtype and device."""
    model.load_state_dict(load_file(str(folder / "model.safetensors")))
