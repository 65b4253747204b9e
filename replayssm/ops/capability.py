"""What has Triton kernels: recurrences, storages, rings, operands, shapes and devices.

Owns the table of what the kernels compute, each refusal with its reason, and how a backend is
chosen by it. Imports no triton, so that the table can be read anywhere. Knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

import torch

from replayssm.formats.block import BlockFormat
from replayssm.formats.number import BF16, FP16, FP32
from replayssm.formats.rounding import NEAREST_EVEN
from replayssm.policy import PrecisionPolicy, Storage

BACKENDS = ("auto", "reference", "triton")
# Recurrences that have them, and their longest rings: a decay per key channel takes K times the
# registers and shared memory.
MAX_RING_LEN = {"mamba2": 64, "gated_delta": 64, "kimi_delta": 32}
KERNELS = tuple(MAX_RING_LEN)

MAX_TOKENS = 32  # of one window
# Of one head's state: a program that writes a scale per head holds all of it.
MAX_ROWS, MAX_COLS = 128, 256
RING_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of inputs kept as they arrive
LEAST_CAPABILITY = (8, 0)
LEAST_TRITON = (3, 6)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The backend in effect, never "auto": "reference", "triton" or "triton (interpreted)".

    reason: why the kernels are not used although "auto" was asked for; otherwise empty.
    """

    backend: str
    reason: str = ""

    @property
    def uses_kernels(self) -> bool:
        return self.backend != "reference"


def check_backend(requested: str) -> None:
    """ValueError unless `requested` is the name of a backend."""
    if requested not in BACKENDS:
        raise ValueError(f"backend {requested!r}: allowed are {', '.join(BACKENDS)}")


def choose_backend(
    requested: str,
    recurrence: str,
    policy: PrecisionPolicy,
    *,
    rows: int,
    cols: int,
    device: torch.device,
) -> Choice:
    """The backend for states [.., rows, cols] on `device`.

    Raises:
        ValueError: `requested` is "triton" and there are no such kernels, or no device for them.
    """
    check_backend(requested)
    if requested == "reference":
        return Choice(backend="reference")
    if requested == "auto" and device.type == "cpu":
        # Not a fallback: on a CPU there is nothing else, and the interpreter is for tests.
        return Choice(backend="reference")
    reason = no_device(device) or no_kernel(recurrence, policy, rows=rows, cols=cols)
    if reason is None:
        return Choice(backend="triton (interpreted)" if _interpreted() else "triton")
    if requested == "triton":
        raise ValueError(f"backend 'triton' is not possible: {reason}")
    return Choice(backend="reference", reason=reason)


def no_kernel(
    recurrence: str, policy: PrecisionPolicy, *, rows: int | None = None, cols: int | None = None
) -> str | None:
    """Why no kernel computes `policy` on states [.., rows, cols] (any, if not given); or None."""
    if recurrence not in KERNELS:
        return f"recurrence {recurrence} has no kernels; these have: {', '.join(KERNELS)}"
    if policy.operand != "fp32":
        return f"operand {policy.operand}: the kernels keep operands exact (fp32)"
    for storage in (policy.checkpoint, policy.read_storage):
        fmt = storage.format
        if isinstance(fmt, BlockFormat) and fmt.scale_axis != "contracted":
            return f"storage {storage.label}: scale axis {fmt.scale_axis}; kernels: contracted"
    if isinstance(policy.ring, Storage) and (why := _no_ring(recurrence, policy.ring)):
        return f"ring {policy.ring.label}: {why}"
    most = MAX_RING_LEN[recurrence]
    if policy.ring_len > most:
        return f"ring length {policy.ring_len}: the kernels of {recurrence} go up to {most}"
    for name, size, most in (("rows", rows, MAX_ROWS), ("columns", cols, MAX_COLS)):
        if size is not None and size > most:
            return f"{size} {name} in a head's state: the kernels go up to {most}"
    return None


def _no_ring(recurrence: str, storage: Storage) -> str | None:
    if storage.scale != "none":
        return "it has scales, for which there is no kernel"
    if recurrence == "mamba2":
        return None
    exact = storage.rounding == NEAREST_EVEN and storage.saturate
    if storage.format not in (FP32, FP16, BF16) or not exact:
        return "kernels of the delta rule keep fp32, fp16 or bf16, nearest-even and saturating"
    return None


def no_device(device: torch.device) -> str | None:
    """Why kernels cannot run on tensors of `device` in this process, or None."""
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "triton is not installed"
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST_TRITON:
        return f"triton {version} is older than {'.'.join(map(str, LEAST_TRITON))}"
    if _interpreted():
        return None
    if device.type != "cuda":
        return (
            f"the device is {device.type!r}; it needs an NVIDIA GPU (device cuda), or Triton's "
            "interpreter (TRITON_INTERPRET=1; slow, for tests)"
        )
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return f"torch {torch.__version__} sees no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{'.'.join(map(str, capability))}, the kernels need "
            f"{'.'.join(map(str, LEAST_CAPABILITY))}"
        )
    return None


def _interpreted() -> bool:
    from replayssm.ops.triton_common import interpreted

    return interpreted()
