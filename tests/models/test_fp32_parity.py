"""The FP32 policy against the unpatched model, for a tiny model of every architecture.

The oracle is the unpatched model's forward over the whole sequence, without a cache: it is the same
in prefill and decode. Differences are taken relative to the standard deviation of the logits. Two
FP32 evaluations of these models in different summation orders (transformers against itself, one
token at a time) already differ by up to 1e-5, zamba2 by 2e-5: its shared attention block is applied
to twice the width.
"""

import pytest
import torch
from tiny_models import TINY_ARCHITECTURES, random_tokens, tiny_config

from replayssm.engine.stream import Stream
from replayssm.models import Adapter, ReplaySession, RowGroup
from replayssm.policy import parse_policy

# FP32 rounding, amplified by at most five layers; a wrong decay, shift or gate is off by 1e-2 or
# more.
TOLERANCE = 1e-4
PROMPT, LENGTH = 9, 41


def groups(policy: str, rows: int = 2) -> list[RowGroup]:
    ids = tuple(range(rows))
    return [RowGroup(policy=parse_policy(policy), sequences=ids, seeds=(0,) * rows)]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.dtype == torch.float32
    return float((got - want).abs().max() / want.std())


@pytest.fixture
def case(request, tiny_model):
    model = tiny_model(request.param)
    tokens = random_tokens(2, LENGTH)
    with torch.inference_mode():
        return Adapter(model), tokens, model(tokens).logits


@pytest.mark.parametrize("case", TINY_ARCHITECTURES, indirect=True)
def test_full_sequence(case):
    adapter, tokens, want = case
    session = ReplaySession(adapter, groups("fp32"))
    with torch.inference_mode(), session:
        got = adapter.forward(tokens, adapter.new_cache(), start=0)
    assert relative_error(got, want) < TOLERANCE


@pytest.mark.parametrize(
    "policy, steps",
    [
        ("fp32@16", [1] * 32),
        ("fp32@16", [16, 16]),
        ("fp32@1", [1] * 8),  # the conventional token recurrence
        ("fp32@1", [16, 16]),
        ("fp32@5", [3, 16, 1, 12]),
    ],
    ids=["L16-tokens", "L16-windows", "L1-tokens", "L1-windows", "L5-mixed"],
)
@pytest.mark.parametrize("case", TINY_ARCHITECTURES, indirect=True)
def test_prefill_then_decode(case, policy, steps):
    adapter, tokens, want = case
    with torch.inference_mode():
        stream = Stream(adapter, groups(policy), source=[0, 1], capacity=LENGTH)
        parts = [stream.prefill(tokens[:, :PROMPT])[:, None]]
        stream.hand_over()
        for step in steps:
            parts.append(stream.step(tokens[:, stream.position : stream.position + step]))
    got = torch.cat(parts, dim=1)
    assert relative_error(got, want[:, PROMPT - 1 : PROMPT + sum(steps)]) < TOLERANCE


@pytest.mark.parametrize("case", TINY_ARCHITECTURES, indirect=True)
def test_unpatched_cached_decode(case):
    """The library's own token-by-token decode, where its missing clamp plays no role."""
    adapter, tokens, _ = case
    for layer in adapter.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (0.0, float("inf"))
    with torch.inference_mode():
        cache, parts = adapter.new_cache(), []
        for start, stop in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, PROMPT + 6))]:
            parts.append(adapter.forward(tokens[:, start:stop], cache, start=start))
        stream = Stream(adapter, groups("fp32"), source=[0, 1], capacity=LENGTH)
        got = [stream.prefill(tokens[:, :PROMPT])]
        stream.hand_over()
        got += [stream.step(tokens[:, i : i + 1])[:, 0] for i in range(PROMPT, PROMPT + 6)]
    want = torch.cat(parts, dim=1)[:, PROMPT - 1 :]
    assert relative_error(torch.stack(got, dim=1), want) < TOLERANCE


@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_step_size_clamp_holds_at_every_token(name, tiny_model):
    """Where step sizes fall below time_step_min, decode agrees with the full sequence.

    The library clamps only where it runs several tokens at once; its own decode is off by 1e-2
    here.
    """
    model = tiny_model(name)
    adapter = Adapter(model)
    for layer in adapter.layers:
        layer.mixer.time_step_limit = (0.1, float("inf"))
    tokens = random_tokens(2, 30)
    with torch.inference_mode():
        want = model(tokens).logits
        stream = Stream(adapter, groups("fp32"), source=[0, 1], capacity=30)
        stream.prefill(tokens[:, :PROMPT])
        stream.hand_over()
        ours = torch.cat([stream.step(tokens[:, i : i + 1]) for i in range(PROMPT, 30)], dim=1)
        cache = adapter.new_cache()
        adapter.forward(tokens[:, :PROMPT], cache, start=0)
        theirs = [adapter.forward(tokens[:, i : i + 1], cache, start=i) for i in range(PROMPT, 30)]
    assert relative_error(ours, want[:, PROMPT:]) < TOLERANCE
    assert relative_error(torch.cat(theirs, dim=1), want[:, PROMPT:]) > 1e-2


def test_falcon_with_norm():
    """falcon_h1 gates inside the one-token call without its norm (tested above) and outside with
    it.
    """
    import transformers

    config = tiny_config("falcon_h1")
    config.mamba_rms_norm = True
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    adapter, tokens = Adapter(model), random_tokens(2, 16)
    with torch.inference_mode():
        want = model(tokens).logits
        stream = Stream(adapter, groups("fp32"), source=[0, 1], capacity=16)
        stream.prefill(tokens[:, :8])
        stream.hand_over()
        got = torch.cat([stream.step(tokens[:, i : i + 1]) for i in range(8, 16)], dim=1)
    assert relative_error(got, want[:, 8:]) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "bamba"])
def test_bf16_model_gets_fp32_logits_and_state(name, tiny_model):
    """A bf16 model keeps an FP32 state and delivers unrounded FP32 logits."""
    adapter = Adapter(tiny_model(name).to(torch.bfloat16))
    tokens = random_tokens(2, 24)
    with torch.inference_mode():
        stream = Stream(adapter, groups("fp32"), source=[0, 1], capacity=24)
        stream.prefill(tokens[:, :8])
        stream.hand_over()
        logits = stream.step(tokens[:, 8:])
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
    for layer in stream.session.layer_indices:
        (state,) = stream.session.states(layer)
        assert state.dtype == torch.float32 and not torch.equal(state, state.bfloat16().float())
