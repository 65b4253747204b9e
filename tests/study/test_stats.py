"""Windows, quantiles, intervals, slopes, phases and control checks on made-up records."""

import numpy as np
import pytest

from replayssm.study import stats
from replayssm.study.bootstrap import Bootstrap, autocorrelation_time, interval
from replayssm.study.records import Positions


def make_positions(kl, *, stride=1, nonfinite=None, match=None, saturated=None):
    kl = np.asarray(kl, dtype=np.float32)
    arms, prompts, length = kl.shape
    bad = np.zeros(kl.shape, bool) if nonfinite is None else nonfinite
    return Positions(
        arms=tuple(f"arm {i}" for i in range(arms)),
        position=np.arange(length) * stride,
        token=np.zeros((prompts, length), np.int64),
        ref_entropy=np.ones((prompts, length), np.float32),
        kl=np.where(bad, np.nan, kl),
        kl_reverse=np.where(bad, np.nan, kl),
        delta_logp=np.where(bad, np.nan, -kl),
        top1_match=np.ones(kl.shape, bool) if match is None else match,
        nonfinite=bad,
        saturated=np.zeros(kl.shape, np.int64) if saturated is None else saturated,
    )


def arm(label, control=None, identity=None, exact=False, ring_len=16):
    return {
        "label": label,
        "kind": "control" if control in ("other_ring_len", "fault") else "policy",
        "control": control,
        "identity": identity or label,
        "exact": exact,
        "ring_len": ring_len,
        "policy": {
            "checkpoint": {"format": "fp32" if exact else label, "rounding": "nearest_even"},
            "read_copy": None,
            "ring": "input",
            "operand": "fp32",
            "update_source": "checkpoint",
            "ring_len": ring_len,
        },
    }


def controlled(length=256, prompts=2, seed=0):
    """Records and arms of a healthy study: fp32, a policy, the floor, the fault."""
    rng = np.random.default_rng(seed)
    noise = rng.gamma(2.0, size=(4, prompts, length))
    sizes = np.array([0.0, 1e-4, 1e-12, 1e-2])[:, None, None]
    arms = [
        arm("fp32", "second_fp32", exact=True),
        arm("fp8"),
        arm("floor", "other_ring_len", exact=True),
        arm("fault", "fault"),
    ]
    return noise * sizes, arms


# -- windows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [16, 17, 100, 2048, 2049, 131072])
@pytest.mark.parametrize("ring_len", [1, 6, 16])
def test_windows_cover_every_position_with_whole_rings(tokens, ring_len):
    windows = stats.geometric_windows(tokens, ring_len)
    assert windows[0][0] == 0 and windows[-1][1] == tokens
    assert all(a[1] == b[0] for a, b in zip(windows[:-1], windows[1:], strict=True))
    assert all(stop % ring_len == 0 for _, stop in windows[:-1])
    assert all(stop - start >= ring_len for start, stop in windows)


def test_last_quarter():
    assert stats.last_quarter(2048) == (1536, 2048)
    assert stats.last_quarter(3) == (2, 3)


# -- reducers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("q, needed", [(0.5, 20), (0.9, 100), (0.99, 1000), (0.999, 10_000)])
def test_a_quantile_needs_enough_values(q, needed):
    values = np.linspace(0, 1, needed)
    assert stats.kl_quantile(values[1:], q) is None
    assert stats.kl_quantile(values, q) == pytest.approx(q, abs=1e-3)


def test_nonfinite_and_infinite_values_are_left_out_and_counted():
    kl = np.full((1, 2, 64), 2.0)
    kl[0, 0, 3] = np.inf
    kl[0, 1, 5] = -1e-3
    bad = np.zeros(kl.shape, bool)
    bad[0, 0, 10] = True
    match = np.ones(kl.shape, bool)
    match[0, 0, 10] = False
    positions = make_positions(kl, nonfinite=bad, match=match)
    row = stats.window_statistics(positions, np.ones(64, bool), Bootstrap(2, block=4))[0]
    assert row["nonfinite_count"] == 1
    assert row["kl_infinite_count"] == 1
    assert row["kl_negative_count"] == 1
    assert row["kl_mean"] == pytest.approx((125 * 2.0 - 1e-3) / 126)
    assert row["kl_min"] == pytest.approx(-1e-3), "negative values are kept"
    assert row["top1_agreement_mean"] == 1.0


def test_every_statistic_is_named_by_its_reducer():
    positions = make_positions(np.ones((1, 1, 64)))
    row = stats.window_statistics(positions, np.ones(64, bool), Bootstrap(1, block=4))[0]
    reducers = ("_mean", "_median", "_p90", "_p99", "_p999", "_max", "_min", "_count")
    for name in row:
        plain = name.removesuffix("_low").removesuffix("_high")
        assert plain == "tokens" or plain.endswith(reducers), name


# -- intervals -------------------------------------------------------------------------------------


def test_autocorrelation_time_of_a_first_order_process():
    rng = np.random.default_rng(0)
    x = np.zeros(40_000)
    for i in range(1, len(x)):
        x[i] = 0.9 * x[i - 1] + rng.normal()
    assert autocorrelation_time(x) == pytest.approx(19.0, rel=0.2)  # (1 + .9) / (1 - .9)
    assert autocorrelation_time(rng.normal(size=10_000)) == pytest.approx(1.0, abs=0.2)
    assert autocorrelation_time(np.zeros(100)) == 1.0


def test_ten_prompts_resample_prompts_and_fewer_resample_blocks():
    assert Bootstrap(10, block=8).describe()["label"] == "over prompts"
    assert Bootstrap(9, block=8).describe()["label"] == "within these documents"


@pytest.mark.parametrize("prompts", [4, 20])
def test_intervals_have_the_width_of_the_sampling_error(prompts):
    rng = np.random.default_rng(1)
    values = rng.normal(5.0, 1.0, size=(1, prompts, 512))
    low, high = interval(Bootstrap(prompts, block=8).means(values)[:, 0])
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 / np.sqrt(values.size), rel=0.35)


@pytest.mark.parametrize("prompts", [3, 12])
def test_arms_are_resampled_together(prompts):
    rng = np.random.default_rng(2)
    one = rng.gamma(1.0, size=(1, prompts, 128))
    samples = Bootstrap(prompts, block=8).means(np.concatenate([one, 3.0 * one]))
    np.testing.assert_allclose(samples[:, 1], 3.0 * samples[:, 0])


def test_correlated_text_widens_the_interval():
    rng = np.random.default_rng(3)
    steps = np.repeat(rng.normal(size=(1, 2, 32)), 32, axis=-1)
    narrow = interval(Bootstrap(2, block=1).means(steps)[:, 0])
    wide = interval(Bootstrap(2, block=64).means(steps)[:, 0])
    assert wide[1] - wide[0] > 2 * (narrow[1] - narrow[0])


# -- growth, phase, summary ------------------------------------------------------------------------


@pytest.mark.parametrize("power, says", [(0.0, "flat"), (1.0, "grows"), (2.0, "grows")])
def test_slope_of_a_power_law(power, says):
    rng = np.random.default_rng(4)
    t = np.arange(4096) + 1.0
    kl = 1e-6 * t**power * rng.gamma(4.0, 0.25, size=(1, 4, 4096))
    positions = make_positions(kl)
    row = stats.growth_slopes(positions, stats.geometric_windows(4096, 16), Bootstrap(4, block=16))[
        0
    ]
    assert row["slope"] == pytest.approx(power, abs=0.05)
    assert row["slope_low"] < power + 0.05 and row["slope_high"] > power - 0.05
    assert row["growth"].startswith(says)


def test_phase_table_uses_each_arms_own_ring():
    kl = np.zeros((2, 1, 64))
    kl[0, 0] = np.arange(64) % 16
    kl[1, 0] = np.arange(64) % 4
    first, second = stats.phase_table(make_positions(kl), [16, 4])
    assert [row["kl_mean"] for row in first] == list(range(16))
    assert [row["kl_mean"] for row in second] == list(range(4))


def test_summary_of_a_healthy_study():
    kl, arms = controlled()
    summary = stats.summarise(make_positions(kl), arms, ring_len=16, tokens=256)
    assert summary["controls"]["failures"] == []
    assert summary["controls"]["second_fp32_kl_max"] == 0.0
    fp8 = summary["arms"][1]
    assert fp8["ratio_to_floor"] == pytest.approx(1e8, rel=0.2)
    assert fp8["ratio_to_floor_low"] < fp8["ratio_to_floor"] < fp8["ratio_to_floor_high"]
    assert fp8["last_quarter"]["start"] == 192
    assert summary["arms"][0]["slope"] is None, "no logarithm of an exact zero"
    again = stats.summarise(make_positions(kl), arms, ring_len=16, tokens=256)
    assert again == summary


# -- controls --------------------------------------------------------------------------------------


def failures(kl, arms):
    positions = make_positions(kl)
    return stats.summarise(positions, arms, ring_len=16, tokens=kl.shape[-1])["controls"][
        "failures"
    ]


def test_a_second_fp32_row_that_differs_fails():
    kl, arms = controlled()
    kl[0, 1, 7] = 1e-14
    (line,) = failures(kl, arms)
    assert line.startswith("second FP32 row") and "1 positions" in line


def test_an_undetected_fault_means_the_hook_is_dead():
    kl, arms = controlled()
    kl[3] = 1e-12
    (line,) = failures(kl, arms)
    assert "hook not live" in line and "fault" in line


def test_a_policy_without_any_effect_means_the_hook_is_dead():
    kl, arms = controlled()
    kl[1] = 0.0
    (line,) = failures(kl, arms)
    assert line == "hook not live: fp8 has KL 0 at every position"


def test_two_policies_with_identical_results_mean_the_hook_is_dead():
    kl, arms = controlled()
    kl = np.concatenate([kl, kl[1:2]])
    (line,) = failures(kl, [*arms, arm("nvfp4")])
    assert line == "hook not live: fp8 and nvfp4 gave identical results"
    assert failures(kl, [*arms, arm("fp8 again", identity="fp8")]) == []


def test_saturated_elements_are_counted_within_the_window():
    counts = np.cumsum(np.ones((2, 3, 40), np.int64), -1)
    counts[1] = 0
    positions = make_positions(np.ones((2, 3, 40)), saturated=counts)
    bootstrap = Bootstrap(3, block=4)
    whole = stats.window_statistics(positions, np.ones(40, bool), bootstrap)
    tail = stats.window_statistics(positions, np.arange(40) >= 30, bootstrap)
    assert [row["saturated_count"] for row in whole] == [3 * 40, 0]
    assert [row["saturated_count"] for row in tail] == [3 * 10, 0]
