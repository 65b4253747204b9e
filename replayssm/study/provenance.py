"""Where a result came from: code, packages, machine class, and what was in effect rather than asked
for.

Owns the content of provenance.json. Holds no time of day and no machine or user name, so that the
same run on the same installation writes the same bytes. Needs torch only to describe the device.
"""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import replayssm

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow")


def environment(device: torch.device, *, backend: str | None = None) -> dict:
    """What a run's numbers may depend on at rounding level, and a one-line `summary` of it.

    backend: which backend of the state update is in effect, in words.
    """
    commit, dirty = code_version()
    packages = {name: _package_version(name) for name in _PACKAGES}
    packages["torch"] = torch.__version__  # names the build (+cpu, +cu130), as metadata may not
    threads = torch.get_num_threads()
    described = describe_device(device)
    code = replayssm.__version__ + (
        f" (commit {commit[:10]}{', modified' if dirty else ''})" if commit != "unknown" else ""
    )
    with_backend = {} if backend is None else {"backend": backend}
    return with_backend | {
        "replayssm": replayssm.__version__,
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": packages,
        "device": described,
        "threads": threads,
        "summary": f"replayssm {code}, torch {packages['torch']}, transformers "
        f"{packages['transformers']}, {described['name']}, {threads} threads"
        + (f", backend {backend}" if backend else ""),
    }


def describe_device(device: torch.device) -> dict:
    """Kind, name and, for a GPU, compute capability and CUDA versions of the device."""
    if device.type == "cuda":
        return {
            "type": "cuda",
            "name": torch.cuda.get_device_name(device),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "cuda": torch.version.cuda,
            "driver": _driver_version(),
            "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
        }
    capability = torch.backends.cpu.get_cpu_capability()
    return {"type": device.type, "name": f"{device.type} ({capability})", "capability": capability}


def code_version() -> tuple[str, bool | None]:
    """(commit, dirty) of the clone that this package runs from.

    Where it is no clone, as in a container, the commit is what the environment variable
    REPLAYSSM_COMMIT says, or "unknown"; dirty is then None.

    Dirty means that tracked or new files of the package differ from the commit; results do not
    count.
    """
    package = Path(replayssm.__file__).resolve().parent
    try:
        # Only if the repository tracks this very file: site-packages may lie inside some other
        # clone.
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(package, "rev-parse", "HEAD").strip()
        dirty = bool(_git(package, "status", "--porcelain", "--", ".").strip())
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("REPLAYSSM_COMMIT") or "unknown", None
    return commit, dirty


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    return done.stdout


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout else None
