"""Replacing functions under a model: exact, per instance, nested, restored after exceptions."""

import importlib

import pytest
import torch
from tiny_models import TINY_ARCHITECTURES, random_tokens

from replayssm.models import Adapter, HookNotLiveError, ReplaySession, RowGroup
from replayssm.models.errors import UnsupportedInputError
from replayssm.models.patching import resolved_implementation
from replayssm.policy import parse_policy


def session(adapter: Adapter) -> ReplaySession:
    group = RowGroup(policy=parse_policy("fp32"), sequences=(0, 1), seeds=(0, 0))
    return ReplaySession(adapter, [group])


def seen(active: ReplaySession) -> int:
    """Tokens that reached the session's layers."""
    (tokens,) = {tokens for tokens, _ in active.prefill_states()}
    return tokens


def snapshot(adapter: Adapter) -> tuple:
    """Everything a session may touch: the modeling module, and every instance's own attributes."""
    module = importlib.import_module(adapter.module_name)
    instances = [(name, dict(m.__dict__)) for name, m in adapter.model.named_modules()]
    return dict(module.__dict__), instances, adapter.config._attn_implementation


def logits(adapter: Adapter, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return adapter.forward(tokens, adapter.new_cache(), start=0)


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_everything_is_restored(name, tiny_model):
    adapter, tokens = Adapter(tiny_model(name)), random_tokens(2, 12)
    before, want = snapshot(adapter), logits(adapter, tokens)
    with session(adapter):
        assert snapshot(adapter) != before
        logits(adapter, tokens)
    assert snapshot(adapter) == before
    assert torch.equal(logits(adapter, tokens), want)


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_restored_after_an_exception_inside_a_layer(name, tiny_model):
    adapter, tokens = Adapter(tiny_model(name)), random_tokens(2, 12)
    before = snapshot(adapter)
    active = session(adapter)
    with pytest.raises(UnsupportedInputError, match="starts"), active:
        logits(adapter, tokens)
        logits(adapter, tokens)  # a fresh cache under a session that has seen tokens
    assert snapshot(adapter) == before
    with session(adapter):
        logits(adapter, tokens)
    assert snapshot(adapter) == before


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_other_instances_are_untouched(name, tiny_model):
    mine, other, tokens = Adapter(tiny_model(name)), Adapter(tiny_model(name)), random_tokens(2, 12)
    want = logits(other, tokens)
    with session(mine) as active:
        assert torch.equal(logits(other, tokens), want)
        assert seen(active) == 0
        logits(mine, tokens)
        assert seen(active) == 12


def test_nested_sessions_on_the_same_and_on_other_models(tiny_model):
    adapter, other = Adapter(tiny_model("mamba2")), Adapter(tiny_model("mamba2"))
    third, tokens = Adapter(tiny_model("qwen3_5")), random_tokens(2, 12)
    before = snapshot(adapter), snapshot(other), snapshot(third)
    with session(adapter) as outer:
        inside = snapshot(adapter)
        with session(adapter) as inner, session(other) as beside, session(third) as unlike:
            logits(adapter, tokens)
            assert (seen(outer), seen(inner), seen(beside), seen(unlike)) == (0, 12, 0, 0)
            logits(other, tokens)
            logits(third, tokens)
            assert (seen(outer), seen(inner), seen(beside), seen(unlike)) == (0, 12, 12, 12)
        assert snapshot(adapter) == inside
        logits(adapter, tokens)
        assert (seen(outer), seen(inner)) == (12, 12)
    assert (snapshot(adapter), snapshot(other), snapshot(third)) == before


def test_a_session_cannot_be_entered_twice_at_once_but_many_times_in_turn(tiny_model):
    adapter = Adapter(tiny_model("mamba2"))
    active = session(adapter)
    with active, pytest.raises(RuntimeError, match="already active"), active:
        pass
    with active:
        logits(adapter, random_tokens(2, 3))


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_a_layer_that_bypasses_us_is_an_error(name, tiny_model):
    """A kernel that replaces a whole layer must not run silently under a policy."""
    adapter = Adapter(tiny_model(name))
    mixer = adapter.layers[0].mixer

    def whole_layer_kernel(hidden_states, cache=None, attention_mask=None, **kwargs):
        return hidden_states

    mixer.forward = whole_layer_kernel
    with pytest.raises(HookNotLiveError, match="0 times"), session(adapter):
        logits(adapter, random_tokens(2, 3))
    assert mixer.__dict__["forward"] is whole_layer_kernel


def test_a_resolved_kernel_is_bypassed_and_reported(tiny_model, monkeypatch):
    """Whatever the library would have run instead of its torch code never runs under a session."""
    adapter = Adapter(tiny_model("mamba2"))
    module = importlib.import_module(adapter.module_name)

    def foreign_kernel(*args, **kwargs):
        raise AssertionError("the library's kernel ran under a session")

    monkeypatch.setattr(module, "mamba2_chunk_scan", foreign_kernel)
    with session(adapter) as active:
        logits(adapter, random_tokens(2, 3))
    assert "foreign_kernel" in active.replaced["mamba2_chunk_scan"]
    assert module.mamba2_chunk_scan is foreign_kernel


def test_resolved_implementation_looks_through_the_decorator():
    def kernel():
        pass

    def decorate(implementation):
        return lambda: implementation()

    assert resolved_implementation(decorate(kernel)).endswith("kernel")
    assert resolved_implementation(kernel).endswith("kernel")


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_padding_is_refused(name, tiny_model):
    adapter, tokens = Adapter(tiny_model(name)), random_tokens(2, 8)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with (
        torch.inference_mode(),
        pytest.raises(UnsupportedInputError, match="padding"),
        session(adapter),
    ):
        adapter.model(input_ids=tokens, attention_mask=mask, use_cache=True)


def test_training_mode_is_refused(tiny_model):
    adapter = Adapter(tiny_model("mamba2").train())
    with pytest.raises(UnsupportedInputError, match="eval"), session(adapter):
        pass
