"""Replayed passes: when they are taken, and that they compute what eager passes compute.

Capturing needs a GPU (`pytest -m gpu`); without one a stand-in for the graph, which runs the pass
when it is replayed, shows that keys, bounds and bookkeeping fit.
"""

from contextlib import contextmanager

import pytest
import torch
from interpreter import needs_interpreter
from tiny_models import random_tokens, tiny_model

from replayssm.engine import graphs
from replayssm.engine.batching import Request, generate_many
from replayssm.engine.graphs import StepGraphs
from replayssm.engine.lockstep import Arm, Lockstep
from replayssm.models import Adapter, attention
from replayssm.models.loading import load
from replayssm.policy import parse_policy


def arms(*labels: str, reference: str = "fp32") -> list[Arm]:
    reference = Arm(label="reference", policy=parse_policy(reference), kind="reference")
    return [reference, *(Arm(label=label, policy=parse_policy(label)) for label in labels)]


ARMS = arms("fp16-sr", "fp32@32", "nvfp4")


def read(adapter, mode, text, *, prompt=16, arms=ARMS, window=16):
    """The engine, and the logits of all windows."""
    engine = Lockstep(adapter, arms, window=window, graphs=mode)
    engine.start(text[:, :prompt], tokens=text.shape[1] - prompt)
    return engine, [w.logits.clone() for w in engine.read(text[:, prompt:])]


def test_modes():
    adapter = Adapter(tiny_model("qwen3_5"))
    text = random_tokens(1, 48)
    for mode, told in (("auto", "eager (the model is on cpu)"), ("off", "eager (switched off)")):
        engine, _ = read(adapter, mode, text)
        assert engine.effective()["graphs"] == told
    with pytest.raises(ValueError, match="graphs 'on' are not possible: the model is on cpu"):
        read(adapter, "on", text)
    with pytest.raises(ValueError, match="allowed are auto, on, off"):
        Lockstep(adapter, arms(), graphs="yes").start(text[:, :4], tokens=8)


# -- a stand-in ------------------------------------------------------------------------------------
class Recorded:
    """What a graph does, by the host: the pass is run again each time it is replayed."""

    replays = captures = 0

    def __init__(self, run):
        self.replay = run


@pytest.fixture
def recorded(monkeypatch):
    """Graphs without a GPU. Nothing moves while one is captured: the pass is not even run."""
    Recorded.replays = Recorded.captures = 0

    def capture(self, key, tokens, forward):
        kept, static = self._kept[key], tokens.clone()

        def run():
            Recorded.replays += 1
            with undone(self._session, kept.cursor):
                kept.logits = forward(static)

        kept.graph, kept.tokens = Recorded(run), static
        Recorded.captures += 1
        return True

    real = StepGraphs.step

    def step(self, tokens, cache, forward, *, cursor, **options):
        monkeypatch.setattr(graphs._Captured, "cursor", cursor, raising=False)
        return real(self, tokens, cache, forward, cursor=cursor, **options)

    monkeypatch.setattr(StepGraphs, "_look_for_obstacle", lambda self, cache: "")
    monkeypatch.setattr(StepGraphs, "_capture", capture)
    monkeypatch.setattr(StepGraphs, "step", step)


@contextmanager
def undone(session, cursor):
    """What the host noted of a pass is taken back: a replay notes nothing."""
    before = [state.tokens for state in session._layers]
    held = cursor and cursor.tokens
    yield
    for state, tokens in zip(session._layers, before, strict=True):
        state.tokens = tokens
    if cursor:
        cursor.tokens = held


def test_windows_are_captured_once_per_stand_of_the_rings(recorded):
    """Rings of 16 and 32 and windows of 16: two kinds of windows, each run, then captured."""
    adapter, text = Adapter(tiny_model("mamba2")), random_tokens(2, 16 + 16 * 40)
    _, eager = read(adapter, "off", text)
    _, replayed = read(adapter, "auto", text)
    assert (Recorded.captures, Recorded.replays) == (2, 38)
    for window, other in zip(eager, replayed, strict=True):
        assert torch.equal(window, other)


def test_short_texts_are_not_worth_it(recorded):
    adapter, text = Adapter(tiny_model("mamba2")), random_tokens(2, 16 + 16 * 20)
    read(adapter, "auto", text)
    assert Recorded.captures == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_more_keys_take_another_graph(recorded, monkeypatch):
    """Attention looks at keys in steps of 16 here; each step is a graph, the last cut to room."""
    needs_interpreter()
    monkeypatch.setattr(attention, "runs_kernel", lambda device: True)
    monkeypatch.setattr(graphs, "KEYS", 16)
    adapter, text = Adapter(tiny_model("qwen3_5")), random_tokens(1, 8 + 36)
    options = dict(prompt=8, arms=arms("nvfp4@4", reference="fp32@4"), window=4)
    _, eager = read(adapter, "off", text, **options)
    _, replayed = read(adapter, "on", text, **options)
    # Up to 16 keys: windows 0 and 1; to 32: 2 to 5; to 48: 6 to 8. The first of each is run.
    assert (Recorded.captures, Recorded.replays) == (3, 6)
    for window, other in zip(eager, replayed, strict=True):
        assert torch.equal(window, other)


def test_lanes_are_captured_after_a_while(recorded):
    adapter = Adapter(tiny_model("mamba2"))
    asked = [Request(prompt=[5, 6, 7 + i], max_new_tokens=12, sequence=i) for i in range(10)]

    def run(mode):
        policy = parse_policy("fp16-sr@4")
        return sorted(generate_many(adapter, asked, policy, graphs=mode), key=lambda c: c.index)

    assert run("auto") == run("off")
    assert Recorded.captures == 1 and Recorded.replays > 5


# -- a GPU -----------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["builtin/gdn", "builtin/mamba2"])
def test_replayed_windows_are_bit_equal(name):
    adapter = load(name, device="cuda").adapter
    text = torch.randint(3, 2000, (2, 16 + 16 * 24), generator=torch.Generator().manual_seed(0))
    _, eager = read(adapter, "off", text)
    engine, replayed = read(adapter, "on", text)
    assert engine.effective()["graphs"] == "graphs"
    for number, (window, other) in enumerate(zip(eager, replayed, strict=True)):
        assert torch.equal(window, other), number


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["builtin/gdn", "builtin/mamba2"])
@pytest.mark.parametrize("policy", ["fp32", "fp8-sr+nvfp4"])
def test_replayed_lanes_generate_the_same(name, policy):
    adapter = load(name, device="cuda").adapter
    draw = torch.Generator().manual_seed(1)
    asked = [
        Request(
            prompt=torch.randint(3, 2000, (5 + i % 7,), generator=draw).tolist(),
            max_new_tokens=20 + i % 11,
            sequence=i,
        )
        for i in range(40)
    ]

    def run(mode, which=asked):
        done = generate_many(adapter, which, parse_policy(policy), lanes=16, graphs=mode)
        return {which[c.index].sequence: c.tokens for c in done}

    eager = run("off")
    assert run("on") == eager == run("on", asked[::-1])


@pytest.mark.gpu
def test_a_step_at_another_position_reads_other_keys():
    """The same graph, thousands of tokens later, against an eager pass."""
    adapter = load("builtin/gdn", device="cuda").adapter
    text = torch.randint(3, 2000, (1, 16 + 16 * 300), generator=torch.Generator().manual_seed(2))
    runs = []
    for mode in ("off", "on"):
        engine = Lockstep(adapter, arms("fp16"), window=16, graphs=mode)
        engine.start(text[:, :16], tokens=text.shape[1] - 16)
        runs.append([w.logits[:, 0, -1].clone() for w in engine.read(text[:, 16:])])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
