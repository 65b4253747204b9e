"""The registered operators: schema, fake implementation, and the launchers' results."""

import pytest
import torch
from interpreter import DEVICE, KERNEL_MARKS
from recurrence_cases import TINY, make_cache, make_inputs, make_update, same_cache, take_tokens

from replayssm.ops.triton_operators import OPERATORS, spelled
from replayssm.policy import PRESETS, PrecisionPolicy, parse_policy

pytestmark = KERNEL_MARKS


def arguments(recurrence, policy, tokens, filled):
    """A used cache's tensors and inputs, as operators take them."""
    update = make_update(recurrence, policy, TINY[recurrence], backend="reference", device=DEVICE)
    inputs = make_inputs(recurrence, TINY[recurrence], 2, filled + tokens)
    inputs = type(inputs)(*(t.to(DEVICE) for t in inputs))
    cache = make_cache(update, 2)
    update.window(cache, take_tokens(inputs, 0, filled))
    update.commit(cache, filled)
    return cache, list(take_tokens(inputs, filled, filled + tokens))


@pytest.mark.parametrize("policy", PRESETS)
def test_a_policy_survives_its_spelling(policy):
    import json

    assert PrecisionPolicy.from_dict(json.loads(spelled(PRESETS[policy]))) == PRESETS[policy]


@pytest.mark.parametrize("recurrence", OPERATORS)
@pytest.mark.parametrize("kernel", ["decode", "window", "step", "flush"])
@pytest.mark.parametrize("policy", ["fp16-sr@4", "fp32+fp16@4:update=read"])
def test_opcheck(recurrence, kernel, policy):
    """What an operator writes is what its schema says, and its fake has the right outputs."""
    tokens = 2 if kernel == "window" else 1
    cache, inputs = arguments(recurrence, policy, tokens, 2 if kernel == "window" else 3)
    mine, text = cache.kernel_arguments, spelled(parse_policy(policy))
    if kernel in ("decode", "window"):
        read = mine["read_copy"] or mine["checkpoint"]
        given = (read, mine["ring"], mine["cursors"], inputs, text)
    elif kernel == "step":
        given = (*(mine[k] for k in mine), inputs, text, 3)
    else:
        rows = torch.tensor([True, False], device=DEVICE)
        given = (*(mine[k] for k in mine), cache.parameters.get("A"), rows, text, 3)
    operator = getattr(OPERATORS[recurrence], kernel)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, given, test_utils=tests)


@pytest.mark.parametrize("recurrence", OPERATORS)
def test_torch_compile_takes_an_operator_whole(recurrence):
    """No graph break, the same bits, and what is written in place is written."""
    cache, inputs = arguments(recurrence, "fp16-sr@4", 1, 3)
    other, text = cache.clone(), spelled(parse_policy("fp16-sr@4"))
    operator = OPERATORS[recurrence].step

    def call(tensors, inputs):
        return 2 * operator(*tensors, inputs, text, 3)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got = compiled(list(cache.kernel_arguments.values()), inputs)
    assert torch.equal(got, call(list(other.kernel_arguments.values()), inputs))
    assert same_cache(cache, other) and other.flushes.tolist() == [2, 2]
