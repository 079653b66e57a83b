"""Ratio and total variation of each token against its rollout probability (DPPO paper, arXiv
2602.04879, figure 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mismatch_cli.base import numbers
from mismatch_cli.metrics.pair_summary import ProbabilityBin
from mismatch_cli.report.drawing.marks import DASHED, draw_points, estimate_array, thin
from mismatch_cli.report.drawing.panels import HIGHEST, LEGEND, Panel, Sheet, lowest_of

if TYPE_CHECKING:
    from mismatch_cli.studies.mismatch import PlotData

STUDY = "mismatch"
SECTION = "Ratio and TV by probability"
PLACE = 1
TITLE = "Ratio and total variation by rollout probability"
DATA = "tokens scored by both sides"
CAPTION = (
    "Each dot is a sampled token at its rollout probability μ, on an axis stretched towards 0 "
    "and 1: the ratio r = π/μ, and the total variation (TV) between both distributions. Lines "
    "are percentiles of the tokens in a bin of μ (1st and 99th), for bins of at least 200 tokens; bands are "
    "their 95 % intervals over prompts, where a bin has enough tokens. The ratio fans out at "
    "small μ even where the distributions hardly differ, so a ratio clip hits rare tokens; "
    "binary TV |π − μ| is small at low μ by construction."
)

EXPLORED = True

_CLOSE = 1e-3  # to 1: a ratio within it is drawn as its distance from 1
_FEWEST = 200  # tokens of a bin, of which two are beyond the percentile

Rows = Sequence[ProbabilityBin]


class _Percentile(NamedTuple):
    """A line over the bins of μ."""

    key: str
    name: str
    colour: str
    dash: Any = "-"


def needs(data: PlotData) -> bool:
    return bool(np.isfinite(data.logp_N).any())


def draw(figure: Sheet, data: PlotData) -> None:
    rows = [row for row in data.summary.volatility if row.tokens >= _FEWEST]
    ratio, tv = figure.panels(2, height=(320, 250), legend=LEGEND)
    for axes in (ratio, tv):
        axes.spread_probability(lowest_of(data.logq_N))
        axes.set_xlabel("rollout probability μ")
    _draw_ratio(ratio, data, rows)
    _draw_tv(tv, data, rows)


def _draw_ratio(axes: Panel, data: PlotData, rows: Rows) -> None:
    """The ratio around 1, or its distance from 1 around 0 if all are close."""
    lines = [
        _Percentile("ratio_p01", "1st percentile", axes.theme.orange),
        _Percentile("ratio_p99", "99th percentile", axes.theme.orange, DASHED),
    ]
    distance_N = np.exp(data.logp_N.astype(np.float64) - data.logq_N) - 1
    reach = _reach(np.abs(distance_N), _percentiles(rows, lines) - 1, 2)
    # Labels of ratios this close to 1 would differ only in their last digits.
    middle, title = (1.0, "Ratio π/μ") if reach >= _CLOSE else (0.0, "Ratio π/μ − 1")
    axes.set_ylim(max(0.0, 1 - reach) - 1 + middle, reach + middle)
    axes.axhline(middle, color=axes.theme.muted, linewidth=0.9, zorder=3)
    for line in lines:
        _draw_percentile(axes, rows, line, shift=middle - 1)
    _draw_tokens(axes, data, distance_N + middle, title)


def _draw_tv(axes: Panel, data: PlotData, rows: Rows) -> None:
    """The top-K TV of each token if it was recorded, else the binary one."""
    name = axes.style.pick("99th percentile of binary TV", "99 % of binary TV")
    binary = _Percentile("tv_binary_p99", name, axes.theme.green)
    if data.tv_topk_N is not None and np.isfinite(data.tv_topk_N).any():
        title = "Total variation, top-K"
        tv_N = data.tv_topk_N.astype(np.float64)
        name = axes.style.pick("99th percentile", "99 %")
        top_k = _Percentile("tv_topk_p99", name, axes.theme.orange)
        lines = [top_k, binary._replace(dash=DASHED)]
    else:
        title = "Binary TV |π − μ|, small at low μ"
        logq_N, logp_N = data.logq_N.astype(np.float64), data.logp_N.astype(np.float64)
        tv_N = np.abs(np.exp(logp_N) - np.exp(logq_N))
        lines = [binary]
    axes.set_ylim(0, _reach(tv_N, _percentiles(rows, lines), 1))
    for line in lines:
        _draw_percentile(axes, rows, line)
    _draw_tokens(axes, data, tv_N, title)


def _percentiles(rows: Rows, lines: Sequence[_Percentile]) -> np.ndarray:
    return estimate_array(row.metrics[line.key] for row in rows for line in lines)


def _reach(distance_N: np.ndarray, lines_B3: np.ndarray, most: float) -> float:
    """The range of an axis: every percentile line, and all but one token in a thousand."""
    finite_N = distance_N[np.isfinite(distance_N)]
    lines_B = np.abs(lines_B3[np.isfinite(lines_B3)])
    reach = 1.08 * max(np.quantile(finite_N, 0.999), lines_B.max(initial=0))
    return float(np.clip(reach, 1e-7, most))


def _draw_tokens(axes: Panel, data: PlotData, y_N: np.ndarray, title: str) -> None:
    """Draw the dots, and note how many are off the scale; limits must be final."""
    every = thin(len(y_N))
    y_N = y_N[every]
    mu_N = np.clip(np.exp(data.logq_N.astype(np.float64)), axes.get_xlim()[0], HIGHEST)[every]
    draw_points(axes, mu_N, y_N, axes.theme.blue)
    low, high = axes.get_ylim()
    beyond = int(np.count_nonzero((y_N < low) | (y_N > high)))
    note = f"{numbers.things(beyond, 'dot')} off the scale" if beyond else ""
    axes.headline(title, note=note)


def _draw_percentile(axes: Panel, rows: Rows, line: _Percentile, shift: float = 0.0) -> None:
    """A step over each bin of μ, in a band for its interval."""
    for number, row in enumerate(rows):
        ends = np.clip([row.mu_low, row.mu_high], *axes.get_xlim())
        value, low, high = estimate_array([row.metrics[line.key]])[0] + shift
        if np.isfinite(low) and np.isfinite(high):
            band: dict[str, Any] = {"color": line.colour, "alpha": 0.2, "linewidth": 0}
            axes.fill_between(ends, low, high, zorder=3, **band)
        # A legend leaves out labels that begin with an underscore: the line has one entry.
        name = f"_{line.name}" if number else line.name
        look: dict[str, Any] = {"color": line.colour, "linestyle": line.dash, "linewidth": 1.8}
        axes.plot(ends, [value, value], zorder=4, label=name, **look)
