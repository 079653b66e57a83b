"""Every kind of limit at, below and above its bound, on the bundled traces; a missing value
fails.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.frameworks import dialects
from mismatch_cli.limits.limit_sets import WHOLE_INTERVAL, Limit, LimitSet
from mismatch_cli.metrics.estimate import FLOOR_RESOLUTION
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.metrics.pair_summary import MetricEstimate
from mismatch_cli.studies.gate import Check, PooledMetrics, check_limits, limit_text, measured_text
from mismatch_cli.trace.reader import Trace
from tests.studies.compared import FLOAT32, changed_trace, without_columns

CLOSE = 1e-5  # relative to the distance from agreement: less is what float32 rounds away


@pytest.fixture(scope="module")
def training() -> PooledMetrics:
    """A training run: mismatch, staleness and total."""
    return PooledMetrics([Trace.open(bundled("traces") / "fp8-kv")], dialects.names())


@pytest.fixture(scope="module")
def control() -> PooledMetrics:
    """Everything in float32, at equal weights."""
    return PooledMetrics([Trace.open(bundled("traces") / "float32")], ["slime"])


def check(
    measured: PooledMetrics, metric: str, bound: str, threshold: float, baseline=None, **words
) -> Check:
    (result,) = check_limits(
        [LimitSet("test", (Limit(metric, bound, threshold, **words),))], measured, baseline
    )
    return result


def estimate(measured: PooledMetrics, metric: str, pair: str = "mismatch") -> MetricEstimate:
    return measured.result.pairs[pair].metrics[metric]


def value(measured: PooledMetrics, metric: str, pair: str = "mismatch") -> float:
    return estimate(measured, metric, pair).value


@pytest.mark.parametrize("pair", ["", "mismatch", "staleness", "total"])
@pytest.mark.parametrize("metric", ["k3", "pearson", "d_mean", "abs_d_max", "reward_mean"])
def test_absolute_limits(training, metric, pair):
    exact = value(training, metric, pair or "mismatch")
    step = abs(exact - (METRICS[metric].agreement or 0)) * CLOSE
    for bound, good, bad in (
        ("max", exact + step, exact - step),
        ("min", exact - step, exact + step),
    ):
        assert check(training, metric, bound, exact, pair=pair).holds
        assert check(training, metric, bound, good, pair=pair).holds
        exceeded = check(training, metric, bound, bad, pair=pair)
        assert not exceeded.holds and exceeded.is_judged
        assert ("above" if bound == "max" else "below") in exceeded.reason


@pytest.mark.parametrize(
    ("metric", "agreement"),
    [("k3", 0), ("tv_binary_mean", 0), ("pearson", 1), ("mult_prob_error", 1)],
)
def test_factors_of_the_floor_apply_to_the_distance_from_agreement(training, metric, agreement):
    floor = estimate(training, metric).noise.floor
    factor = abs(value(training, metric) - agreement) / max(
        abs(floor - agreement), FLOOR_RESOLUTION
    )
    assert check(training, metric, "max_times_floor", factor * (1 + CLOSE)).holds
    assert not check(training, metric, "max_times_floor", factor * (1 - CLOSE)).holds


def test_a_floor_below_resolution_counts_as_the_resolution(control):
    assert estimate(control, "abs_d_mean").noise.times_floor == "below resolution"
    factor = value(control, "abs_d_mean") / FLOOR_RESOLUTION
    assert check(control, "abs_d_mean", "max_times_floor", factor * (1 + CLOSE)).holds
    assert not check(control, "abs_d_mean", "max_times_floor", factor * (1 - CLOSE)).holds


@pytest.mark.parametrize(
    ("metric", "agreement"), [("k3", 0), ("mult_prob_error", 1), ("length_mean", 0)]
)
def test_factors_of_a_baseline(training, control, metric, agreement):
    factor = (value(training, metric) - agreement) / (value(control, metric) - agreement)
    for threshold, holds in ((factor * (1 + CLOSE), True), (factor * (1 - CLOSE), False)):
        assert check(training, metric, "max_times_baseline", threshold, control).holds == holds


def test_steps_above_and_below_a_baseline(training, control):
    rise = value(training, "k3") - value(control, "k3")
    fall = value(control, "pearson") - value(training, "pearson")
    for factor, holds in ((1 + CLOSE, True), (1 - CLOSE, False)):
        assert check(training, "k3", "max_above_baseline", rise * factor, control).holds == holds
        assert (
            check(training, "pearson", "max_below_baseline", fall * factor, control).holds == holds
        )
    assert check(control, "k3", "max_above_baseline", 0, training).holds
    assert check(control, "pearson", "max_below_baseline", 0, training).holds


def test_a_frameworks_own_metric_is_the_frameworks_number(training, control):
    table = pq.read_table(Trace.open(bundled("traces") / "float32").shards[0]).to_pydict()
    means = [
        np.abs(np.subtract(pi, mu, dtype=np.float64)).mean()
        for pi, mu in zip(table["logp_trainer"], table["logp_rollout"], strict=True)
    ]
    name = "slime:train/train_rollout_logprob_abs_diff"
    number = check(control, name, "max", 1).measured.value
    assert number == pytest.approx(np.mean(means), rel=1e-5)
    assert check(control, name, "max", number).holds
    assert not check(control, name, "max", number * (1 - CLOSE)).holds
    assert not check(training, name, "max_times_baseline", 10, control).holds


def test_surely_requires_the_whole_interval(training):
    tv, ranks = estimate(training, "tv_binary_mean"), estimate(training, "spearman")
    between = (tv.low + tv.value) / 2
    assert not check(training, "tv_binary_mean", "max", between).holds
    assert check(training, "tv_binary_mean", "max", between, decide=WHOLE_INTERVAL).holds
    assert not check(training, "tv_binary_mean", "max", tv.low * 0.99, decide=WHOLE_INTERVAL).holds
    between = (ranks.high + ranks.value) / 2
    assert not check(training, "spearman", "min", between).holds
    assert check(training, "spearman", "min", between, decide=WHOLE_INTERVAL).holds
    assert not check(training, "spearman", "min", ranks.high * 1.0001, decide=WHOLE_INTERVAL).holds
    factor = (1 - ranks.high) / max(1 - ranks.noise.floor, FLOOR_RESOLUTION)
    assert check(
        training, "spearman", "max_times_floor", factor * 1.01, decide=WHOLE_INTERVAL
    ).holds
    assert not check(
        training, "spearman", "max_times_floor", factor * 0.99, decide=WHOLE_INTERVAL
    ).holds
    extreme = value(training, "abs_d_max")  # without an interval the value decides
    assert not check(training, "abs_d_max", "max", extreme * 0.99, decide=WHOLE_INTERVAL).holds


def test_an_interval_around_agreement_has_distance_zero_from_it(training):
    ratio = estimate(training, "ratio_mean")
    assert ratio.low < 1 < ratio.high
    limit = ("ratio_mean", "max_times_floor", 0.0)
    assert not check(training, *limit).holds
    assert check(training, *limit, decide=WHOLE_INTERVAL).holds


@pytest.fixture
def poor(tmp_path) -> PooledMetrics:
    """The control without floor, advantages and top K."""
    lost = ("topk", "logp_trainer_repeat", "advantage")
    path = changed_trace(tmp_path / "poor", FLOAT32, lambda row: without_columns(row, *lost))
    return PooledMetrics([Trace.open(path)], ["verl"])


@pytest.mark.parametrize(
    ("metric", "bound", "pair", "reason"),
    [
        ("tv_topk_mean", "max", "", "not measured"),
        ("k3", "max_times_floor", "", "has no noise"),
        ("k3", "max", "staleness", "no staleness pair was measured (measured: mismatch)"),
        ("verl:actor/pg_clipfrac", "max", "", "not measured: needs"),
        ("tv_topk_mean", "max_times_baseline", "", "not measured"),
    ],
)
def test_a_missing_measurement_fails(poor, control, metric, bound, pair, reason):
    result = check(poor, metric, bound, 1e9, control, pair=pair)
    assert not result.holds and not result.is_judged
    assert reason in result.reason


def test_a_metric_missing_in_the_baseline_fails(poor, control):
    result = check(control, "tv_topk_mean", "max_above_baseline", 1e9, poor)
    assert not result.holds and result.reason.startswith("in the baseline: not measured")


def test_the_baseline_uses_the_measured_pair(training, control):
    only_total = copy(training)
    pairs = {"total": training.result.pairs["total"]}
    only_total.result = replace(training.result, pairs=pairs)
    result = check(control, "k3", "max_above_baseline", 1e9, only_total)
    assert (
        not result.holds
        and "in the baseline: the number includes staleness, but the limit is" in result.reason
    )
    total = check(
        only_total, "k3", "max_above_baseline", 0, training
    )  # its first pair; the baseline's first is mismatch
    assert total.holds and total.reference == value(training, "k3", "total")


def test_numbers_are_readable(training, control):
    result = check(training, "spearman", "max_times_floor", 10.0)
    assert limit_text(result).startswith("distance from 1 ≤ 10 × that of the noise; noise 0.999")
    assert measured_text(result) == "0.9992 [0.9990, 0.9994]"
    # One prompt decides it
    assert (
        measured_text(check(training, "pearson", "max_times_floor", 10.0))
        == "0.999° [0.942, 1.000]"
    )
    assert limit_text(check(training, "k3", "max_above_baseline", 0.5, control)).startswith(
        "≤ baseline + 0.5; baseline"
    )
    assert (
        limit_text(check(training, "k1", "min", -0.1, decide=WHOLE_INTERVAL))
        == "≥ −0.1 (95 % sure)"
    )
