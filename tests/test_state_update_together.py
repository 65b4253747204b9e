"""Policies that take their step together: the bits of each are those it has alone."""

import pytest
import torch
from recurrence_cases import (
    GEOMETRIES,
    PLAIN,
    make_cache,
    make_inputs,
    make_update,
    same_cache,
    take_rows,
    take_tokens,
)

from replayssm.formats.codec import NonFiniteStateError
from replayssm.state_update.together import company, step_together

POLICIES = ("fp32", "fp16-sr", "nvfp4", "fp32+nvfp4:update=read", "fp8-sr+nvfp4:update=read")
RECOMPUTED = ("fp16+nvfp4", "fp8-sr+fp16", "fp32+mxfp8")
STORED_RINGS = ("fp32:ring=fp8", "nvfp4:ring=fp8", "int8-sr:ring=fp8")


def make_members(recurrence, policies, *, ring_len=16, rows=2, geometry=None):
    """Updates and caches of `rows` rows each; every row has its own sequence number."""
    updates = []
    for policy in policies:
        head, *options = policy.split(":")
        label = ":".join([f"{head}@{ring_len}", *options])
        updates.append(make_update(recurrence, label, geometry))
    caches = [
        make_cache(update, rows, sequence=range(7 * i, 7 * i + rows))
        for i, update in enumerate(updates)
    ]
    return updates, caches


def rows_of(index, rows):
    return torch.arange(index * rows, (index + 1) * rows)


@pytest.mark.parametrize("recurrence", PLAIN)
@pytest.mark.parametrize("policies", [POLICIES, RECOMPUTED, STORED_RINGS])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("ring_len, tokens", [(16, 16), (16, 5), (5, 12), (32, 16)])
def test_together_equals_alone(recurrence, policies, rows, ring_len, tokens):
    updates, caches = make_members(recurrence, policies, ring_len=ring_len, rows=rows)
    assert len({company(update) for update in updates}) == 1
    alone = [cache.clone() for cache in caches]
    inputs = make_inputs(recurrence, PLAIN[recurrence], rows * len(updates), 4 * tokens)
    for start in range(0, 4 * tokens, tokens):
        part = take_tokens(inputs, start, start + tokens)
        together = step_together(updates, caches, part)
        for i, (update, cache) in enumerate(zip(updates, alone, strict=True)):
            out = update.step(cache, take_rows(part, rows_of(i, rows)))
            assert torch.equal(together[rows_of(i, rows)], out)
            assert same_cache(cache, caches[i])


def test_a_full_ring_is_flushed_before_the_first_window():
    updates, caches = make_members("mamba2", POLICIES)
    alone = [cache.clone() for cache in caches]
    inputs = make_inputs("mamba2", PLAIN["mamba2"], 2 * len(updates), 20)
    for held in (caches, alone):
        for i, (update, cache) in enumerate(zip(updates, held, strict=True)):
            update.window(cache, take_tokens(take_rows(inputs, rows_of(i, 2)), 0, 16))
            update.commit(cache, 16)
    rest = take_tokens(inputs, 16, 20)
    together = step_together(updates, caches, rest)
    for i, (update, cache) in enumerate(zip(updates, alone, strict=True)):
        assert torch.equal(
            together[rows_of(i, 2)], update.step(cache, take_rows(rest, rows_of(i, 2)))
        )
        assert same_cache(cache, caches[i])


def test_who_goes_together():
    def one(policy, name="mamba2", geometry=None):
        return company(make_update(name, policy, geometry))

    assert one("fp32") == one("nvfp4") == one("fp16+nvfp4")
    assert one("fp32") != one("fp32@32")
    assert one("fp32") != one("fp32:operand=bf16")
    assert one("fp32") != one("fp32:ring=fp8")
    # A fold that recomputes u needs more records.
    assert one("fp32", "gated_delta") != one("fp32+nvfp4", "gated_delta")
    assert one("fp32", "gated_delta") == one("fp32+nvfp4:update=read", "gated_delta")
    # Rows of odd widths have no bits of their own wherever they stand.
    assert one("fp32", *GEOMETRIES["mamba2-p5-n7"]) is None


def test_a_state_that_is_not_finite_is_refused_under_its_own_policy():
    updates, caches = make_members("mamba2", ("fp32", "fp16", "nvfp4"))
    inputs = make_inputs("mamba2", PLAIN["mamba2"], 6, 16)
    inputs.x[3, 4, 2, 0] = torch.inf  # of fp16's second row
    with pytest.raises(NonFiniteStateError, match="row 1 .*under policy fp16") as refused:
        step_together(updates, caches, inputs)
    assert (refused.value.row, refused.value.head) == (1, 2)


def test_inputs_are_checked_against_all_rows():
    updates, caches = make_members("mamba2", POLICIES)
    inputs = make_inputs("mamba2", PLAIN["mamba2"], 9, 16)
    with pytest.raises(ValueError, match="inputs have 9 rows, the cache has 10"):
        step_together(updates, caches, inputs)
