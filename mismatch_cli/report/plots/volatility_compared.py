"""How much ratio and total variation scatter in each bin of the rollout probability, for each trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch_cli.report.plots._panels import add_subject, legend_above, logarithmic, panels, title
from mismatch_cli.report.plots._style import Style
from mismatch_cli.report.plots._traces import has_value, legend_height, looks_of
from mismatch_cli.report.plots.volatility import draw_bins, draw_series
from mismatch_cli.studies.comparison import ComparisonPlotData, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STUDY = "comparison"
SECTION = "Ratio and TV by probability"
TITLE = "Ratio and TV by probability"
CAPTION = (
    "For the tokens in each bin of μ, the standard deviation of the ratio r = π/μ and of the total variation, with "
    "95 % intervals over prompts. Curves of the same shape at another height speak for one cause, stronger or weaker; "
    "another shape for another cause."
)
_TV = (("tv_topk_sd", "Spread of top-K TV"), ("tv_binary_sd", "Spread of |π − μ|"))


def needs(data: ComparisonPlotData) -> bool:
    return any(has_value(row, "ratio_sd") for rows in data.rows("volatility") for row in rows)


def draw(figure: Figure, data: ComparisonPlotData, style: Style) -> None:
    legend, tables = legend_height(data), data.rows("volatility")
    two_panels = panels(figure, style, 2, height=300 if style.wide else 240, legend=legend)
    occupied = [place for place, rows in enumerate(zip(*tables, strict=True)) if any(row["tokens"] for row in rows)]
    chosen = [[rows[place] for place in occupied] for rows in tables]
    for axes, (key, words) in zip(two_panels, (("ratio_sd", "Spread of the ratio π/μ"), _tv_of(chosen)), strict=True):
        for (name, look), rows in zip(looks_of(data, style).items(), chosen, strict=True):
            draw_series(axes, [row[key] for row in rows], 0.0, name, "o", look.colour)
        draw_bins(axes, chosen[0], style)
        if axes.lines:
            axes.set_yscale("log")
            logarithmic(axes, "y")
            legend_above(axes, style)
        axes.set_xlabel("rollout probability μ, edges of the bins")
        title(axes, words, style, legend)
    add_subject(figure, style, data.subject)


def _tv_of(tables: list[list[Row]]) -> tuple[str, str]:
    """Top-K TV where all traces have it, else the binary one."""
    return _TV[0] if all(any(has_value(row, "tv_topk_sd") for row in rows) for rows in tables) else _TV[1]
