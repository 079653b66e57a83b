"""Spread of ratio and total variation in each bin of the rollout probability, for each trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mismatch_cli.metrics.pair_summary import ProbabilityBin
from mismatch_cli.report.drawing.marks import RUNS, Part, looks, parts_of, run_labels, values_of
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

# Of several traces: keys and words
_TOP_K, _BINARY = ("tv_topk_sd", "SD of top-K TV"), ("tv_binary_sd", "SD of |π − μ|")

Rows = Sequence[ProbabilityBin]


class _Line(NamedTuple):
    label: str
    estimates: Sequence[Part]
    colour: str
    marker: str = "o"
    shift: float = 0.0  # subtracted from every estimate


def needs(data: PlotData | ComparisonPlotData) -> bool:
    bins = [bin_ for summary in data.by_trace.values() for bin_ in summary.volatility]
    spreads = [bin_.metrics[key] for bin_ in bins for key in ("ratio_sd", "ratio_p99")]
    return bool(np.isfinite(values_of(spreads)).any())


def draw(figure: Sheet, data: PlotData | ComparisonPlotData) -> None:
    rows_of = _occupied({trace: summary.volatility for trace, summary in data.by_trace.items()})
    first, single = next(iter(rows_of.values())), len(rows_of) == 1
    legend = LEGEND if single else legend_height(list(rows_of), RUNS)
    panels = figure.panels(2, height=(300, 240), legend=legend)
    lines_of = _quantities(first, figure.style) if single else _traces(rows_of, figure.style)
    for axes, (words, lines) in zip(panels, lines_of.items(), strict=True):
        for line in lines:
            _draw_line(axes, line)
        axes.label_bins([row.mu_low for row in first] + [first[-1].mu_high])
        axes.set_xlabel("rollout probability μ, bin edges")
        axes.headline(words, ncols=len(lines) if single else RUNS)
    _set_vertical([axes for axes in panels if axes.lines], shared=single)


def _occupied(rows_of: Mapping[str, Rows]) -> dict[str, Rows]:
    """The bins in which any trace has tokens."""
    bins = list(zip(*rows_of.values(), strict=True))
    places = [place for place, rows in enumerate(bins) if any(row.tokens for row in rows)]
    return {trace: [rows[place] for place in places] for trace, rows in rows_of.items()}


def _quantities(rows: Rows, style: Style) -> dict[str, list[_Line]]:
    """For one trace: standard deviations and tails of the ratio and of the total variations."""
    return {
        "Standard deviation per bin": _spreads(rows, "sd", style),
        "99th percentile per bin": _spreads(rows, "p99", style),
    }


def _spreads(rows: Rows, end: str, style: Style) -> list[_Line]:
    """Percentiles of the ratio are those of r − 1, over bins with enough tokens."""
    tail = end == "p99"
    fewest, shift, of_ratio = (_FEWEST, 1.0, "ratio − 1") if tail else (0, 0.0, "ratio")
    bins = [row.metrics if row.tokens >= fewest else {} for row in rows]
    theme = style.theme
    return [
        _Line(of_ratio, _column(bins, f"ratio_{end}"), theme.blue, "o", shift),
        _Line("binary TV", _column(bins, f"tv_binary_{end}"), theme.green, "s"),
        _Line("top-K TV", _column(bins, f"tv_topk_{end}"), theme.orange, "D"),
    ]


def _column(bins: Sequence[Mapping[str, Part]], key: str) -> list[Part]:
    return [metrics.get(key) for metrics in bins]


def _traces(rows_of: Mapping[str, Rows], style: Style) -> dict[str, list[_Line]]:
    """For several traces: the ratio and the TV of each, top-K if all traces have it."""
    key, _ = _TOP_K
    spreads = [values_of(row.metrics[key] for row in rows) for rows in rows_of.values()]
    tv = _TOP_K if all(np.isfinite(spread_B).any() for spread_B in spreads) else _BINARY
    labels = run_labels(list(rows_of), style)
    return {
        words: [
            _Line(labels[trace], [row.metrics[key] for row in rows_of[trace]], look.colour)
            for trace, look in looks(rows_of, style).items()
        ]
        for key, words in (("ratio_sd", "SD of the ratio π/μ"), tv)
    }


def _draw_line(axes: Panel, line: _Line) -> None:
    """A line through the middles of the bins, hollow where there is no interval; zeros are not
    drawn on the log axis.
    """
    value_B, low_B, high_B = parts_of(line.estimates).T - line.shift
    centre_B, drawn_B = np.arange(len(value_B)) + 0.5, value_B > 0
    if not drawn_B.any():
        return
    look: dict[str, Any] = {"color": line.colour, "marker": line.marker, "markersize": 4.5}
    axes.plot(centre_B[drawn_B], value_B[drawn_B], linewidth=1.5, label=line.label, **look)
    sure_B = drawn_B & np.isfinite(high_B)
    hollow = {"linestyle": "none", "markerfacecolor": axes.theme.page, "label": f"_{line.label}"}
    unsure_B = drawn_B & ~sure_B
    axes.plot(centre_B[unsure_B], value_B[unsure_B], **look | hollow)
    _draw_whiskers(axes, centre_B[sure_B], value_B[sure_B], low_B[sure_B], high_B[sure_B], line)


def _draw_whiskers(
    axes: Panel,
    centre_B: np.ndarray,
    value_B: np.ndarray,
    low_B: np.ndarray,
    high_B: np.ndarray,
    line: _Line,
) -> None:
    """Intervals; one that reaches far down ends in an arrow."""
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
    for axes in filled:
        axes.set_yscale("log")
    limits = [axes.get_ylim() for axes in filled]
    for axes in filled:
        if shared:
            axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        axes.logarithmic("y")
