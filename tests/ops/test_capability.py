"""Which combinations have kernels, and that a refusal says why."""

import pytest
import torch

from replayssm.ops import capability
from replayssm.ops.capability import choose_backend, no_device, no_kernel
from replayssm.policy import PRESETS, PrecisionPolicy, parse_policy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def compiled(monkeypatch):
    """As if Triton's interpreter was off."""
    monkeypatch.setattr(capability, "_interpreted", lambda: False)


@pytest.fixture
def gpu(monkeypatch, compiled):
    """As if there was a usable GPU."""
    monkeypatch.setattr(capability, "no_device", lambda device: None)


@pytest.mark.parametrize("recurrence", capability.KERNELS)
@pytest.mark.parametrize("policy", PRESETS)
def test_every_named_policy_has_kernels(recurrence, policy):
    for rows, cols in ((64, 128), (80, 16), (128, 128), (128, 256)):
        assert no_kernel(recurrence, PRESETS[policy], rows=rows, cols=cols) is None


@pytest.mark.parametrize(
    "policy, recurrence, reason",
    [
        ("fp32:operand=bf16", "mamba2", "operand bf16: the kernels keep operands exact"),
        ("fp32:ring=fp8", "mamba2", "ring fp8: it has scales"),
        ("fp16:ring=int8", "gated_delta", "ring int8: it has scales"),
        ("fp32@65", "gated_delta", "ring length 65: the kernels of gated_delta go up to 64"),
        ("fp32@33", "kimi_delta", "ring length 33: the kernels of kimi_delta go up to 32"),
        ("fp32", "other", "recurrence other has no kernels; these have: mamba2, gated_delta, kimi"),
    ],
)
def test_what_has_none_says_why(policy, recurrence, reason):
    assert reason in no_kernel(recurrence, parse_policy(policy))


def test_shapes_blocks_and_roundings_without_kernels():
    policy = parse_policy("fp32")
    assert "129 rows in a head's state" in no_kernel("mamba2", policy, rows=129, cols=16)
    assert "512 columns" in no_kernel("mamba2", policy, rows=16, cols=512)
    along_rows = {"format": {"name": "nvfp4", "scale_axis": "rows"}}
    policy = PrecisionPolicy.from_dict({"checkpoint": "fp32", "read_copy": along_rows})
    assert "scale axis rows" in no_kernel("gated_delta", policy)
    truncated = {"format": "bf16", "rounding": "toward_zero"}
    policy = PrecisionPolicy.from_dict({"checkpoint": "fp32", "ring": truncated})
    assert no_kernel("mamba2", policy) is None
    assert "nearest-even" in no_kernel("gated_delta", policy)


def choose(requested, policy="fp32", device=CUDA):
    return choose_backend(
        requested, "mamba2", parse_policy(policy), rows=64, cols=128, device=device
    )


def test_auto_takes_kernels_where_there_are_some_and_says_why_not(gpu):
    assert choose("auto").backend == "triton" and choose("auto").uses_kernels
    other = choose("auto", "fp32:operand=tf32")
    assert other.backend == "reference" and "operand tf32" in other.reason
    assert choose("auto", device=CPU).backend == "reference"
    assert choose("reference").backend == "reference"
    with pytest.raises(ValueError, match="backend 'triton' is not possible: operand tf32"):
        choose("triton", "fp32:operand=tf32")


def test_triton_without_a_gpu_is_an_error_that_says_why(compiled):
    with pytest.raises(ValueError, match="not possible: the device is 'cpu'; it needs an NVIDIA"):
        choose("triton", device=CPU)
    with pytest.raises(ValueError, match="'cuda'.*allowed are auto, reference, triton"):
        choose("cuda")


def test_an_old_or_missing_triton_is_named(compiled, monkeypatch):
    monkeypatch.setattr(capability.metadata, "version", lambda name: "3.5.1")
    assert no_device(CUDA) == "triton 3.5.1 is older than 3.6"

    def missing(name):
        raise capability.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(capability.metadata, "version", missing)
    assert no_device(CUDA) == "triton is not installed"


def test_an_old_gpu_is_named(compiled, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    assert no_device(CUDA) == "T4 has compute capability 7.5, the kernels need 8.0"


def test_the_interpreter_counts_as_a_device_and_says_so(monkeypatch):
    monkeypatch.setattr(capability, "_interpreted", lambda: True)
    assert choose("triton", device=CPU).backend == "triton (interpreted)"
    assert choose("auto", device=CPU).backend == "reference"
