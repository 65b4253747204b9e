"""Records of the benchmarks of whole steps, made up: files, tables, figures, and redrawing them."""

import csv
import io
import json
import re
import subprocess
import sys
from dataclasses import asdict, fields, replace

import pytest

from replayssm.study.bench_step_figures import step_figures
from replayssm.study.bench_step_records import (
    COLUMNS,
    StepRecord,
    StepRow,
    load_record,
    row_line,
    step_csv,
    step_markdown,
    write_record,
)

MODEL = "random/qwen3.5-4b"


def row(batch, ms, arm="replay", policy="fp32", drafts=0, base=10.0, **more):
    ratios = {"speedup": base / ms, "recurrent_speedup": 2.0, "steps": ms / 10.0}
    times = {"ms": ms, "ms_low": ms - 0.1, "ms_high": ms + 0.1, "recurrent_ms": ms / 2, "cycles": 3}
    sizes = {
        "state_bytes": 50_000_000,
        "draft_bytes": drafts * 50_000,
        "sequence_bytes": 17_000_000,
    }
    return StepRow(
        model=MODEL, batch=batch, context=512, drafts=drafts, arm=arm, policy=policy, status="ok",
        backend="triton", graphs="graphs", recurrent_steps=0.5, error=1.2e-7,
        **times, **ratios, **sizes, **more,
    )  # fmt: skip


def made_up(kind="decode", **changes):
    """Two batches, or two numbers of drafts, three arms, and one refusal."""
    rows = []
    if kind == "decode":
        for batch in (1, 256):
            rows.append(row(batch, 10.0, arm="conventional", launch="16 rows, 2 warps"))
            rows += [row(batch, 8.0), row(batch, 5.0, policy="fp16-sr+nvfp4")]
        refused = StepRow(
            model=MODEL, batch=512, context=512, arm="replay", policy="fp32", status="failed",
            note="OutOfMemoryError: no memory",
        )  # fmt: skip
    else:
        rows.append(row(256, 10.0, arm="conventional"))
        for drafts in (4, 8):
            rows.append(row(256, 40.0, arm="conventional", drafts=drafts, base=40.0))
            rows.append(row(256, 12.5, drafts=drafts, base=40.0))
        refused = StepRow(
            model=MODEL, batch=256, context=512, drafts=8, arm="replay", policy="fp16-sr",
            status="wrong", note="outputs differ",
        )  # fmt: skip
    values = {
        "kind": kind,
        "environment": {"summary": "replayssm 0, torch 0, A GPU", "device": {"name": "A GPU"}},
        "settings": {"ring_len": 16, "dtype": "bfloat16"},
        "clocks": {"before": None, "after": None},
        "rows": [*rows, refused],
    }
    return StepRecord(**values | changes)


def test_every_field_is_a_documented_column():
    assert list(COLUMNS) == [field.name for field in fields(StepRow)]


@pytest.mark.parametrize("kind", ["decode", "speculate"])
def test_a_record_survives_its_file(kind, tmp_path):
    write_record(made_up(kind), tmp_path)
    assert load_record(kind, tmp_path) == made_up(kind)
    assert json.loads((tmp_path / f"{kind}.json").read_text())["columns"] == COLUMNS


def test_a_row_has_a_time_exactly_if_it_is_right():
    first = made_up().rows[0]
    with pytest.raises(ValueError, match="'wrong' with a time"):
        replace(first, status="wrong")
    with pytest.raises(ValueError, match="'ok' with a time of None"):
        replace(first, ms=None)


def test_csv_holds_every_row():
    record = made_up()
    rows = list(csv.DictReader(io.StringIO(step_csv(record))))
    assert len(rows) == len(record.rows) and list(rows[0]) == list(COLUMNS)
    assert rows[-1]["ms"] == "" and float(rows[0]["ms"]) == asdict(record.rows[0])["ms"]


def test_what_weights_and_device_mean_is_said():
    record = made_up()
    text = step_markdown(record)
    assert "bfloat16 weights, random: only times mean anything." in text
    assert "computed as servers do" in text
    trained = [replace(row, model="builtin/gdn") for row in record.rows]
    here = {"summary": "a laptop", "device": {"type": "cpu", "name": "cpu"}}
    text = step_markdown(replace(record, rows=trained, environment=here))
    assert "- a laptop, bfloat16 weights.\n" in text
    assert "the library's own code" in text and "servers" not in text


def test_the_table_of_decode_steps():
    text = step_markdown(made_up())
    assert re.search(r"conventional fp32 +\| 10.00 ms \(1.00×\) +\| 10.00 ms \(1.00×\) +\| –", text)
    assert "8.00 ms (1.25×)" in text and "5.00 ms (2.00×)" in text
    assert "published (fp32, H100)" in text and "0.99×" in text and "1.27×" in text
    assert "failed: OutOfMemoryError: no memory" in text
    assert "attention and convolutions" in text and "1.20–1.47×" in text


def test_the_table_of_verifications():
    text = step_markdown(made_up("speculate"))
    assert "40.00 ms (4.00 steps)" in text and "12.50 ms (1.25 steps)" in text
    assert "Batch 256, recurrent layers alone" in text and "+ 8 drafts" in text
    assert "wrong: outputs differ" in text


def test_lines_of_rows():
    assert "2.00 x" in row_line(made_up().rows[2]) and "steps" not in row_line(made_up().rows[2])
    assert "[16 rows, 2 warps]" in row_line(made_up().rows[0])
    assert "1.25 steps" in row_line(made_up("speculate").rows[2])


def test_what_torch_computed_is_said_wherever_its_time_stands():
    said = "computed by torch: ring length 65: the kernels of gated_delta go up to 64"
    slow = row(256, 20.0, policy="fp16-sr", note=said)
    assert row_line(slow).endswith(said)
    record = made_up(rows=[*made_up().rows[:-1], slow])
    assert record.bad == []
    text = step_markdown(record)
    assert f"- **{row_line(slow)}**" in text
    assert "20.00 ms (0.50×), by torch" in text and text.count("by torch") == 3


@pytest.mark.parametrize(
    ("kind", "names"),
    [("decode", {"random-qwen3.5-4b-512"}), ("speculate", {"random-qwen3.5-4b-512-batch-256"})],
)
def test_figures_are_the_same_bytes_when_redrawn(kind, names):
    record = made_up(kind)
    files = step_figures(record)
    assert set(files) == {f"{name}.{end}" for name in names for end in ("svg", "png")}
    assert step_figures(made_up(kind)) == files
    assert step_figures(made_up(kind, rows=record.rows[-1:])) == {}, "nothing was measured"


@pytest.mark.parametrize("kind", ["decode", "speculate"])
def test_redraw_needs_no_gpu_and_no_torch(kind, tmp_path):
    write_record(made_up(kind), tmp_path)
    program = (
        "import sys; from replayssm import cli; "
        f"code = cli.main(['bench', {kind!r}, '--redraw', '--out', {str(tmp_path)!r}]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr  # one row was refused, and it says so
    assert made_up(kind).bad[0].note in done.stderr
    assert (tmp_path / f"{kind}.md").read_text() == step_markdown(made_up(kind))
