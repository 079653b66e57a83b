"""Blocked tokens over training: their share, probability and entropy (DPPO paper, figure 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mismatch_cli.report.drawing.marks import (
    DASHED,
    any_above_0,
    draw_line,
    middle_of_steps,
)
from mismatch_cli.report.drawing.panels import Panel, Sheet, legend_below_height
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


class _StepQuantity(NamedTuple):
    """What a panel shows by step: fields of `BlockedInSteps` about blocked tokens, and about those
    that the first algorithm keeps, if it shows these.
    """

    title: str
    blocked_field: str
    kept_field: str = ""

    def over_blocked(self, rows: Sequence[BlockedInSteps]) -> list[Estimate]:
        """The quantity over the blocked tokens of each row."""
        return list(map(attrgetter(self.blocked_field), rows))


_SHARE = _StepQuantity("Blocked tokens, %", "blocked.all")
_MU = _StepQuantity("Mean μ of blocked tokens", "mu_blocked", "mu_kept")
_ENTROPY = _StepQuantity("Mean entropy of blocked tokens, nats", "entropy_blocked", "entropy_kept")
_KEPT = "kept by the first"
_MOST, _BANDS = 6, 3  # algorithms, and those with a band
_FAR_APART = 40  # times between shares: beyond, a linear axis hides the smaller ones
_FEWEST_STEPS = 3


def needs(data: ClippingPlotData) -> bool:
    rows = data.result.algorithms
    return any(len(row.by_step) >= _FEWEST_STEPS and _has(row, _SHARE) for row in rows)


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    blocking = [row for row in data.result.algorithms if _has(row, _SHARE)]
    masks = data.result.distinct_masks(blocking, _MOST)
    row_of = {mask.label: mask.row for mask in masks}
    look_of = dict(zip(row_of, _looks(figure.style), strict=False))
    look_of[_KEPT] = {"color": figure.theme.ink, "linestyle": ":", "linewidth": 1.8}
    quantities = []
    for quantity in (_SHARE, _MU, _ENTROPY):
        if any(_has(row, quantity) for row in row_of.values()):
            quantities.append(quantity)
    columns = figure.style.pick(len(quantities), 1)
    below = legend_below_height(len(look_of), columns)
    panels = figure.panels(len(quantities), height=(270, 190), columns=columns, below=below)
    for axes, quantity in zip(panels, quantities, strict=True):
        _draw_quantity(axes, quantity, row_of, look_of)
        _scale(axes, quantity)
    figure.legend_below(look_of, columns)


def _has(row: AlgorithmRow, quantity: _StepQuantity) -> bool:
    return any_above_0(quantity.over_blocked(row.by_step))


def _looks(style: Style) -> list[dict[str, Any]]:
    """The look of each line: three solid ones, then three dashed ones."""
    colours = (style.theme.blue, style.theme.orange, style.theme.green)
    size = style.pick(4.5, 4)
    looks = []
    for dash, markers in (("-", "osD"), (DASHED, "v^P")):
        for colour, marker in zip(colours, markers, strict=True):
            look = {"color": colour, "linestyle": dash, "marker": marker, "markersize": size}
            looks.append(look)
    return looks


def _draw_quantity(
    axes: Panel,
    quantity: _StepQuantity,
    row_of: Mapping[str, AlgorithmRow],
    look_of: Mapping[str, dict[str, Any]],
) -> None:
    """A line per algorithm, the first ones with bands; and one for the tokens that the first keeps."""
    for number, (name, row) in enumerate(row_of.items()):
        look = look_of[name] | {"band": 0.17 if number < _BANDS else 0.0, "label": name}
        draw_line(axes, middle_of_steps(row.by_step), quantity.over_blocked(row.by_step), **look)
    if quantity.kept_field:
        steps = next(iter(row_of.values())).by_step
        over_kept = list(map(attrgetter(quantity.kept_field), steps))
        draw_line(axes, middle_of_steps(steps), over_kept, label=_KEPT, **look_of[_KEPT])


def _scale(axes: Panel, quantity: _StepQuantity) -> None:
    """From 0; shares in percent, and nearly logarithmic if the algorithms are far apart."""
    values = axes.drawn_values()
    # A step with a handful of blocked tokens has a band that would flatten the lines.
    axes.set_ylim(0, 1 if quantity is _MU else 1.25 * np.nanmax(values))
    axes.whole_steps()
    axes.headline(quantity.title)
    if quantity is not _SHARE:
        return
    axes.in_percent()
    above_0 = values[values > 0]
    if above_0.max() > _FAR_APART * above_0.min():
        axes.stretch(0.5 * above_0.min(), (0, 1.6 * above_0.max()))
