"""One table of words for every number."""

from __future__ import annotations

from mismatch_cli.metrics.catalog import CATALOG, METRICS, VOLATILITY
from mismatch_cli.metrics.formulas import FORMULAS


def test_every_metric_is_described_once() -> None:
    assert len(METRICS) == len(CATALOG)
    for metric in (*CATALOG, *VOLATILITY):
        assert all((metric.key, metric.label, metric.formula, metric.unit, metric.source)), metric.key


def test_every_formula_has_words() -> None:
    assert set(FORMULAS) <= set(METRICS)
