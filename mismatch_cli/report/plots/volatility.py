"""Spread of ratio and total variation in each bin of the rollout probability, for each trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mismatch_cli.metrics.pair_summary import ProbabilityBin
from mismatch_cli.report.drawing.marks import (
    RUNS,
    MaybeEstimate,
    any_above_0,
    estimate_array,
    looks,
    run_labels,
    values_of,
)
from mismatch_cli.report.drawing.panels import LEGEND, Panel, Sheet, legend_height
from mismatch_cli.report.drawing.style import Style

if TYPE_CHECKING:
    from mismatch_cli.studies.comparison import ComparisonPlotData
    from mismatch_cli.studies.mismatch import PlotData

STUDY = ("mismatch", "comparison")
SECTION = "Ratio and TV by probability"
PLACE = 1
TITLE = {
    "mismatch": "Volatility by rollout probability",
    "comparison": "Ratio and TV by probability",
}
DATA = "enough tokens scored by both sides"
_INTERVALS = (
    "with 95 % intervals over prompts (arrow: reaches below a tenth of the value; hollow mark: "
    "too few tokens). "
)
CAPTION = {
    "mismatch": (
        "For the tokens in each bin of μ: standard deviation and 99th percentile of the ratio r "
        f"= π/μ, of the binary TV |π − μ| and of the top-K TV, {_INTERVALS}The percentile of the "
        "ratio is that of r − 1. If a line falls from left to right, a threshold on that "
        "quantity hits rare tokens first."
    ),
    "comparison": (
        "For the tokens in each bin of μ, the standard deviation (SD) of the ratio r = π/μ and "
        f"of the total variation, {_INTERVALS}Curves of the same shape at different heights "
        "suggest one cause of different strength; different shapes suggest different causes."
    ),
}

_FEWEST = 100  # tokens in a bin, of which one is beyond the 99th percentile
_LONGEST = 10  # times below the value: whiskers are cut here, with an arrow

# With several traces, a panel has one quantity: its key and its title.
_RATIO = ("ratio_sd", "SD of the ratio π/μ")
_TOP_K = ("tv_topk_sd", "SD of top-K TV")
_BINARY = ("tv_binary_sd", "SD of |π − μ|")

Rows = Sequence[ProbabilityBin]


class _Line(NamedTuple):
    label: str
    estimates: Sequence[MaybeEstimate]
    colour: str
    marker: str = "o"
    shift: float = 0.0  # subtracted from every estimate


def needs(data: PlotData | ComparisonPlotData) -> bool:
    spreads: list[MaybeEstimate] = []
    for summary in data.by_trace.values():
        for mu_bin in summary.volatility:
            keys = [_RATIO[0], _BINARY[0], _TOP_K[0]]
            if mu_bin.tokens >= _FEWEST:
                keys.append("tv_binary_p99")
            spreads += map(mu_bin.metrics.get, keys)
    # The axes are logarithmic: without a spread, as of one token in each bin, they would be empty.
    return any_above_0(spreads)


def draw(figure: Sheet, data: PlotData | ComparisonPlotData) -> None:
    rows_of = _occupied({trace: summary.volatility for trace, summary in data.by_trace.items()})
    first = next(iter(rows_of.values()))
    single = len(rows_of) == 1
    if single:
        legend, lines_of = LEGEND, _lines_of_trace(first, figure.style)
    else:
        legend = legend_height(list(rows_of), RUNS)
        lines_of = _lines_of_traces(rows_of, figure.style)
    panels = figure.panels(2, height=(300, 240), legend=legend)
    for axes, (title, lines) in zip(panels, lines_of.items(), strict=True):
        for line in lines:
            _draw_line(axes, line)
        axes.label_bins([row.mu_low for row in first] + [first[-1].mu_high])
        axes.set_xlabel("rollout probability μ, bin edges")
        axes.headline(title, ncols=len(lines) if single else RUNS)
    _set_vertical([axes for axes in panels if axes.lines], shared=single)


def _occupied(rows_of: Mapping[str, Rows]) -> dict[str, Rows]:
    """The bins in which any trace has tokens."""
    bins = zip(*rows_of.values(), strict=True)
    is_occupied = [sum(map(attrgetter("tokens"), rows)) > 0 for rows in bins]
    return {trace: list(compress(rows, is_occupied)) for trace, rows in rows_of.items()}


def _lines_of_trace(rows: Rows, style: Style) -> dict[str, list[_Line]]:
    """For one trace: standard deviations and tails of the ratio and of the total variations."""
    return {
        "Standard deviation per bin": _spreads(rows, "sd", style),
        "99th percentile per bin": _spreads(rows, "p99", style),
    }


def _spreads(rows: Rows, end: str, style: Style) -> list[_Line]:
    """One kind of spread of the three quantities, named by the `end` of the metrics' keys."""
    fewest, shift, ratio = 0, 0.0, "ratio"
    if end == "p99":
        # A percentile near 1 has no logarithmic axis, its distance from 1 has.
        fewest, shift, ratio = _FEWEST, 1.0, "ratio − 1"
    bins = [row.metrics if row.tokens >= fewest else {} for row in rows]
    theme = style.theme
    return [
        _Line(ratio, _column(bins, f"ratio_{end}"), theme.blue, "o", shift),
        _Line("binary TV", _column(bins, f"tv_binary_{end}"), theme.green, "s"),
        _Line("top-K TV", _column(bins, f"tv_topk_{end}"), theme.orange, "D"),
    ]


def _column(bins: Sequence[Mapping[str, MaybeEstimate]], key: str) -> list[MaybeEstimate]:
    return [metrics.get(key) for metrics in bins]


def _lines_of_traces(rows_of: Mapping[str, Rows], style: Style) -> dict[str, list[_Line]]:
    """For several traces: the ratio and the TV of each, top-K if all traces have it."""
    tv = _TOP_K
    for rows in rows_of.values():
        if not np.isfinite(values_of(row.metrics[_TOP_K[0]] for row in rows)).any():
            tv = _BINARY
    labels = run_labels(list(rows_of), style)
    lines_of: dict[str, list[_Line]] = {}
    for key, title in (_RATIO, tv):
        lines_of[title] = []
        for trace, look in looks(rows_of, style).items():
            estimates = [row.metrics[key] for row in rows_of[trace]]
            lines_of[title].append(_Line(labels[trace], estimates, look.colour))
    return lines_of


def _draw_line(axes: Panel, line: _Line) -> None:
    """A line through the middles of the bins, hollow where there is no interval; zeros are not
    drawn on the log axis.
    """
    value_B, low_B, high_B = estimate_array(line.estimates).T - line.shift
    centre_B = np.arange(len(value_B)) + 0.5
    drawn_B = value_B > 0
    if not drawn_B.any():
        return
    look: dict[str, Any] = {"color": line.colour, "marker": line.marker, "markersize": 4.5}
    axes.plot(centre_B[drawn_B], value_B[drawn_B], linewidth=1.5, label=line.label, **look)
    whisker_B = drawn_B & np.isfinite(high_B)
    hollow_B = drawn_B & ~whisker_B
    # A legend leaves out a label that begins with an underscore, so the line has one entry.
    hollow = {"linestyle": "none", "markerfacecolor": axes.theme.page, "label": f"_{line.label}"}
    axes.plot(centre_B[hollow_B], value_B[hollow_B], **look | hollow)
    ends = low_B[whisker_B], high_B[whisker_B]
    _draw_whiskers(axes, centre_B[whisker_B], value_B[whisker_B], *ends, line)


def _draw_whiskers(
    axes: Panel,
    centre_B: np.ndarray,
    value_B: np.ndarray,
    low_B: np.ndarray,
    high_B: np.ndarray,
    line: _Line,
) -> None:
    """Intervals; one that reaches far down ends in an arrow."""
    # On a logarithmic axis an interval down to almost 0 would squeeze all values into its top.
    end_B = np.maximum(low_B, value_B / _LONGEST)
    cut_B = low_B < end_B
    axes.vlines(centre_B, end_B, high_B, color=line.colour, linewidth=1.2)
    ends: dict[str, Any] = {"color": line.colour, "markersize": 5, "linestyle": "none"}
    axes.plot(centre_B, high_B, marker="_", **ends)
    axes.plot(centre_B[~cut_B], end_B[~cut_B], marker="_", **ends)
    axes.plot(centre_B[cut_B], end_B[cut_B], marker="v", **ends)


def _set_vertical(filled: Sequence[Panel], *, shared: bool) -> None:
    """Make vertical axes logarithmic; quantities of one trace share a scale, so that heights
    compare.
    """
    # The limits that matplotlib chooses are those of the scale at the time they are asked for.
    for axes in filled:
        axes.set_yscale("log")
    limit_P2 = np.array([axes.get_ylim() for axes in filled])
    for axes in filled:
        if shared:
            axes.set_ylim(limit_P2.min(), limit_P2.max())
        axes.logarithmic("y")
