"""One order of sums: a row's bits do not depend on how many are computed beside it."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import random_tokens, tiny_config, tiny_model

from replayssm.engine.stream import Stream
from replayssm.models import Adapter
from replayssm.models.errors import UnsupportedInputError
from replayssm.models.invariance import invariant_order
from replayssm.models.session import RowGroup
from replayssm.policy import parse_policy

CPU = torch.device("cpu")
WEIGHT, BIAS = torch.randn(70, 96), torch.randn(70)
OPERATIONS = {
    "linear": lambda x: F.linear(x, WEIGHT[:, : x.shape[-1]]),
    "linear with a bias": lambda x: F.linear(x, WEIGHT[:, : x.shape[-1]], BIAS),
    "sigmoid": torch.sigmoid,
    "sigmoid, a method": lambda x: x.sigmoid(),
    "silu": F.silu,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "mean, by name": lambda x: torch.mean(x, dim=[-1]),
    "sum": lambda x: x.sum(dim=-1, keepdim=True),
    "sum, a function": lambda x: torch.sum(x, -1),
    "softmax": lambda x: x.softmax(-1),
}


def differing(operation, width):
    """Share of elements that differ between all rows together and other groups of them."""
    x = 3 * torch.randn(2, 37, width)
    whole, shares = operation(x), []
    for rows in (1, 2, 3, 5, 9):
        parts = [operation(part.clone()) for part in x.split(rows, dim=1)]
        shares.append(float((torch.cat(parts, 1) != whole).float().mean()))
    for row in range(2):
        shares.append(float((operation(x[row : row + 1].clone()) != whole[row]).float().mean()))
    return max(shares)


@pytest.mark.parametrize("width", [3, 10, 16, 64, 96])
@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_do_not_depend_on_each_other(name, width):
    operation = OPERATIONS[name]
    with invariant_order(tiny_config("qwen3_5"), CPU):
        assert differing(operation, width) == 0.0
        x = torch.randn(2, 3, width)
        inside = operation(x)
    torch.testing.assert_close(inside, operation(x), rtol=1e-5, atol=1e-5)
    assert inside.shape == operation(x).shape


def test_without_it_they_do():
    assert differing(OPERATIONS["linear"], 96) > 0.1
    assert differing(OPERATIONS["softplus"], 10) > 0.0


@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize("width", [16, 64])
def test_attention_sees_its_own_keys(width, shared):
    """Queries of `shared` heads over one head's keys; the tokens of a window, and one by one."""
    tokens, past = 5, 30
    query = torch.randn(2, 2, shared, tokens, width)
    key, value = torch.randn(2, 2, 2, past + tokens, width)
    mask = torch.ones(tokens, past + tokens, dtype=torch.bool).tril(past)
    attend = F.scaled_dot_product_attention

    def window():
        queries = query.reshape(2, 2, shared * tokens, width)
        out = attend(queries, key, value, attn_mask=mask.repeat(shared, 1)[None, None], scale=0.2)
        return out.view(query.shape)

    outside = window()
    with invariant_order(tiny_config("qwen3_5"), CPU):
        together = window()
        for row in range(2):
            for t in range(tokens):
                k, v = (x[row : row + 1, :, : past + t + 1].clone() for x in (key, value))
                alone = attend(query[row : row + 1, :, :, t], k, v, scale=0.2)
                assert torch.equal(alone[0], together[row, :, :, t])
    torch.testing.assert_close(together, outside)


def test_it_ends_with_the_session():
    model = tiny_model("qwen3_5_moe")
    adapter = Adapter(model, invariant=True)
    experts = adapter.config._experts_implementation
    group = RowGroup(policy=parse_policy("fp32"), sequences=(0,), seeds=(0,))
    stream = Stream(adapter, [group], source=[0], capacity=9)
    with torch.inference_mode():
        stream.prefill(random_tokens(1, 5))
    assert adapter.config._experts_implementation == experts
    assert differing(OPERATIONS["linear"], 96) > 0.1


def test_only_on_the_cpu():
    with (
        pytest.raises(UnsupportedInputError, match="is on meta: .* on the CPU only"),
        invariant_order(tiny_config("qwen3_5"), torch.device("meta")),
    ):
        pass
