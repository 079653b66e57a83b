"""The gap of each other trace over that of the first, metric by metric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator

from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.report.plots._lines import looks, parts_of
from mismatch_cli.report.plots._panels import RIGHT, TOP, Box, Panel, Sheet, legend_height, width_of

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


def needs(data: ComparisonPlotData) -> bool:
    return bool(_factors(data))


def draw(figure: Sheet, data: ComparisonPlotData) -> None:
    factors, (first, *others), style = _factors(data), data.names, figure.style
    left = max(width_of(label, style.small) for label in factors) + 14
    legend = legend_height(data.names) if len(others) > 1 else 0
    height = len(factors) * (_ROW + 3 * (len(others) - 1))
    (axes,) = figure.place([Box(left, TOP + legend, style.width - left - RIGHT, height, legend)])
    look_of, step, factor_RC3 = looks(data.names, style), 0.7 / len(others), np.stack(list(factors.values()))
    for number, name in enumerate(others):
        place_R = np.arange(len(factors)) + step * (number - (len(others) - 1) / 2)
        _draw_factors(axes, factor_RC3[:, number], place_R, look_of[name].colour, name)
    axes.set_yticks(range(len(factors)), factors, fontsize=style.small)
    axes.set_ylim(len(factors) - 0.4, -0.6)
    _scale(axes, factor_RC3, ticks=style.pick(7, 3))
    axes.axvline(1, color=style.theme.muted, linewidth=0.9, zorder=1)
    axes.set_xlabel("factor")
    axes.headline(f"{f'Gap of {others[0]}' if len(others) == 1 else 'Each gap'} over that of {first}")


def _factors(data: ComparisonPlotData) -> dict[str, np.ndarray]:
    """Value, low and high of each comparison by the metric's label: metrics of which one at least is above 0."""
    found = {}
    for metric in METRICS.values() if data.comparisons else ():
        factor_C3 = parts_of(comparison["metrics"][metric.key]["factor"] for comparison in data.comparisons)
        factor_C3[~(factor_C3[:, 0] > 0)] = np.nan
        if metric.agreement is not None and np.isfinite(factor_C3[:, 0]).any():
            found[metric.label] = factor_C3
    return found


def _draw_factors(axes: Panel, factor_R3: np.ndarray, place_R: np.ndarray, colour: str, name: str) -> None:
    sure_R = np.isfinite(factor_R3[:, 1])
    axes.hlines(place_R[sure_R], factor_R3[sure_R, 1], factor_R3[sure_R, 2], color=colour, linewidth=1.6)
    dots: dict[str, Any] = {"color": colour, "markersize": 4.5}
    axes.plot(factor_R3[sure_R, 0], place_R[sure_R], "o", label=name, **dots)
    axes.plot(factor_R3[~sure_R, 0], place_R[~sure_R], "o", markerfacecolor=axes.theme.page, **dots)


def _scale(axes: Panel, factor_RC3: np.ndarray, ticks: int) -> None:
    """Room for every value and for 1, logarithmic where the values span much."""
    reached = factor_RC3[factor_RC3 > 0]
    low, high = min(reached.min(), 0.95), max(reached.max(), 1.05)
    margin = (high / low) ** 0.03
    axes.set_xlim(low / margin, high * margin)
    if high / low < _LINEAR:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks))
        return
    axes.logarithmic("x")
    if high / low > _DECADES:
        axes.xaxis.set_major_locator(LogLocator(numticks=ticks))
