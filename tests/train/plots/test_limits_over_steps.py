"""The metrics that have limits, with the limits as lines and the alarms as bands and marks."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.report.figures import figure_of
from mismatch_cli.train.plots import limits_over_steps
from mismatch_cli.train.studies.training import TrainingAnalysis
from tests.train.training_runs import limit, make_run, watched


def test_each_limited_metric_that_steps_record_has_a_chart():
    study = watched(
        limit("tv_binary_mean", "max", 0.01),
        limit("tv_binary_mean", "max", 0.02, "total"),
        limit("k1", "max_size", 0.1),
        limit("pearson", "min", 0.9),
        alarms=((3, 5), (9, 9)),
    )
    gap, stale, k1 = limits_over_steps.charts(study)
    assert (gap.title, gap.limits, gap.note) == ("mean |π − μ|", [0.01], "≤ 0.01")
    assert gap.alarms == [(3, 5), (9, 9)] and stale.alarms == k1.alarms == []
    assert stale.title == "mean |π − μ|, with staleness" and stale.limits == [0.02]
    assert (k1.limits, k1.note) == ([-0.1, 0.1], "within ±0.1")
    recorded = study.runs[0].series("mismatch", "k1")
    (curve,) = k1.curves[0].values()
    np.testing.assert_allclose(curve.value_N, recorded)


def test_without_a_watch_or_a_recorded_metric_there_is_nothing_to_draw():
    assert not limits_over_steps.needs(TrainingAnalysis.of([make_run(steps=20)]))
    assert not limits_over_steps.needs(watched(limit("pearson", "min", 0.9)))


@pytest.mark.parametrize("far", [False, True])
def test_a_limit_near_the_values_is_a_line_and_an_alarm_is_marked(far):
    """A limit a hundred times above all values would flatten them."""
    value_N = make_run(steps=20).series("mismatch", "abs_dp_mean")
    threshold = float(value_N.mean()) * (100 if far else 1)
    study = watched(limit("tv_binary_mean", "max", threshold), alarms=((3, 5),))
    axes = figure_of(study, "limits-over-steps").axes[0]
    lines = [line for line in axes.get_lines() if set(line.get_ydata()) == {threshold}]
    assert len(lines) == (not far)
    low, high = axes.get_ylim()
    assert low < value_N.min() and value_N.max() < high < 3 * value_N.max()
    (mark,) = [line for line in axes.get_lines() if line.get_label() == "an alarm begins"]
    assert list(mark.get_xdata()) == [3]
