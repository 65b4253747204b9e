"""A fast adapter: the model's numbers, norms, convolutions and gates by kernels; all put back."""

import copy

import pytest
import torch
from tiny_models import TINY_ARCHITECTURES, random_tokens, tiny_model

from replayssm.engine.stream import Stream
from replayssm.models import Adapter, attention, glue, glue_layers
from replayssm.models.convolution import ConvolutionTape
from replayssm.models.errors import UnsupportedInputError
from replayssm.models.kv_cache import cache_tensors
from replayssm.models.session import ReplaySession, RowGroup
from replayssm.ops import capability
from replayssm.ops.glue import triton_gates, triton_glue, triton_layers
from replayssm.policy import parse_policy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
KERNELS = {
    triton_glue: ("rms_norm", "convolution_step", "convolution", "unit_vectors"),
    triton_gates: ("gated", "step_size", "squared_relu"),
    triton_layers: ("delta_inputs", "scan_inputs", "rotated_heads"),
}
# What the tables name for an architecture: its kernels. (On the CPU attention is the library's.)
ATTENDS = {"rotated_heads"} if DEVICE == "cuda" else set()
DELTA = {"rms_norm", "convolution", "gated", "unit_vectors", "delta_inputs", *ATTENDS}
USED = {
    "qwen3_5": DELTA,
    "qwen3_5_moe": DELTA,
    "nemotron_h": {"rms_norm", "convolution", "step_size", "squared_relu", "scan_inputs"},
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
    for module, name in ((module, name) for module, found in KERNELS.items() for name in found):
        right = getattr(module, name)

        def noted(*args, _name=name, _right=right, **kwargs):
            names.add(_name)
            return _right(*args, **kwargs)

        monkeypatch.setattr(module, name, noted)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
def test_attention_by_kernels(name, dtype, called, monkeypatch):
    """As on a GPU: no mask, norms and rotation in one kernel."""
    model = copy_of(name).to(dtype)
    monkeypatch.setattr(attention, "runs_kernel", lambda device: True)
    wanted = decoded(Adapter(model))
    got = decoded(Adapter(model, fast=True))
    assert called == USED[name] | ({"rotated_heads"} if name == "qwen3_5" else set())
    assert relative(got, wanted) < (1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
def test_a_tape_hears_of_windows(name):
    """What is rejected is wound back, though the library's update of convolutions is not called."""
    model = copy_of(name)

    def after_a_rejection(adapter):
        stream = Stream(adapter, [GROUP], source=range(2), capacity=16)
        text = random_tokens(2, 12).to(DEVICE)
        with torch.inference_mode():
            stream.prefill(text[:, :5])
            stream.hand_over()
            tape = ConvolutionTape(stream.cache, tokens=4)
            for start, tokens in ((0, 3), (3, 1)):
                tape.before(start, tokens)
                stream.step(text[:, 5 + start : 5 + start + tokens])
                tape.after(start, tokens)
            tape.keep(torch.tensor([1, 4]))
        return [t for name, t in cache_tensors(stream.cache).items() if ".conv." in name]

    wanted, got = (after_a_rejection(Adapter(model, fast=fast)) for fast in (False, True))
    assert wanted
    for a, b in zip(got, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_projections_side_by_side():
    """One product for those of the same input, of weights that are what they were; projections by
    themselves, where the weights were moved since.
    """
    model = copy_of("qwen3_5")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Adapter(model, fast=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    mixer = model.model.layers[0].linear_attn
    x = torch.randn(2, 1, 64, device=DEVICE)
    parts = (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)
    got = glue_layers.projected(x, mixer)
    assert all(part.stride(0) == sum(len(p.weight) for p in parts) for part in got)
    for part, projection in zip(got, parts, strict=True):
        assert torch.allclose(part, projection(x), atol=1e-6)
    mixer.in_proj_z.weight.data = mixer.in_proj_z.weight.data.clone()
    for part, projection in zip(glue_layers.projected(x, mixer), parts, strict=True):
        assert torch.equal(part, projection(x))


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
