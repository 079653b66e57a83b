"""Which tokens are blocked as training goes on: how many, how probable, how uncertain (DPPO paper, figure 6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.report.plots._lines import DASHED, any_above_0, draw_line, middle_of_steps, positive, values_of
from mismatch_cli.report.plots._panels import Panel, Sheet, legend_below_height, power_label
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


def needs(data: ClippingPlotData) -> bool:
    return any(len(row["by_step"]) >= _FEWEST_STEPS and _has(row, "blocked") for row in data.rows)


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    rows = _chosen(data)
    shown = [panel for panel in _PANELS if any(_has(row, panel[1]) for row in rows)]
    columns = figure.style.pick(len(shown), 1)
    below = legend_below_height(len(rows) + 1, columns)
    panels = figure.panels(len(shown), height=(270, 190), columns=columns, below=below)
    looks = {row["name"]: look for row, look in zip(rows, _looks(figure.style), strict=False)}
    x_B = middle_of_steps(rows[0]["by_step"])
    kept_line: dict[str, Any] = {"color": figure.theme.ink, "linestyle": ":", "linewidth": 1.8}
    for axes, (name, blocked, kept) in zip(panels, shown, strict=True):
        for row in rows:
            estimates = positive(_estimate(step, blocked) for step in row["by_step"])
            band, line = looks[row["name"]]
            draw_line(axes, middle_of_steps(row["by_step"]), estimates, band=band, **line)
        if kept:
            draw_line(axes, x_B, [step[kept] for step in rows[0]["by_step"]], **kept_line)
        # A step with a handful of blocked tokens has a band that would flatten the lines.
        axes.set_ylim(0, 1 if kept == "mu_kept" else 1.25 * np.nanmax(axes.drawn_values()))
        axes.whole_steps()
        axes.headline(name)
    _scale_share(panels[0])
    lines = {name: line for name, (_, line) in looks.items()} | {"kept by the first": kept_line}
    figure.legend_below(lines, columns, beside=75, handlelength=2.6, columnspacing=2.5)


def _has(row: Mapping[str, Any], key: str) -> bool:
    return any_above_0(_estimate(step, key) for step in row["by_step"])


def _estimate(step: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """Of all signs; without advantages there is no such share."""
    found: Mapping[str, Any] | None = step[key]["all"] if key == "blocked" else step[key]
    return found


def _chosen(data: ClippingPlotData) -> list[Mapping[str, Any]]:
    """The compared algorithms first, then those that block other tokens than the ones before."""
    first = [algorithm.name for algorithm in data.compared]
    rows = sorted((row for row in data.rows if _has(row, "blocked")), key=lambda row: row["name"] not in first)
    overlap = data.result.get("overlap") or {"names": [], "jaccard": []}
    jaccard_of = {
        (name, other): estimate
        for name, estimates in zip(overlap["names"], overlap["jaccard"], strict=True)
        for other, estimate in zip(overlap["names"], estimates, strict=True)
    }
    chosen: list[Mapping[str, Any]] = []
    for row in rows:
        jaccard = values_of(jaccard_of.get((row["name"], before["name"])) for before in chosen)
        if row["name"] in first or not (jaccard > _ALIKE).any():
            chosen.append(row)
    return chosen[:_MOST]


def _looks(style: Style) -> list[tuple[float, dict[str, Any]]]:
    """Opacity of the band and look of each line: three solid ones with a band, then dashed."""
    colours, size = (style.theme.blue, style.theme.orange, style.theme.green), style.pick(4.5, 4)
    return [
        (0.17 * (marker in "os"), {"color": colour, "linestyle": line, "marker": marker, "markersize": size})
        for line, markers in (("-", "osD"), (DASHED, "v^P"))
        for colour, marker in zip(colours, markers, strict=True)
    ]


def _scale_share(axes: Panel) -> None:
    """Shares in percent; on a logarithmic axis where the algorithms are far apart."""
    values = axes.drawn_values()
    above_0 = values[values > 0]
    if far_apart := above_0.max() > 40 * above_0.min():
        axes.set_ylim(above_0.min() / 1.6, above_0.max() * 1.6)
        axes.logarithmic("y")
    axes.in_percent(power_label if far_apart else None)
