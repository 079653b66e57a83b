"""One look for each algorithm in every figure of a training run, and curves drawn in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import floor, log10
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mismatch_cli.report.plots._layout import BOTTOM, LEFT, RIGHT, TOP, Box, place, short_names
from mismatch_cli.report.plots._panels import add_subject, logarithmic, plain_label, power_label, title
from mismatch_cli.report.plots._style import CSS_PX, LIGHT, Style
from mismatch_cli.studies.curves import LEAST_SIGMA, SMOOTHED_FROM, Curve, envelope, smoothed, thinned
from mismatch_cli.studies.training import TrainingAnalysis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BANDS = (
    "Colours are algorithms. Of several seeds the line is the mean of those that reached the step, and the band "
    "goes from the lowest to the highest of two, or covers 95 % (± t · s.e.) with more. "
    f"Curves of more than {SMOOTHED_FROM} steps are smoothed by a Gaussian with σ = 1 % of their steps, at least "
    f"{LEAST_SIGMA}; the raw ones are faint behind."
)
AS_ABOVE = "Lines, bands and smoothing are those of the training curves."

_LINE = 18  # pixels of a line of the legend
_POINTS, _COLUMNS = 200, 120  # of a smoothed line, and of the raw one behind it
_MARKED_UP_TO = 40  # points of a line that are marked one by one
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.4)))
_BEYOND = 0.3  # a band may take as much of the lines' range above and below them
_NARROWEST = 3e-3  # of the value: what a vertical axis shows at least, so that its labels stay short
_NARROWEST_SHARE = 0.05  # the same for a reward or an accuracy: what is less is noise
_FEW = 4  # lines whose bands can be told apart; those of more are fainter


class Look(NamedTuple):
    """How a line is drawn."""

    colour: str
    dash: Any = "-"


class Panel(NamedTuple):
    """A titled panel, with the curves of one or more numbers in it, each by the name of its look."""

    title: str
    curves: Sequence[Mapping[str, Curve]]
    short: str = ""  # the title where there is little room
    log: bool = False
    within: tuple[float, float] = (-np.inf, np.inf)  # where values can be: bands are not shown beyond
    from_0: bool = False  # the axis begins at 0
    percent: bool = False


def palette(style: Style) -> tuple[str, ...]:
    """Six hues after Okabe and Ito (2008) with a contrast of at least 3 against the page."""
    theme = style.theme
    accents = ("#a1378b", "#8a6a00", "#2f8fb8") if theme.name == LIGHT.name else ("#e48fce", "#e3c64a", "#9ad8f5")
    return (theme.blue, theme.orange, theme.green, *accents)


def looks(names: Iterable[str], style: Style) -> dict[str, Look]:
    """A colour for each algorithm; every three of them the dashes change, so that eighteen stay apart."""
    colours = palette(style)
    return {
        name: Look(colours[place % len(colours)], _DASHES[place // 3 % len(_DASHES)])
        for place, name in enumerate(names)
    }


def draw_panels(
    figure: Figure,
    data: TrainingAnalysis,
    style: Style,
    panels: Sequence[Panel],
    look_of: Mapping[str, Look],
    boxes: Sequence[Box] | None = None,
) -> list[Axes]:
    """Panels over the same steps, with one legend below where there is more than one line to tell apart."""
    boxes = grid(len(panels), style) if boxes is None else boxes
    drawn = {name for panel in panels for curves in panel.curves for name in curves}
    names = [name for name in look_of if name in drawn]
    columns = _legend_columns(style, len(names))
    lines = -(-len(names) // columns) if len(names) > 1 else 0
    axes = place(figure, style, boxes, BOTTOM + lines * _LINE)
    for panel_axes, panel in zip(axes, panels, strict=True):
        for curves in panel.curves:
            for name, curve in curves.items():
                draw_curve(panel_axes, curve, look_of[name], log=panel.log, faint=len(names) > _FEW)
        note = _scale(panel_axes, panel)
        _whole_steps(panel_axes, style)
        title(panel_axes, panel.title if style.wide else panel.short or panel.title, style, note=note)
    _share_steps(axes)
    if lines:
        _draw_legend(figure, {name: look_of[name] for name in names}, columns, style)
    add_subject(figure, style, data.subject)
    return axes


def grid(count: int, style: Style) -> list[Box]:
    """Two panels beside each other when wide, or three where there are as many; one below the other when narrow."""
    columns = (3 if count == 3 else min(count, 2)) if style.wide else 1
    height = (230 if count > 3 else 270) if style.wide else 180
    cell = style.layout.width / columns
    return [
        Box(
            LEFT + index % columns * cell,
            TOP + index // columns * (TOP + height + BOTTOM),
            cell - LEFT - RIGHT,
            height,
        )
        for index in range(count)
    ]


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
    value_N = np.concatenate([line.get_ydata() for line in axes.lines])
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
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_ylim()
    largest = factor * max(abs(low), abs(high))
    exponent = 0 if 0.01 <= largest < 1e5 else floor(log10(largest))

    def label(value: float, _position: float = 0) -> str:
        return plain_label(0.0 if abs(value) < 1e-9 * (high - low) else float(f"{factor * value / 10**exponent:.5g}"))

    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(label)
    return f"× {power_label(10.0**exponent)}" if exponent else ""


def _whole_steps(axes: Axes, style: Style) -> None:
    from matplotlib.ticker import MaxNLocator

    few = MaxNLocator(nbins=8 if style.wide else 5, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    axes.xaxis.set_major_locator(few)
    axes.set_xlabel("step")


def _share_steps(axes: Sequence[Axes]) -> None:
    """The same steps in every panel, whatever was recorded when; one step alone stands in the middle."""
    limits = np.array([panel.dataLim.intervalx for panel in axes])
    low, high = limits[:, 0].min(), limits[:, 1].max()
    margin = 0.03 * (high - low) or 0.5
    for panel in axes:
        panel.set_xlim(low - margin, high + margin)


def _legend_columns(style: Style, entries: int) -> int:
    return min(entries, 4) if style.wide and entries else 1


def _draw_legend(figure: Figure, look_of: Mapping[str, Look], columns: int, style: Style) -> None:
    """The names below the panels: they are too long to stand above one."""
    from matplotlib import rcParams
    from matplotlib.lines import Line2D

    width, height = figure.get_size_inches() / CSS_PX
    room = (width - LEFT) / columns - 62
    names = short_names(list(look_of), room, rcParams["legend.fontsize"])
    handles = [
        Line2D([], [], color=look.colour, linestyle=look.dash, label=name)
        for name, look in zip(names, look_of.values(), strict=True)
    ]
    left = LEFT if style.wide else 8
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(left / width, 22 / height), ncols=columns,
        borderaxespad=0, borderpad=0.2, handlelength=2.4, columnspacing=1.8, labelspacing=0.35,
    )  # fmt: skip
