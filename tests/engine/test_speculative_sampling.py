"""Speculative sampling keeps the target's distribution: counted, with fixed seeds."""

import pytest
import torch
from tiny_models import tiny_model

from replayssm.engine.decode import generate
from replayssm.engine.drafters import Drafts, ModelDrafter, NGramDrafter
from replayssm.engine.sampling import ACCEPT, CHOICE, DRAFT, REPLACE, Sampler, pick
from replayssm.engine.speculative import RowProgress, SpeculativeDecoder, speculate
from replayssm.models import Adapter
from replayssm.policy import parse_policy

ROWS, VOCABULARY, DRAFTS = 40_000, 7, 3
# Upper 1e-4 quantiles of chi-square, by degrees of freedom.
CRITICAL = {6: 27.9, 7: 29.9}


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.fixture
def bench():
    """(decoder with ROWS rows at one position, target p [T, V], draft q [N, V])."""
    generator = torch.Generator().manual_seed(3)
    p = torch.randn(DRAFTS + 1, VOCABULARY, generator=generator, dtype=torch.float64) * 1.3
    q = torch.randn(DRAFTS, VOCABULARY, generator=generator, dtype=torch.float64) * 1.3
    decoder = SpeculativeDecoder(
        Adapter(tiny_model("mamba2")),
        parse_policy("fp32"),
        NGramDrafter(),
        drafts=DRAFTS,
        sampler=Sampler(temperature=1.0, seed=11),
    )
    decoder.rows = [RowProgress(id=i, prompt=[1], max_new_tokens=9) for i in range(ROWS)]
    decoder._state.positions = [20] * ROWS
    return decoder, p, q.softmax(-1)


def drawn(decoder, q):
    """Drafts of every row by q, as a drafter draws them."""
    uniform = [
        decoder._sampler.uniform(range(ROWS), 20 + place, purpose=DRAFT) for place in range(len(q))
    ]
    tokens = [pick(q[i].expand(ROWS, -1), u) for i, u in enumerate(uniform)]
    return Drafts(
        tokens=torch.stack(tokens, dim=1),
        counts=[len(q)] * ROWS,
        probabilities=q.expand(ROWS, -1, -1),
    )


def written(decoder, p, drafts):
    accepted, following, finite = decoder._verify(p.float().expand(ROWS, -1, -1), drafts)
    assert all(finite)
    proposed = drafts.tokens.tolist()
    return [[*proposed[i][:a], f] for i, (a, f) in enumerate(zip(accepted, following, strict=True))]


def test_drafts_drawn_from_another_distribution(bench):
    """Tokens at every place, given that the place was reached, are the target's."""
    decoder, p, q = bench
    drafts = drawn(decoder, q)
    texts = written(decoder, p, drafts)
    target = p.softmax(-1)
    for place in range(DRAFTS + 1):
        tokens = torch.tensor([text[place] for text in texts if len(text) > place])
        counts = torch.bincount(tokens, minlength=VOCABULARY)
        assert len(tokens) > 500
        assert chi_square(counts, target[place]) < CRITICAL[6], place
    # As often accepted as can be: 1 - half the distance between the distributions.
    expected = float(torch.minimum(target[0], q[0]).sum())
    share = sum(len(text) > 1 for text in texts) / ROWS
    assert abs(share - expected) < 4 * (expected * (1 - expected) / ROWS) ** 0.5
    # A test that cannot fail tests nothing: the drafts themselves are not the target's.
    counts = torch.bincount(drafts.tokens[:, 0], minlength=VOCABULARY)
    assert chi_square(counts, target[0]) > 10 * CRITICAL[6]


def test_two_tokens_together(bench):
    """What is drafted does not lean on what follows: pairs, too, come as the target has them."""
    decoder, p, q = bench
    texts = written(decoder, p, drawn(decoder, q))
    target = p.softmax(-1)
    pairs = torch.zeros(VOCABULARY, VOCABULARY)
    reached = torch.zeros(VOCABULARY)
    for text in texts:
        if len(text) > 1:
            pairs[text[0], text[1]] += 1
            reached[text[0]] += 1
    expected = reached[:, None] * target[1]
    kept = expected > 5
    statistic = ((pairs - expected) ** 2 / expected)[kept].sum()
    degrees = int(kept.sum()) - int(kept.any(1).sum())
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5 + 4


def test_rows_with_fewer_drafts_draw_the_next_token_from_the_target(bench):
    decoder, p, q = bench
    drafts = drawn(decoder, q)
    drafts.counts[:] = [row % (DRAFTS + 1) for row in range(ROWS)]
    texts = written(decoder, p, drafts)
    target = p.softmax(-1)
    for count in range(DRAFTS + 1):
        mine = texts[count :: DRAFTS + 1]
        assert max(map(len, mine)) == count + 1
        for place in (0, count):
            tokens = torch.tensor([text[place] for text in mine if len(text) > place])
            counts = torch.bincount(tokens, minlength=VOCABULARY)
            assert chi_square(counts, target[place]) < CRITICAL[6], (count, place)


def test_certain_drafts_are_accepted_as_often_as_the_target_has_them(bench):
    decoder, p, _ = bench
    tokens = torch.full((ROWS, DRAFTS), 2)
    texts = written(decoder, p, Drafts(tokens=tokens, counts=[DRAFTS] * ROWS))
    target = p.softmax(-1)
    first = torch.bincount(torch.tensor([text[0] for text in texts]), minlength=VOCABULARY)
    assert chi_square(first, target[0]) < CRITICAL[6]
    share = sum(len(text) > 1 for text in texts) / ROWS
    expected = float(target[0, 2])
    assert abs(share - expected) < 4 * (expected * (1 - expected) / ROWS) ** 0.5


def test_draws_for_different_purposes_are_independent():
    sampler = Sampler(temperature=1.0, seed=1)
    draws = torch.stack(
        [sampler.uniform(range(20_000), 5, purpose=p) for p in (CHOICE, DRAFT, ACCEPT, REPLACE)]
    )
    assert float((torch.corrcoef(draws) - torch.eye(4)).abs().max()) < 0.03
    assert torch.equal(draws[0], sampler.uniform(range(20_000), 5))


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_prompt_lookup_samples_what_decoding_samples(name):
    """With certain drafts the same random numbers choose the same tokens."""
    adapter, policy = Adapter(tiny_model(name)), parse_policy("fp16-sr+nvfp4@6")
    prompts = [[5, 6, 7, 8] * 3, [9, 4] * 6]
    sampler = Sampler(temperature=0.4, seed=4)
    want = generate(
        adapter, torch.tensor(prompts), policy, max_new_tokens=40, sampler=sampler, seed=1
    )
    got = speculate(
        adapter,
        prompts,
        policy,
        NGramDrafter(shortest=1),
        drafts=4,
        max_new_tokens=40,
        sampler=sampler,
        seed=1,
    )
    assert [row.generation.tokens for row in got] == [row.tokens for row in want]
    assert sum(row.acceptance.drafted for row in got) > 0


def test_a_model_that_drafts_for_itself_by_chance_is_always_right():
    """Its p is its q, so all drafts pass: the rings, keys and convolutions of both agree."""
    adapter = Adapter(tiny_model("qwen3_5"))
    got = speculate(
        adapter,
        [[5, 6, 7], [9, 4, 4]],
        parse_policy("fp32"),
        ModelDrafter(adapter),
        drafts=4,
        max_new_tokens=40,
        sampler=Sampler(temperature=1.0, seed=2),
    )
    assert all(row.acceptance.rate > 0.98 for row in got)  # 1, but for rounding


def test_texts_of_a_whole_model_come_as_without_drafts():
    """Second and third tokens of many answers to one prompt, with drafts and without."""
    adapter, smaller = Adapter(tiny_model("mamba2")), Adapter(tiny_model("nemotron_h"))
    policy, rows, counts = parse_policy("fp16@4"), 400, []
    for drafter, drafts, seed in ((None, 0, 1), (ModelDrafter(smaller), 2, 2)):
        got = speculate(
            adapter,
            [[5, 6, 7]] * rows,
            policy,
            drafter,
            drafts=drafts,
            max_new_tokens=4,
            sampler=Sampler(temperature=0.5, seed=seed),
        )
        counts.append(
            [
                torch.bincount(
                    torch.tensor([row.generation.tokens[at] for row in got]), minlength=128
                )
                for at in (1, 2)
            ]
        )
    assert sum(row.acceptance.num_accepted for row in got) > 10
    for without, with_drafts in zip(*counts, strict=True):
        frequent = (without + with_drafts).topk(7).indices
        table = torch.stack([row[frequent] for row in (without, with_drafts)]).double()
        rest = rows - table.sum(1, keepdim=True)
        table = torch.cat([table, rest], 1)
        expected = table.sum(0) / 2
        statistic = float(((table - expected) ** 2 / expected).sum())
        assert statistic < CRITICAL[7]
