"""The benchmark of a study: that it runs, what it counts, and how it divides a trace."""

import csv
import json

import pytest
import torch

from replayssm.study import bench_study
from replayssm.study.bench_arms import seek
from replayssm.study.bench_study import ARM_SETS, Case, arm_set, extrapolate, measure, open_model
from replayssm.study.bench_trace import divide

TINY = "random/qwen3.5-tiny"


def test_every_length_is_timed_and_written(tmp_path, monkeypatch):
    case = Case(model=TINY, lengths=(20, 400), windows=2, prompts=2)
    (result,) = bench_study.run([case], device="cpu", out=tmp_path, show=lambda _: None)
    assert [row["length"] for row in result["rows"]] == [20, 400]
    for row in result["rows"]:
        assert row["rows"] == 18 and row["backend"] == "reference"
        assert row["tokens_per_second"] == pytest.approx(32e3 / row["window_ms"], rel=1e-2)
    with (tmp_path / "windows.csv").open() as handle:
        assert len(list(csv.DictReader(handle))) == 2
    document = json.loads((tmp_path / "windows.json").read_text())
    assert document["cases"][0]["extrapolated_seconds_131072_tokens"] > 0
    assert "torch" in document["environment"]["packages"]


def test_a_window_is_read_at_the_length_that_is_pretended():
    case = Case(model=TINY, lengths=(200,), windows=1)
    adapter = open_model(case, "cpu")
    with torch.inference_mode():
        engine = bench_study._engine(case, adapter)
        seek(engine._stream, 200)
        bench_study._stepper(engine, case)()
    assert engine.position == 216
    layer = engine._stream.cache.layers[3]
    assert layer.get_seq_length() == 216 and layer.keys.isfinite().all()


def test_extrapolation_is_the_integral_of_a_line():
    rows = [{"length": n, "window": 16, "window_ms": 10 + n / 1000} for n in (1000, 60000, 130000)]
    expected = sum(10 + n / 1000 for n in range(0, 131072, 16)) / 1e3
    assert extrapolate(rows) == pytest.approx(expected, rel=1e-3)
    assert extrapolate(rows[:1]) is None


@pytest.mark.parametrize("name", ARM_SETS)
def test_arm_sets_begin_with_the_reference(name):
    arms = arm_set(name)
    assert arms[0].kind == "reference" and len({arm.label for arm in arms}) == len(arms)
    assert len(arms) == {"eight": 9, "study": 29}[name]


def test_bad_cases():
    for wrong, message in (
        ({"arms": "ten"}, "allowed are eight, study"),
        ({"window": 0}, "window must be"),
        ({"lengths": (3,)}, "lengths must be"),
    ):
        with pytest.raises(ValueError, match=message):
            Case(model=TINY, **wrong)
    with pytest.raises(ValueError, match="qwen3.5-4b"):
        list(measure(Case(model="x"), open_model(Case(model="random/none"), "cpu")))


def test_kernels_go_to_the_stretch_that_launched_them():
    def kernel(name, correlation, duration):
        return {"cat": "kernel", "name": name, "dur": duration, "ts": 0,
                "args": {"correlation": correlation}}  # fmt: skip

    def launch(correlation, at):
        return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1,
                "args": {"correlation": correlation}}  # fmt: skip

    def label(name, start, stop):
        return {"cat": "user_annotation", "name": name, "ts": start, "dur": stop - start}

    events = [
        label("head", 10, 20), label("recurrence", 30, 40), label("other", 0, 100),
        launch(1, 5), launch(2, 12), launch(3, 33), launch(4, 34), launch(5, 41),
        kernel("gemm", 1, 2000), kernel("gemm", 2, 4000), kernel("_window_kernel", 3, 6000),
        kernel("_attend_kernel", 4, 8000), kernel("copy", 5, 10000), kernel("lost", 9, 1000),
        {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    found = divide(events, 2, labels=("recurrence", "head"), kernels={"attention": ("attend",)})
    assert found["parts"] == {"recurrence": 3.0, "head": 2.0, "attention": 4.0, "rest": 6.5}
    assert found["launches"] == 3
    assert found["kernels"][0] == ("copy", 0.5, 5.0)
    assert ("gemm", 1.0, 3.0) in found["kernels"]
