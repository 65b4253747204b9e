"""From a name to a model that is ready to run: built-in, a folder, or the hub; safetensors only.

Owns finding the files, refusing what cannot be run with one clear line, loading, and digests for
provenance. Must not know policies or studies.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from replayssm.models.adapter import Adapter
from replayssm.models.architectures import Architecture, find_architecture
from replayssm.models.errors import ModelError, TokenizerError, WeightsError

BUILTIN_PREFIX = "builtin/"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")

_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model, its tokenizer, and where both came from.

    name: what the person asked for; folder: the files that were read.
    """

    name: str
    folder: Path
    adapter: Adapter
    tokenizer: Any
    dtype: torch.dtype

    @property
    def model(self) -> nn.Module:
        return self.adapter.model

    @property
    def device(self) -> torch.device:
        return self.adapter.device

    @cached_property
    def weights_digest(self) -> str:
        """SHA-256 over the names and contents of the weight files."""
        return _digest(_weight_files(self.folder, self.name))

    @cached_property
    def tokenizer_digest(self) -> str:
        """SHA-256 over the names and contents of the tokenizer files."""
        return _digest([self.folder / n for n in _TOKENIZER_FILES if (self.folder / n).exists()])


def load(
    name_or_path: str,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    device_map: Any = None,
) -> LoadedModel:
    """Load `builtin/NAME`, a local folder, or a model id of the hub, in eval mode.

    Args:
        dtype: of the weights: "float32", "bfloat16" or "float16"; not of the recurrent state.
        device: where the model goes, unless `device_map` is given.
        trust_remote_code: run code from the model's repository for its tokenizer; off unless asked
            for. The model itself is always the library's own class.
        device_map: how to spread the model over several devices ("auto", "balanced", ..., or a
            mapping from modules to devices), by the package accelerate; None: all on `device`.

    Raises:
        ModelError (a ValueError) with one line: unknown name, no recurrent layer, unsupported
        family, weights missing, corrupt, incomplete or not in safetensors, tokenizer missing,
        accelerate missing, some weights on no device.
    """
    torch_dtype = _as_dtype(dtype)
    _check_device_map(device_map)
    _quieten_transformers()
    folder, _ = _identify(name_or_path, trust_remote_code)
    _check_weights(folder, name_or_path)
    tokenizer = _load_tokenizer(folder, name_or_path, trust_remote_code)
    model = _load_weights(folder, name_or_path, torch_dtype, device_map)
    if device_map is None:
        model = model.to(as_device(device))
    return LoadedModel(
        name=name_or_path,
        folder=folder,
        adapter=Adapter(model.eval(), name=name_or_path),
        tokenizer=tokenizer,
        dtype=torch_dtype,
    )


def architecture_of(name_or_path: str, *, trust_remote_code: bool = False) -> Architecture:
    """What `load` would load, from its config.json alone; raises as `load` does."""
    return _identify(name_or_path, trust_remote_code)[1]


def builtin_models() -> tuple[str, ...]:
    """Names of the packaged models, as given to `load`."""
    root = Path(str(files("replayssm") / "assets"))
    found = sorted(path.parent.name for path in root.glob(f"*/{_WEIGHTS}"))
    return tuple(BUILTIN_PREFIX + name for name in found)


# -- files -----------------------------------------------------------------------------------------


def _identify(name: str, trust_remote_code: bool) -> tuple[Path, Architecture]:
    """The folder of a model, and its architecture."""
    folder = _find_folder(name, trust_remote_code)
    model_type = _read_config(folder, name)["model_type"]
    return folder, find_architecture(model_type, where=repr(name))


def _find_folder(name: str, trust_remote_code: bool) -> Path:
    if name.startswith(BUILTIN_PREFIX):
        if name not in builtin_models():
            have = ", ".join(builtin_models()) or "none"
            raise ModelError(f"there is no built-in model {name!r}; packaged models: {have}")
        return Path(str(files("replayssm") / "assets" / name.removeprefix(BUILTIN_PREFIX)))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"{name!r} is a file; give the folder that holds config.json and weights")
    if not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ModelError(f"{name!r} is neither a folder, nor a model id of the hub (owner/name)")
    return _download(name, trust_remote_code)


def _download(name: str, trust_remote_code: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns + ["*.py"] * trust_remote_code))
    except Exception as error:  # the hub client raises a dozen unrelated types
        raise ModelError(
            f"{name!r} is not a local folder and could not be fetched from the hub: "
            f"{_first_line(error)}"
        ) from error


def _read_config(folder: Path, name: str) -> dict:
    path = folder / "config.json"
    if not path.exists():
        raise ModelError(f"{name!r}: the folder has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{name!r}: config.json is not JSON: {_first_line(error)}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"{name!r}: config.json names no model_type")
    return config


def _weight_files(folder: Path, name: str) -> list[Path]:
    index = folder / _WEIGHTS_INDEX
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = sorted(set(weight_map.values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise WeightsError(f"{name!r}: {_WEIGHTS_INDEX} cannot be read") from error
        return [folder / shard for shard in shards]
    return [folder / _WEIGHTS]


def _check_weights(folder: Path, name: str) -> None:
    """Every weight file is there and its header fits its size."""
    from safetensors import SafetensorError, safe_open

    paths = _weight_files(folder, name)
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        others = sorted(p.name for s in ("*.bin", "*.pt", "*.pth") for p in folder.glob(s))
        reason = (
            f" (it has {', '.join(others[:3])}: pickled weights can run code and are not loaded; "
            "convert them to safetensors)"
            if others
            else ""
        )
        raise WeightsError(f"{name!r}: weights are missing: {', '.join(missing)}{reason}")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as handle:
                handle.keys()
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{name!r}: {path.name} is corrupt or cut short: {_first_line(error)}"
            ) from error


# -- transformers ----------------------------------------------------------------------------------


def _load_tokenizer(folder: Path, name: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    if not any((folder / file).exists() for file in _TOKENIZER_FILES):
        raise TokenizerError(f"{name!r}: the folder has no tokenizer (tokenizer.json)")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises bare Exception on a damaged file
        raise TokenizerError(
            f"{name!r}: the tokenizer cannot be read: {_first_line(error)}"
        ) from error


def _load_weights(folder: Path, name: str, dtype: torch.dtype, device_map: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=_own_config(folder, name),
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=False,  # the adapters know the library's own classes only
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, with the name of the tensor
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise WeightsError(f"{name!r}: cannot be loaded: {_first_line(error)}") from error
    # Missing weights are filled with random numbers and a warning: here that is an error.
    absent = sorted(report["missing_keys"])
    if absent:
        raise WeightsError(
            f"{name!r}: the weight files lack {len(absent)} tensors of the model, the first is "
            f"{absent[0]!r}"
        )
    for key, stored, wanted in report["mismatched_keys"]:
        raise WeightsError(
            f"{name!r}: {key!r} is {list(stored)} in the weight files, {list(wanted)} in the model"
        )
    return model


def _own_config(folder: Path, name: str) -> Any:
    """The configuration as transformers' own class, which leads to its own model class.

    Other packages put theirs in its place under the same model type as soon as they are imported
    (flash-linear-attention does, and transformers imports it where it is installed).
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type = _read_config(folder, name)["model_type"]
    if model_type not in CONFIG_MAPPING_NAMES:
        raise ModelError(
            f"{name!r}: model type {model_type!r} is not known to "
            f"transformers {transformers.__version__}"
        )
    return getattr(transformers, CONFIG_MAPPING_NAMES[model_type]).from_pretrained(folder)


def _quieten_transformers() -> None:
    """No progress bars and no notices that a kernel package is missing, unless asked for.

    The notices concern the convolution only: the recurrence is ours whatever is installed.
    """
    import transformers

    if os.environ.get("TRANSFORMERS_VERBOSITY", "error") == "error":
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()


def _as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def as_device(device: str | torch.device) -> torch.device:
    """The device called `device`; ModelError with one line if there is none here."""
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device {device!r}: {_first_line(error)}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device 'cuda' was asked for, but torch sees no CUDA device")
    return device


def _check_device_map(device_map: Any) -> None:
    if device_map is None:
        return
    if isinstance(device_map, str) and device_map not in DEVICE_MAPS:
        raise ModelError(f"device_map {device_map!r} is not one of {', '.join(DEVICE_MAPS)}")
    if find_spec("accelerate") is None:
        raise ModelError(
            f"device_map {device_map!r} needs the package accelerate, which is not installed: "
            "pip install accelerate"
        )


def _digest(paths: list[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(paths):
        with path.open("rb") as handle:
            content = hashlib.file_digest(handle, "sha256").hexdigest()
        total.update(f"{path.name} {content}\n".encode())
    return total.hexdigest()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
