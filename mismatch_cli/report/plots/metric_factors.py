"""The gap of each other trace over that of the first, metric by metric."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.report.plots._lines import looks
from mismatch_cli.report.plots._panels import (
    RIGHT,
    TOP,
    Box,
    legend_above,
    legend_height,
    logarithmic,
    place_boxes,
    title,
    width_of,
)
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from mismatch_cli.studies.comparison import ComparisonPlotData

STUDY = "comparison"
SECTION = "What differs in the gap"
TITLE = "How many times as far apart"
CAPTION = (
    "For each metric of the gap, its distance from agreement over that of the first trace, with 95 % intervals over "
    "prompts; hollow: no interval. On the line both are the same. Signed metrics and those whose gap is "
    "exactly 0 have no factor."
)
_ROW = 19  # pixels of a metric, and more for each trace
_DECADES = 100  # a range of factors from here on has ticks at powers of ten alone
_LINEAR = 2.5  # a range of factors below this needs no logarithm


class _Row(NamedTuple):
    metric: Metric
    factor_C3: np.ndarray  # of each comparison: value, low, high; NaN: none


def needs(data: ComparisonPlotData) -> bool:
    return bool(_rows(data))


def draw(figure: Figure, data: ComparisonPlotData, style: Style) -> None:
    rows, others = _rows(data), data.names[1:]
    left = max(width_of(row.metric.label, style.small) for row in rows) + 14
    legend = legend_height(data.names) if len(others) > 1 else 0
    height = len(rows) * (_ROW + 3 * (len(others) - 1))
    box = Box(left, TOP + legend, style.layout.width - left - RIGHT, height)
    (axes,) = place_boxes(figure, style, [box])
    look_of, step = looks(data.names, style), 0.7 / len(others)
    for number, name in enumerate(others):
        factor_R3 = np.stack([row.factor_C3[number] for row in rows])
        place_R = np.arange(len(rows)) + step * (number - (len(others) - 1) / 2)
        _draw_factors(axes, factor_R3, place_R, look_of[name].colour, name, style)
    axes.set_yticks(range(len(rows)), [row.metric.label for row in rows], fontsize=style.small)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    _scale(axes, np.stack([row.factor_C3 for row in rows]), ticks=7 if style.wide else 3)
    axes.axvline(1, color=style.theme.muted, linewidth=0.9, zorder=1)
    axes.set_xlabel("factor")
    if legend:
        legend_above(axes, style)
    whose = f"Gap of {others[0]}" if len(others) == 1 else "Each gap"
    title(axes, f"{whose} over that of {data.names[0]}", style, legend)


def _rows(data: ComparisonPlotData) -> list[_Row]:
    """Metrics of a gap for which at least one comparison has a factor above 0."""
    rows = []
    for metric in METRICS.values() if data.comparisons else ():
        found = [comparison["metrics"][metric.key]["factor"] for comparison in data.comparisons]
        factor_C3 = np.array([[factor["value"], factor["low"], factor["high"]] for factor in found], dtype=np.float64)
        factor_C3[~(factor_C3[:, 0] > 0)] = np.nan
        if metric.agreement is not None and np.isfinite(factor_C3[:, 0]).any():
            rows.append(_Row(metric, factor_C3))
    return rows


def _draw_factors(axes: Axes, factor_R3: np.ndarray, place_R: np.ndarray, colour: str, name: str, style: Style) -> None:
    sure_R = np.isfinite(factor_R3[:, 1])
    axes.hlines(place_R[sure_R], factor_R3[sure_R, 1], factor_R3[sure_R, 2], color=colour, linewidth=1.6)
    axes.plot(factor_R3[sure_R, 0], place_R[sure_R], "o", color=colour, markersize=4.5, label=name)
    axes.plot(
        factor_R3[~sure_R, 0], place_R[~sure_R], "o", color=colour, markersize=4.5, markerfacecolor=style.theme.page
    )


def _scale(axes: Axes, factor_RC3: np.ndarray, ticks: int) -> None:
    """Room for every value and for 1, logarithmic where the values span much."""
    reached = factor_RC3[factor_RC3 > 0]
    low, high = min(reached.min(), 0.95), max(reached.max(), 1.05)
    margin = (high / low) ** 0.03
    if high / low < _LINEAR:
        axes.set_xlim(low / margin, high * margin)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks))
        return
    axes.set_xscale("log")
    axes.set_xlim(low / margin, high * margin)
    logarithmic(axes, "x")
    if high / low > _DECADES:
        axes.xaxis.set_major_locator(LogLocator(numticks=ticks))
