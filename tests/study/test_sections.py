"""Tables, sentences and figures of what only some studies measure, on made-up summaries."""

import copy

import pytest

from replayssm.study import comparison_figures, figures, state_figures, tables
from replayssm.study.findings import findings
from replayssm.study.store import RunRecord
from replayssm.study.table_sections import sections

HEADS = [(layer, head) for layer in (0, 2) for head in range(4)]


def arm(label, kl, *, control=None, kind="policy", **more):
    quarter = {"kl_mean": kl, "kl_mean_low": kl / 2, "kl_mean_high": kl * 2}
    quarter |= {"nonfinite_count": 0, "kl_infinite_count": 0}
    window = {"start": 0, "stop": 64, "kl_mean": kl, "kl_mean_low": kl / 2, "kl_mean_high": kl * 2}
    growth = {"slope": 0.5, "slope_low": 0.4, "slope_high": 0.6, "growth": "grows"}
    return (
        {"label": label, "kind": kind, "control": control, "ratio_to_floor": None}
        | {"whole": {"kl_mean": kl, "kl_max": kl}, "last_quarter": quarter}
        | {"curve": [window, window | {"start": 64, "stop": 256}]}
        | growth
        | more
    )


def ratio(policy, every, low, high):
    middle = (low * high) ** 0.5
    row = {"policy": policy, "every": every, "kl_mean": 1e-3, "kl_policy_mean": 1e-3 * middle}
    return row | {"ratio": middle, "ratio_low": low, "ratio_high": high}


def estimate(name, value):
    return {name: value, f"{name}_low": value * 0.9, f"{name}_high": value * 1.1}


def axis(name, choice, alone, removed):
    row = {"axis": name, "choice": choice}
    for key, value in (("alone", alone), ("removed", removed)):
        for unit, scale in (("kl", 1e-3), ("share", 1.0)):
            full = f"{key}_{unit}"
            missing = {full: None, f"{full}_low": None, f"{full}_high": None}
            row |= missing if value is None else estimate(full, value * scale)
    return row


def attributed(policy, checkpoint=0.1, read_copy=0.85):
    row = {"policy": policy, "ring_len": 16} | estimate("kl", 1e-3)
    row |= estimate("interaction", 5e-5) | estimate("interaction_share", 0.05)
    row["axes"] = [
        axis("checkpoint", "fp16-sr", checkpoint, checkpoint),
        axis("read copy", "nvfp4", read_copy, read_copy),
        axis("rounding", "stochastic", None, -0.02),
    ]
    return row


def state_arm(label, error, stagnating=()):
    errors = [None if error is None else error * (1 + i / 10) for i in range(len(HEADS))]
    exact = error is None
    curve = [
        {"position": at, "read_median": None, "output_median": 0.1, "underflowed_mean": 0.25}
        | {f"checkpoint_{band}": None if exact else error for band in ("median", "low", "high")}
        | {f"predicted_{band}": None if exact else error / 2 for band in ("median", "low", "high")}
        for at in (64, 256)
    ]
    return {
        "label": label,
        "curve": curve,
        "checkpoint": errors,
        "predicted": None if exact else [value / 2 for value in errors],
        "residual": None if exact else [1.0] * 6 + [2.0, 3.0],
        "stagnating": list(stagnating),
    }


@pytest.fixture
def record():
    """Everything a study can measure."""
    line = {"scale": 1.0, "read_copy_kl": 0.0, "kl": [1e-3, 2e-3]}
    arms = [
        arm("fp8", 2e-3, theory=line),
        arm("nvfp4", 5e-2),
        arm("fp16-sr+nvfp4", 1e-3),
        arm("nvfp4, refresh 64", 1e-3, control="refresh", kind="control"),
    ]
    summary = {
        "prompts": 2,
        "tokens": 131_072,
        "interval": {"confidence": 0.95, "label": "within these documents"},
        "arms": arms,
        "refresh": [ratio("nvfp4", 64, 20.0, 80.0), ratio("fp16-sr+nvfp4", 64, 0.9, 1.1)],
        "attribution": [attributed("fp16-sr+nvfp4")],
        "states": {
            "layers": [layer for layer, _ in HEADS],
            "heads": [head for _, head in HEADS],
            "memory": [1.0, 10.0, None, 1000.0, 5.0, 50.0, 500.0, 5000.0],
            "positions": [64, 256],
            "arms": [state_arm("fp8", 0.1, (3,)), state_arm("nvfp4", 0.4), state_arm("x", None)],
        },
        "generations": {
            "tokens": 64,
            "arms": [
                {"label": "reference", "length_mean": 64.0, "length_ratio_mean": 1.0}
                | {"stopped_share": 0.0, "diverged_share": 0.0, "first_divergence_median": 64.0}
                | {"repeated_share_mean": None, "loop_share": 0.5}
            ],
        },
    }
    summary["arms"].append(arm("x", 1e-9))
    return RunRecord(
        path=None,
        run_id="abc123",
        experiment="e",
        model="builtin/gdn",
        document={},
        provenance={},
        summary=summary,
    )


# -- tables ----------------------------------------------------------------------------------------


def test_every_section_is_there_when_it_was_measured(record):
    text = "\n".join(sections(record.summary))
    assert "| nvfp4         | 64 " in text and "| 40    | [20, 80]" in text  # refresh
    assert "| fp8   | 0.1 " in text and "1 of 8" in text  # states
    assert "| reference | 64 " in text  # free run
    assert "| fp16-sr+nvfp4 | rounding " in text and "| left over " in text
    assert "| nvfp4, refresh 64 | 0.001 " in text  # controls


def test_a_run_without_any_of_it_has_its_controls_only(record):
    parts = sections({"arms": record.summary["arms"]})
    assert parts[0] == "Controls:" and len(parts) == 2


# -- sentences -------------------------------------------------------------------------------------


def test_refresh_says_whether_drift_accumulates(record):
    said = findings(record.summary)
    assert said[0].endswith(
        "with a state refreshed every 64 tokens; drift accumulates beyond 64 tokens."
    )
    assert "nothing accumulates beyond 64 tokens" in said[1]
    record.summary["refresh"] = [ratio("nvfp4", 64, 0.5, 5.0)]
    assert "is undecided" in findings(record.summary)[0]
    record.summary["refresh"][0]["ratio"] = None
    assert not findings(record.summary)[0].startswith("Refresh")


@pytest.mark.parametrize(
    "checkpoint, read_copy, words",
    [
        (0.1, 0.9, "drifts through its read copy"),
        (0.9, 0.1, "drifts through its checkpoint"),
        (0.5, 0.5, "through both copies, or undecided which"),
    ],
)
def test_the_decomposition_names_the_copy(record, checkpoint, read_copy, words):
    record.summary["attribution"] = [attributed("fp16-sr+nvfp4", checkpoint, read_copy)]
    (sentence,) = [s for s in findings(record.summary) if s.startswith("Decomposition")]
    assert words in sentence and "their interaction 5 %" in sentence


def test_slopes_and_theory_are_one_sentence_each(record):
    said = findings(record.summary)
    (slopes,) = [s for s in said if s.startswith("Slope")]
    assert "KL grows for fp8 (0.50 [0.40, 0.60]), nvfp4" in slopes and "refresh" not in slopes
    theory = [s for s in said if s.startswith("Theory")]
    assert len(theory) == 1 and "fp8 1 (6 of 8 heads within 15 %, 1 stagnating); nvfp4" in theory[0]


# -- figures ---------------------------------------------------------------------------------------

DRAWN = state_figures.FIGURES | comparison_figures.FIGURES


@pytest.mark.parametrize("name", DRAWN)
def test_figures_are_drawn_alike_each_time_and_only_from_what_was_measured(record, name):
    first = DRAWN[name](record)
    assert first["png"].startswith(b"\x89PNG") and first["svg"].startswith(b"<?xml")
    assert DRAWN[name](copy.deepcopy(record)) == first
    for key in ("states", "refresh", "attribution"):
        record.summary.pop(key)
    assert DRAWN[name](record) is None


def test_one_head_with_one_error_is_a_heat_map(record):
    states = record.summary["states"]
    states |= {"layers": [0], "heads": [0], "memory": [None]}
    states["arms"] = [state_arm("fp8", 0.1)]
    states["arms"][0]["checkpoint"] = [0.1]
    assert state_figures.error_by_head(record)["png"]


def test_the_published_numbers_stand_apart_and_only_beside_long_runs(record):
    drawn = comparison_figures.published_comparison([record])
    assert drawn["png"]
    short = copy.deepcopy(record)
    short.summary["tokens"] = 2048
    assert comparison_figures.published_comparison([short]) is None
    short.summary["tokens"] = 131_072
    short.summary["arms"] = [arm("fp8", 1e-3)]
    assert comparison_figures.published_comparison([short]) is None


def test_the_theory_is_drawn_where_there_is_one(record):
    with_line = figures.kl_by_position(record)
    del record.summary["arms"][0]["theory"]
    assert figures.kl_by_position(record) != with_line


# -- seeds -----------------------------------------------------------------------------------------


def test_of_several_seeds_the_first_is_drawn_and_all_must_be_safe(record):
    quiet = {"bytes_per_token": 10.0, "kind": "policy"}
    arms = [arm(f"fp16-sr seed {seed}", kl, **quiet) for seed, kl in ((7, 1e-6), (3, 1e-7))]
    arms += [arm("fp32", 1e-12, bytes_per_token=40.0)]
    for entry in arms:
        entry["last_quarter"]["top1_agreement_mean"] = 1.0
        entry["whole"] |= {"nonfinite_count": 0, "kl_infinite_count": 0}
    limits = {"kl_mean": 1e-3, "top1_agreement_mean": 0.5}
    record.document["display"] = {"limits": limits}
    record.summary["arms"] = arms
    assert list(figures.line_styles(record)) == ["fp16-sr seed 7", "fp32"]
    assert [entry["label"] for entry in figures.drawable(record)] == ["fp16-sr seed 7", "fp32"]
    assert tables.recommended(record)["label"] == "fp16-sr seed 3"
    assert figures.bytes_against_kl(record)["png"]
    limits["kl_mean"] = 5e-7
    assert tables.recommended(record)["label"] == "fp32"  # seed 7 is not safe
