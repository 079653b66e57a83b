"""The gap along the response of each trace: from its first token, and from its last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.report.plots._lines import RUNS, Look, looks, parts_of, run_labels, values_of
from mismatch_cli.report.plots._panels import Panel, Sheet, legend_height

if TYPE_CHECKING:
    from mismatch_cli.studies.comparison import ComparisonPlotData
    from mismatch_cli.studies.mismatch import PlotData

STUDY = ("mismatch", "comparison")
SECTION = "Along the response"
TITLE = "Gap by position in the response"
_BINS = (
    "Mean |log π − log μ| over the tokens at each distance from the first token and from the last (0), in bins that "
    "double in width, with 95 % intervals over prompts where a bin has enough of them; one that reaches the top goes "
    "on. "
)
CAPTION = {
    "mismatch": _BINS + "A level line is healthy; a rise with position points to positional encoding or caches, a "
    "jump at the last token to end-of-sequence handling.",
    "comparison": _BINS + "Curves that part with the distance point to caches and position encoding, curves that part "
    "at the last token to end-of-sequence handling.",
}

_SPAN = 20  # between the largest values of two traces
_BEYOND = 2  # times the largest value: where bands are cut, or one would flatten the lines

Rows = Sequence[Mapping[str, Any]]


def needs(data: PlotData | ComparisonPlotData) -> bool:
    return any(_measured(rows) for rows in data.by_trace("positions").values())


def draw(figure: Sheet, data: PlotData | ComparisonPlotData) -> None:
    traces = list(data.by_trace("positions"))
    panels, labels = (
        figure.panels(2, height=(250, 200), legend=legend_height(traces, RUNS)),
        run_labels(traces, figure.style),
    )
    for axes, key, name in zip(panels, ("positions", "from_end"), ("first", "last"), strict=True):
        rows_of = {trace: _measured(rows) for trace, rows in data.by_trace(key).items()}
        for trace, look in looks(rows_of, figure.style).items():
            if rows_of[trace]:
                _draw_steps(axes, rows_of[trace], look, labels[trace])
        if any(rows_of.values()):
            _label_positions(axes, max(rows_of.values(), key=len))
        axes.headline(
            f"Mean |log π − log μ| from the {name} token, nats", f"Mean |d| from the {name} token, nats", ncols=RUNS
        )
        axes.set_xlabel(f"tokens from the {name} token, edges of the bins")
    _share_vertical(panels, data)


def _measured(rows: Rows) -> Rows:
    """The rows up to the last one that has a value."""
    last = max((place for place, row in enumerate(rows) if row["abs_d_mean"]["value"] is not None), default=-1)
    return rows[: last + 1]


def _draw_steps(axes: Panel, rows: Rows, look: Look, label: str) -> None:
    """A step over each bin, in a band for its interval; each bin is as wide as the others."""
    edges = np.arange(len(rows) + 1)
    value_B, low_B, high_B = parts_of(row["abs_d_mean"] for row in rows).T
    axes.stairs(value_B, edges, baseline=None, color=look.colour, linestyle=look.dash, linewidth=1.8, label=label)
    axes.stairs(high_B, edges, baseline=low_B, fill=True, color=look.colour, alpha=0.2, linewidth=0)


def _label_positions(axes: Panel, rows: Rows) -> None:
    """The first distance of each row at its left edge, and at the end the one behind the last."""
    every = axes.style.pick(1, 2)
    edges = [*(row["first"] for row in rows), rows[-1]["last"] + 1]
    labels = [f"{edge}" if i % every == 0 else "" for i, edge in enumerate(edges)]
    labels[-1] = labels[-1] if len(labels[-1]) <= 3 else ""  # it would reach out of the figure
    axes.set_xticks(range(len(edges)), labels)
    axes.set_xlim(0, len(rows))


def _share_vertical(panels: Sequence[Panel], data: PlotData | ComparisonPlotData) -> None:
    """The same scale in both panels: from 0, or logarithmic where one trace would lie flat on the axis."""
    values = [values_of(row["abs_d_mean"] for row in rows) for rows in data.by_trace("positions").values()]
    above_0 = [value_B[value_B > 0] for value_B in values if (value_B > 0).any()]
    largest = [value_B.max() for value_B in above_0]
    apart = len(largest) > 1 and max(largest) >= _SPAN * min(largest)
    top = max(float(axes.dataLim.y1) for axes in panels if axes.patches)
    for axes in panels:
        axes.set_ylim(0, 1.1 * min(top, _BEYOND * max(largest, default=1.0)) or 1.0)
        if apart:
            axes.set_yscale("log")
            axes.set_ylim(min(value_B.min() for value_B in above_0) / 2, 1.5 * top)
            axes.logarithmic("y")
