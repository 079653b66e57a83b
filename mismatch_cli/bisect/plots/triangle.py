"""Distances between engine, trainer and the trainer in float32, and the noise of each side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.ticker import MaxNLocator

from mismatch_cli.base import numbers
from mismatch_cli.report.drawing.lines import parts_of
from mismatch_cli.report.drawing.panels import BOTTOM, RIGHT, TOP, Box, Panel, Sheet, width_of

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
_WIDEST = 9.0  # points of an edge
_ROW = 31  # pixels of a bar
_ASIDE = 18  # pixels for half of the last tick label
_HEIGHT = 210  # pixels of the triangle


class _Distance(NamedTuple):
    """A bar: between two programs, or two precisions, or within one side."""

    name: str
    estimate: Estimate
    is_within: bool


def needs(data: BisectionAnalysis) -> bool:
    return data.triangle.as_recorded.value is not None and len(_distances(data.triangle)) > 1


def _distances(found: Triangle) -> list[_Distance]:
    """The distances that were measured."""
    distances = (
        ("engine – trainer, as recorded", found.as_recorded, False),
        ("engine – float32", found.rollout_reference, False),
        ("trainer – float32", found.trainer_reference, False),
        ("engine: decode – prefill", found.decode_prefill, True),
        ("engine: batches – single", found.rollout_noise, True),
        ("trainer: micro-batches", found.trainer_noise, True),
    )
    return [_Distance(name, each, within) for name, each, within in distances if each is not None]


def draw(figure: Sheet, data: BisectionAnalysis) -> None:
    distances, style = _distances(data.triangle), figure.style
    left = max(width_of(distance.name, style.small) for distance in distances) + 14
    beside = style.pick(0.42 * style.width, 0)  # where the bars with their names begin
    room = style.pick(beside - figure.flush, style.width - 2 * figure.flush)
    height = _ROW * len(distances)
    corners = Box(figure.flush, style.pick(8, TOP), room, max(_HEIGHT, style.pick(height, 0)))
    top = style.pick(TOP, corners.top + corners.height + TOP + 10)
    within = Box(beside + left, top, style.width - beside - left - RIGHT - _ASIDE, height)
    triangle, bars = figure.place([corners, within], style.pick(BOTTOM - 22, BOTTOM))
    _draw_corners(triangle, data.triangle)
    _draw_bars(bars, distances)
    bars.flush = (max(beside, figure.flush) - within.left) / within.width
    bars.headline("Mean |difference|, nats", is_axis=False)


def alternative(data: BisectionAnalysis) -> str:
    """Each distance with its interval."""
    distances = [f"{each.name} {_plus_minus(each.estimate)}" for each in _distances(data.triangle)]
    return (
        "A triangle with engine, trainer and trainer in float32 at its corners, and bars of the "
        f"same distances. Horizontal: mean |difference|, nats: {'; '.join(distances)}."
    )


def _plus_minus(estimate: Estimate) -> str:
    return numbers.plus_minus(estimate.value, estimate.low, estimate.high)


def _draw_corners(axes: Panel, found: Triangle) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    edges = [(found.as_recorded, _ENGINE, _TRAINER)]
    if found.trainer_reference is not None:
        edges.append((found.trainer_reference, _TRAINER, _REFERENCE))
        if found.rollout_reference is not None:
            edges.append((found.rollout_reference, _ENGINE, _REFERENCE))
    widest = max(distance.value or 0.0 for distance, *_ in edges) or 1.0
    for distance, start, end in edges:
        value = distance.value or 0.0
        _draw_edge(axes, value, start, end, max(0.8, _WIDEST * value / widest))
    _draw_corner(axes, _ENGINE, "engine", axes.theme.orange, found.rollout_noise)
    _draw_corner(axes, _TRAINER, "trainer", axes.theme.blue, found.trainer_noise)
    if len(edges) > 1:
        _draw_corner(axes, _REFERENCE, "trainer in float32", axes.theme.green, None)


def _draw_edge(axes: Panel, value: float, start: _Place, end: _Place, width: float) -> None:
    """A line as wide as its distance, labelled with it on the outside."""
    x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    look: dict[str, Any] = {"color": axes.theme.purple, "alpha": 0.4, "zorder": 1}
    axes.plot(
        (start[0], end[0]), (start[1], end[1]), linewidth=width, solid_capstyle="butt", **look
    )
    aside = {-1: (-12, -6, "right"), 0: (0, 10, "center"), 1: (12, -6, "left")}[
        int(np.sign(round(x - 0.5, 6)))
    ]
    axes.annotate(
        numbers.number(value),
        (x, y),
        xytext=aside[:2],
        textcoords="offset points",
        ha=aside[2],
        color=axes.theme.ink,
    )


def _draw_corner(
    axes: Panel, place: _Place, name: str, colour: str, noise: Estimate | None
) -> None:
    """A dot with its name and its noise, above it, or below it for the lowest dot."""
    axes.plot(*place, "o", color=colour, markersize=11, zorder=2)
    below = place == _REFERENCE
    offset: dict[str, Any] = {"textcoords": "offset points", "ha": "center"}
    axes.annotate(
        name, place, xytext=(0, -22 if below else 25 if noise else 11), fontweight="bold", **offset
    )
    if noise is not None:
        words = f"noise {numbers.number(noise.value, 2)}"
        axes.annotate(
            words,
            place,
            xytext=(0, 11),
            fontsize=axes.style.small,
            color=axes.theme.muted,
            **offset,
        )


def _draw_bars(axes: Panel, distances: Sequence[_Distance]) -> None:
    part_B3, theme, small = (
        parts_of(each.estimate for each in distances),
        axes.theme,
        axes.style.small,
    )
    colours = [theme.gold if each.is_within else theme.purple for each in distances]
    rows = np.arange(len(distances))
    axes.barh(
        rows, np.nan_to_num(part_B3[:, 0]), 0.6, color=colours, alpha=0.85, linewidth=0, zorder=2
    )
    reach_B = np.nanmax(part_B3[:, [0, 2]], axis=1)
    for row, (value, low, high) in enumerate(part_B3):
        if np.isfinite(high):
            axes.hlines(row, low, high, color=theme.ink, linewidth=1.1, zorder=3)
        axes.annotate(
            numbers.number(value),
            (max(value, reach_B[row]), row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center_baseline",
            fontsize=small,
            color=theme.ink,
        )
    axes.set_yticks(rows, [each.name for each in distances], fontsize=small)
    axes.set_ylim(len(distances) - 0.4, -0.6)
    axes.set_xlim(0, float(np.nanmax(reach_B)) * axes.style.pick(1.2, 1.4) or 1.0)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=axes.style.pick(7, 3)))
    axes.set_xlabel("nats")
