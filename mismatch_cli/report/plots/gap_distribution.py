"""How many tokens have a gap of at least a size, for each trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from mismatch_cli.report.plots._lines import looks
from mismatch_cli.report.plots._panels import legend_above, legend_height, logarithmic, panels, title
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from mismatch_cli.studies.comparison import ComparisonPlotData

STUDY = "comparison"
SECTION = "How large the gaps are"
TITLE = "Distribution of the gap"
CAPTION = (
    "The share of tokens whose |log π − log μ| is at least the value below. A curve that lies further right has larger "
    "gaps; curves that part only at the lower end differ in a few tokens, not in all of them. Each ends at its largest "
    "gap."
)


def needs(data: ComparisonPlotData) -> bool:
    return any(curve.shape[1] for curve in data.exceedance)


def draw(figure: Figure, data: ComparisonPlotData, style: Style) -> None:
    legend = legend_height(data.names)
    (axes,) = panels(figure, style, 1, height=320 if style.wide else 250, legend=legend)
    for (name, look), (abs_d, share) in zip(looks(data.names, style).items(), data.exceedance, strict=True):
        axes.plot(abs_d, share, color=look.colour, linestyle=look.dash, label=name, drawstyle="steps-pre")
    axes.margins(x=0.02)
    for which in "xy":
        getattr(axes, f"set_{which}scale")("log")
        logarithmic(axes, which)
    axes.set_xlabel("|log π − log μ|, nats")
    legend_above(axes, style)
    title(axes, "Share of tokens with at least that gap" if style.wide else "Share of tokens", style, legend)
