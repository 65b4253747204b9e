"""The speculation study: counting, intervals, flags, files, and a short run."""

import csv
import io
import subprocess
import sys
from dataclasses import replace

import pytest

from replayssm import cli
from replayssm.study.speculation_figures import acceptance_figures
from replayssm.study.speculation_summary import (
    Cell,
    SpeculationRecord,
    load_records,
    speculation_csv,
    speculation_markdown,
    summarise,
    unhealthy,
    write_record,
)

PROMPTS = 12
DRAFTER = "builtin/mamba2"


def cell(policy, drafts, **changes):
    """Rounds of unequal prompts: half of the drafts accepted."""
    rounds = [10 + p % 3 for p in range(PROMPTS)]
    values = {
        "rounds": rounds,
        "drafted": [n * drafts for n in rounds],
        "accepted": [n * drafts // 2 for n in rounds],
        "kl": [1e-13 if policy == "fp32" else 1e-3 * (1 + p % 4) for p in range(PROMPTS)],
        "repeated": [0.01 * (p % 2) for p in range(PROMPTS)],
        "tokens_per_second": 100.0 * (1 + drafts / 8),
    }
    named = {"policy": policy, "drafter": DRAFTER if drafts else None, "drafts": drafts}
    return Cell(**named, **(values | changes), backend="reference")


def record(cells=None):
    if cells is None:
        cells = [cell(policy, drafts) for policy in ("fp32", "nvfp4") for drafts in (0, 2, 4)]
    return SpeculationRecord(
        environment={"summary": "made up"},
        settings={
            "model": "builtin/gdn",
            "policies": ["fp32", "nvfp4"],
            "drafters": [DRAFTER],
            "drafts": [0, 2, 4],
            "prompts": PROMPTS,
            "tokens": 64,
            "temperature": 0.0,
        },
        weights="00",
        cells=cells,
    )


def row_of(made, policy="nvfp4", drafts=4):
    return next(r for r in summarise(made) if (r.policy, r.drafts) == (policy, drafts))


def changed(**changes):
    """The record with other numbers of nvfp4 at four drafts."""
    cells = [
        replace(c, **changes) if (c.policy, c.drafts) == ("nvfp4", 4) else c for c in record().cells
    ]
    return record(cells)


def test_numbers():
    row = row_of(record())
    assert row.tokens_per_round == 3.0 and row.rate == 0.5
    assert row.gain == row.gain_low == row.gain_high == 0.0
    assert row.kl == pytest.approx(2.5e-3) and row.kl_low < row.kl < row.kl_high
    assert row.speedup == pytest.approx(1.5)
    assert row.flags == ()
    plain = row_of(record(), drafts=0)
    assert (plain.rate, plain.tokens_per_round, plain.speedup) == (None, 1.0, 1.0)
    assert unhealthy(summarise(record())) == []


def test_differences_are_paired():
    """Prompts differ ten times as much as policies do, and the difference is still seen."""
    base = [4 * (p + 1) for p in range(PROMPTS)]
    cells = [
        cell("fp32", 4, rounds=[20] * PROMPTS, accepted=base),
        cell("nvfp4", 4, rounds=[20] * PROMPTS, accepted=[n - 2 for n in base]),
    ]
    row = row_of(record(cells))
    assert [row.gain, row.gain_low, row.gain_high] == pytest.approx([-0.1] * 3)
    assert row.tokens_per_round_high - row.tokens_per_round_low > 0.5
    assert row.speedup is None  # nothing without drafts was measured


def test_a_gain_with_drift_or_repetition_is_flagged():
    more = [n * 3 for n in cell("nvfp4", 4).rounds]
    row = row_of(changed(accepted=more))
    assert row.gain > 0 and row.flags == ("acceptance rises with KL",)
    row = row_of(changed(accepted=more, repeated=[0.5] * PROMPTS))
    assert row.flags == ("acceptance rises with KL", "acceptance rises with repetition")
    row = row_of(changed(accepted=more, kl=[1e-14] * PROMPTS))
    assert row.flags == ()  # nothing is lost
    row = row_of(changed(tokens_per_second=190.0, repeated=[0.5] * PROMPTS))
    assert row.flags == ("speed rises with KL", "speed rises with repetition")
    assert row_of(changed(tokens_per_second=170.0)).flags == ()
    fewer = [n // 2 for n in cell("nvfp4", 4).rounds]
    assert row_of(changed(accepted=fewer, repeated=[0.5] * PROMPTS)).flags == ()
    made = changed(accepted=more)
    assert unhealthy(summarise(made)) == [
        "nvfp4, builtin/mamba2, 4 drafts: acceptance rises with KL"
    ]
    assert "Flagged: nvfp4, builtin/mamba2, 4 drafts" in speculation_markdown([made])


def test_few_prompts_have_no_intervals():
    short = {
        name: getattr(cell("nvfp4", 4), name)[:4]
        for name in ("rounds", "drafted", "accepted", "kl", "repeated")
    }
    cells = [replace(c, **short) for c in (cell("fp32", 4), cell("nvfp4", 4))]
    row = row_of(record(cells))
    assert row.tokens_per_round_low is None and row.gain_high is None and row.flags == ()
    assert "| –" in speculation_markdown([record(cells)])
    assert acceptance_figures(record(cells))


def test_files(tmp_path, capsys):
    made = record()
    assert write_record(made, tmp_path).name == "gdn.json"
    assert load_records(tmp_path) == [made]
    assert cli.main(["speculation", "--redraw", "--out", str(tmp_path)]) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        *("gdn.json", "speculation.md", "speculation.csv"),
        *("gdn-builtin-mamba2.svg", "gdn-builtin-mamba2.png"),
    }
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert cli.main(["speculation", "--redraw", "--out", str(tmp_path)]) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    rows = list(csv.DictReader(io.StringIO(speculation_csv([made]))))
    assert len(rows) == 6 and rows[0]["model"] == "builtin/gdn" and rows[0]["rate"] == ""
    (tmp_path / "gdn.json").write_text('{"version": 0}')
    with pytest.raises(ValueError, match="version 0"):
        load_records(tmp_path)
    (tmp_path / "gdn.json").write_text('{"version": 1, "cells": [{"policy": "fp32"}]}')
    with pytest.raises(ValueError, match="no record of a speculation study"):
        load_records(tmp_path)
    assert cli.main(["speculation", "--redraw", "--out", str(tmp_path / "none")]) == 2
    assert "holds no record" in capsys.readouterr().err


def test_redrawing_loads_no_model_library(tmp_path):
    write_record(record(), tmp_path)
    code = (
        "import sys; from replayssm import cli; "
        f"cli.main(['speculation', '--redraw', '--out', {str(tmp_path)!r}]); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_short_run(tmp_path, capsys):
    options = ["--models", "builtin/gdn", "--policies", "fp32,nvfp4@4", "--drafts", "0,3"]
    sizes = ["--prompts", "2", "--prompt-tokens", "24", "--tokens", "10", "--device", "cpu"]
    drafters = ["--drafters", "ngram,builtin/mamba2"]
    assert cli.main(["speculation", *options, *sizes, *drafters, "--out", str(tmp_path)]) == 0
    (made,) = load_records(tmp_path)
    keys = [(c.policy, c.drafter, c.drafts) for c in made.cells]
    assert keys == [
        ("fp32", None, 0),
        ("fp32", "ngram", 3),
        ("nvfp4@4", None, 0),
        ("nvfp4@4", "ngram", 3),
        ("fp32", "builtin/mamba2", 3),
        ("nvfp4@4", "builtin/mamba2", 3),
    ]
    exact = made.cell("fp32", None, 0)
    assert exact.rounds == [9, 9] and exact.accepted == [0, 0]
    for c in made.cells:
        assert [a + r for a, r in zip(c.accepted, c.rounds, strict=True)] == [9, 9]
        assert all(0 <= a <= d for a, d in zip(c.accepted, c.drafted, strict=True))
        assert max(c.kl) < 1e-9 if c.policy == "fp32" else min(c.kl) > 1e-9
    # A policy's drift is its own, however its text was drafted.
    kls = [c.kl for c in made.cells if c.policy == "nvfp4@4"]
    assert kls[1] == pytest.approx(kls[0], rel=1e-3)
    assert kls[2] == pytest.approx(kls[0], rel=1e-3)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--policies", "nvfp4"], "first policy must be fp32"),
        (["--drafts", "17"], "drafts must be 0 to 16"),
        (["--prompts", "0"], "prompts must be at least 1"),
        (["--tokens", "1"], "tokens must be at least 2"),
    ],
)
def test_refusals(options, message, tmp_path, capsys):
    assert cli.main(["speculation", "--out", str(tmp_path), "--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err
