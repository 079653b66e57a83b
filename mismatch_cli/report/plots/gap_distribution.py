"""The share of tokens with at least a given gap, for each trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch_cli.report.drawing.marks import RUNS, looks, run_labels
from mismatch_cli.report.drawing.panels import Sheet, legend_height

if TYPE_CHECKING:
    from mismatch_cli.studies.comparison import ComparisonPlotData

STUDY = "comparison"
SECTION = "Distribution of the gap"
PLACE = 1
TITLE = "Distribution of the gap"
DATA = "tokens with a gap"
CAPTION = (
    "The share of tokens whose |log π − log μ| is at least the value on the axis. A curve "
    "further right has larger gaps; curves that separate only at the lower end differ in a few "
    "tokens. Each ends at its largest gap."
)


def needs(data: ComparisonPlotData) -> bool:
    return any(curve.shape[1] for curve in data.exceedance)


def draw(figure: Sheet, data: ComparisonPlotData) -> None:
    (axes,) = figure.panels(1, height=(320, 250), legend=legend_height(data.names, RUNS))
    labels = run_labels(data.names, figure.style)
    look_of = looks(data.names, figure.style)
    for name, (abs_d, share) in zip(data.names, data.exceedance, strict=True):
        line = look_of[name].of_line
        axes.plot(abs_d, share, label=labels[name], drawstyle="steps-pre", **line)
    axes.margins(x=0.02)
    axes.logarithmic("x")
    axes.logarithmic("y")
    axes.set_xlabel("|log π − log μ|, nats")
    axes.headline("Share of tokens with at least this gap", "Share of tokens", ncols=RUNS)
