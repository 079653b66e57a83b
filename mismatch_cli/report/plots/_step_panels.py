"""The curves of training runs, in panels over the same steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log10
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mismatch_cli.report.plots._lines import Look, drawn_values
from mismatch_cli.report.plots._panels import (
    BOTTOM,
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
from mismatch_cli.studies.curves import LEAST_SIGMA, SMOOTHED_FROM, envelope, smoothed, thinned

if TYPE_CHECKING:
    from mismatch_cli.studies.curves import Curve

BANDS = (
    "Colours are algorithms. Of several seeds the line is the mean of those that reached the step, and the band "
    "goes from the lowest to the highest of two, or covers 95 % (± t · s.e.) with more. "
    f"Curves of more than {SMOOTHED_FROM} steps are smoothed by a Gaussian with σ = 1 % of their steps, at least "
    f"{LEAST_SIGMA}; the raw ones are faint behind."
)
AS_ABOVE = "Lines, bands and smoothing are those of the training curves."

_POINTS, _COLUMNS = 200, 120  # of a smoothed line, and of the raw one behind it
_MARKED_UP_TO = 40  # points of a line that are marked one by one
_BEYOND = 0.3  # a band may take as much of the lines' range above and below them
_NARROWEST = 3e-3  # of the value: what a vertical axis shows at least, so that its labels stay short
_NARROWEST_SHARE = 0.05  # the same for a reward or an accuracy: what is less is noise
_FEW = 4  # lines whose bands can be told apart; those of more are fainter


class Panel(NamedTuple):
    """A titled panel, with the curves of one or more numbers in it, each by the name of its look."""

    title: str
    curves: Sequence[Mapping[str, Curve]]
    short: str = ""  # the title where there is little room
    log: bool = False
    within: tuple[float, float] = (-np.inf, np.inf)  # where values can be: bands are not shown beyond
    from_0: bool = False  # the axis begins at 0
    percent: bool = False


def draw_panels(
    figure: Figure,
    style: Style,
    drawn: Sequence[Panel],
    look_of: Mapping[str, Look],
    *,
    columns: int = 0,
    height: int = 0,
    between: int = BOTTOM,
) -> list[Axes]:
    """Panels over the same steps, with one legend below where there is more than one line to tell apart.

    Two stand beside each other when wide, or three where there are as many, if no number of `columns` is given.
    """
    found = {name for panel in drawn for curves in panel.curves for name in curves}
    names = [name for name in look_of if name in found]
    legend_columns = min(len(names), 4) if style.wide and names else 1
    axes = panels(
        figure, style, len(drawn), columns=columns or (3 if len(drawn) == 3 else 2), between=between,
        height=height or ((230 if len(drawn) > 3 else 270) if style.wide else 180),
        below=legend_below_height(len(names), legend_columns) if len(names) > 1 else 0,
    )  # fmt: skip
    for panel_axes, panel in zip(axes, drawn, strict=True):
        for curves in panel.curves:
            for name, curve in curves.items():
                draw_curve(panel_axes, curve, look_of[name], log=panel.log, faint=len(names) > _FEW)
        note = _scale(panel_axes, panel)
        whole_steps(panel_axes, 8 if style.wide else 5)
        title(panel_axes, panel.title if style.wide else panel.short or panel.title, style, note=note)
    _share_steps(axes)
    if len(names) > 1:
        lines = {name: {"color": look_of[name].colour, "linestyle": look_of[name].dash} for name in names}
        legend_below(figure, style, lines, legend_columns)
    return axes


def draw_curve(axes: Axes, curve: Curve, look: Look, *, log: bool = False, faint: bool = False) -> None:
    """A line with its band; a long one is smoothed, with the raw one faint behind it."""
    raw = curve
    if curve.is_long:
        axes.plot(
            *envelope(curve, _COLUMNS), color=look.colour, alpha=0.14 if faint else 0.22, linewidth=0.8, zorder=1.5
        )
        curve = thinned(smoothed(curve), _POINTS)
    if np.isfinite(curve.high_N).any():
        low_N = np.where(curve.low_N > 0, curve.low_N, 1e-3 * curve.value_N) if log else curve.low_N
        axes.fill_between(
            curve.step_N, low_N, curve.high_N, color=look.colour, alpha=0.06 if faint else 0.15, linewidth=0
        )
    value_N = np.where(curve.value_N > 0, curve.value_N, np.nan) if log else curve.value_N
    axes.plot(
        curve.step_N, value_N, color=look.colour, linestyle=look.dash, marker="o", markersize=3.5,
        markevery=_marked(value_N, long=raw.is_long),
    )  # fmt: skip


def _marked(value_N: np.ndarray, *, long: bool) -> list[int]:
    """The points that get a mark: all where there are few, and those without a neighbour, which no line shows."""
    finite_N = np.isfinite(value_N)
    if finite_N.sum() <= _MARKED_UP_TO and not long:
        return [int(place) for place in np.flatnonzero(finite_N)]
    beside_N = np.pad(finite_N, 1)
    return [int(place) for place in np.flatnonzero(finite_N & ~beside_N[:-2] & ~beside_N[2:])]


def _scale(axes: Axes, panel: Panel) -> str:
    """Room for the lines; a band that reaches far beyond them would flatten them, and is cut. The unit, if any."""
    value_N = drawn_values(axes)
    value_N = value_N[np.isfinite(value_N)]
    if panel.log:
        axes.set_ylim(value_N[value_N > 0].min() / 1.5, value_N.max() * 1.5)
        logarithmic(axes, "y")
        return ""
    bottom, top = axes.get_ylim()  # with the bands
    low, high = float(value_N.min()), float(value_N.max())
    least = _NARROWEST * max(abs(low), abs(high)) or 0.01
    if panel.within == (0, 1) and not panel.from_0:
        least = _NARROWEST_SHARE
    room = max(_BEYOND * (high - low), least)
    bottom, top = min(max(bottom, low - room), low - 0.1 * room), max(min(top, high + room), high + 0.1 * room)
    if panel.within[0] <= low and high <= panel.within[1]:
        margin = 0.03 * (high - low) or 0.1 * room
        bottom, top = max(bottom, panel.within[0] - margin), min(top, panel.within[1] + margin)
    if panel.from_0 and low >= 0:
        bottom, top = 0, max(top, 1.05 * high)
    axes.set_ylim(bottom, top)
    return _label_in_units(axes, 100 if panel.percent else 1)


def _label_in_units(axes: Axes, factor: float) -> str:
    """Few and short tick labels: small values in units of a power of ten, which is returned as a note."""
    low, high = axes.get_ylim()
    largest = factor * max(abs(low), abs(high))
    exponent = 0 if 0.01 <= largest < 1e5 else floor(log10(largest))

    def label(value: float, _position: float = 0) -> str:
        return plain_label(0.0 if abs(value) < 1e-9 * (high - low) else float(f"{factor * value / 10**exponent:.5g}"))

    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(label)
    return f"× {power_label(10.0**exponent)}" if exponent else ""


def _share_steps(axes: Sequence[Axes]) -> None:
    """The same steps in every panel, whatever was recorded when; one step alone stands in the middle."""
    limits = np.array([each.dataLim.intervalx for each in axes])
    low, high = limits[:, 0].min(), limits[:, 1].max()
    margin = 0.03 * (high - low) or 0.5
    for each in axes:
        each.set_xlim(low - margin, high + margin)
