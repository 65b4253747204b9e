"""Refilled lanes: a sequence's tokens and logits do not depend on anything but itself."""

import pytest
import torch
from interpreter import needs_interpreter
from tiny_models import TINY_ARCHITECTURES, spread, tiny_model

from replayssm.engine import batching
from replayssm.engine.batching import Request, generate_many
from replayssm.engine.decode import generate
from replayssm.engine.sampling import Sampler
from replayssm.models import Adapter, attention
from replayssm.policy import parse_policy

FP32 = parse_policy("fp32@4")


def requests(count: int, *, seed: int = 0) -> list[Request]:
    """Prompts of 4 to 14 tokens with caps of 4 to 14, each its own sequence number."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        length, cap = torch.randint(4, 15, (2,), generator=draw).tolist()
        prompt = torch.randint(3, 128, (length,), generator=draw).tolist()
        made.append(Request(prompt=prompt, max_new_tokens=cap, sequence=1000 + number))
    return made


@pytest.fixture
def logits_seen(monkeypatch):
    """Every logits row that a token is chosen from: (request's sequence, position) -> row."""
    seen = {}
    real = batching._advance

    def spy(running, logits, *rest):
        for lane, row in zip(running, logits, strict=True):
            seen[lane.request.sequence, lane.position] = row.clone()
        return real(running, logits, *rest)

    monkeypatch.setattr(batching, "_advance", spy)
    return seen


def run(adapter, asked, policy=FP32, **options):
    done = list(generate_many(adapter, asked, policy, **options))
    assert sorted(c.index for c in done) == list(range(len(asked)))
    return {asked[c.index].sequence: (c.tokens, c.finish) for c in done}


def answered_the_same(seen, adapter, asked, *others, **options):
    """Answers to `asked`; those of each of `others`, (requests, options), are checked to have the
    same tokens and the same bits in every row of logits."""
    first = run(adapter, asked, **options)
    kept = dict(seen)
    for other, more in others:
        seen.clear()
        again = run(adapter, other, **options | more)
        assert again == {key: first[key] for key in again}
        for where, row in seen.items():
            assert torch.equal(row, kept[where]), (where, more)
    return first


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_order_neighbours_and_batch_size_change_no_bit(name, logits_seen):
    adapter = Adapter(tiny_model(name))
    asked = requests(10)
    others = (asked[:2:-1], {"lanes": 8}), (asked[3:8], {"lanes": 16})
    answered_the_same(logits_seen, adapter, asked, *others, lanes=8)


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_prompts_of_several_windows_do_not_depend_on_the_batch(name, logits_seen):
    adapter = Adapter(tiny_model(name))
    long = [
        Request(prompt=[*r.prompt] * 9, max_new_tokens=5, sequence=r.sequence)
        for r in requests(7, seed=7)
    ]
    assert {len(request.prompt) // 64 for request in long} == {0, 1}
    others = (long[::-1], {"lanes": 1}), (long[2:], {"lanes": 3}), (long, {"lanes": 16})
    first = answered_the_same(logits_seen, adapter, long, *others, lanes=8)
    for request in long[:2]:
        prompt, new = torch.tensor([request.prompt]), request.max_new_tokens
        (alone,) = generate(adapter, prompt, FP32, max_new_tokens=new)
        assert first[request.sequence][0] == alone.tokens


def test_more_prompts_than_are_read_side_by_side(logits_seen, monkeypatch):
    adapter, policy = Adapter(tiny_model("mamba2")), parse_policy("fp16-sr+nvfp4@4")
    asked = [
        Request(prompt=[*r.prompt] * 3, max_new_tokens=3, sequence=r.sequence)
        for r in requests(13, seed=8)
    ]
    first = run(adapter, asked, policy, lanes=16, prefill=2)
    kept = dict(logits_seen)
    logits_seen.clear()
    monkeypatch.setattr(batching, "_MOST_READ", 8)
    assert run(adapter, asked, policy, lanes=16, prefill=2) == first
    assert all(torch.equal(row, kept[where]) for where, row in logits_seen.items())


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
@pytest.mark.parametrize("policy", ["fp16-sr", "nvfp4", "fp8-sr+nvfp4@4"])
def test_rounded_states_do_not_depend_on_the_batch_either(name, policy, logits_seen):
    adapter, policy = Adapter(tiny_model(name)), parse_policy(policy)
    asked = requests(10, seed=1)
    options = {"policy": policy, "sampler": Sampler(temperature=1.0, seed=5), "seed": 3}
    answered_the_same(logits_seen, adapter, asked, (asked[:3:-1], {}), lanes=8, **options)


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_lanes_generate_what_plain_decode_generates(name):
    adapter = Adapter(tiny_model(name))
    asked = requests(3, seed=2)
    got = run(adapter, asked, lanes=8)
    for request in asked:
        (alone,) = generate(
            adapter,
            torch.tensor([request.prompt]),
            FP32,
            max_new_tokens=request.max_new_tokens,
        )
        assert got[request.sequence][0] == alone.tokens


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_lanes_compute_what_the_model_itself_computes(name, logits_seen):
    """The library's own forward over prompt and answer: logits, not just the best token."""
    adapter = Adapter(tiny_model(name))
    asked = requests(3, seed=6)
    got = run(adapter, asked, lanes=8)
    for request in asked:
        text = [*request.prompt, *got[request.sequence][0]]
        with torch.inference_mode():
            want = adapter.model(torch.tensor([text])).logits[0]
        for position in range(len(request.prompt), len(text)):
            row = logits_seen[request.sequence, position]
            assert torch.allclose(row, want[position - 1], atol=1e-3 * float(want.std()))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_attention_by_kernel_depends_on_the_row_only(logits_seen, monkeypatch):
    """The GPU's path, in the interpreter: other neighbours, another order, another storage."""
    needs_interpreter()
    monkeypatch.setattr(attention, "runs_kernel", lambda device: True)
    adapter = Adapter(tiny_model("qwen3_5"))
    asked = [
        Request(prompt=r.prompt[:9], max_new_tokens=2 + i, sequence=r.sequence)
        for i, r in enumerate(requests(4, seed=3))
    ]
    answered_the_same(logits_seen, adapter, asked, (asked[:1:-1], {}))


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "falcon_h1"])
def test_prompts_read_under_the_policy_do_not_depend_on_the_batch(name, logits_seen):
    adapter, policy = Adapter(tiny_model(name)), parse_policy("fp16-sr+nvfp4@4")
    long = [
        Request(prompt=[*r.prompt] * 3, max_new_tokens=6, sequence=r.sequence)
        for r in requests(10, seed=4)
    ]
    other = long[:2:-1], {"lanes": 16}
    answered_the_same(logits_seen, adapter, long, other, policy=policy, lanes=8, prefill=2)


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "zamba2"])
def test_reading_a_prompt_in_fp32_is_prefilling_it(name, logits_seen):
    adapter = Adapter(tiny_model(name))
    long = [Request(prompt=r.prompt, max_new_tokens=8, sequence=r.sequence) for r in requests(5)]
    prefilled = run(adapter, long)
    kept = dict(logits_seen)
    assert run(adapter, long, prefill=1) == prefilled
    for where, row in logits_seen.items():
        assert torch.allclose(row, kept[where], atol=2e-4)


def test_a_policy_acts_on_a_prompt_that_is_read(logits_seen):
    adapter, policy = Adapter(tiny_model("mamba2")), parse_policy("nvfp4@4")
    asked = [Request(prompt=[5, 6, 7] * 12, max_new_tokens=1)]
    first = []
    for prefill in (None, 4):
        list(generate_many(adapter, asked, policy, prefill=prefill))
        first.append(logits_seen.pop((0, 36)))
    list(generate_many(adapter, asked, FP32))
    exact = logits_seen.pop((0, 36))
    assert torch.equal(first[0], exact)  # chosen from the prefill's own logits
    assert not torch.allclose(first[1], exact, atol=1e-3)


def test_the_models_attention_is_restored():
    model = tiny_model("qwen3_5")
    adapter = Adapter(model)
    before = model.config._attn_implementation
    run(adapter, requests(3))
    assert model.config._attn_implementation == before
    running = generate_many(adapter, requests(9), FP32)
    next(running)
    assert model.config._attn_implementation == before


def test_ends_stop_tokens_stop_functions_and_caps():
    adapter = Adapter(tiny_model("mamba2"))
    prompt = [5, 6, 7]
    (free,) = generate_many(adapter, [Request(prompt=prompt, max_new_tokens=12)], FP32)
    assert free.finish == "length" and len(free.tokens) == 12
    stop = free.tokens[4]
    first = free.tokens.index(stop)
    (cut,) = generate_many(
        adapter, [Request(prompt=prompt, max_new_tokens=12)], FP32, stop_tokens=[stop]
    )
    assert (cut.finish, cut.tokens) == ("stop_token", free.tokens[:first])
    three = Request(prompt=prompt, max_new_tokens=12, stop=lambda tokens: len(tokens) == 3)
    (cut,) = generate_many(adapter, [three], FP32)
    assert (cut.finish, cut.tokens) == ("stop", free.tokens[:3])
    at_once = generate_many(
        adapter,
        [Request(prompt=prompt, max_new_tokens=12)] * 3,
        FP32,
        stop_tokens=[free.tokens[0]],
    )
    assert [(c.index, c.finish, c.tokens) for c in at_once] == [
        (i, "stop_token", ()) for i in range(3)
    ]


def test_a_long_answer_does_not_hold_up_the_others(monkeypatch):
    adapter = Adapter(tiny_model("mamba2"))
    steps = []
    real = batching._Batch.step
    monkeypatch.setattr(batching._Batch, "step", lambda self: steps.append(1) or real(self))
    long = Request(prompt=[9, 8], max_new_tokens=30)
    short = [Request(prompt=[3, 4, 5 + i], max_new_tokens=6) for i in range(28)]
    order = [c.index for c in generate_many(adapter, [long, *short], FP32, lanes=8)]
    # Seven lanes share 28 short answers of five steps each: 20 steps, inside the long one's 29.
    assert order[-1] == 0 and len(steps) == 29


def test_sampling_depends_on_seed_and_sequence_only():
    adapter = Adapter(tiny_model("mamba2"))
    asked = [Request(prompt=[5, 6, 7], max_new_tokens=16, sequence=s) for s in (1, 2, 1)]

    def draw(seed, which=asked):
        sampler = Sampler(temperature=1.0, seed=seed)
        done = sorted(generate_many(adapter, which, FP32, sampler=sampler), key=lambda c: c.index)
        return [c.tokens for c in done]

    one, two, again = draw(0)
    assert one == again != two
    assert draw(0, asked[1:2]) == [two]
    assert draw(1)[0] != one


def test_bad_requests():
    adapter = Adapter(tiny_model("qwen3_5"))
    with pytest.raises(ValueError, match="at least one token"):
        Request(prompt=[], max_new_tokens=1)
    with pytest.raises(ValueError, match="max_new_tokens"):
        Request(prompt=[1], max_new_tokens=0)
    with pytest.raises(ValueError, match="sequence"):
        Request(prompt=[1], max_new_tokens=1, sequence=1 << 32)
    with pytest.raises(ValueError, match="lanes"):
        list(generate_many(adapter, [], FP32, lanes=0))
    with pytest.raises(ValueError, match="prefill must be at least 1"):
        list(generate_many(adapter, [], FP32, prefill=0))
    with pytest.raises(ValueError, match="at least two tokens"):
        list(generate_many(adapter, [Request(prompt=[1], max_new_tokens=1)], FP32, prefill=1))
    with pytest.raises(ValueError, match="4096 positions"):
        list(generate_many(adapter, [Request(prompt=[1], max_new_tokens=4096)], FP32))


def test_logits_that_are_not_finite_are_named(tiny_model):
    model = tiny_model("mamba2")
    with torch.no_grad():
        model.get_output_embeddings().weight[:] = float("nan")
    with pytest.raises(ValueError, match="not finite under policy fp32@4: request 0, position 1"):
        list(generate_many(Adapter(model), [Request(prompt=[4, 5], max_new_tokens=3)], FP32))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "nemotron_h"])
@pytest.mark.parametrize("second", [("layers.1", "layers.3"), ("layers.2", "lm_head")])
def test_a_model_on_two_gpus_answers_like_one_on_one(name, second, tiny_model):
    """Some layers, of attention too, or those of logits are not where tokens go; eager on both."""
    accelerate = pytest.importorskip("accelerate")
    policy, asked = parse_policy("fp16-sr+nvfp4@4"), requests(9)
    one, two = tiny_model(name).cuda(), tiny_model(name)
    where = spread(two, second)
    two = accelerate.dispatch_model(two, where, skip_keys=two._skip_keys_device_placement)
    assert len(Adapter(two).devices) == 2
    for options in ({}, {"prefill": 2}):
        want = run(Adapter(one), asked, policy, graphs="off", **options)
        assert run(Adapter(two), asked, policy, graphs="off", **options) == want
