"""The gap of each trace by distance from the first and from the last token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch_cli.report.drawing.marks import (
    RUNS,
    Rows,
    draw_steps,
    share_vertical,
    trim_unmeasured,
)
from mismatch_cli.report.drawing.panels import Panel, Sheet, legend_height

if TYPE_CHECKING:
    from mismatch_cli.studies.comparison import ComparisonPlotData
    from mismatch_cli.studies.mismatch import PlotData

STUDY = ("mismatch", "comparison")
SECTION = "By position in the response"
TITLE = "Gap by position in the response"
_BINS = (
    "Mean |log π − log μ| by distance from the first token and from the last (0), in bins that "
    "double in width, with 95 % intervals over prompts where a bin has enough; an interval that "
    "reaches the top extends beyond it. "
)
DATA = "tokens scored by both sides, at several positions"
CAPTION = {
    "mismatch": _BINS
    + "A level line is healthy; a rise with position points to position encoding or caches, a jump at "
    "the last token to end-of-sequence handling.",
    "comparison": _BINS
    + "Curves that diverge with distance point to position encoding or caches, curves that diverge "
    "at the last token to end-of-sequence handling.",
}

_GAP = "abs_d_mean"


def needs(data: PlotData | ComparisonPlotData) -> bool:
    return any(trim_unmeasured(_positions(data), _GAP).values())


def draw(figure: Sheet, data: PlotData | ComparisonPlotData) -> None:
    traces = list(data.by_trace)
    from_end = {trace: summary.from_end for trace, summary in data.by_trace.items()}
    panels = figure.panels(2, height=(250, 200), legend=legend_height(traces, RUNS))
    distances = {"first": _positions(data), "last": from_end}
    for axes, (name, all_rows_of) in zip(panels, distances.items(), strict=True):
        rows_of = trim_unmeasured(all_rows_of, _GAP)
        draw_steps(axes, rows_of, _GAP)
        if any(rows_of.values()):
            _label_positions(axes, max(rows_of.values(), key=len))
        axes.set_xlabel(f"tokens from the {name} token, bin edges")
        title = f"Mean |log π − log μ| from the {name} token, nats"
        axes.headline(title, f"Mean |d| from the {name} token, nats", ncols=RUNS)
    share_vertical(panels, _positions(data), _GAP)


def _positions(data: PlotData | ComparisonPlotData) -> dict[str, Rows]:
    return {trace: summary.positions for trace, summary in data.by_trace.items()}


def _label_positions(axes: Panel, rows: Rows) -> None:
    """Label each bin with its first distance, and the end with the distance after the last."""
    bins = range(0, len(rows), axes.style.pick(1, 2))
    label_at = {number: str(rows[number].first) for number in bins}
    end = str((rows[-1].last or 0) + 1)
    # A long last label would leave the figure.
    if len(end) <= 3:
        label_at[len(rows)] = end
    axes.set_xticks(list(label_at), list(label_at.values()))
