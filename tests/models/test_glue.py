"""A fast adapter: the model's numbers, norms, convolutions and gates by kernels; all put back."""

import copy

import pytest
import torch
from tiny_models import TINY_ARCHITECTURES, random_tokens, tiny_model

from replayssm.engine.stream import Stream
from replayssm.models import Adapter, glue
from replayssm.models.errors import UnsupportedInputError
from replayssm.models.session import ReplaySession, RowGroup
from replayssm.ops import capability
from replayssm.ops.glue import triton_glue
from replayssm.policy import parse_policy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
KERNELS = ("rms_norm", "convolution_step", "convolution", "gated", "unit_vectors", "step_size")
# What the tables name for an architecture: its kernels.
USED = {
    "qwen3_5": {"rms_norm", "convolution_step", "convolution", "gated", "unit_vectors"},
    "nemotron_h": {"rms_norm", "convolution_step", "convolution", "step_size"},
}
GROUP = RowGroup(policy=parse_policy("fp32@4"), sequences=(0, 1), seeds=(0, 0))


def decoded(adapter):
    """Logits of a prompt's last token, three single tokens and a window of two."""
    stream = Stream(adapter, [GROUP], source=range(2), capacity=16)
    text = random_tokens(2, 10).to(DEVICE)
    with torch.inference_mode():
        logits = [stream.prefill(text[:, :5])[:, None]]
        stream.hand_over()
        for part in text[:, 5:].split([1, 1, 1, 2], dim=1):
            logits.append(stream.step(part).clone())
    return torch.cat(logits, dim=1)


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.fixture
def called(monkeypatch):
    """Names of the kernels that were launched."""
    names = set()
    for name in KERNELS:
        right = getattr(triton_glue, name)

        def noted(*args, _name=name, _right=right, **kwargs):
            names.add(_name)
            return _right(*args, **kwargs)

        monkeypatch.setattr(triton_glue, name, noted)
    return names


def copy_of(name):
    """A tiny model to move and cast: the shared one is other tests', too."""
    return copy.deepcopy(tiny_model(name)).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", USED)
def test_known_architectures_run_on_kernels(name, dtype, called):
    model = copy_of(name).to(dtype)
    wanted = decoded(Adapter(model))
    assert not called, "only a fast adapter has kernels"
    got = decoded(Adapter(model, fast=True))
    assert called == USED[name]
    assert relative(got, wanted) < (1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("name", [name for name in TINY_ARCHITECTURES if name not in USED])
def test_others_run_as_far_as_tables_go(name):
    model = copy_of(name)
    assert relative(decoded(Adapter(model, fast=True)), decoded(Adapter(model))) < 1e-5


@pytest.mark.parametrize("name", USED)
def test_everything_is_put_back(name):
    model = copy_of(name)
    adapter = Adapter(model, fast=True)
    library = __import__(adapter.module_name, fromlist=["x"])
    before = library.causal_conv1d_update
    replaced = [m for m in model.modules() if type(m).__name__ in glue._MODULES]
    assert replaced
    with ReplaySession(adapter, [GROUP]):
        assert library.causal_conv1d_update is not before
        assert all("forward" in vars(module) for module in replaced)
    assert library.causal_conv1d_update is before
    assert not any("forward" in vars(module) for module in replaced)


def test_a_session_beside_it_keeps_the_library(called):
    """Functions of a module are replaced for the layers of fast sessions only."""
    model = copy_of("nemotron_h")
    with ReplaySession(Adapter(copy.deepcopy(model), fast=True), [GROUP]):
        decoded(Adapter(model))
    assert not called


def test_what_is_refused(monkeypatch):
    model = copy_of("qwen3_5")
    with pytest.raises(ValueError, match="fast or invariant, not both"):
        Adapter(model, fast=True, invariant=True)
    spread = Adapter(model, fast=True)
    spread.devices = (torch.device(DEVICE), torch.device("cuda:1"))
    with pytest.raises(UnsupportedInputError, match="it is spread over .*, cuda:1; they need a si"):
        decoded(spread)
    monkeypatch.setattr(capability, "_interpreted", lambda: False)
    if DEVICE == "cpu":
        with pytest.raises(UnsupportedInputError, match="cannot be run by kernels: the device is"):
            decoded(Adapter(model, fast=True))
