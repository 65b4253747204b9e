"""ReplayCache: copies, row selection, saving, bytes."""

import pytest
import torch
from recurrence_cases import PLAIN, make_cache, make_inputs, make_update, same_cache, take_tokens

from replayssm.policy import StateGeometry, parse_policy

POLICIES = ["fp32", "fp16-sr", "fp8+nvfp4", "nvfp4:ring=fp8", "mxfp8+fp16:ring=bf16"]


def used_cache(recurrence, policy, rows=3):
    """A cache in mid-ring, its rows at different cursors."""
    update = make_update(recurrence, policy)
    inputs = make_inputs(recurrence, PLAIN[recurrence], rows, 30)
    cache = make_cache(update, rows, sequence=range(10, 10 + rows))
    update.step(cache, take_tokens(inputs, 0, 20))
    update.window(cache, take_tokens(inputs, 20, 24))
    update.commit(cache, torch.arange(rows) % 4)
    return update, cache, inputs


@pytest.mark.parametrize("recurrence", PLAIN)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_clone_shares_nothing_and_goes_on_alike(recurrence, policy):
    update, cache, inputs = used_cache(recurrence, policy)
    copy = cache.clone()
    assert same_cache(copy, cache)
    mine, theirs = cache.state_dict(), copy.state_dict()
    for name, tensor in mine.items():
        if tensor.dim() and not name.startswith("parameters."):
            assert tensor.data_ptr() != theirs[name].data_ptr(), name
    frozen = copy.clone()
    update.step(cache, take_tokens(inputs, 24, 30))
    assert same_cache(copy, frozen), "the original moved the clone"
    update.step(copy, take_tokens(inputs, 24, 30))
    assert same_cache(copy, cache)


@pytest.mark.parametrize("recurrence", PLAIN)
@pytest.mark.parametrize("policy", POLICIES)
def test_selected_rows_can_be_put_back(recurrence, policy):
    _, cache, _ = used_cache(recurrence, policy)
    rows = torch.tensor([2, 0])
    part = cache.select(rows)
    assert part.batch == 2 and part.sequence.tolist() == [12, 10]
    assert part.pos.tolist() == cache.pos[rows].tolist()
    assert same_cache(part.select(torch.tensor([1, 0])), cache.select(torch.tensor([0, 2])))
    other = make_cache(make_update(recurrence, policy), 3, state=None, seed=9)
    other.assign(torch.tensor([1, 2]), part)
    assert same_cache(other.select(torch.tensor([1, 2])), part)
    assert other.seed.tolist() == [9, 5, 5]


def test_cursor_is_one_number_only_if_all_rows_agree():
    _, cache, _ = used_cache("mamba2", "fp32")
    assert torch.equal(cache.cursor, cache.pos)
    assert cache.select(torch.tensor([1, 1])).cursor == int(cache.pos[1])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_of_another_shape_or_policy_is_refused(policy):
    _, cache, _ = used_cache("gated_delta", policy)
    saved = {name: tensor.clone() for name, tensor in cache.state_dict().items()}
    smaller = make_cache(make_update("gated_delta", policy), 2)
    untouched = smaller.clone()
    with pytest.raises(
        ValueError, match=r"saved pos is torch.int64 \[3\].*holds torch.int64 \[2\]"
    ):
        smaller.load_state_dict(saved)
    assert same_cache(smaller, untouched)
    separate = make_cache(make_update("gated_delta", "bf16+bf16"), 3)
    with pytest.raises(ValueError, match="saved"):
        separate.load_state_dict(saved)
    saved.pop("ring.u")
    with pytest.raises(ValueError, match="ring.u"):
        cache.load_state_dict(saved)


@pytest.mark.parametrize("recurrence", PLAIN)
@pytest.mark.parametrize("policy", ["fp32", "fp16", "fp8-sr", "nvfp4", "fp32+nvfp4", "mxfp4+fp8"])
def test_bytes_are_those_the_policy_predicts(recurrence, policy):
    """Stored parts match the policy's byte model, ring included, for bf16 inputs."""
    policy = parse_policy(policy)
    update = make_update(recurrence, policy)
    heads, rows, cols = update.geometry.state_shape
    geometry = StateGeometry(
        recurrence=recurrence, heads=heads, rows=rows, cols=cols, key_groups=2, input_bytes=2
    )
    held = make_cache(update, 5, dtype=torch.bfloat16).bytes()
    elements = 5 * heads * rows * cols
    stored = held["checkpoint"] + held["read_copy"]
    assert stored == policy.bytes_per_state_element(geometry) * elements
    assert (held["read_copy"] > 0) == (policy.read_copy is not None)
    record = sum(policy._record_bytes(geometry))
    assert held["ring"] == 5 * policy.ring_len * record
    assert held["cursors"] == 6 * 5 * 8
