"""The table has one row per number."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.gap_table import (
    GAP_GROUPS,
    METRICS,
    RESPONSES,
    SEQUENCE,
    VOLATILITY,
    metrics_in_group,
)
from mismatch_cli.metrics.sums import COLUMNS, evaluate
from mismatch_cli.metrics.update_table import CLIPPING, TRAINING


def test_every_metric_is_described() -> None:
    for table in (METRICS, VOLATILITY, CLIPPING, TRAINING):
        for key, metric in table.items():
            assert key == metric.key
            assert all((metric.key, metric.label, metric.formula, metric.unit, metric.source)), key


def test_every_gap_metric_is_in_a_group_on_the_page() -> None:
    shown = [
        metric.key
        for group in (*GAP_GROUPS, SEQUENCE, RESPONSES)
        for metric in metrics_in_group(group)
    ]
    assert sorted(shown) == sorted(METRICS)


def test_functions_of_sums_work_on_totals_of_any_shape() -> None:
    totals = evaluate(np.ones((2, 3, len(COLUMNS))))
    assert set(totals) == {key for key, metric in METRICS.items() if metric.value}
    assert all(values.shape == (2, 3) for values in totals.values())
