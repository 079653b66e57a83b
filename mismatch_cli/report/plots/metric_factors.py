"""The gap of each other trace divided by that of the first, by metric."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.report.drawing.marks import RUNS, estimate_array, looks, names_beside, run_labels
from mismatch_cli.report.drawing.panels import (
    Panel,
    Sheet,
    legend_height,
    plain_label,
    power_label,
)

if TYPE_CHECKING:
    from mismatch_cli.studies.comparison import ComparisonPlotData

STUDY = "comparison"
SECTION = "Differences in the gap"
TITLE = "Gap relative to the first run"
DATA = "metrics of two traces above 0"
CAPTION = (
    "For each metric: its distance from agreement, as a multiple of that of the first run (÷: "
    "that many times smaller), with 95 % intervals over prompts; hollow marks have no interval. "
    "On the vertical line both are equal. KL and effective sample sizes change with the square "
    "of a gap. Not drawn if every gap differs more than a hundredfold in one direction: see the "
    "table."
)
_SHOWN = (
    "tv_binary_mean", "tv_topk_mean", "abs_d_mean", "abs_d_p50", "abs_d_p99", "d_sd", "ratio_p99",
    "mult_prob_error",
    "k3", "kl_reverse_k3", "ess_token", "ess_sequence", "sequence_d_sd",
)  # fmt: skip
_ROW = 20  # pixels per metric, and more for each trace
_DECADES = 100  # from this range of factors on, ticks are at powers of ten only
_LINEAR = 2.5  # below this range of factors, the axis is linear
_CONTROL = 100  # times: if all gaps are beyond it on one side, a run is a control


def needs(data: ComparisonPlotData) -> bool:
    near_below, near_above = False, False
    for factor_C3 in _factors(data).values():
        factor_C = factor_C3[np.isfinite(factor_C3[:, 0]), 0]
        near_below |= bool((factor_C < _CONTROL).any())
        near_above |= bool((factor_C > 1 / _CONTROL).any())
    return near_below and near_above


def draw(figure: Sheet, data: ComparisonPlotData) -> None:
    style = figure.style
    factors_of = _factors(data)
    first, *others = data.names
    names, left = names_beside(list(factors_of), style)
    high = len(factors_of) * (_ROW + 3 * (len(others) - 1))
    legend = legend_height(others, RUNS)
    (axes,) = figure.panels(1, height=(high, high), left=left, legend=legend)
    axes.name_rows(names)
    factor_RC3 = np.stack(list(factors_of.values()))
    _draw_traces(axes, factor_RC3, data.names)
    _scale(axes, factor_RC3, most=style.pick(8, 3))
    axes.axvline(1, color=style.theme.muted, linewidth=0.9, zorder=1)
    labels = run_labels(data.names, style)
    which = labels[others[0]] if len(others) == 1 else "each run"
    axes.set_xlabel(style.pick(f"gap relative to that of {labels[first]}", ""))
    axes.headline(f"Gap of {which} relative to {labels[first]}", is_axis=False, ncols=RUNS)


def _draw_traces(axes: Panel, factor_RC3: np.ndarray, traces: Sequence[str]) -> None:
    """Every trace but the first, side by side within a row."""
    labels = run_labels(traces, axes.style)
    look_of = looks(traces, axes.style)
    others = traces[1:]
    for number, name in enumerate(others):
        shift = 0.7 / len(others) * (number - (len(others) - 1) / 2)
        y_R = np.arange(len(factor_RC3)) + shift
        _draw_factors(axes, factor_RC3[:, number], y_R, look_of[name].colour, labels[name])


def _factors(data: ComparisonPlotData) -> dict[str, np.ndarray]:
    """Value, low and high of each comparison by the metric's label, for metrics with a factor
    above 0.
    """
    factors = {}
    for key in _SHOWN:
        factor_C3 = estimate_array(row.metrics[key].factor for row in data.result.comparisons)
        factor_C3[~(factor_C3[:, 0] > 0)] = np.nan
        if np.isfinite(factor_C3[:, 0]).any():
            factors[METRICS[key].label] = factor_C3
    return factors


def _draw_factors(
    axes: Panel, factor_R3: np.ndarray, y_R: np.ndarray, colour: str, name: str
) -> None:
    """Dots with their intervals, hollow where there is none; the name enters a legend once."""
    filled_R = np.isfinite(factor_R3[:, 1])
    ends_2R = factor_R3[filled_R, 1:].T
    axes.hlines(y_R[filled_R], *ends_2R, color=colour, linewidth=1.6)
    dots: dict[str, Any] = {"color": colour, "markersize": 4.5}
    axes.plot(factor_R3[filled_R, 0], y_R[filled_R], "o", label=name, **dots)
    hollow: dict[str, Any] = {"markerfacecolor": axes.theme.page, "label": f"_{name}"}
    axes.plot(factor_R3[~filled_R, 0], y_R[~filled_R], "o", **hollow, **dots)


def _scale(axes: Panel, factor_RC3: np.ndarray, most: int) -> None:
    """Show every value and 1, on a logarithmic axis if they span much, with at most `most`
    ticks.
    """
    reached = factor_RC3[factor_RC3 > 0]
    low, high = min(reached.min(), 0.95), max(reached.max(), 1.05)
    margin = (high / low) ** 0.03
    axes.set_xlim(low / margin, high * margin)
    if high / low < _LINEAR:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=most))
        axes.xaxis.set_major_formatter(lambda value, _position: f"×{plain_label(value)}")
        return
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(_ticks(low / margin, high * margin, most))
    axes.xaxis.set_major_formatter(times)


def _ticks(low: float, high: float, most: int) -> np.ndarray:
    """1, and factors to both sides of it: powers of ten, and their multiples by 2 and 5 if there
    is room.
    """
    powers = np.arange(floor(log10(low)), ceil(log10(high)) + 1)
    if high / low < _DECADES:
        tick_N = np.outer(10.0**powers, (1, 2, 5)).ravel()
    else:
        tick_N = 10.0 ** powers[powers % ceil(len(powers) / most) == 0]
    return tick_N[(tick_N >= low) & (tick_N <= high)]


def times(value: float, _position: float = 0) -> str:
    """×2, or ÷2 for a half."""
    # Rounding may leave the tick at 1 a little below it.
    sign = "×" if value > 0.999 else "÷"
    size = max(value, 1 / value)
    if size < 1e4:
        return f"{sign}{size:,.0f}"
    return sign + power_label(size)
