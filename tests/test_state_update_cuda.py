"""StateUpdate on a CUDA device: the reference has the CPU's numbers, kernels the reference's, in
captured graphs, too, and without waiting for the device."""

import pytest
import torch
from recurrence_cases import (
    GEOMETRIES,
    PLAIN,
    make_cache,
    make_inputs,
    make_update,
    oracle,
    random_state,
    relative,
    same_cache,
    take_rows,
    take_tokens,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def moved(inputs, device):
    return type(inputs)(*(t.to(device) for t in inputs))


def cache_on(update, state, sequence):
    cache = update.new_cache(len(sequence), sequence=sequence, seed=5)
    update.load(cache, state.to(update.device))
    return cache


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("tokens", [1, 16])
def test_fp32_products_are_fp32(name, tokens):
    """Within FP32 rounding of the float64 oracle: no TF32 anywhere."""
    recurrence, geometry = GEOMETRIES[name]
    update = make_update(recurrence, "fp32", geometry, device="cuda", backend="reference")
    inputs = make_inputs(recurrence, geometry, 3, 48)
    state = random_state(update, 3)
    expected, last = oracle(recurrence, state, inputs)
    cache = cache_on(update, state, [0, 1, 2])
    on_device = moved(inputs, "cuda")
    outputs = torch.cat(
        [update.step(cache, take_tokens(on_device, t, t + tokens)) for t in range(0, 48, tokens)], 1
    )
    assert relative(outputs.cpu(), expected) < 1e-6
    assert relative(update.state(cache).cpu(), last) < 1e-6
    outputs, final = update.prefill(state.cuda(), on_device)
    assert relative(outputs.cpu(), expected) < 1e-6 and relative(final.cpu(), last) < 1e-6


@pytest.mark.parametrize("recurrence", PLAIN)
@pytest.mark.parametrize("policy", ["fp16-sr", "fp8-sr", "nvfp4", "fp16-sr+nvfp4", "fp32:ring=fp8"])
def test_rows_at_different_cursors_round_like_the_cpu(recurrence, policy):
    inputs = make_inputs(recurrence, PLAIN[recurrence], 4, 60)
    caches, outputs = {}, {}
    for device in ("cpu", "cuda"):
        update = make_update(recurrence, policy, device=device, backend="reference")
        cache = cache_on(update, random_state(update, 4), [3, 1, 4, 2])
        for row in range(1, 4):
            index = torch.tensor([row])
            part = cache.select(index)
            warmup = take_tokens(take_rows(inputs, index), 0, 5 * row)
            update.step(part, moved(warmup, device))
            cache.assign(index, part)
        outputs[device] = torch.cat(
            [
                update.step(cache, moved(take_tokens(inputs, t, t + 4), device))
                for t in range(0, 60, 4)
            ],
            dim=1,
        ).cpu()
        caches[device] = cache
    a, b = (caches[d].checkpoint.data.cpu() for d in ("cpu", "cuda"))
    assert (a != b).double().mean() < (1.0 if policy.startswith("fp32") else 5e-3)
    assert relative(outputs["cuda"], outputs["cpu"]) < 2e-2
    assert torch.equal(caches["cuda"].flushes.cpu(), caches["cpu"].flushes)
    assert torch.equal(caches["cuda"].pos.cpu(), caches["cpu"].pos)


def test_tf32_is_refused():
    update = make_update("mamba2", device="cuda", backend="reference")
    cache = update.new_cache(1, sequence=[0], seed=0)
    inputs = moved(make_inputs("mamba2", PLAIN["mamba2"], 1, 4), "cuda")
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="'tf32' on cuda"):
            update.step(cache, inputs)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


QUICK = [
    *("fp32", "fp16", "fp16-sr", "fp8", "fp8-sr", "nvfp4"),
    *("fp32+nvfp4", "fp16-sr+nvfp4", "fp8-sr+nvfp4"),
]
REAL = {
    "mamba2": dict(num_heads=32, head_dim=64, n_groups=8, d_state=128),
    "gated_delta": dict(num_k_heads=8, num_v_heads=16, head_k_dim=128, head_v_dim=128),
}


def real_update(recurrence, policy, backend="triton", **more):
    return make_update(recurrence, policy, REAL[recurrence], device="cuda", backend=backend, **more)


def real_inputs(recurrence, rows, tokens):
    inputs = make_inputs(recurrence, REAL[recurrence], rows, tokens, ring=torch.bfloat16)
    return moved(inputs, "cuda")


def real_cache(update, rows):
    return make_cache(update, rows, dtype=torch.bfloat16)


@pytest.mark.parametrize("recurrence", REAL)
@pytest.mark.parametrize("policy", QUICK)
def test_kernels_equal_the_reference_at_real_sizes(recurrence, policy):
    """Single tokens and windows, 60 of them, in the dtype of real inputs."""
    inputs = real_inputs(recurrence, 3, 60)
    results = {}
    for backend in ("reference", "triton"):
        update = real_update(recurrence, policy, backend)
        cache = real_cache(update, 3)
        cuts = [0, 16, 32, *range(33, 50), 60]
        parts = [take_tokens(inputs, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
        outputs = torch.cat([update.step(cache, part) for part in parts], 1)
        update.check_finite(cache)
        results[backend] = outputs, update.state(cache), cache
    (a, state_a, one), (b, state_b, other) = results["reference"], results["triton"]
    exact = policy == "fp32"
    assert relative(b, a) < (1e-6 if exact else 2e-3)
    assert relative(state_b, state_a) < (1e-6 if exact else 2e-2)
    assert torch.equal(one.pos, other.pos) and torch.equal(one.flushes, other.flushes)
    assert torch.equal(one.saturated, other.saturated)
    different = one.checkpoint.data.view(torch.uint8) != other.checkpoint.data.view(torch.uint8)
    assert policy.startswith("fp32") or different.double().mean() < 5e-3
    assert other.known == other.cursor == 12


def captured(update, cache, inputs):
    """A graph of `step` on copies of `inputs`, and what it reads and writes."""
    static = type(inputs)(*(None if t is None else t.clone() for t in inputs))
    update.step(cache.clone(), static)  # compiles
    cache.parameters = update._ops.parameters(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = update.step(cache, static)
    return graph, static, output


@pytest.mark.parametrize("recurrence", REAL)
@pytest.mark.parametrize("policy", ["fp32", "fp16-sr", "fp16-sr+nvfp4"])
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_a_captured_step_equals_eager_steps(recurrence, policy, tokens):
    """Bit for bit, for 48 tokens and three flushes.

    One token's flush is the device's decision; of a window, a graph fixes where the rings stand.
    """
    update = real_update(recurrence, policy)
    inputs = real_inputs(recurrence, 4, 48)
    eager = real_cache(update, 4)
    eager.parameters = update._ops.parameters(inputs)
    cache = eager.clone()
    assert cache.kernel_arguments
    graphs = {}
    for start in range(0, 48, tokens):
        part = take_tokens(inputs, start, start + tokens)
        stand = 0 if tokens == 1 else start % 16
        if stand not in graphs:
            before = cache.clone()
            graphs[stand] = captured(update, cache, part)
            assert same_cache(before, cache) and cache.known == start % 16, "capturing moves it"
        graph, static, output = graphs[stand]
        for mine, given in zip(static, part, strict=True):
            mine.copy_(given)
        graph.replay()
        update.replayed(cache, tokens)
        assert torch.equal(output, update.step(eager, part))
    assert same_cache(eager, cache) and cache.known == eager.known == 0
    assert eager.flushes.tolist() == [4] * 4


@pytest.mark.parametrize("recurrence", REAL)
def test_a_captured_step_follows_rows_at_different_slots(recurrence):
    """One graph for any cursors: rows flush at different replays."""
    update = real_update(recurrence, "fp16-sr+nvfp4")
    inputs = real_inputs(recurrence, 3, 40)
    cache = real_cache(update, 3)
    update.window(cache, take_tokens(inputs, 0, 12))
    update.commit(cache, torch.tensor([3, 12, 7], device="cuda"))
    assert cache.known is None, "only the device knows"
    eager = cache.clone()
    graph, static, output = captured(update, cache, take_tokens(inputs, 0, 1))
    for start in range(12, 40):
        part = take_tokens(inputs, start, start + 1)
        for mine, given in zip(static, part, strict=True):
            mine.copy_(given)
        graph.replay()
        assert torch.equal(output, update.step(eager, part))
    assert same_cache(eager, cache)
    assert cache.cursor.tolist() == [(n + 28) % 16 for n in (3, 12, 7)]


@pytest.mark.parametrize("recurrence", REAL)
def test_nothing_waits_for_the_device(recurrence):
    """Window, commit, flush, step and replay under torch's check for synchronisation."""
    update = real_update(recurrence, "fp16-sr+nvfp4")
    cache, inputs = real_cache(update, 3), real_inputs(recurrence, 3, 16)
    accepted = torch.tensor([1, 2, 3], device="cuda")

    def everything():
        update.step(cache, inputs)
        update.step(cache, take_tokens(inputs, 0, 1))
        update.window(cache, take_tokens(inputs, 0, 4))
        update.commit(cache, 2)
        update.window(cache, take_tokens(inputs, 0, 4))
        update.commit(cache, accepted)
        update.step(cache, take_tokens(inputs, 0, 1))
        update.flush(cache, accepted > 1)
        update.flush(cache)

    everything()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recurrence", REAL)
def test_a_row_without_room_is_nan_where_only_the_device_knows(recurrence):
    update = real_update(recurrence, "fp32")
    cache, inputs = real_cache(update, 2), real_inputs(recurrence, 2, 16)
    update.window(cache, inputs)
    update.commit(cache, torch.tensor([16, 4], device="cuda"))
    outputs = update.window(cache, take_tokens(inputs, 0, 8))
    assert outputs[0].isnan().all() and outputs[1].isfinite().all()


def test_auto_takes_kernels_and_says_where_it_does_not():
    assert make_update("mamba2", device="cuda").effective_backend == "triton"
    other = make_update("mamba2", "fp32:operand=bf16", device="cuda")
    assert other.effective_backend == "reference" and "operand bf16" in other.backend_reason
