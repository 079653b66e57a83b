"""Blocked tokens over training: their share, probability and entropy (DPPO paper, figure 6)."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mismatch_cli.report.drawing.lines import (
    DASHED,
    any_above_0,
    draw_line,
    middle_of_steps,
    parts_of,
)
from mismatch_cli.report.drawing.masks import distinct_masks
from mismatch_cli.report.drawing.panels import Panel, Sheet, legend_below_height
from mismatch_cli.report.drawing.scales import stretch
from mismatch_cli.report.drawing.style import Style

if TYPE_CHECKING:
    from mismatch_cli.metrics.clipping.blocked_rows import AlgorithmRow, BlockedInSteps
    from mismatch_cli.metrics.estimate import Estimate
    from mismatch_cli.studies.clipping import ClippingPlotData

STUDY = "clipping"
SECTION = "What each algorithm blocks"
TITLE = "Blocked tokens over the steps"
DATA = "several steps, in which one of the algorithms blocks tokens"
CAPTION = (
    "By step: the share of blocked tokens, on an axis that is logarithmic except near 0; the "
    "mean rollout probability μ and the mean entropy of π over blocked tokens, with gaps where "
    "nothing is blocked; dotted, the same over the tokens that the first algorithm keeps. Bands "
    "are 95 % intervals over prompts, for at most three algorithms and for steps with at least "
    "ten prompts. At most six algorithms are drawn: the compared ones, then those that block "
    "different tokens (Jaccard index up to 0.65). DPPO paper, figure 6."
)


class _ByStep(NamedTuple):
    """What a panel shows by step."""

    title: str
    blocked: Callable[[BlockedInSteps], Estimate]
    kept: Callable[[BlockedInSteps], Estimate] | None = None
    highest: float | None = None  # of the axis


_SHARE = _ByStep("Blocked tokens, %", attrgetter("blocked.all"))
_QUANTITIES = (
    _SHARE,
    _ByStep("Mean μ of blocked tokens", attrgetter("mu_blocked"), attrgetter("mu_kept"), highest=1),
    _ByStep(
        "Mean entropy of blocked tokens, nats",
        attrgetter("entropy_blocked"),
        attrgetter("entropy_kept"),
    ),
)
_KEPT = "kept by the first"
_MOST = 6
_FAR_APART = 40  # times between shares: beyond, a linear axis hides the smaller ones
_FEWEST_STEPS = 3


def needs(data: ClippingPlotData) -> bool:
    rows = [row for row in data.result.algorithms if len(row.by_step) >= _FEWEST_STEPS]
    return any(_has(row, _SHARE) for row in rows)


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    blocking = [row for row in data.result.algorithms if _has(row, _SHARE)]
    masks = distinct_masks(data.result, blocking, _MOST)
    rows = [mask.row for mask in masks]
    shown = [each for each in _QUANTITIES if any(_has(row, each) for row in rows)]
    columns = figure.style.pick(len(shown), 1)
    below = legend_below_height(len(rows) + 1, columns)
    panels = figure.panels(len(shown), height=(270, 190), columns=columns, below=below)
    looks = list(zip(masks, _looks(figure.style), strict=False))
    x_B = middle_of_steps(rows[0].by_step)
    kept_line: dict[str, Any] = {"color": figure.theme.ink, "linestyle": ":", "linewidth": 1.8}
    for axes, quantity in zip(panels, shown, strict=True):
        bands = False
        for mask, (band, line) in looks:
            steps = mask.row.by_step
            estimates = list(map(quantity.blocked, steps))
            draw_line(axes, middle_of_steps(steps), estimates, band=band, gid=mask.label, **line)
            bands |= bool(np.isfinite(parts_of(estimates)[:, 1]).any())
        if quantity.kept:
            estimates = list(map(quantity.kept, rows[0].by_step))
            draw_line(axes, x_B, estimates, gid=_KEPT, **kept_line)
        # A step with a handful of blocked tokens has a band that would flatten the lines.
        axes.set_ylim(0, quantity.highest or 1.25 * np.nanmax(axes.drawn_values()))
        axes.whole_steps()
        few = "" if bands or quantity.kept else "few prompts: no bands"
        axes.headline(quantity.title, note=few)
    _scale_share(panels[0])
    lines = {mask.label: line for mask, (_, line) in looks} | {_KEPT: kept_line}
    figure.legend_below(lines, columns, beside=75, handlelength=2.6, columnspacing=2.5)


def _has(row: AlgorithmRow, quantity: _ByStep) -> bool:
    return any_above_0(map(quantity.blocked, row.by_step))


def _looks(style: Style) -> list[tuple[float, dict[str, Any]]]:
    """Opacity of the band and look of each line: three solid ones with a band, then dashed ones."""
    colours, size = (style.theme.blue, style.theme.orange, style.theme.green), style.pick(4.5, 4)
    return [
        (
            0.17 * (marker in "os"),
            {"color": colour, "linestyle": line, "marker": marker, "markersize": size},
        )
        for line, markers in (("-", "osD"), (DASHED, "v^P"))
        for colour, marker in zip(colours, markers, strict=True)
    ]


def _scale_share(axes: Panel) -> None:
    """Shares in percent, from 0; nearly logarithmic if the algorithms are far apart."""
    values = axes.drawn_values()
    above_0 = values[values > 0]
    axes.in_percent()
    if above_0.max() > _FAR_APART * above_0.min():
        stretch(axes, 0.5 * above_0.min(), (0, 1.6 * above_0.max()), percent=True)
