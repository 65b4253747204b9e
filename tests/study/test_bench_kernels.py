"""The kernel benchmark on tiny layers, kernels interpreted: what is checked and what refused."""

import importlib
import sys
import types
from dataclasses import replace

import pytest
import torch

from replayssm import cli
from replayssm.ops.gated_delta.reference import GatedDeltaGeometry
from replayssm.ops.kimi_delta.reference import KimiDeltaGeometry
from replayssm.ops.mamba2.reference import Mamba2Geometry
from replayssm.policy import parse_policy
from replayssm.study import bench_kernels, bench_timing
from replayssm.study.bench_kernels import (
    KernelBench,
    compile_ahead,
    measure,
    run_kernel_bench,
    single_row_launches,
)
from replayssm.study.bench_public import public_updates
from replayssm.study.bench_records import KernelRow, load_record
from replayssm.study.bench_timing import Timing
from replayssm.study.bench_workload import (
    LAYERS,
    BenchLayer,
    make_pool,
    make_sequences,
    visits,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = {
    "mamba2": Mamba2Geometry(num_heads=2, head_dim=16, n_groups=1, d_state=32),
    "gated_delta": GatedDeltaGeometry(num_k_heads=1, num_v_heads=2, head_k_dim=32, head_v_dim=16),
    "kimi_delta": KimiDeltaGeometry(num_k_heads=1, num_v_heads=2, head_k_dim=32, head_v_dim=16),
}
SMALL = {"batches": (2,), "ring_lens": (3,), "states": ("fp32",), "window": 2}


@pytest.fixture(autouse=True)
def tiny_layers(monkeypatch):
    """A layer of each recurrence, under its name, and two launches instead of the whole sweep."""
    from replayssm.ops import triton_conventional

    for name, geometry in TINY.items():
        layer = BenchLayer(name=name, title=f"Tiny {name}", geometry=geometry)
        monkeypatch.setitem(LAYERS, name, layer)
    monkeypatch.setattr(triton_conventional, "SWEEP", triton_conventional.SWEEP[3:5])


def timer(launches, *, reset, seconds):
    """Ten microseconds, whatever it is, for one replay."""
    del seconds
    reset()
    for launch in launches:
        launch()
    return Timing(us=10.0, low=9.0, high=12.0, replays=7)


def rows_of(*, cache=500, **options):
    bench = KernelBench(**SMALL | options)
    return list(measure(bench, timer=timer, device=DEVICE, cache=cache))


def by_kernel(rows):
    return {(row.policy, row.kernel): row for row in rows}


# -- measuring -------------------------------------------------------------------------------------
@pytest.mark.parametrize("recurrence", TINY)
@pytest.mark.parametrize("policy", ["fp32", "fp32+nvfp4", "fp16-sr+nvfp4:update=read"])
def test_every_kernel_is_checked_and_timed(recurrence, policy):
    rows = rows_of(layers=[recurrence], policies=[policy])
    assert [(row.policy, row.kernel, row.status) for row in rows] == [
        ("fp32", "conventional", "ok"),
        *((policy, kernel, "ok") for kernel in ("cycle", "step", "window")),
    ], [row.note for row in rows]
    conventional, cycle, step, window = rows
    assert conventional.us == 10.0 and conventional.launch and conventional.speedup is None
    sizes = LAYERS[recurrence].sizes
    state = 4 * sizes.heads * sizes.rows * sizes.cols
    assert conventional.megabytes == pytest.approx(2 * 2 * state / 1e6)
    counted = replace(parse_policy(policy), ring_len=3).bytes_per_token(sizes)
    assert cycle.megabytes == step.megabytes == pytest.approx(2 * counted / 1e6)
    assert (cycle.speedup, window.speedup, window.tokens, window.megabytes) == (1.0, 2.0, 2, None)
    assert all(0 < row.error < 2e-2 for row in rows) and cycle.ring_len == 3
    assert cycle.launches % 3 == 0 and cycle.working_set_mb > 0


def test_small_working_sets_are_repeated():
    rows = rows_of(layers=["mamba2"], policies=["fp32"], cache=3_000, batches=(1,), ring_lens=(4,))
    assert [row.status for row in rows] == ["ok"] * 4, [row.note for row in rows]
    # A state is 4 kB: three for 9 kB, each at all four positions.
    assert [row.launches for row in rows] == [6, 12, 12, 12]


def test_few_rows_and_a_ring_of_one():
    rows = rows_of(layers=["mamba2"], policies=["fp32"], batches=(1,), ring_lens=(1, 5))
    assert [row.status for row in rows] == ["ok"] * 7, [row.note for row in rows]


@pytest.mark.parametrize("recurrence", TINY)
def test_wrong_outputs_get_no_time(recurrence, monkeypatch):
    module = importlib.import_module(f"replayssm.ops.{recurrence}.triton_decode")
    right = module.decode
    monkeypatch.setattr(module, "decode", lambda *a, **k: right(*a, **k) * 1.0001)
    rows = by_kernel(rows_of(layers=[recurrence], policies=["fp32"]))
    cycle = rows["fp32", "cycle"]
    assert cycle.status == "wrong" and cycle.us is None and cycle.speedup is None
    assert "outputs differ from the float64 recurrence by 1.0e-04" in cycle.note
    assert rows["fp32", "window"].status == "ok", "does not go through decode"


@pytest.mark.parametrize("copy", ["checkpoint", "read copy"])
def test_a_wrong_stored_state_gets_no_time(copy, monkeypatch):
    from replayssm.ops.mamba2 import triton_decode

    right = triton_decode.step

    def step(checkpoint, read_copy, ring, policy, cursors, inputs, *, layer):
        full = cursors.slots[cursors.pos[cursors.slots] == policy.ring_len - 1]
        out = right(checkpoint, read_copy, ring, policy, cursors, inputs, layer=layer)
        if copy == "checkpoint":
            checkpoint.data[full] *= 1.0001
        else:
            read_copy.data[full] ^= 1
        return out

    monkeypatch.setattr(triton_decode, "step", step)
    rows = by_kernel(rows_of(layers=["mamba2"], policies=["fp32+nvfp4"]))
    for kernel in ("cycle", "step"):
        row = rows["fp32+nvfp4", kernel]
        assert row.status == "wrong" and row.note.startswith(f"{copy} differ"), row
    assert rows["fp32+nvfp4", "window"].status == "ok"


def test_without_a_right_conventional_kernel_there_is_no_speedup(monkeypatch):
    from replayssm.ops.mamba2 import triton_conventional

    monkeypatch.setattr(
        triton_conventional, "conventional", lambda state, slots, inputs, launch: inputs.x.float()
    )
    rows = rows_of(layers=["mamba2"], policies=["fp32"])
    assert rows[0].status == "wrong" and rows[0].us is None
    assert rows[1].us == 10.0 and rows[1].speedup is None


def test_what_cannot_run_says_why_and_stops_nothing():
    policies = ["fp32:ring=fp16", "fp32:ring=fp8", "fp32"]
    found = by_kernel(rows_of(layers=["mamba2"], policies=policies))
    for policy, why in (
        (policies[0], "inputs' dtype only"),
        (policies[1], "for which there is no kernel"),
    ):
        refused = found[policy, "cycle"]
        assert refused.status == "failed" and why in refused.note
    assert found["fp32", "cycle"].status == "ok"


def test_a_ring_that_the_library_gives_no_kernel_gets_no_time():
    sequences = make_sequences(LAYERS["kimi_delta"], 33, DEVICE)
    refusal = bench_kernels._template(sequences, replace(parse_policy("fp32"), ring_len=33))
    assert str(refusal) == "ring length 33: the kernels of kimi_delta go up to 32"


def test_narrow_conventional_states():
    rows = rows_of(layers=["mamba2"], policies=["fp32"], states=("bf16", "fp16", "fp32"))
    states = [row for row in rows if row.kernel == "conventional"]
    assert [row.policy for row in states] == ["fp32", "bf16", "fp16"]
    assert [row.status for row in states] == ["ok"] * 3, [row.note for row in states]
    assert states[0].megabytes == 2 * states[1].megabytes


@pytest.mark.parametrize("recurrence", TINY)
def test_everything_can_be_launched_once_ahead(recurrence):
    """All rows but one are padding: what is compiled is chosen by the batch, little is run."""
    bench = KernelBench(**SMALL | {"batches": (5,)}, layers=[recurrence], policies=["fp32+nvfp4"])
    calls = single_row_launches(bench, LAYERS[recurrence], DEVICE)
    assert len(calls) == 2 + 1 + 1 + 2  # decode, step, step, window; two launches of the sweep
    for call in calls:
        call()


@pytest.fixture
def pretended_gpu(monkeypatch):
    """A device that measures one row, at 100 GB/s."""
    row = KernelRow(
        layer="mamba2",
        recurrence="mamba2",
        batch=2,
        policy="fp32",
        kernel="conventional",
        us=10.0,
        us_low=9.0,
        us_high=11.0,
        megabytes=0.5,
        status="ok",
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("replayssm.ops.triton_common.interpreted", lambda: False)
    monkeypatch.setattr(bench_kernels, "compile_ahead", lambda bench, device: None)
    monkeypatch.setattr(bench_kernels, "measure", lambda bench, **options: iter([row]))
    described = {"summary": "code", "device": {"name": "none"}}
    monkeypatch.setattr(bench_kernels, "environment", lambda device: described)
    for name, value in (("clocks", None), ("cache_bytes", 6e7), ("copy_bandwidth", 100.0)):
        monkeypatch.setattr(bench_timing, name, lambda value=value: value)
    return row


def test_a_run_is_recorded_with_what_explains_it(pretended_gpu, tmp_path, capsys):
    options = ["bench", "kernels", "--layers", "mamba2", "--out", str(tmp_path)]
    assert cli.main(options) == 0
    record = load_record(tmp_path)
    assert record.rows == [replace(pretended_gpu, bandwidth_share=0.5)]
    assert (record.titles, record.cache_mb) == ({"mamba2": "Tiny mamba2"}, 60.0)
    assert record.settings["layers"] == ["mamba2"] and record.settings["window"] == 8
    printed = capsys.readouterr()
    assert "50 % of copy" in printed.out and "kernels.csv" in printed.out
    assert "mamba_ssm" in printed.err or not record.missing


def test_interpreted_kernels_are_not_timed(pretended_gpu, monkeypatch):
    monkeypatch.setattr("replayssm.ops.triton_common.interpreted", lambda: True)
    with pytest.raises(ValueError, match="TRITON_INTERPRET is set"):
        run_kernel_bench(KernelBench(layers=["mamba2"]))


# -- workload --------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 7, 100, 1000])
@pytest.mark.parametrize("ring_len", [1, 5, 16])
def test_a_cycle_visits_every_position_equally_and_outruns_the_cache(size, ring_len):
    plan = visits(size, 100, ring_len)
    blocks = 1 + max(block for block, _ in plan)
    positions = [position for _, position in plan]
    assert {positions.count(p) for p in range(ring_len)} == {len(plan) // ring_len}
    assert blocks * size >= 300 or (blocks == 1 and size >= 300)
    for first, (block, _) in enumerate(plan[:blocks]):
        assert block == first, "blocks follow one another, so that a block comes back last"


@pytest.mark.parametrize("recurrence", TINY)
def test_a_pool_repeats_its_sequences(recurrence):
    policy = replace(parse_policy("fp16-sr+nvfp4"), ring_len=4)
    template = make_pool(make_sequences(LAYERS[recurrence], 4, "cpu"), policy)
    pool = template.repeated(6)
    assert pool.slots == 6
    for tensors in (pool.checkpoint.tensors(), pool.read_copy.tensors(), pool.ring):
        for tensor in tensors.values():
            assert torch.equal(tensor[4:].float(), tensor[:2].float()) and tensor.is_contiguous()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": ["llama"]}, "layer 'llama' is not one of nemotron-3-super"),
        ({"states": ["fp8"]}, "state 'fp8' is not one of fp32"),
        ({"states": ["fp16"]}, "states must include fp32"),
        ({"batches": [0]}, "batch 0 is not an integer of at least 1"),
        ({"batches": []}, "nothing to measure"),
        ({"policies": ["fp32@8"]}, "ring lengths are given for all policies"),
        ({"policies": ["fp33"]}, "policy 'fp33'"),
        ({"seconds": 0}, "seconds 0 is not positive"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        KernelBench(**options)


# -- public kernels --------------------------------------------------------------------------------
def test_absent_public_kernels_are_named():
    for recurrence, name in (
        ("mamba2", "mamba_ssm"),
        ("gated_delta", "fla"),
        ("kimi_delta", "fla"),
    ):
        if name in sys.modules:
            pytest.skip(f"{name} is installed")
        found, missing = public_updates(recurrence)
        assert not found and len(missing) == 1 and name in missing[0]


def selective_state_update(state, x, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False):
    """What mamba_ssm's documentation says it computes, state in place."""
    assert dt.stride(-1) == A.stride(-1) == A.stride(-2) == dt_bias.stride(-1) == 0
    assert not dt_softplus
    per_group = x.shape[1] // B.shape[1]
    B, C = (t.float().repeat_interleave(per_group, 1) for t in (B, C))
    state.mul_(torch.exp(A * dt[..., None])).add_((dt * x)[..., None] * B[:, :, None])
    return ((state * C[:, :, None]).sum(-1) + D * x).to(x.dtype)


def fused_recurrent_gated_delta_rule(q, k, v, *, g, beta, scale, initial_state, output_final_state):
    """The same of fla: states [B, HV, K, V], a new one is returned."""
    return fused_recurrent_kda(
        q, k, v, g[..., None], beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state,
    )  # fmt: skip


def fused_recurrent_kda(q, k, v, g, beta, *, scale, initial_state, output_final_state):
    """The same with a gate for every key channel, [B, T, HV, K]."""
    assert scale == 1.0 and output_final_state
    per_key = v.shape[2] // k.shape[2]
    q, k = (t[:, 0].float().repeat_interleave(per_key, 1) for t in (q, k))
    state = initial_state * g[:, 0, :, :, None].exp()
    u = beta[:, 0, :, None] * (v[:, 0] - (state * k[..., None]).sum(-2))
    state = state + k[..., None] * u[..., None, :]
    return (state * q[..., None]).sum(-2)[:, None].to(v.dtype), state


@pytest.mark.parametrize(
    ("recurrence", "module", "function"),
    [
        ("mamba2", "mamba_ssm.ops.triton.selective_state_update", selective_state_update),
        ("gated_delta", "fla.ops.gated_delta_rule", fused_recurrent_gated_delta_rule),
        ("kimi_delta", "fla.ops.kda", fused_recurrent_kda),
    ],
)
def test_public_kernels_are_called_as_documented(recurrence, module, function, monkeypatch):
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        fake = types.ModuleType(".".join(parts[:depth]))
        fake.__path__ = []
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    setattr(fake, function.__name__, function)
    rows = rows_of(layers=[recurrence], policies=["fp32"])
    public = [row for row in rows if row.source != "replayssm"]
    assert [(row.source, row.status) for row in public] == [(parts[0], "ok")], public
    assert public[0].policy == "fp32" and public[0].kernel == "conventional"


# -- command ---------------------------------------------------------------------------------------
@pytest.mark.skipif(DEVICE == "cuda", reason="needs a machine without a GPU")
def test_without_a_gpu_one_line_and_exit_code_2(tmp_path, capsys):
    assert cli.main(["bench", "kernels", "--quick", "--out", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0 and "CUDA GPU" in error and not (tmp_path / "new").exists()


def test_options_reach_the_settings(monkeypatch, tmp_path):
    seen = []

    def run(bench, *, emit):
        seen.append(bench)
        raise ValueError("enough")

    monkeypatch.setattr(bench_kernels, "run_kernel_bench", run)
    options = ["--layers", "qwen3.5-4b", "--batch", "2,8", "--ring-len", "8,32", "--window", "4"]
    assert cli.main(["bench", "kernels", *options, "--policies", "fp8,nvfp4", "--quick"]) == 2
    assert seen[0] == KernelBench(
        layers=["qwen3.5-4b"],
        batches=[2, 8],
        ring_lens=[8, 32],
        policies=["fp8", "nvfp4"],
        window=4,
        states=("fp32",),
        seconds=0.04,
    )


# -- device ----------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_times_on_a_device():
    x = torch.ones(1 << 29, device="cuda")
    calls = []
    launches = [lambda: x.mul_(1.0)] * 4
    timing = bench_timing.graph_time(launches, reset=lambda: calls.append(1), seconds=0.01)
    assert 0 < timing.low <= timing.us <= timing.high and len(calls) == timing.replays + 2
    moved = 2 * x.nbytes / timing.us / 1e3
    assert moved < 1.2 * bench_timing.copy_bandwidth()
    assert bench_timing.cache_bytes() > 0


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_tiny_layer_on_a_device():
    bench = KernelBench(
        **SMALL, layers=["mamba2", "gated_delta"], policies=["fp32", "fp16-sr+nvfp4"]
    )
    compile_ahead(bench, "cuda")
    rows = list(measure(bench, timer=bench_timing.graph_time, device="cuda", cache=20_000))
    assert {row.status for row in rows} == {"ok"}, [row.note for row in rows]
    assert sum(row.source == "replayssm" for row in rows) == 14
