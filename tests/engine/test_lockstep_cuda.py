"""Lockstep on Triton kernels: the reference backend's study, at rounding level."""

import pytest
import torch

from replayssm import models
from replayssm.engine.lockstep import Arm, Lockstep
from replayssm.policy import parse_policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POLICIES = [
    *("fp32", "fp16", "fp16-sr", "fp8", "fp8-sr", "nvfp4"),
    *("fp32+nvfp4", "fp16-sr+nvfp4", "fp8-sr+nvfp4"),
]
ARMS = [
    Arm(label="reference", policy=parse_policy("fp32"), kind="reference"),
    *(Arm(label=name, policy=parse_policy(name)) for name in POLICIES),
    Arm(label="floor", policy=parse_policy("fp32@32"), kind="floor"),
    Arm(label="fault", policy=parse_policy("fp32"), kind="fault", fault=1.01),
]
TEXT = "".join(f"Question {n}: what is {n} plus {7 * n}? Answer: {8 * n}. " for n in range(40))


def drift(a, b):
    """Mean KL(a || b) of each arm, for log-probabilities [arms, prompts, tokens, vocabulary]."""
    return (a.exp() * (a - b)).sum(-1).mean((1, 2))


@pytest.mark.parametrize("model", ["builtin/gdn", "builtin/mamba2"])
def test_both_backends_measure_the_same(model):
    loaded = models.load(model, device="cuda")
    ids = loaded.tokenizer.encode(TEXT, add_special_tokens=False)
    prompts = torch.tensor([ids[:96], ids[96:192]])
    found = {}
    for backend in ("reference", "triton"):
        engine = Lockstep(loaded.adapter, ARMS, backend=backend)
        engine.start(prompts[:, :32], tokens=64)
        windows = [w.logits.double().log_softmax(-1) for w in engine.read(prompts[:, 32:])]
        assert engine.backends == (backend,)
        found[backend] = torch.cat(windows, 2)
        second = found[backend][1]
        assert torch.equal(second, found[backend][0]), "a second FP32 row is the first"
    between = drift(found["reference"], found["triton"])
    own = drift(found["triton"][:1], found["triton"])
    for index, arm in enumerate(ARMS):
        exact = arm.policy.label.startswith("fp32") and arm.policy.read_copy is None
        assert between[index] < (1e-9 if exact else 1e-9 + 0.1 * own[index]), arm.label
    assert own[ARMS.index(next(a for a in ARMS if a.label == "floor"))] < 1e-9
    assert own[-1] > 1e-7, "the fault shows"
