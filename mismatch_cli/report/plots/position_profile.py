"""The gap along the response of each trace: from its first token, and from its last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.report.plots._lines import draw_line, looks, parts_of
from mismatch_cli.report.plots._panels import Panel, Sheet, legend_height

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


def draw(figure: Sheet, data: PlotData | ComparisonPlotData) -> None:
    panels = figure.panels(2, height=(250, 200), legend=legend_height(data.by_trace("positions")))
    for axes, key, name in zip(panels, ("positions", "from_end"), ("first", "last"), strict=True):
        rows_of = {trace: _measured(rows) for trace, rows in data.by_trace(key).items()}
        for trace, look in looks(rows_of, figure.style).items():
            estimates = [row["abs_d_mean"] for row in rows_of[trace]]
            x_B = np.arange(len(estimates))
            draw_line(axes, x_B, estimates, look.colour, band=0.2, marker="o", markersize=4.5, label=trace)
        if found := [row["abs_d_mean"] for rows in rows_of.values() for row in rows]:
            axes.set_ylim(0, 1.15 * float(np.nanmax(parts_of(found))) or 1.0)
            _label_positions(axes, max(rows_of.values(), key=len))
        axes.headline(f"Mean |log π − log μ| from the {name} token", f"Mean |d| from the {name} token, nats")
        axes.set_xlabel(f"tokens from the {name} token")
    _share_vertical(panels, alone=not panels[0].box.legend)
    panels[1].invert_xaxis()


def _measured(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["abs_d_mean"]["value"] is not None]


def _label_positions(axes: Panel, rows: Sequence[Mapping[str, Any]]) -> None:
    """A tick at each row, with its first distance."""
    every = axes.style.pick(1, 2)
    axes.set_xticks(range(len(rows)), [f"{row['first']}" if i % every == 0 else "" for i, row in enumerate(rows)])
    axes.set_xlim(-0.4, max(len(rows) - 0.6, 0.6))


def _share_vertical(panels: Sequence[Panel], *, alone: bool) -> None:
    """The same scale in both panels: from 0, or logarithmic where one trace would lie flat on the axis."""
    lines = [np.asarray(line.get_ydata()) for axes in panels for line in axes.lines]
    above_0 = [line for line in lines if line.max() > 0]
    largest = [float(line.max()) for line in above_0]
    top = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(0, top)
    if alone or not largest or max(largest) < _SPAN * min(largest):
        return
    lowest = min(float(line[line > 0].min()) for line in above_0)
    for axes in panels:
        axes.set_yscale("log")
        axes.set_ylim(lowest / 2, 1.5 * top)
        axes.logarithmic("y")
