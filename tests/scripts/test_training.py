"""The training code of the built-in models: equal to transformers' own modules, and its parts to
plain formulas."""

import sys
from pathlib import Path
from random import Random

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from training import data, export, sources  # noqa: E402
from training.blocks import AffineScan, DecayScan, UnitLowerInverse  # noqa: E402
from training.optimizer import Optimizer, orthogonalize  # noqa: E402

from replayssm.study import corpus  # noqa: E402

SMALL = {
    "gdn": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "layers": 4,
        "num_k_heads": 2,
        "num_v_heads": 4,
        "head_k_dim": 32,
        "head_v_dim": 32,
        "attention_heads": 2,
        "attention_head_dim": 32,
    },
    "mamba2": {"hidden_size": 64, "layers": 3, "head_dim": 32, "state_size": 32},
}


def perturbed(name: str, seed: int = 0, **sizes):
    """A small model whose every parameter differs from its initial value (so that
    zero-initialised ones matter)."""
    torch.manual_seed(seed)
    model = export.build(name, **SMALL[name] | sizes)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


@pytest.mark.parametrize(
    ("name", "sizes"), [("gdn", {}), ("mamba2", {}), ("mamba2", {"groups": 2})]
)
def test_exported_model_gives_the_same_logits_in_transformers(name, sizes, tmp_path):
    from transformers import AutoModelForCausalLM

    model = perturbed(name, **sizes)
    export.save(model, tmp_path, torch.float32)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(other).__name__ == model.config.hugging_face()["architectures"][0]
    ids = torch.randint(0, 2048, (2, 192), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, _ = model(ids, model.new_states(2, "cpu"))
        theirs = other(ids, use_cache=False).logits
    assert (ours - theirs).abs().max() <= 1e-4
    assert theirs.std() > 0.1


@pytest.mark.parametrize("name", ["gdn", "mamba2"])
def test_token_steps_equal_the_chunk_form(name):
    model = perturbed(name)
    ids = torch.randint(0, 2048, (3, 128), generator=torch.Generator().manual_seed(2))
    cache = model.new_cache(3, 128, "cpu")
    with torch.no_grad():
        whole, _ = model(ids, model.new_states(3, "cpu"))
        steps = torch.stack(
            [model.step(ids[:, t], torch.tensor([t]), cache) for t in range(128)], dim=1
        )
    assert (whole - steps).abs().max() <= 1e-4


def test_mamba2_states_carry_over():
    """Without a convolution (its history is not carried between rows), two halves equal the
    whole."""
    model = perturbed("mamba2", conv_width=1)
    ids = torch.randint(0, 2048, (2, 256), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        whole, final = model(ids, model.new_states(2, "cpu"))
        _, middle = model(ids[:, :128], model.new_states(2, "cpu"))
        second, end = model(ids[:, 128:], middle)
    assert (whole[:, 128:] - second).abs().max() <= 1e-4
    for a, b in zip(final, end, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_own_backward_passes():
    torch.manual_seed(0)
    a = torch.randn(2, 8, 8, dtype=torch.float64).tril(-1).requires_grad_()
    expected = torch.linalg.inv(torch.eye(8, dtype=torch.float64) - a.detach())
    torch.testing.assert_close(UnitLowerInverse.apply(a), expected)
    assert torch.autograd.gradcheck(lambda x: UnitLowerInverse.apply(x.tril(-1)), (a,))
    m = torch.randn(3, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    n = torch.randn(3, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    start = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(AffineScan.apply, (m, n, start))
    decay = torch.rand(3, 2, 2, dtype=torch.float64, requires_grad=True)
    added = torch.randn(3, 2, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    start = torch.randn(2, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(DecayScan.apply, (decay, added, start))


def test_inverse_is_stable_for_equal_keys():
    """All keys equal and beta 1: the inverse is 1 on the diagonal, -1 below it; products of
    powers would lose it."""
    a = -torch.ones(64, 64).tril(-1)
    expected = torch.eye(64) - torch.diag(torch.ones(63), -1)
    torch.testing.assert_close(UnitLowerInverse.apply(a), expected)


def test_optimizer_lowers_the_loss_and_ignores_non_finite_gradients():
    model = perturbed("mamba2", layers=1)
    optimizer = Optimizer(model)
    optimizer.learning_rate.fill_(3e-3)
    ids = torch.randint(0, 50, (2, 65), generator=torch.Generator().manual_seed(4))
    losses = []
    for _ in range(12):
        logits, _ = model(ids[:, :-1], model.new_states(2, "cpu"))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.5
    before = [p.detach().clone() for p in model.parameters()]
    model.zero_grad()
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert (
        max((a - b).abs().max().item() for a, b in zip(before, model.parameters(), strict=True))
        < 0.1
    )


def test_orthogonalize_gives_near_unit_singular_values():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(2, 48, 32)).float())
    assert 0.5 < values.min() and values.max() < 1.4


@pytest.fixture(scope="module")
def tokenizer():
    rng = Random(0)
    lines = [
        line
        for _ in range(4000)
        for f in corpus.sample_facts(rng, 1)
        for line in (f.statement, f.question)
    ]
    return sources.train_tokenizer(
        lines + [corpus.heldout_english()] + [sources.drill(rng) for _ in range(50)]
    )


def test_rows_hold_answers_with_extra_weight_and_nothing_is_asked_before_it_is_stated(tokenizer):
    english = data.plain_pool(tokenizer, [corpus.heldout_english()]).tokens
    problems = data.problem_pool(tokenizer, list(corpus.heldout_problems()[:50]))
    pools = {
        "gsm": problems,
        "gsm8k": problems,
        "drill": data.plain_pool(tokenizer, [sources.drill(Random(1))]),
    }
    builder = data.RowBuilder(tokenizer, pools, english)
    ids, weights = builder.row("x", 1.0)
    again, _ = builder.row("x", 1.0)
    assert (ids == again).all() and len(ids) == len(weights) == data.ROW + 1
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    stated, asked = {}, 0
    for document in text.split(corpus.END_OF_DOCUMENT)[:-1]:
        for line in document.split("\n"):
            verb, _, rest = line.partition(": ")
            stem, _, value = rest.rpartition(" ")
            if verb == "Remember":
                stated[stem] = value
            elif verb == "Recall":
                asked += 1
                assert stated[stem] == value
    assert asked >= 10
    # one token for an item; a space and two digits for a number
    assert asked <= (weights == data.ANSWER_WEIGHT).sum() <= 3 * asked + 3


def test_digits_are_single_tokens(tokenizer):
    assert tokenizer.decode(tokenizer.encode("x = 12345.").ids) == "x = 12345."
    assert len(tokenizer.encode("12345").ids) == 5
    assert tokenizer.token_to_id(corpus.END_OF_DOCUMENT) == 0


def test_sources():
    rng = Random(3)
    for line in (line for _ in range(200) for line in sources.drill(rng).split("\n")):
        left, right = line.split(" = ")
        assert eval(left.replace("x", "*")) == pytest.approx(float(right)), (
            line
        )  # our own sums, not input
    head, tail = sources.split_shakespeare("a\n\n" * sources.SHAKESPEARE_HELDOUT_CHARS)
    assert head.endswith("\n\n") and 0 < len(tail) <= sources.SHAKESPEARE_HELDOUT_CHARS
