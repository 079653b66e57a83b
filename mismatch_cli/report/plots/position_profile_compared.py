"""The gap along the response, for each trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.report.plots._panels import add_subject, legend_above, logarithmic, panels, title
from mismatch_cli.report.plots._style import Style
from mismatch_cli.report.plots._traces import has_value, legend_height, looks_of
from mismatch_cli.report.plots.position_profile import draw_profile, label_positions
from mismatch_cli.studies.comparison import ComparisonPlotData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STUDY = "comparison"
SECTION = "Along the response"
TITLE = "Gap by position in the response"
CAPTION = (
    "Mean |log π − log μ| at each distance from the first token and from the last, in octaves, with 95 % intervals "
    "over prompts. Curves that part with the distance point to caches and position encoding, curves that part at the "
    "last token to end-of-sequence handling."
)

_SPAN = 20  # between the largest values of two traces


def needs(data: ComparisonPlotData) -> bool:
    return any(has_value(row, "abs_d_mean") for rows in data.rows("positions") for row in rows)


def draw(figure: Figure, data: ComparisonPlotData, style: Style) -> None:
    legend = legend_height(data)
    start, end = panels(figure, style, 2, height=250 if style.wide else 200, legend=legend)
    for axes, key, name in ((start, "positions", "from the first token"), (end, "from_end", "from the last token")):
        tables = [[row for row in rows if has_value(row, "abs_d_mean")] for rows in data.rows(key)]
        for (trace, look), rows in zip(looks_of(data, style).items(), tables, strict=True):
            if rows:
                draw_profile(axes, rows, look.colour, trace)
        if longest := max(tables, key=len):
            label_positions(axes, longest, style)
            legend_above(axes, style)
        title(axes, f"Mean |log π − log μ| {name}" if style.wide else f"Mean |d| {name}, nats", style, legend)
        axes.set_xlabel(f"tokens {name}")
    _share_vertical((start, end))
    end.invert_xaxis()
    add_subject(figure, style, data.subject)


def _share_vertical(panels: Sequence[Axes]) -> None:
    """The same scale in both panels: from 0, or logarithmic where one trace would lie flat on the axis."""
    lines = [np.asarray(line.get_ydata()) for axes in panels for line in axes.lines]
    largest = [float(line.max()) for line in lines if line.max() > 0]
    top = max(axes.get_ylim()[1] for axes in panels)
    if not largest or max(largest) < _SPAN * min(largest):
        for axes in panels:
            axes.set_ylim(0, top)
        return
    lowest = min(float(line[line > 0].min()) for line in lines if line.max() > 0)
    for axes in panels:
        axes.set_yscale("log")
        axes.set_ylim(lowest / 2, 1.5 * top)
        logarithmic(axes, "y")
