"""A session whose recurrent layers run on Triton kernels, under a whole model.

Runs in Triton's interpreter without a GPU, compiled with one (`pytest -m gpu`).
"""

import pytest
import torch
from interpreter import DEVICE, KERNEL_MARKS, TRITON
from tiny_models import random_tokens

from replayssm.engine.stream import Stream
from replayssm.formats.codec import NonFiniteStateError
from replayssm.models import Adapter, RowGroup
from replayssm.models.session import describe_backends
from replayssm.policy import parse_policy

pytestmark = KERNEL_MARKS


def group(policy, *ids, factor=1.0):
    return RowGroup(
        policy=parse_policy(policy), sequences=ids, seeds=(0,) * len(ids), log_decay_factor=factor
    )


def decoding(adapter, groups, tokens, backend, prompt=5):
    """A stream that has read `prompt` tokens of each row and was handed over."""
    source = [row for g in groups for row in range(g.rows)]
    stream = Stream(adapter, groups, source=source, capacity=tokens.shape[1], backend=backend)
    stream.prefill(tokens[:, :prompt])
    stream.hand_over()
    return stream, tokens[source].to(DEVICE)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])
@torch.inference_mode()
def test_both_backends_give_the_same_logits(name, tiny_model):
    """Groups with other policies and a fault; single tokens, and windows across flushes."""
    adapter, tokens = Adapter(tiny_model(name).to(DEVICE)), random_tokens(1, 10)
    groups = [group("fp32@4", 0), group("fp16-sr+nvfp4@3", 0), group("fp32@4", 0, factor=1.01)]
    logits = {}
    for backend in ("reference", "triton"):
        stream, rows = decoding(adapter, groups, tokens, backend)
        parts = [stream.step(rows[:, a:b]).clone() for a, b in ((5, 6), (6, 10))]
        logits[backend] = torch.cat(parts, 1)
        stream.session.check_finite()
        assert stream.session.backends == (TRITON if backend == "triton" else backend,)
    difference = (logits["triton"] - logits["reference"]).abs().amax((1, 2))
    size = logits["reference"].std()
    assert difference[0] < 1e-4 * size and difference[2] < 1e-4 * size
    assert difference[1] < 0.05 * size, "a code may fall on the other side"
    fault = (logits["triton"][2] - logits["triton"][0]).abs().max()
    assert fault > 10 * difference.max(), "a fault reaches the kernels"


@torch.inference_mode()
def test_a_text_is_resumed_under_the_other_backend(tiny_model):
    adapter, tokens = Adapter(tiny_model("mamba2").to(DEVICE)), random_tokens(1, 12)
    groups = [group("fp16-sr@4", 0)]
    stream, rows = decoding(adapter, groups, tokens, "reference")
    stream.step(rows[:, 5:10])
    saved = {name: tensor.clone() for name, tensor in stream.tensors().items()}
    want = stream.step(rows[:, 10:12])
    resumed = Stream(adapter, groups, source=[0], capacity=12, backend="triton")
    resumed.load_tensors(saved)
    got = resumed.step(rows[:, 10:12])
    assert (got - want).abs().max() < 1e-4 * want.std()


@torch.inference_mode()
def test_a_non_finite_state_is_found_and_named(tiny_model):
    adapter, tokens = Adapter(tiny_model("mamba2").to(DEVICE)), random_tokens(1, 12)
    stream, rows = decoding(adapter, [group("fp32@2", 4), group("fp16@2", 4)], tokens, "triton")
    session = stream.session
    stream.step(rows[:, 5:7])
    session.check_finite()
    _, cache = session.updates(session.layer_indices[0])[1]
    cache.ring["x"].fill_(float("nan"))
    cache.advance(1)
    stream.step(rows[:, 7:8])
    with pytest.raises(NonFiniteStateError, match=r"layer \d+, row 0 \(sequence 4\).*fp16@2"):
        session.check_finite()


def test_backends_are_described_policy_by_policy(tiny_model):
    adapter = Adapter(tiny_model("qwen3_5"))
    policies = {"a": parse_policy("fp32"), "b": parse_policy("nvfp4:operand=bf16")}
    assert describe_backends(adapter, policies, backend="auto") == "reference"
    only = {"a": policies["a"]}
    assert (
        describe_backends(adapter.__class__(adapter.model.to(DEVICE)), only, backend="triton")
        == TRITON
    )
    with pytest.raises(ValueError, match="'triton' is not possible: operand bf16"):
        describe_backends(adapter, policies, backend="triton")


def test_reasons_are_told_where_auto_takes_torch_on_a_gpu(tiny_model, monkeypatch):
    monkeypatch.setattr("replayssm.ops.capability.no_device", lambda device: None)
    adapter = Adapter(tiny_model("qwen3_5"))
    policies = {"a": parse_policy("fp32"), "b": parse_policy("nvfp4:operand=bf16")}
    monkeypatch.setattr(
        "replayssm.state_update.choose_backend",
        lambda requested, *args, device, **sizes: choose_on_gpu(*args, **sizes),
    )
    told = describe_backends(adapter, policies, backend="auto")
    assert (
        told
        == f"{TRITON} for a; reference (operand bf16: the kernels keep operands exact (fp32)) for b"
    )


def choose_on_gpu(*args, **sizes):
    from replayssm.ops.capability import choose_backend

    return choose_backend("auto", *args, device=torch.device("cuda"), **sizes)
