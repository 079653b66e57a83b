"""Distances between engine, trainer and the trainer in float32, and the noise of each side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from mismatch_cli.base import numbers
from mismatch_cli.bisect.plots._rows import end_bar
from mismatch_cli.report.drawing.marks import names_beside
from mismatch_cli.report.drawing.panels import Panel, Sheet

if TYPE_CHECKING:
    from mismatch_cli.bisect.studies.bisection import BisectionAnalysis
    from mismatch_cli.bisect.studies.bisection_result import Triangle
    from mismatch_cli.metrics.estimate import Estimate

STUDY = "bisection"
SECTION = "Engine, trainer and float32"
PLACE = 2
TITLE = "Engine, trainer and float32"
DATA = "float32 readings of the same tokens"
CAPTION = (
    "Mean |difference| of the log-probabilities of the same tokens, in nats. The width of an "
    "edge of the triangle is its distance; the thinner of the two lower edges leads to the side "
    "that is closer to float32. Bars are the distances with 95 % intervals over prompts, and "
    "those of a side from itself: the engine decoding and in one prefill, and in batches and one "
    "response at a time; the trainer in two micro-batch shapes."
)
_Place = tuple[float, float]
_ENGINE, _TRAINER, _REFERENCE = (0.15, 0.76), (0.85, 0.76), (0.5, 0.16)
_ASIDE_OF = {  # of each edge, where its label is: points to the right and up, and its alignment
    (_ENGINE, _TRAINER): (0, 10, "center"),
    (_ENGINE, _REFERENCE): (-12, -6, "right"),
    (_TRAINER, _REFERENCE): (12, -6, "left"),
}
_WIDEST = 9.0  # points of an edge
_ROW = 31  # pixels of a bar
_HEIGHT = 210  # pixels at least
_ASIDE = 16  # pixels left of each panel


def needs(data: BisectionAnalysis) -> bool:
    distances = data.triangle
    has_several = len(distances.between | distances.within) > 1
    return distances.as_recorded.value is not None and has_several


def draw(figure: Sheet, data: BisectionAnalysis) -> None:
    distances = data.triangle.between | data.triangle.within
    names, beside = names_beside(list(distances), figure.style)
    high = max(_HEIGHT, _ROW * len(distances))
    triangle, bars = figure.panels(2, height=(high, high), left=_ASIDE)
    _draw_corners(triangle, data.triangle)
    bars.indent(beside)
    bars.name_rows(names)
    _draw_bars(bars, data.triangle)
    bars.headline("Mean |difference|, nats", is_axis=False)


def alternative(data: BisectionAnalysis) -> str:
    """Each distance with its interval."""
    distances = [
        f"{name} {numbers.plus_minus(distance.value, distance.low, distance.high)}"
        for name, distance in (data.triangle.between | data.triangle.within).items()
    ]
    return (
        "A triangle with engine, trainer and trainer in float32 at its corners, and bars of the "
        f"same distances. Horizontal: mean |difference|, nats: {'; '.join(distances)}."
    )


def _draw_corners(axes: Panel, distances: Triangle) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    edges = [(distances.as_recorded, _ENGINE, _TRAINER)]
    if distances.trainer_reference is not None:
        edges.append((distances.trainer_reference, _TRAINER, _REFERENCE))
        if distances.rollout_reference is not None:
            edges.append((distances.rollout_reference, _ENGINE, _REFERENCE))
    widest = max(distance.value or 0.0 for distance, *_ in edges) or 1.0
    for distance, start, end in edges:
        width = max(0.8, _WIDEST * (distance.value or 0.0) / widest)
        _draw_edge(axes, distance.value, start, end, width)
    _draw_corner(axes, _ENGINE, "engine", axes.theme.orange, distances.rollout_noise)
    _draw_corner(axes, _TRAINER, "trainer", axes.theme.blue, distances.trainer_noise)
    if len(edges) > 1:
        _draw_corner(axes, _REFERENCE, "trainer in float32", axes.theme.green, None)


def _draw_edge(axes: Panel, value: float | None, start: _Place, end: _Place, width: float) -> None:
    """A line as wide as its distance, labelled with it on the outside."""
    ends = np.array((start, end))
    look: dict[str, Any] = {"color": axes.theme.purple, "alpha": 0.4, "zorder": 1}
    axes.plot(*ends.T, linewidth=width, solid_capstyle="butt", **look)
    x, y, align = _ASIDE_OF[start, end]
    axes.annotate_beside(numbers.number(value), tuple(ends.mean(0)), (x, y), ha=align)


def _draw_corner(
    axes: Panel, place: _Place, name: str, colour: str, noise: Estimate | None
) -> None:
    """Draw a corner as a dot; its label (name, noise) goes above it, for the lowest corner below."""
    axes.plot(*place, "o", color=colour, markersize=11, zorder=2)
    height = 11
    if place == _REFERENCE:
        height = -22
    elif noise is not None:
        height = 25  # above the noise
    axes.annotate_beside(name, place, (0, height), ha="center", fontweight="bold")
    if noise is not None:
        label = f"noise {numbers.number(noise.value, 2)}"
        axes.annotate_beside(label, place, (0, 11), ha="center", color=axes.theme.muted)


def _draw_bars(axes: Panel, triangle: Triangle) -> None:
    distances, theme = triangle.between | triangle.within, axes.theme
    for row, (name, distance) in enumerate(distances.items()):
        value = distance.value or 0.0
        colour = theme.gold if name in triangle.within else theme.purple
        axes.barh(row, value, 0.6, color=colour, alpha=0.85, linewidth=0, zorder=2)
        end_bar(axes, row, value, (distance.low, distance.high), numbers.number(distance.value))
    ends = [0.0]
    for distance in distances.values():
        ends += [distance.value or 0.0, distance.high or 0.0]
    axes.set_xlim(0, max(ends) * axes.style.pick(1.3, 1.8) or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=axes.style.pick(6, 3), steps=[1, 2, 5, 10]))
    axes.set_xlabel("nats")
