"""How much ratio and total variation scatter in each bin of the rollout probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.report.plots._panels import add_subject, legend_above, logarithmic, panels, power_label, title
from mismatch_cli.report.plots._style import Style
from mismatch_cli.studies.mismatch import PlotData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STUDY = "mismatch"
SECTION = "Ratio against TV"
TITLE = "Volatility by rollout probability"
CAPTION = (
    "For the tokens in each bin of μ: standard deviation and 99th percentile of the ratio r = π/μ, of the binary "
    "TV |π − μ| and of the top-K TV, with 95 % intervals over prompts; for the ratio the percentile of r − 1. "
    "Where a line falls from left to right, a threshold on that quantity is hit by rare tokens first."
)

_LEGEND = 20
_SERIES = (("ratio", "ratio", "o"), ("tv_binary", "binary TV", "s"), ("tv_topk", "top-K TV", "D"))


def needs(data: PlotData) -> bool:
    return bool(_rows(data))


def draw(figure: Figure, data: PlotData, style: Style) -> None:
    rows = _rows(data)
    two_panels = panels(figure, style, 2, height=300 if style.wide else 240, legend=_LEGEND)
    _draw_panel(two_panels[0], rows, "sd", style)
    _draw_panel(two_panels[1], rows, "p99", style)
    title(two_panels[0], "Standard deviation in the bin", style, _LEGEND)
    title(two_panels[1], "99th percentile in the bin", style, _LEGEND)
    for axes in two_panels:
        axes.set_xlabel("rollout probability μ, edges of the bins")
    _share_vertical([axes for axes in two_panels if axes.lines], style)
    add_subject(figure, style, data.subject)


def _share_vertical(filled: Sequence[Axes], style: Style) -> None:
    """The same logarithmic scale in both panels, so that their heights compare."""
    limits = [axes.get_ylim() for axes in filled]
    for axes in filled:
        axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        logarithmic(axes, "y")
        legend_above(axes, style)


def _rows(data: PlotData) -> list[Mapping[str, Any]]:
    return [row for row in data.summary.get("volatility", []) if row["tokens"]]


def _draw_panel(axes: Axes, rows: Sequence[Mapping[str, Any]], statistic: str, style: Style) -> None:
    theme = style.theme
    for (key, label, marker), colour in zip(_SERIES, (theme.blue, theme.green, theme.orange), strict=True):
        of_ratio = (key, statistic) == ("ratio", "p99")
        estimates = [row.get(f"{key}_{statistic}") for row in rows]
        draw_series(axes, estimates, 1.0 if of_ratio else 0.0, "ratio − 1" if of_ratio else label, marker, colour)
    draw_bins(axes, rows, style)
    if axes.lines:
        axes.set_yscale("log")


def draw_series(
    axes: Axes, estimates: Sequence[Mapping[str, Any] | None], shift: float, label: str, marker: str, colour: str
) -> None:
    """One line through the middles of the bins, with a whisker for each interval; a logarithmic axis has no zero."""
    value_B3 = np.array([_numbers(estimate) for estimate in estimates], dtype=np.float64) - shift
    centre_B = np.arange(len(value_B3)) + 0.5
    drawn_B = value_B3[:, 0] > 0
    if not drawn_B.any():
        return
    axes.plot(
        centre_B[drawn_B], value_B3[drawn_B, 0], color=colour, marker=marker, markersize=4.5, linewidth=1.5, label=label
    )
    whisker_B = drawn_B & (value_B3[:, 2] > 0)
    lowest = value_B3[drawn_B, 0].min() / 3
    low_B = np.maximum(value_B3[whisker_B, 1], lowest)
    axes.vlines(centre_B[whisker_B], low_B, value_B3[whisker_B, 2], color=colour, linewidth=1.2, alpha=0.8)


def _numbers(estimate: Mapping[str, Any] | None) -> list[float]:
    parts = [(estimate or {}).get(name) for name in ("value", "low", "high")]
    return [np.nan if part is None else float(part) for part in parts]


def draw_bins(axes: Axes, rows: Sequence[Mapping[str, Any]], style: Style) -> None:
    edges = [*(row["mu_low"] for row in rows), rows[-1]["mu_high"]]
    labels = ["0" if edge == 0 else power_label(edge).removeprefix("0") for edge in edges]
    if not style.wide:
        labels = [label if index % 2 == len(labels) % 2 else "" for index, label in enumerate(labels)]
    axes.set_xlim(0, len(rows))
    axes.set_xticks(range(len(edges)), labels)
