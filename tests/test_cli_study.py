"""The command attribute: which runs it makes, what it prints and refuses."""

import pytest
from test_cli import fake, run  # noqa: F401  (a fixture)


def attribute(out, policy, *more):
    model = "builtin/gdn"  # its config.json says which recurrence it is; the engine is the fake
    options = ["--tokens", 160, "--prompts", 2, "--out", out, "--no-progress"]
    return run("attribute", "--model", model, "--policy", policy, *options, *more)


def test_attribute_measures_and_prints_shares(tmp_path, fake, capsys):  # noqa: F811
    assert attribute(tmp_path, "fp16-sr+nvfp4") == 0
    out = capsys.readouterr().out
    assert "Checkpoint and read copy apart and together" in out
    assert "Which choice causes how much" in out and "| left over " in out
    for axis in ("checkpoint", "read copy", "rounding"):
        assert f"| fp16-sr+nvfp4 | {axis} " in out
    assert (tmp_path / "tables" / "attribution-attribution.csv").exists()
    assert attribute(tmp_path, "fp16-sr+nvfp4") == 0
    assert "Reused:" in capsys.readouterr().out  # a normal run


@pytest.mark.parametrize("policy", ["fp32", "fp16", "nvfp4"])
def test_one_choice_has_nothing_to_attribute(tmp_path, fake, capsys, policy):  # noqa: F811
    assert attribute(tmp_path, policy) == 2
    assert "differs from FP32 in one choice at most" in capsys.readouterr().err


def test_engine_names_are_policies_and_say_what_differs(tmp_path, fake, capsys):  # noqa: F811
    assert attribute(tmp_path, "flashinfer-gdn") in (0, 1)  # the fake knows no operands
    err = capsys.readouterr().err
    assert (
        "note: bf16:operand=bf16:ring=bf16 is nearest to what flashinfer-gdn, vllm-gdn-spec" in err
    )
    assert attribute(tmp_path, "flashinfer-mamba2-int16") == 2
    assert "INT16 with a scale per row is not a format here" in capsys.readouterr().err
