"""Records of the kernel benchmark, made up: files, table, figures, and redrawing them."""

import csv
import io
import json
import subprocess
import sys
from dataclasses import asdict, fields, replace

import pytest

from replayssm import cli
from replayssm.study.bench_figures import kernel_figures
from replayssm.study.bench_records import (
    COLUMNS,
    KernelRecord,
    KernelRow,
    kernel_csv,
    kernel_markdown,
    load_record,
    row_line,
    write_record,
)

BATCHES = (1, 16, 256)


def made_up(**changes):
    """A record of two layers, two policies, and one refusal."""
    rows = []
    for layer, recurrence in (("a", "mamba2"), ("b", "gated_delta")):
        common = {"layer": layer, "recurrence": recurrence, "status": "ok", "error": 1.5e-7}
        for batch in BATCHES:
            us = 4.0 + 2 * batch
            time = {"us": us, "us_low": us - 0.1, "us_high": us + 0.2, "batch": batch}
            state = {"kernel": "conventional", "policy": "fp32", "megabytes": 8.0 * batch}
            rows.append(KernelRow(**common, **time, **state, launch="16 rows, 2 warps"))
            slower = time | {"us": us + 1, "us_high": us + 1.5}
            rows.append(KernelRow(**common, **slower, **state, source="mamba_ssm"))
            for i, policy in enumerate(("fp32", "fp16-sr+nvfp4")):
                for kernel, tokens in (("cycle", 1), ("step", 1), ("window", 8)):
                    speedup = 2.0 + i
                    rows.append(
                        KernelRow(
                            **common,
                            batch=batch,
                            ring_len=16,
                            policy=policy,
                            kernel=kernel,
                            tokens=tokens,
                            us=tokens * us / speedup,
                            us_low=tokens * us / speedup - 0.05,
                            us_high=tokens * us / speedup + 0.05,
                            megabytes=None if kernel == "window" else 4.0 * batch,
                            bandwidth_share=None if kernel == "window" else 0.8,
                            speedup=speedup,
                        )
                    )
    refused = KernelRow(
        layer="b",
        recurrence="gated_delta",
        batch=1,
        ring_len=16,
        policy="fp8",
        kernel="cycle",
        status="wrong",
        note="outputs differ",
    )
    values = {
        "titles": {"a": "Layer A", "b": "Layer B"},
        "environment": {"summary": "replayssm 0, torch 0", "device": {"name": "A GPU"}},
        "settings": {"batches": list(BATCHES)},
        "copy_gb_per_s": 4200.0,
        "cache_mb": 60.0,
        "clocks": {"before": None, "after": None},
        "missing": ["fla's fused_recurrent is not measured: no module"],
        "rows": [*rows, refused],
    }
    return KernelRecord(**values | changes)


@pytest.fixture
def stored(tmp_path):
    write_record(made_up(), tmp_path)
    return tmp_path


def test_every_field_is_a_documented_column():
    assert list(COLUMNS) == [field.name for field in fields(KernelRow)]


def test_a_record_survives_its_file(stored):
    assert load_record(stored) == made_up()
    assert json.loads((stored / "kernels.json").read_text())["columns"] == COLUMNS


def test_a_row_has_a_time_exactly_if_it_is_right():
    row = made_up().rows[0]
    with pytest.raises(ValueError, match="'wrong' with a time"):
        replace(row, status="wrong")
    with pytest.raises(ValueError, match="'ok' with a time of None"):
        replace(row, us=None)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: d.pop("rows"), "lacks rows"),
        (lambda d: d.update(version=0), "version 0, not 1"),
        (lambda d: d["rows"][0].update(colour="red"), "holds a row that is none"),
    ],
)
def test_a_damaged_record_is_named(stored, spoil, message):
    path = stored / "kernels.json"
    document = json.loads(path.read_text())
    spoil(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        load_record(stored)


def test_the_fastest_conventional_kernel_is_the_yardstick():
    record = made_up()
    assert record.best_conventional("a", 16).source == "replayssm"
    assert record.best_conventional("a", 16, "fp16") is None
    assert record.ring_lens("b") == [16]


def test_csv_holds_every_row():
    record = made_up()
    rows = list(csv.DictReader(io.StringIO(kernel_csv(record))))
    assert len(rows) == len(record.rows) and list(rows[0]) == list(COLUMNS)
    assert rows[-1]["us"] == "" and rows[-1]["status"] == "wrong"
    assert float(rows[0]["us"]) == asdict(record.rows[0])["us"]


def test_the_table_shows_times_speedups_and_what_was_refused():
    text = kernel_markdown(made_up())
    assert "## Layer A" in text and "## Layer B" in text and "4,200 GB/s" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| fp8 ")]
    assert "wrong" in line
    assert "| conventional fp32 " in text and "conventional fp32, 8 steps" in text
    assert "258 µs (2.00×)" in text and "172 µs (3.00×)" in text
    assert "**b, batch 1, fp8, cycle: wrong: outputs differ**" in text
    assert "Not compared: fla's fused_recurrent" in text
    assert "80 %" in text and "16 rows, 2 warps" in text


def test_lines_of_rows():
    record = made_up()
    assert "wrong: outputs differ" in row_line(record.rows[-1])
    assert "2.00 x" in row_line(record.rows[2]) and "80 % of copy" in row_line(record.rows[2])
    assert "(mamba_ssm)" in row_line(record.rows[1])


def test_figures_are_the_same_bytes_when_redrawn():
    record = made_up()
    files = kernel_figures(record)
    assert set(files) == {f"{layer}-L16.{kind}" for layer in "ab" for kind in ("svg", "png")}
    assert kernel_figures(made_up()) == files
    faster = [replace(row, us=row.us / 2) if row.us else row for row in record.rows]
    assert kernel_figures(made_up(rows=faster))["a-L16.svg"] != files["a-L16.svg"]


def test_nothing_is_drawn_of_what_has_no_times():
    rows = made_up().rows
    assert kernel_figures(made_up(rows=rows[-1:])) == {}
    assert kernel_figures(made_up(rows=[row for row in rows if row.batch != 16])) == {}  # no curve


def test_redraw_needs_no_gpu_and_no_torch(stored):
    program = (
        "import sys; from replayssm import cli; "
        f"code = cli.main(['bench', 'kernels', '--redraw', '--out', {str(stored)!r}]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 1, done.stderr  # one row is wrong, and it says so
        assert "wrong: outputs differ" in done.stderr and "fused_recurrent" in done.stderr
        written = {p.name: p.read_bytes() for p in stored.iterdir()}
        names = {f"{layer}-L16.{kind}" for layer in "ab" for kind in ("svg", "png")}
        assert set(written) == names | {"kernels.json", "kernels.csv", "kernels.md"}
        assert written["kernels.md"].decode() == kernel_markdown(made_up())


def test_redraw_without_records_says_what_is_missing(tmp_path, capsys):
    assert cli.main(["bench", "kernels", "--redraw", "--out", str(tmp_path)]) == 2
    assert "kernels.json is missing" in capsys.readouterr().err
