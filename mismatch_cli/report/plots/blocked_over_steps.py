"""Which tokens are blocked as training goes on: how many, how probable, how uncertain (DPPO paper, figure 6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mismatch_cli.report.plots._lines import (
    DASHED,
    any_above_0,
    draw_line,
    drawn_values,
    middle_of_steps,
    positive,
    values_of,
)
from mismatch_cli.report.plots._panels import (
    in_percent,
    legend_below,
    legend_below_height,
    logarithmic,
    panels,
    plain_label,
    power_label,
    title,
    whole_steps,
)
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from mismatch_cli.studies.clipping import ClippingPlotData

STUDY = "clipping"
SECTION = "What each algorithm throws away"
TITLE = "Blocked tokens over the steps"
CAPTION = (
    "For each step the share of blocked tokens, and over the blocked tokens the mean rollout probability μ and the "
    "mean entropy of π; dotted, the same over the tokens that the first algorithm keeps. Bands are 95 % intervals "
    "over prompts, where a step has ten or more; a line is interrupted where nothing was blocked. At most six "
    "algorithms are drawn: the compared ones, then those that block other tokens than the ones before (Jaccard index "
    "up to 0.65). DPPO paper, figure 6."
)

_PANELS = (  # title, over blocked tokens, over kept tokens
    ("Blocked tokens, %", "blocked", ""),
    ("Mean μ of blocked tokens", "mu_blocked", "mu_kept"),
    ("Mean entropy of blocked tokens, nats", "entropy_blocked", "entropy_kept"),
)
_MOST = 6
_ALIKE = 0.65  # algorithms whose Jaccard index is higher draw nearly the same line
_FEWEST_STEPS = 3
_KEPT: dict[str, Any] = {"linestyle": ":", "linewidth": 1.8}


def needs(data: ClippingPlotData) -> bool:
    return any(len(row["by_step"]) >= _FEWEST_STEPS and _has(row, "blocked") for row in data.rows)


def draw(figure: Figure, data: ClippingPlotData, style: Style) -> None:
    rows = _chosen(data)
    shown = [panel for panel in _PANELS if any(_has(row, panel[1]) for row in rows)]
    columns = len(shown) if style.wide else 1
    axes = panels(
        figure, style, len(shown), height=270 if style.wide else 190, columns=columns,
        below=legend_below_height(len(rows) + 1, columns),
    )  # fmt: skip
    looks = dict(zip((row["name"] for row in rows), _looks(style), strict=False))
    for panel, (name, blocked, kept) in zip(axes, shown, strict=True):
        for row in rows:
            estimates = positive([_estimate(step, blocked) for step in row["by_step"]])
            colour, band, line = looks[row["name"]]
            draw_line(panel, middle_of_steps(row["by_step"]), estimates, colour, band=band, **line)
        if kept:
            x_B, estimates = middle_of_steps(rows[0]["by_step"]), [step[kept] for step in rows[0]["by_step"]]
            draw_line(panel, x_B, estimates, style.theme.ink, **_KEPT)
        _fit_vertical(panel, 1 if kept == "mu_kept" else None)
        whole_steps(panel)
        title(panel, name, style)
    _scale_share(axes[0])
    lines = {name: {"color": colour, **line} for name, (colour, _, line) in looks.items()}
    lines["kept by the first"] = {"color": style.theme.ink, **_KEPT}
    legend_below(figure, style, lines, columns, beside=75, handlelength=2.6, columnspacing=2.5)


def _has(row: Mapping[str, Any], key: str) -> bool:
    return any_above_0([_estimate(step, key) for step in row["by_step"]])


def _estimate(step: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """Of all signs; without advantages there is no such share."""
    found: Mapping[str, Any] | None = step[key]["all"] if key == "blocked" else step[key]
    return found


def _chosen(data: ClippingPlotData) -> list[Mapping[str, Any]]:
    """The compared algorithms first, then those that block other tokens than the ones before."""
    first = [algorithm.name for algorithm in data.compared]
    rows = sorted((row for row in data.rows if _has(row, "blocked")), key=lambda row: row["name"] not in first)
    overlap = data.result.get("overlap") or {"names": [], "jaccard": []}
    place = {name: index for index, name in enumerate(overlap["names"])}
    chosen: list[Mapping[str, Any]] = []
    for row in rows:
        pairs = [
            (place[row["name"]], place[other["name"]]) for other in chosen if {row["name"], other["name"]} <= set(place)
        ]
        jaccard = values_of(overlap["jaccard"][row_place][other_place] for row_place, other_place in pairs)
        if row["name"] in first or not (jaccard > _ALIKE).any():
            chosen.append(row)
    return chosen[:_MOST]


def _looks(style: Style) -> list[tuple[str, float, dict[str, Any]]]:
    """Colour, opacity of the band and look of each line: three solid ones with a band, then dashed."""
    theme, size = style.theme, 4.5 if style.wide else 4
    colours = (theme.blue, theme.orange, theme.green)
    return [
        (colour, 0.17 * (marker in "os"), {"linestyle": line, "marker": marker, "markersize": size})
        for line, markers in (("-", "osD"), (DASHED, "v^P"))
        for colour, marker in zip(colours, markers, strict=True)
    ]


def _fit_vertical(axes: Axes, top: float | None) -> None:
    """From 0 to above the lines: a step with a handful of blocked tokens has a band that would flatten them."""
    values = drawn_values(axes)
    axes.set_ylim(0, top or 1.25 * np.nanmax(values))


def _scale_share(axes: Axes) -> None:
    """Shares in percent; on a logarithmic axis where the algorithms are far apart."""
    values = drawn_values(axes)
    above_0 = values[values > 0]
    if far_apart := above_0.max() > 40 * above_0.min():
        axes.set_ylim(above_0.min() / 1.6, above_0.max() * 1.6)
        logarithmic(axes, "y")
    in_percent(axes.yaxis, power_label if far_apart else plain_label)
