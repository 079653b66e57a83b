"""Which tokens are blocked as training goes on: how many, how probable, how uncertain (DPPO paper, figure 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.report.plots._layout import BOTTOM, LEFT, RIGHT, TOP, Box, place, short_names
from mismatch_cli.report.plots._panels import add_subject, logarithmic, plain_label, power_label, title
from mismatch_cli.report.plots._series import (
    any_above_0,
    draw_line,
    middle_of_steps,
    parts_of,
    positive,
    whole_steps,
)
from mismatch_cli.report.plots._style import CSS_PX, Style
from mismatch_cli.studies.clipping import ClippingPlotData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
_LINE = 18  # pixels of a line of the legend
_DASHED = (0, (4, 1.6))


def needs(data: ClippingPlotData) -> bool:
    return any(len(row["by_step"]) >= _FEWEST_STEPS and _has(row, "blocked") for row in data.rows)


def draw(figure: Figure, data: ClippingPlotData, style: Style) -> None:
    rows = _chosen(data)
    panels = [panel for panel in _PANELS if any(_has(row, panel[1]) for row in rows)]
    boxes, legend_lines = _boxes(len(panels), len(rows) + 1, style)
    axes = place(figure, style, boxes, BOTTOM + legend_lines * _LINE)
    for panel, (name, blocked, kept) in zip(axes, panels, strict=True):
        for row, look in zip(rows, _looks(style), strict=False):
            draw_line(
                panel,
                middle_of_steps(row["by_step"]),
                positive([_estimate(step, blocked) for step in row["by_step"]]),
                **look,
            )
        if kept:
            x_B, estimates = middle_of_steps(rows[0]["by_step"]), [step[kept] for step in rows[0]["by_step"]]
            draw_line(panel, x_B, estimates, style.theme.ink, linestyle=":", linewidth=1.8)
        _fit_vertical(panel, 1 if kept == "mu_kept" else None)
        whole_steps(panel)
        title(panel, name, style)
    _scale_share(axes[0])
    _draw_legend(figure, rows, len(panels) if style.wide else 1, style)
    add_subject(figure, style, data.subject)


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
        jaccard = parts_of([overlap["jaccard"][first][other] for first, other in pairs])[:, 0]
        if row["name"] in first or not (jaccard > _ALIKE).any():
            chosen.append(row)
    return chosen[:_MOST]


def _looks(style: Style) -> list[dict[str, Any]]:
    """One look a line: three colours, solid with a band for the first, then dashed."""
    theme, size = style.theme, 4.5 if style.wide else 4
    colours = (theme.blue, theme.orange, theme.green)
    return [
        {"colour": colour, "linestyle": line, "marker": marker, "markersize": size, "band": marker in "os"}
        for line, markers in (("-", "osD"), (_DASHED, "v^P"))
        for colour, marker in zip(colours, markers, strict=True)
    ]


def _boxes(count: int, entries: int, style: Style) -> tuple[list[Box], int]:
    """All panels in one row when wide; and how many lines the legend below them takes."""
    if not style.wide:
        height, width = 190, style.layout.width - LEFT - RIGHT
        return [Box(LEFT, TOP + index * (TOP + height + BOTTOM), width, height) for index in range(count)], entries
    cell = style.layout.width / count
    return [Box(LEFT + index * cell, TOP, cell - LEFT - RIGHT, 270) for index in range(count)], -(-entries // count)


def _fit_vertical(axes: Axes, top: float | None) -> None:
    """From 0 to above the lines: a step with a handful of blocked tokens has a band that would flatten them."""
    values = np.concatenate([line.get_ydata() for line in axes.lines])
    axes.set_ylim(0, top or 1.25 * np.nanmax(values))


def _scale_share(axes: Axes) -> None:
    """Shares in percent; on a logarithmic axis where the algorithms are far apart."""
    values = np.concatenate([line.get_ydata() for line in axes.lines])
    above_0 = values[values > 0]
    if far_apart := above_0.max() > 40 * above_0.min():
        axes.set_ylim(above_0.min() / 1.6, above_0.max() * 1.6)
        logarithmic(axes, "y")
    label = power_label if far_apart else plain_label
    axes.yaxis.set_major_formatter(lambda value, _position: label(100 * value))


def _draw_legend(figure: Figure, rows: Sequence[Mapping[str, Any]], columns: int, style: Style) -> None:
    """The names below the panels: they are too long to stand above one."""
    from matplotlib import rcParams
    from matplotlib.lines import Line2D

    width, height = figure.get_size_inches() / CSS_PX
    room = (width - LEFT) / columns - 75
    names = short_names([row["name"] for row in rows], room, rcParams["legend.fontsize"])
    handles = []
    for name, look in zip(names, _looks(style), strict=False):
        line = {key: value for key, value in look.items() if key not in ("colour", "band")}
        handles.append(Line2D([], [], color=look["colour"], label=name, **line))
    handles.append(Line2D([], [], color=style.theme.ink, linestyle=":", linewidth=1.8, label="kept by the first"))
    left = LEFT if style.wide else 8
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(left / width, 22 / height), ncols=columns,
        borderaxespad=0, borderpad=0.2, handlelength=2.6, columnspacing=2.5, labelspacing=0.35,
    )  # fmt: skip
