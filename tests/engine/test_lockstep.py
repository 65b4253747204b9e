"""Lockstep: bit-equal rows, windows against tokens, own text, inspection, resuming."""

import pytest
import torch
from tiny_models import TINY_ARCHITECTURES, random_tokens

from replayssm.engine.lockstep import UNKNOWN_TOKEN, Arm, Lockstep
from replayssm.engine.sampling import Sampler
from replayssm.engine.stream import Stream
from replayssm.models import Adapter, RowGroup
from replayssm.policy import parse_policy

POLICIES = ["fp16", "fp16-sr", "fp8", "fp8-sr", "nvfp4", "fp32+nvfp4", "fp8-sr+nvfp4@8"]


def arm(label: str, policy: str, kind: str = "policy", **kwargs) -> Arm:
    return Arm(label=label, policy=parse_policy(policy), kind=kind, **kwargs)


def all_arms() -> list[Arm]:
    """Reference first, its twin last: the rows that are farthest apart must agree bit for bit."""
    return [
        arm("reference", "fp32", "reference"),
        arm("other ring", "fp32@4", "control"),
        arm("fault", "fp32", "fault", fault=1.01),
        *(arm(name, name, seed=3) for name in POLICIES),
        arm("twin", "fp32", "floor"),
    ]


def kl(logits: torch.Tensor) -> torch.Tensor:
    """Mean KL(arm 0 || arm) of a window's logits, in float64."""
    logp = logits.double().log_softmax(-1)
    return (logp[0].exp() * (logp[0] - logp)).sum(-1).mean((1, 2))


def collect(engine: Lockstep, windows) -> torch.Tensor:
    """Logits of all windows, [arms, prompts, tokens, vocabulary]."""
    return torch.cat([window.logits.clone() for window in windows], dim=2)


@pytest.mark.parametrize(
    "window, tokens, prompts, padding",
    [(16, 48, 2, 0), (16, 32, 1, 0), (16, 37, 1, 5), (1, 5, 2, 2), (4, 8, 1, 1), (6, 15, 3, 7)],
)
@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_second_fp32_row_is_bit_identical(name, window, tokens, prompts, padding, tiny_model):
    engine = Lockstep(Adapter(tiny_model(name)), all_arms(), window=window)
    text = random_tokens(prompts, 10 + tokens)
    engine.start(text[:, :10], tokens=tokens)
    assert engine.padding_rows == padding
    logits = collect(engine, engine.read(text[:, 10:]))
    assert logits.shape == (len(engine.arms), prompts, tokens, 128)
    assert torch.equal(logits[0], logits[-1])
    assert float(kl(logits)[-1]) == 0.0


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_arms_order_as_they_should(name, tiny_model):
    """Every architecture: floor at rounding level, fault and coarse formats far above, all live."""
    engine = Lockstep(Adapter(tiny_model(name)), all_arms())
    text = random_tokens(2, 58)
    engine.start(text[:, :10], tokens=48)
    logits = collect(engine, engine.read(text[:, 10:]))
    drift = dict(zip((a.label for a in engine.arms), kl(logits).tolist(), strict=True))
    assert 0 < drift["other ring"] < 1e-10
    assert drift["fault"] > 1e5 * drift["other ring"]
    assert drift["fp16"] < drift["fp8"] < drift["nvfp4"]
    assert drift["fp16"] > 1e2 * drift["other ring"]
    values = [drift[name] for name in POLICIES]
    assert len(set(values)) == len(values)
    assert drift["twin"] < 1e-11  # exactly 0 without experts; see lockstep.py


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_windows_equal_token_by_token(name, tiny_model):
    """FP32 and every policy: the same numbers as decoding one token at a time with the same ring.

    Up to FP32 reassociation, which may push a value to the other neighbour of a coarse format: such
    flips are rare, and what they do is far below what the format itself does.
    """
    adapter, text = Adapter(tiny_model(name)), random_tokens(2, 58)
    runs = []
    for window in (16, 1):
        engine = Lockstep(adapter, all_arms(), window=window)
        engine.start(text[:, :10], tokens=48)
        runs.append(collect(engine, engine.read(text[:, 10:])))
    windows, tokens = runs
    scale = windows[0].std()
    for index, label in enumerate(a.label for a in engine.arms):
        difference = (windows[index] - tokens[index]).abs().amax(-1) / scale  # [P, T]
        policy_error = (windows[index] - windows[0]).abs().mean() / scale
        if label in ("reference", "twin", "other ring", "fault"):
            assert difference.max() < 1e-4, label
        else:
            assert difference.mean() < 1e-5 + 0.3 * policy_error, label


def test_windows_are_what_was_asked_for(tiny_model):
    engine = Lockstep(Adapter(tiny_model("qwen3_5")), all_arms()[:2], window=16)
    text = random_tokens(3, 50)
    engine.start(text[:, :9], tokens=41, prompt_ids=[7, 8, 9])
    windows = list(engine.read(text[:, 9:]))
    assert [list(w.positions)[:: len(w.positions) - 1] for w in windows] == [
        [9, 24],
        [25, 40],
        [41, 49],
    ]
    assert torch.equal(torch.cat([w.tokens for w in windows], 1), text[:, 9:])
    targets = torch.cat([w.targets for w in windows], 1)
    assert torch.equal(targets[:, :-1], text[:, 10:])
    assert (targets[:, -1] == UNKNOWN_TOKEN).all()
    assert all(w.logits.dtype == torch.float32 for w in windows)
    assert engine.position == 50


def test_reading_in_pieces_is_reading_at_once(tiny_model):
    adapter, text = Adapter(tiny_model("mamba2")), random_tokens(2, 52)
    engine = Lockstep(adapter, all_arms())
    engine.start(text[:, :10], tokens=42)
    at_once = collect(engine, engine.read(text[:, 10:]))
    engine.start(text[:, :10], tokens=42)
    first = collect(engine, engine.read(text[:, 10:42]))
    rest = collect(engine, engine.read(text[:, 42:]))
    assert torch.equal(torch.cat([first, rest], dim=2), at_once)


def test_reference_equals_the_model_itself(tiny_model):
    model, text = tiny_model("qwen3_5"), random_tokens(2, 42)
    engine = Lockstep(Adapter(model), all_arms()[:3])
    engine.start(text[:, :10], tokens=32)
    logits = collect(engine, engine.read(text[:, 10:]))
    with torch.inference_mode():
        want = model(text).logits[:, 10:]
    assert float((logits[0] - want).abs().max() / want.std()) < 1e-4


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_greedy_generation_follows_the_reference(name, tiny_model):
    model, prompt = tiny_model(name), random_tokens(2, 10)
    engine = Lockstep(Adapter(model), all_arms())
    engine.start(prompt, tokens=40)
    windows = [(w.tokens, w.targets, w.logits.clone()) for w in engine.generate(40)]
    tokens, targets = (torch.cat([w[i] for w in windows], dim=1) for i in (0, 1))
    logits = torch.cat([w[2] for w in windows], dim=2)
    assert tokens.shape == (2, 40)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    with torch.inference_mode():
        whole = model(torch.cat([prompt, tokens], dim=1)).logits
    assert torch.equal(whole[:, 9:-1].argmax(-1), tokens)
    assert torch.equal(logits[0].argmax(-1), targets)
    assert torch.equal(logits[0], logits[-1])


def test_sampled_generation_depends_on_seed_and_prompt_only(tiny_model):
    adapter, prompt = Adapter(tiny_model("mamba2")), random_tokens(2, 10)
    engine = Lockstep(adapter, all_arms()[:2])

    def generated(rows: list[int], seed: int) -> torch.Tensor:
        engine.start(prompt[rows], tokens=24, prompt_ids=[row + 5 for row in rows])
        sampler = Sampler(temperature=1.0, seed=seed)
        return torch.cat([w.tokens for w in engine.generate(24, sampler)], dim=1)

    both = generated([0, 1], seed=1)
    assert torch.equal(both, generated([0, 1], seed=1))
    assert torch.equal(both[1:], generated([1], seed=1))
    assert not torch.equal(both, generated([0, 1], seed=2))


@pytest.mark.parametrize("mode", ["read", "generate"])
@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_resuming_is_byte_identical(name, mode, tiny_model, tmp_path):
    adapter, text = Adapter(tiny_model(name)), random_tokens(2, 62)
    arms = [all_arms()[i] for i in (0, 1, 4, 9, 10)]
    sampler = Sampler(temperature=0.8, seed=4)

    def rest(engine: Lockstep):
        if mode == "read":
            return engine.read(text[:, 42:])
        return engine.generate(20, sampler)

    engine = Lockstep(adapter, arms)
    engine.start(text[:, :10], tokens=52, prompt_ids=[3, 4])
    first = engine.read(text[:, 10:42]) if mode == "read" else engine.generate(32, sampler)
    for _ in first:
        pass
    torch.save(engine.engine_state(), tmp_path / "state.pt")
    want = collect(engine, rest(engine))

    resumed = Lockstep(adapter, arms)
    resumed.load_engine_state(torch.load(tmp_path / "state.pt"))
    assert resumed.position == 42
    assert torch.equal(collect(resumed, rest(resumed)), want)


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_states_and_saturation(name, tiny_model):
    engine = Lockstep(Adapter(tiny_model(name)), all_arms())
    text = random_tokens(2, 42)
    engine.start(text[:, :10], tokens=32)
    for _ in engine.read(text[:, 10:]):
        pass
    for layer in engine.layers:
        states = engine.states(layer)
        assert states.shape[:2] == (len(engine.arms), 2) and states.dtype == torch.float32
        assert torch.equal(states[0], states[-1])
        norm = states[0].norm()
        errors = {
            a.label: float((s - states[0]).norm() / norm)
            for a, s in zip(engine.arms, states, strict=True)
        }
        assert errors["other ring"] < 1e-5 < errors["fp16"] < errors["fp8"] < errors["nvfp4"]
    assert engine.saturated().shape == (len(engine.arms), 2)
    assert (engine.saturated()[0] == 0).all()


def test_effective_formats_are_read_back(tiny_model):
    engine = Lockstep(Adapter(tiny_model("mamba2").bfloat16()), all_arms())
    text = random_tokens(1, 26)
    engine.start(text[:, :10], tokens=16)
    for _ in engine.read(text[:, 10:]):
        pass
    effective = engine.effective()
    assert set(effective["dtypes"]) == {a.label for a in engine.arms}
    assert effective["dtypes"]["fp16"]["checkpoint.data"] == "float16"
    assert effective["dtypes"]["reference"]["checkpoint.data"] == "float32"
    assert effective["dtypes"]["reference"]["ring.x"] == "bfloat16"
    assert effective["cache"] == {"conv": "bfloat16"}
    assert "mamba2_chunk_scan" in effective["replaced"]


def test_a_new_text_forgets_the_old_one(tiny_model):
    adapter = Adapter(tiny_model("qwen3_5"))
    first, second = random_tokens(2, 26, seed=1), random_tokens(2, 26, seed=2)
    engine, out = Lockstep(adapter, all_arms()), []
    for text in (first, second, first):
        engine.start(text[:, :10], tokens=16)
        out.append(collect(engine, engine.read(text[:, 10:])))
    assert torch.equal(out[0], out[2]) and not torch.equal(out[0], out[1])


def test_long_prompts_are_prefilled_in_chunks(tiny_model, monkeypatch):
    adapter, text = Adapter(tiny_model("qwen3_5")), random_tokens(2, 40)
    whole = Stream(adapter, [group()], source=[0, 1], capacity=40)
    chunked = Stream(adapter, [group()], source=[0, 1], capacity=40)
    with torch.inference_mode():
        want = whole.prefill(text)
        monkeypatch.setattr("replayssm.engine.stream.PREFILL_CHUNK", 16)
        got = chunked.prefill(text)
    assert chunked.position == 40
    assert torch.allclose(got, want, atol=1e-4)


def group() -> RowGroup:
    return RowGroup(policy=parse_policy("fp32"), sequences=(0, 1), seeds=(0, 0))


def test_bad_arguments(tiny_model):
    adapter = Adapter(tiny_model("qwen3_5"))
    with pytest.raises(ValueError, match="kind 'reference'"):
        Lockstep(adapter, [arm("a", "fp32")])
    with pytest.raises(ValueError, match="labels must differ"):
        Lockstep(adapter, [arm("a", "fp32", "reference"), arm("a", "fp16")])
    with pytest.raises(ValueError, match="window"):
        Lockstep(adapter, all_arms(), window=0)
    with pytest.raises(ValueError, match="not one of"):
        arm("a", "fp32", "other")
    with pytest.raises(ValueError, match="fault"):
        arm("a", "fp32", "fault")
    engine = Lockstep(adapter, all_arms()[:2])
    text = random_tokens(2, 40)
    with pytest.raises(ValueError, match="positions"):
        engine.start(text, tokens=4096)
    with pytest.raises(ValueError, match="prompts must be"):
        engine.start(text[:, :0], tokens=16)
    with pytest.raises(ValueError, match="at least one token"):
        engine.start(text, tokens=0)
    with pytest.raises(ValueError, match="3 prompt ids"):
        engine.start(text, tokens=16, prompt_ids=[1, 2, 3])
    engine.start(text[:, :10], tokens=30)
    with pytest.raises(ValueError, match="1 to 30 tokens"):
        next(engine.read(text[:, :31]))
    with pytest.raises(ValueError, match="whole windows"):
        next(engine.read(text[:, 10:17]))
    next(engine.read(text[:, 10:26]))
    with pytest.raises(ValueError, match="cannot go on from a text that was read"):
        next(engine.generate(14))
