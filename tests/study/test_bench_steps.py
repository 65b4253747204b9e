"""The benchmarks of whole steps on tiny models: what is checked, what refused, what a row says.

Conventional kernels are interpreted without a GPU, which takes seconds a step; replay is torch.
"""

import csv
import json
from dataclasses import replace

import pytest
import torch

from replayssm import cli, state_update
from replayssm.models.random_weights import random_model
from replayssm.ops import capability
from replayssm.ops.gated_delta import triton_conventional
from replayssm.state_update import StateUpdate
from replayssm.study import bench_arms, bench_steps, bench_timing
from replayssm.study.bench_arms import (
    Stage,
    conventional_arm,
    kept_in_a_cycle,
    replay_arm,
    state_bytes,
)
from replayssm.study.bench_cases import WrongResultError
from replayssm.study.bench_layer import observe, one_by_one
from replayssm.study.bench_step_records import StepRow
from replayssm.study.bench_step_settings import StepBench, cases
from replayssm.study.bench_steps import run_step_bench

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]
QWEN, NEMOTRON = "random/qwen3.5-tiny", "random/nemotron-3-tiny"
SMALL = {"batches": (2,), "contexts": (20,), "ring_len": 2, "seconds": 1e-6}


@pytest.fixture(autouse=True)
def few_cycles(monkeypatch):
    monkeypatch.setattr(bench_timing, "FEWEST_CYCLES", 2)


@pytest.fixture(scope="module")
def probe():
    adapter = random_model(QWEN, dtype=torch.float32, device=DEVICE)
    return observe(adapter, 6)


def run(kind, **options):
    return run_step_bench(StepBench(kind=kind, **SMALL | options), device=DEVICE)


# -- settings --------------------------------------------------------------------------------------
def test_what_is_measured_in_which_order():
    bench = StepBench(kind="speculate", drafts=(1, 8), policies=("fp32",), states=("fp16", "fp32"))
    names = [(arm.kind, arm.label, tokens) for arm, tokens in cases(bench)]
    assert names[0] == ("conventional", "fp32", 1), "what verification is compared with"
    arms = [("conventional", "fp32"), ("conventional", "fp16"), ("replay", "fp32")]
    assert names[1:] == [(*arm, tokens) for tokens in (2, 9) for arm in arms]
    decode = cases(replace(bench, kind="decode"))
    assert [(arm.kind, arm.label, tokens) for arm, tokens in decode] == [(*a, 1) for a in arms]
    assert decode[2][0].policy.label == "fp32" and decode[0][0].policy.ring_len == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "other"}, "kind 'other' is not one of decode, speculate"),
        ({"batches": (0,)}, "batch 0 is not an integer of at least 1"),
        ({"contexts": ()}, "nothing to measure"),
        ({"drafts": (17,)}, "drafts 17 is not an integer of 1 to 16"),
        ({"ring_len": 0}, "ring length 0"),
        ({"states": ("fp16",)}, "states must include fp32"),
        ({"states": ("fp32", "fp8")}, "state 'fp8' is not one of fp32, fp16, bf16"),
        ({"dtype": "int8"}, "dtype 'int8' is not one of"),
        ({"backend": "cuda"}, "backend 'cuda': allowed are auto, reference, triton"),
        ({"seconds": 0}, "seconds 0 is not positive"),
        ({"policies": ("fp32@4",)}, "the ring length is given for all policies"),
        ({"policies": ("fp31",)}, "fp31"),
    ],
)
def test_bad_settings(wrong, message):
    with pytest.raises(ValueError, match=message):
        StepBench(**{"kind": "decode"} | wrong)


# -- arms ------------------------------------------------------------------------------------------
def test_a_cycle_keeps_a_ring_full():
    assert kept_in_a_cycle(replay_arm("fp32", 16), 9) == [9, 7]
    assert kept_in_a_cycle(replay_arm("fp32", 16), 2) == [2] * 8
    assert kept_in_a_cycle(replay_arm("fp32", 16), 17) == [16]
    assert kept_in_a_cycle(conventional_arm("fp32"), 9) == [9]


def test_rings_get_slots_for_a_window():
    arm = replay_arm("fp32", 16)
    assert arm.verifying("mamba2", 9).ring_len == 24
    assert conventional_arm("fp32").verifying("mamba2", 9).ring_len == 1


@torch.inference_mode()
def test_memory_of_drafts(probe):
    """Snapshots cost a state each, ring slots what a record costs; decoding needs neither."""
    stage = Stage(probe, batch=2, context=20, room=16, backend="auto")
    replay, conventional = replay_arm("fp32", 4), conventional_arm("fp32")
    decode = stage.open(replay.policy, StateUpdate.step).session
    verify = stage.open(replay.verifying("gated_delta", 3), StateUpdate.window).session
    stream = stage.open(conventional.policy, StateUpdate.step)
    whole = stream.session
    plain = sum(decode.state_bytes().values())
    assert state_bytes(replay, decode) == (plain, 0)
    more = sum(verify.state_bytes().values()) - plain
    assert state_bytes(replay, verify, 2) == (plain, more) and more > 0
    state = 3 * 4 * 16 * 16 * 4  # layers, heads, rows, columns, bytes
    assert state_bytes(conventional, whole, 2) == (state, 2 * state)
    keys = 2 * 2 * 16 * 4 * 20  # both, heads, width, bytes, tokens; one layer
    convolutions = 3 * (2 * 32 + 64) * 4 * 4  # layers, channels, taps, bytes
    stream.step(torch.ones(2, 1, dtype=torch.int64, device=DEVICE))
    assert stage.sequence_bytes(stream) == keys + convolutions


@torch.inference_mode()
def test_arms_share_the_attention_cache_and_start_alike(probe):
    stage = Stage(probe, batch=3, context=20, room=16, backend="auto")
    streams = [stage.open(replay_arm("fp32", n).policy, StateUpdate.step) for n in (2, 4)]
    assert streams[0].cache is streams[1].cache
    token = torch.ones(3, 1, dtype=torch.int64, device=DEVICE)
    keys = stage.cache.layers[3].storage[0]
    convolutions = {i: s.clone() for i, s in _convolutions(stage)}
    logits = []
    for stream in streams:
        for i, states in _convolutions(stage):
            states.copy_(convolutions[i])
        bench_arms.seek(stream, 20)
        logits.append(stream.step(token).clone())
        assert stream.position == 21
    assert torch.allclose(*logits, rtol=1e-4, atol=1e-5)
    assert keys.isfinite().all()


def _convolutions(stage):
    return [(i, layer.conv_states[0]) for i, layer in enumerate(stage.cache.layers) if i != 3]


# -- checks ----------------------------------------------------------------------------------------
@torch.inference_mode()
@pytest.mark.parametrize("policy", ["fp32", "fp16-sr", "fp32+nvfp4"])
def test_steps_are_checked_across_a_flush(probe, policy):
    arm = replay_arm(policy, 3)
    options = {"batch": 9, "tokens": 5, "backend": "auto"}
    assert probe.check(arm.policy, one_by_one(StateUpdate.step), **options) > 0

    def faulty(update, cache, inputs):
        return update.step(cache, inputs._replace(g=inputs.g * 3 - 1.0))

    with pytest.raises(WrongResultError, match="differ from the float64 recurrence by"):
        probe.check(arm.policy, one_by_one(faulty), **options)


@torch.inference_mode()
def test_a_wrong_conventional_kernel_is_not_timed(monkeypatch):
    right = triton_conventional.conventional
    monkeypatch.setattr(triton_conventional, "conventional", lambda *a, **k: 1.001 * right(*a, **k))
    record = run("decode", models=(QWEN,), policies=("fp32",), dtype="float32")
    conventional, replay = record.rows
    assert (conventional.status, conventional.ms) == ("wrong", None)
    assert "float64 recurrence by 1.0e-03" in conventional.note
    assert replay.status == "ok" and replay.speedup is None and record.bad == [conventional]


# -- rows ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", [QWEN, NEMOTRON])
def test_decode_steps(model):
    seen = []
    bench = StepBench(kind="decode", models=(model,), policies=("fp16-sr+nvfp4",), **SMALL)
    record = run_step_bench(bench, device=DEVICE, emit=lambda r: seen.append(r.rows[-1]))
    assert seen == record.rows and not record.bad, [row.note for row in record.bad]
    conventional, replay = record.rows
    assert (conventional.name, replay.name) == ("conventional fp32", "fp16-sr+nvfp4")
    assert conventional.speedup == 1.0 and conventional.launch and conventional.draft_bytes == 0
    assert replay.speedup == pytest.approx(conventional.ms / replay.ms, rel=1e-3)
    assert replay.tokens_per_second == pytest.approx(2e3 / replay.ms, rel=1e-3)
    assert replay.error < 0.3 and conventional.error < 1e-5
    assert 0 < replay.recurrent_ms and replay.cycles >= 2
    assert record.settings["ring_len"] == 2 and "torch" in record.environment["packages"]
    if DEVICE == "cpu":
        assert "eager" in replay.graphs and conventional.backend == "triton (interpreted)"


def test_verifications():
    record = run("speculate", models=(QWEN,), policies=("fp32",), drafts=(2,), batches=(1,))
    assert not record.bad, [row.note for row in record.bad]
    step, conventional, replay = record.rows
    assert [row.drafts for row in record.rows] == [0, 2, 2]
    assert step.steps == 1.0 and conventional.speedup == 1.0
    assert replay.steps == pytest.approx(replay.ms / step.ms, abs=1e-4)
    assert replay.recurrent_steps == pytest.approx(
        replay.recurrent_ms / step.recurrent_ms, abs=1e-4
    )
    assert conventional.draft_bytes == 2 * conventional.state_bytes
    assert replay.draft_bytes < conventional.draft_bytes


def test_what_does_not_run_stops_nothing_else(monkeypatch):
    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench_arms, "new_snapshots", no_memory)
    record = run("speculate", models=(QWEN,), policies=("fp32",), drafts=(1,), batches=(1,))
    assert [row.status for row in record.rows] == ["ok", "failed", "ok"]
    assert "OutOfMemoryError: CUDA out of memory" in record.rows[1].note
    monkeypatch.setattr(bench_steps, "Stage", no_memory)
    record = run("decode", models=(QWEN,), policies=("fp32",))
    assert [row.status for row in record.rows] == ["failed", "failed"]


def test_models_are_looked_for_before_the_first_is_measured():
    seen = []
    for name, message in (("random/none", "no random model"), ("builtin/none", "no built-in mod")):
        bench = StepBench(kind="decode", models=(QWEN, name), policies=("fp32",), **SMALL)
        with pytest.raises(ValueError, match=message):
            run_step_bench(bench, device=DEVICE, emit=seen.append)
    assert not seen


@torch.inference_mode()
def test_a_time_says_that_torch_took_the_place_of_kernels(probe, monkeypatch):
    def as_on_a_gpu(*args, device, **sizes):
        return capability.choose_backend(*args, device=torch.device("cuda"), **sizes)

    monkeypatch.setattr(state_update, "choose_backend", as_on_a_gpu)
    monkeypatch.setattr(capability, "no_device", lambda device: None)
    monkeypatch.setitem(capability.MAX_RING_LEN, "gated_delta", 1)
    bench = StepBench(kind="decode", models=(QWEN,), policies=("fp32",), **SMALL)
    stage = Stage(probe, batch=2, context=20, room=64, backend=bench.backend)
    asked = StepRow(model=QWEN, batch=2, context=20, arm="replay", policy="fp32")
    row = bench_steps.timed_row(bench, stage, asked, replay_arm("fp32", 2), 1, 1e-7, {})
    assert (row.status, row.backend) == ("ok", "reference")
    assert row.note == "computed by torch: ring length 2: the kernels of gated_delta go up to 1"


# -- the commands ----------------------------------------------------------------------------------
def test_the_command_writes_everything(tmp_path, capsys):
    options = ["--batches", "1,2", "--contexts", "20", "--ring-len", "2", "--policies", "fp32"]
    options += ["--models", QWEN, "--seconds", "1e-6", "--out", str(tmp_path), "--device", DEVICE]
    assert cli.main(["bench", "decode", *options]) == 0
    printed = capsys.readouterr().out
    assert printed.count("decode step") == 4 and "conventional fp32" in printed
    figure = "random-qwen3.5-tiny-20"
    names = {"decode.json", "decode.csv", "decode.md", f"{figure}.svg", f"{figure}.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert json.loads((tmp_path / "decode.json").read_text())["kind"] == "decode"
    with (tmp_path / "decode.csv").open() as handle:
        assert [row["batch"] for row in csv.DictReader(handle)] == ["1", "1", "2", "2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["decode", "--models", "random/none"], "there is no random model 'random/none'"),
        (["decode", "--device", "gpu", "--models", QWEN], "device 'gpu': Expected one of"),
        (["decode", "--batches", "0"], "batch 0 is not an integer of at least 1"),
        (["speculate", "--drafts", "20"], "drafts 20 is not an integer of 1 to 16"),
        (["speculate", "--policies", "fp31"], "fp31"),
        (["speculate", "--redraw"], "speculate.json is missing"),
    ],
)
def test_bad_input_is_one_line(options, message, tmp_path, capsys):
    assert cli.main(["bench", *options, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
