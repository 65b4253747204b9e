"""The torch reference on a CUDA device: the CPU's numbers, wherever the tensors live."""

import pytest
import torch
from recurrence_cases import (
    GEOMETRIES,
    PLAIN,
    make_inputs,
    make_update,
    oracle,
    random_state,
    relative,
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
