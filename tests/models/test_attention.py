"""The attention used under a session, and the limits that make equal rows equal bits."""

from types import SimpleNamespace

import pytest
import torch
from interpreter import needs_interpreter
from tiny_models import random_tokens

from replayssm.models import Adapter, ReplaySession, RowGroup, attention
from replayssm.models.attention import NAME, attend, note_rows, shared_key_attention
from replayssm.models.errors import UnsupportedInputError
from replayssm.models.kv_cache import RowCursor, RowLayer
from replayssm.models.threads import MOST_THREADS, few_threads
from replayssm.policy import parse_policy


def naive(query, key, value, mask, scale):
    """Float64 softmax attention with the keys repeated for every query head."""
    shared = query.shape[1] // key.shape[1]
    query, key, value = (t.double() for t in (query, key, value))
    key, value = (t.repeat_interleave(shared, dim=1) for t in (key, value))
    scores = query @ key.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("tokens", [1, 3, 16, 40])
def test_attend_equals_float64(heads, tokens):
    keys = 40
    query = torch.randn(3, heads[0], tokens, 16)
    key, value = torch.randn(2, 3, heads[1], keys, 16)
    mask = torch.ones(1, 1, tokens, keys, dtype=torch.bool).tril(keys - tokens)
    got, weights = attend(None, query, key, value, mask, scaling=0.3)
    assert weights is None and got.is_contiguous()
    assert torch.allclose(got.double(), naive(query, key, value, mask, 0.3), atol=1e-5)
    if tokens == 1:
        unmasked, _ = attend(None, query, key, value, None, scaling=0.3)
        assert torch.allclose(unmasked, got, atol=1e-6)


@pytest.mark.parametrize("kernel", [False, True])
def test_rows_of_different_lengths(kernel, monkeypatch):
    """Each over its own keys; what lies beyond is not even looked at."""
    if kernel:
        needs_interpreter()
        monkeypatch.setattr(attention, "runs_kernel", lambda device: True)
    cursor = RowCursor(3, torch.device("cpu"))
    layer = RowLayer(40, cursor)
    held = torch.randn(2, 3, 2, 20, 16)
    layer.set(*held)
    for storage in layer.storage:
        storage[..., 20:, :] = float("nan")
    lengths = [4, 20, 11]
    cursor.past.copy_(torch.tensor(lengths))
    cursor.tokens = 20
    new = torch.randn(2, 3, 2, 1, 16)
    query = torch.randn(3, 4, 1, 16)
    got, _ = attend(None, query, *layer.update(*new), None, scaling=0.3)
    for row, length in enumerate(lengths):
        keys, values = (
            torch.cat([old[row : row + 1, :, :length], fresh[row : row + 1]], dim=2)
            for old, fresh in zip(held, new, strict=True)
        )
        want = naive(query[row : row + 1], keys, values, None, 0.3)
        assert torch.allclose(got[row : row + 1].double(), want, atol=1e-5)


def test_layers_on_another_device_get_a_copy_of_where_rows_stand():
    cursor = RowCursor(3, torch.device("cpu"))
    assert cursor.on(torch.device("cpu")) is cursor.past, "a graph must see it move"
    assert cursor.on(torch.device("meta")).device.type == "meta"


def test_what_is_noted_is_for_one_call():
    cursor = RowCursor(1, torch.device("cpu"))
    q = torch.randn(1, 1, 1, 16)
    note_rows(cursor)
    first, _ = attend(None, q, torch.cat([q, q], 2), torch.cat([q, 2 * q], 2), None)
    second, _ = attend(None, q, torch.cat([q, q], 2), torch.cat([q, 2 * q], 2), None)
    assert torch.equal(first, q) and not torch.equal(second, q)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "kimi_linear"])
def test_lockstep_by_kernel(name, tiny_model, monkeypatch):
    """What runs on a GPU, in the interpreter: the same numbers, and equal rows bit for bit."""
    needs_interpreter()
    from replayssm.engine.lockstep import Arm, Lockstep

    arms = [
        Arm(label="reference", policy=parse_policy("fp32@4"), kind="reference"),
        Arm(label="coarse", policy=parse_policy("nvfp4@4")),
        Arm(label="twin", policy=parse_policy("fp32@4")),
    ]
    text = random_tokens(2, 21)
    runs = []
    for kernel in (False, True):
        if kernel:
            monkeypatch.setattr(attention, "runs_kernel", lambda device: True)
        engine = Lockstep(Adapter(tiny_model(name)), arms, window=4)
        engine.start(text[:, :9], tokens=12)
        runs.append(torch.cat([w.logits.clone() for w in engine.read(text[:, 9:])], dim=2))
    cpu, kernel = runs
    assert torch.equal(kernel[0], kernel[2])
    assert torch.allclose(kernel[0], cpu[0], atol=1e-4 * float(cpu.std()))


def test_what_it_does_not_compute_is_refused():
    q = torch.randn(1, 1, 1, 16)
    with pytest.raises(UnsupportedInputError, match="softcap"):
        attend(None, q, q, q, None, softcap=30.0)


def test_another_choice_of_attention_is_kept():
    for chosen, inside in [("sdpa", NAME), ("eager", "eager")]:
        config = SimpleNamespace(_attn_implementation=chosen)
        with pytest.raises(KeyError), shared_key_attention(config):
            assert config._attn_implementation == inside
            raise KeyError
        assert config._attn_implementation == chosen


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_few_threads_inside_and_as_before_outside(four_threads, tiny_model):
    adapter, seen = Adapter(tiny_model("mamba2")), []
    handle = adapter.model.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    session = ReplaySession(
        adapter, [RowGroup(policy=parse_policy("fp32"), sequences=(0,), seeds=(0,))]
    )
    with torch.inference_mode(), session:
        adapter.forward(random_tokens(1, 4), adapter.new_cache(), start=0)
    handle.remove()
    assert seen == [MOST_THREADS] and torch.get_num_threads() == 4
    with few_threads(torch.device("cuda")):
        assert torch.get_num_threads() == 4


def test_equal_rows_get_equal_bits_whatever_the_threads(four_threads):
    """Attention of one token in 16 rows, and an activation, on two threads."""
    query = torch.randn(1, 4, 1, 64).repeat(16, 1, 1, 1)
    key, value = torch.randn(2, 1, 1, 96, 64).repeat(1, 16, 1, 1, 1)
    with few_threads(query.device):
        out, _ = attend(None, query, key, value, None)
        gate = torch.nn.functional.silu(torch.randn(1, 16, 831 + 1).repeat(7 * 8, 1, 1))
    assert (out == out[0]).all() and (gate == gate[0]).all()
