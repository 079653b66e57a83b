"""A look for each line, lines with their intervals, and the curves of training runs in panels over the same steps."""

from collections.abc import Iterable, Mapping, Sequence
from math import floor, log10
from typing import Any, NamedTuple

import numpy as np
from matplotlib.ticker import MaxNLocator

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.report.plots._panels import BOTTOM, Panel, Sheet, legend_below_height, plain_label, power_label
from mismatch_cli.report.plots._style import Style
from mismatch_cli.studies.training import LEAST_SIGMA, SMOOTHED_FROM, Curve, envelope, smoothed, thinned

Part = Mapping[str, Any] | None  # an estimate of a JSON: value, low, high

_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.4)))
DASHED = _DASHES[1]

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


class Look(NamedTuple):
    """How a line is drawn."""

    colour: str
    dash: Any = "-"


def looks(names: Iterable[str], style: Style) -> dict[str, Look]:
    """A colour for each name; every three of them the dashes change, so that eighteen stay apart."""
    colours = style.theme.accents
    return {
        name: Look(colours[place % len(colours)], _DASHES[place // 3 % len(_DASHES)])
        for place, name in enumerate(names)
    }


def parts_of(estimates: Iterable[Part]) -> np.ndarray:
    """Value, low and high of each estimate in a row; NaN where there is none."""
    rows = [[(estimate or {}).get(part) for part in ("value", "low", "high")] for estimate in estimates]
    return np.array(rows, dtype=np.float64).reshape(-1, 3)


def values_of(estimates: Iterable[Part]) -> np.ndarray:
    return parts_of(estimates)[:, 0]


def any_above_0(estimates: Iterable[Part]) -> bool:
    return bool((values_of(estimates) > 0).any())


def draw_line(
    axes: Panel, x_B: np.ndarray, estimates: Sequence[Part], color: str, *, band: float = 0.17, **line: Any
) -> None:
    """A line through the values, in a band of that opacity for the interval; what has no value leaves a gap."""
    value_B, low_B, high_B = parts_of(estimates).T
    if not np.isfinite(value_B).any():
        return
    if band and np.isfinite(high_B).any():
        axes.fill_between(x_B, low_B, high_B, color=color, alpha=band, linewidth=0)
    axes.plot(x_B, value_B, color=color, **line)


def draw_bars(axes: Panel, x_B: Sequence[float], means: Iterable[Estimate], colour: str, **line: Any) -> np.ndarray:
    """A line through means, each with a bar for its interval, if it has one; the ends of the bars, [B, 3]."""
    part_B3 = parts_of(map(vars, means))
    part_B3 = np.where(np.isnan(part_B3), part_B3[:, :1], part_B3)
    reach_2B = np.abs(part_B3[:, 1:] - part_B3[:, :1]).T
    axes.errorbar(x_B, part_B3[:, 0], yerr=reach_2B, color=colour, marker="o", **line)
    return part_B3


def draw_profile(figure: Sheet, points: Sequence[tuple[float, Estimate]], along: str) -> None:
    """Means with their bars along an axis, in typical gaps."""
    (axes,) = figure.panels(1, height=(240, 190))
    x_B, means = zip(*points, strict=True)
    part_B3 = draw_bars(axes, x_B, means, axes.theme.blue, markersize=4.5, elinewidth=1)
    axes.set_ylim(0, 1.15 * max(float(part_B3[:, 2].max()), 1e-6))
    axes.set_xlabel(along)
    axes.headline("Mean gap, in typical gaps of the token’s probability", "Mean gap, typical = 1")


def positive(estimates: Iterable[Part]) -> list[Part]:
    """For a logarithmic axis, which has no zero: the line ends there, and a band goes on to the lower edge."""
    rows: list[Part] = []
    for value, low, high in parts_of(estimates):
        has_band = value > 0 and np.isfinite(low) and np.isfinite(high)
        band = (max(low, 1e-4 * value), high) if has_band else (None, None)
        rows.append({"value": value if value > 0 else None, "low": band[0], "high": band[1]})
    return rows


def middle_of_steps(rows: Iterable[Mapping[str, Any]]) -> np.ndarray:
    """Where each row of `by_step` stands on the axis of steps."""
    return np.array([(row["first"] + row["last"]) / 2 for row in rows])


class Chart(NamedTuple):
    """A titled panel, with the curves of one or more numbers in it, each by the name of its look."""

    title: str
    curves: Sequence[Mapping[str, Curve]]
    short: str = ""  # the title where there is little room
    log: bool = False
    within: tuple[float, float] = (0, 1)  # where values can be: bands are not shown beyond
    from_0: bool = False  # the axis begins at 0
    percent: bool = False


def draw_charts(
    figure: Sheet,
    charts: Sequence[Chart],
    look_of: Mapping[str, Look],
    *,
    columns: int = 0,
    height: tuple[int, int] | None = None,
    between: int = BOTTOM,
) -> list[Panel]:
    """Those that have curves, over the same steps; one legend below where there is more than one line to tell apart.

    Two stand beside each other when wide, or three where there are as many, if no number of `columns` is given.
    """
    charts = [chart for chart in charts if any(chart.curves)]
    names = [name for name in look_of if any(name in curves for chart in charts for curves in chart.curves)]
    legend_columns = figure.style.pick(min(len(names), 4), 1) or 1
    panels = figure.panels(
        len(charts), columns=columns or (3 if len(charts) == 3 else 2), between=between,
        height=height or (230 if len(charts) > 3 else 270, 180),
        below=legend_below_height(len(names), legend_columns) if len(names) > 1 else 0,
    )  # fmt: skip
    for axes, chart in zip(panels, charts, strict=True):
        for curves in chart.curves:
            for name, curve in curves.items():
                _draw_curve(axes, curve, look_of[name], log=chart.log, faint=len(names) > _FEW)
        note = _scale(axes, chart)
        axes.whole_steps(figure.style.pick(8, 5))
        axes.headline(chart.title, chart.short, note)
    _share_steps(panels)
    if len(names) > 1:
        lines = {name: {"color": look_of[name].colour, "linestyle": look_of[name].dash} for name in names}
        figure.legend_below(lines, legend_columns)
    return panels


def _draw_curve(axes: Panel, curve: Curve, look: Look, *, log: bool = False, faint: bool = False) -> None:
    """A line with its band; a long one is smoothed, with the raw one faint behind it."""
    long = curve.is_long
    if long:
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
        markevery=_marked(value_N, long=long),
    )  # fmt: skip


def _marked(value_N: np.ndarray, *, long: bool) -> list[int]:
    """The points that get a mark: all where there are few, and those without a neighbour, which no line shows."""
    marked_N = np.isfinite(value_N)
    if long or marked_N.sum() > _MARKED_UP_TO:
        beside_N = np.pad(marked_N, 1)
        marked_N &= ~beside_N[:-2] & ~beside_N[2:]
    return [int(place) for place in np.flatnonzero(marked_N)]


def _scale(axes: Panel, chart: Chart) -> str:
    """Room for the lines; a band that reaches far beyond them would flatten them, and is cut. The unit, if any."""
    value_N = axes.drawn_values()
    value_N = value_N[np.isfinite(value_N)]
    if chart.log:
        axes.set_ylim(value_N[value_N > 0].min() / 1.5, value_N.max() * 1.5)
        axes.logarithmic("y")
        return ""
    bottom, top = axes.get_ylim()  # with the bands
    low, high = float(value_N.min()), float(value_N.max())
    least = _NARROWEST * max(abs(low), abs(high)) or 0.01
    if chart.within == (0, 1) and not chart.from_0:
        least = _NARROWEST_SHARE
    room = max(_BEYOND * (high - low), least)
    bottom, top = min(max(bottom, low - room), low - 0.1 * room), max(min(top, high + room), high + 0.1 * room)
    if chart.within[0] <= low and high <= chart.within[1]:
        margin = 0.03 * (high - low) or 0.1 * room
        bottom, top = max(bottom, chart.within[0] - margin), min(top, chart.within[1] + margin)
    if chart.from_0 and low >= 0:
        bottom, top = 0, max(top, 1.05 * high)
    axes.set_ylim(bottom, top)
    return label_in_units(axes, 100 if chart.percent else 1)


def label_in_units(axes: Panel, factor: float) -> str:
    """Few and short tick labels: small values in units of a power of ten, which is returned as a note."""
    low, high = axes.get_ylim()
    largest = factor * max(abs(low), abs(high))
    exponent = 0 if 0.01 <= largest < 1e5 else floor(log10(largest))

    def label(value: float, _position: float = 0) -> str:
        return plain_label(0.0 if abs(value) < 1e-9 * (high - low) else float(f"{factor * value / 10**exponent:.5g}"))

    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(label)
    return f"× {power_label(10.0**exponent)}" if exponent else ""


def _share_steps(panels: Sequence[Panel]) -> None:
    """The same steps in every panel, whatever was recorded when; one step alone stands in the middle."""
    limit_P2 = np.array([axes.dataLim.intervalx for axes in panels])
    low, high = limit_P2[:, 0].min(), limit_P2[:, 1].max()
    margin = 0.03 * (high - low) or 0.5
    for axes in panels:
        axes.set_xlim(low - margin, high + margin)
