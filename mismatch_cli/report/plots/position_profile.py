"""The gap along the response of each trace: from its first token, and from its last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mismatch_cli.report.plots._lines import draw_line, looks, parts_of
from mismatch_cli.report.plots._panels import legend_above, legend_height, logarithmic, panels, title
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from mismatch_cli.studies.comparison import ComparisonPlotData
    from mismatch_cli.studies.mismatch import PlotData

STUDY = ("mismatch", "comparison")
SECTION = "Along the response"
TITLE = "Gap by position in the response"
CAPTION = {
    "mismatch": "Mean |log π − log μ| over the tokens at each distance from the first token and from the last, in "
    "octaves, with 95 % intervals over prompts. A level line is healthy; a rise with position points to positional "
    "encoding or caches, a jump at the last token to end-of-sequence handling.",
    "comparison": "Mean |log π − log μ| at each distance from the first token and from the last, in octaves, with "
    "95 % intervals over prompts. Curves that part with the distance point to caches and position encoding, curves "
    "that part at the last token to end-of-sequence handling.",
}

_SPAN = 20  # between the largest values of two traces


def needs(data: PlotData | ComparisonPlotData) -> bool:
    return any(_measured(rows) for rows in data.by_trace("positions").values())


def draw(figure: Figure, data: PlotData | ComparisonPlotData, style: Style) -> None:
    legend = legend_height(list(data.by_trace("positions")))
    start, end = panels(figure, style, 2, height=250 if style.wide else 200, legend=legend)
    for axes, key, name in ((start, "positions", "from the first token"), (end, "from_end", "from the last token")):
        rows_of = {trace: _measured(rows) for trace, rows in data.by_trace(key).items()}
        for trace, look in looks(rows_of, style).items():
            _draw_profile(axes, rows_of[trace], look.colour, trace)
        if longest := max(rows_of.values(), key=len):
            _label_positions(axes, longest, style)
            if legend:
                legend_above(axes, style)
        title(axes, f"Mean |log π − log μ| {name}" if style.wide else f"Mean |d| {name}, nats", style, legend)
        axes.set_xlabel(f"tokens {name}")
    _share_vertical((start, end), alone=not legend)
    end.invert_xaxis()


def _measured(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["abs_d_mean"]["value"] is not None]


def _draw_profile(axes: Axes, rows: Sequence[Mapping[str, Any]], colour: str, label: str) -> None:
    """Mean |d| in each row with its band; the axis reaches above all that were drawn."""
    if not rows:
        return
    estimates = [row["abs_d_mean"] for row in rows]
    draw_line(axes, np.arange(len(rows)), estimates, colour, band=0.2, marker="o", markersize=4.5, label=label)
    before = axes.get_ylim()[1] if len(axes.lines) > 1 else 0.0
    axes.set_ylim(0, max(before, 1.15 * float(np.nanmax(parts_of(estimates)))) or 1.0)


def _label_positions(axes: Axes, rows: Sequence[Mapping[str, Any]], style: Style) -> None:
    """A tick at each row, with its first distance."""
    labels = [f"{row['first']}" for row in rows]
    axes.set_xticks(range(len(rows)), [label if style.wide or i % 2 == 0 else "" for i, label in enumerate(labels)])
    axes.set_xlim(-0.4, max(len(rows) - 0.6, 0.6))


def _share_vertical(two_panels: Sequence[Axes], *, alone: bool) -> None:
    """The same scale in both panels: from 0, or logarithmic where one trace would lie flat on the axis."""
    lines = [np.asarray(line.get_ydata()) for axes in two_panels for line in axes.lines]
    largest = [float(line.max()) for line in lines if line.max() > 0]
    top = max(axes.get_ylim()[1] for axes in two_panels)
    if alone or not largest or max(largest) < _SPAN * min(largest):
        for axes in two_panels:
            axes.set_ylim(0, top)
        return
    lowest = min(float(line[line > 0].min()) for line in lines if line.max() > 0)
    for axes in two_panels:
        axes.set_yscale("log")
        axes.set_ylim(lowest / 2, 1.5 * top)
        logarithmic(axes, "y")
