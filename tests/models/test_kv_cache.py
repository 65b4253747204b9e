"""Appending without copying, and copying whole caches between rows."""

import pytest
import torch
from tiny_models import TINY_ARCHITECTURES, random_tokens
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from replayssm.models import Adapter
from replayssm.models.kv_cache import AppendLayer, cache_tensors, filled_cache, new_cache


@pytest.mark.parametrize("capacity", [0, 200])
def test_append_layer_equals_the_library_layer(capacity):
    ours, theirs = AppendLayer(capacity), DynamicLayer()
    for length in [5, 1, 70, 1, 16, 1, 130]:
        keys, values = torch.randn(2, 3, length, 8), torch.randn(2, 3, length, 8)
        got, want = ours.update(keys, values), theirs.update(keys, values)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(4) == theirs.get_mask_sizes(4)


def test_append_layer_does_not_copy_within_its_capacity():
    layer = AppendLayer(64)
    first, _ = layer.update(torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4))
    for _ in range(59):
        keys, _ = layer.update(torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4))
        assert keys.data_ptr() == first.data_ptr()
    keys, _ = layer.update(torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4))
    assert keys.shape[-2] == 65 and keys.data_ptr() != first.data_ptr()


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_no_library_concatenation_is_left(name, tiny_model):
    """Every full-attention layer of every architecture got the appending storage."""
    cache = Adapter(tiny_model(name)).new_cache()
    assert not any(type(layer) is DynamicLayer for layer in cache.layers)


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_filled_cache_continues_like_the_original(name, tiny_model):
    """The library's own forward, continued from a copy with its rows swapped (less the state)."""
    adapter = Adapter(tiny_model(name))
    tokens = random_tokens(2, 12)
    with torch.inference_mode():
        cache = adapter.new_cache()
        adapter.forward(tokens, cache, start=0)
        tensors = cache_tensors(cache)
        copy = filled_cache(adapter.config, tensors, rows=[1, 0, 1])
    again = cache_tensors(copy)
    assert tensors.keys() == again.keys() and tensors
    for key, tensor in tensors.items():
        assert torch.equal(again[key], tensor[[1, 0, 1]])
        assert again[key].data_ptr() != tensor.data_ptr()


def test_sliding_window_layers_stay_the_library_s_and_are_copied(tiny_model):
    config = Adapter(tiny_model("qwen3_5")).config
    config.layer_types = ["linear_attention", "sliding_attention", "full_attention"]
    config.sliding_window = 4
    cache = new_cache(config)
    assert type(cache.layers[1]) is DynamicSlidingWindowLayer
    for layer in (1, 2):
        cache.update(torch.randn(2, 2, 6, 4), torch.randn(2, 2, 6, 4), layer)
    copy = filled_cache(config, cache_tensors(cache), rows=[0, 1])
    new = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4)
    for layer in (1, 2):
        assert copy.layers[layer].get_seq_length() == 6
        got, want = copy.update(*new, layer), cache.update(*new, layer)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
