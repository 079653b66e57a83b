"""The curves of training runs in panels over the same steps, a line for each algorithm."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import MaxNLocator

from mismatch_cli.report.plots._lines import Look, looks
from mismatch_cli.report.plots._panels import Panel, Sheet, legend_below_height, plain_label
from mismatch_cli.report.plots._style import Style
from mismatch_cli.studies.training import SMOOTHED_FROM, Curve, envelope, smoothed, thinned

BANDS = (
    "Colours are algorithms; a dash-dotted line is the mask of its colour, measured from π′ (the trainer recomputed at "
    "the weights that sampled) in place of μ. Of several seeds the line is the mean, and the band goes from the lowest "
    f"to the highest. Curves of more than {SMOOTHED_FROM} steps are smoothed by a Gaussian, the raw ones faint behind."
)
AS_ABOVE = "Lines and bands are those of the training curves."

_POINTS, _COLUMNS = 200, 120  # of a smoothed line, and of the raw one behind it
_MARKED_UP_TO = 40  # points of a line that are marked one by one
_MARKED_APART = 12  # evaluations: of more the diamonds are small
_NARROWEST = 0.01  # of the value: what a vertical axis shows at least
_MARGIN = 0.05  # of the values, above and below them
_MOST_IN_FULL = 1e5  # beyond, a tick is labelled with an exponent
_FEW = 4  # lines whose bands can be told apart; those of more are fainter
_ASIDE = 0.018  # of the steps, between the marks of two algorithms
_TWIN = (0, (5, 1.5, 1.2, 1.5))  # dashes that no other line has


class Chart(NamedTuple):
    """A titled panel, with the curves of one or more numbers in it, each by the name of its look."""

    title: str
    curves: Sequence[Mapping[str, Curve]]
    points: Mapping[str, Curve] = {}  # marks of their own, without a line
    note: str = ""
    log: bool = False
    from_0: bool = False  # the axis begins at 0
    percent: bool = False
    least: float = 0.0  # what the axis shows at least: less is noise


def draw_charts(figure: Sheet, charts: Iterable[Chart], names: Iterable[str]) -> None:
    """Those that have curves, over the same steps; one legend below where there is more than one line to tell apart."""
    charts = [chart for chart in charts if any(chart.curves)]
    look_of = _looks(names, figure.style)
    shown = [name for name in look_of if any(name in curves for chart in charts for curves in chart.curves)]
    legend_columns = figure.style.pick(min(len(shown), 4), 1) or 1
    panels = figure.panels(
        len(charts), columns=2 if len(charts) in (2, 4) else 3, height=(210, 170),
        below=legend_below_height(len(shown), legend_columns) if len(shown) > 1 else 0,
    )  # fmt: skip
    for axes, chart in zip(panels, charts, strict=True):
        for curves in chart.curves:
            for name, curve in curves.items():
                _draw_curve(axes, curve, look_of[name], log=chart.log, faint=len(shown) > _FEW)
        for place, (name, curve) in enumerate(chart.points.items()):
            aside = _ASIDE * (place - (len(chart.points) - 1) / 2) * (len(chart.points) <= _FEW)
            _draw_points(axes, curve, look_of[name].colour, aside)
        _scale(axes, chart)
        axes.whole_steps(figure.style.pick(6, 5))
        axes.headline(chart.title, note=chart.note)
    _share_steps(panels)
    if len(shown) > 1:
        lines = {name: {"color": look_of[name].colour, "linestyle": look_of[name].dash} for name in shown}
        figure.legend_below(lines, legend_columns)


def _looks(names: Iterable[str], style: Style) -> dict[str, Look]:
    """Those of the names; a mask that measures from the recomputed policy has the colour of its twin that does not."""
    names = list(names)
    twin_of = {f"{head}-recompute{colon}{rest}": f"{head}{colon}{rest}" for head, colon, rest in map(_parted, names)}
    own = looks([name for name in names if name not in twin_of], style)
    return {name: own.get(name) or Look(own[twin_of[name]].colour, _TWIN) for name in names}


def _parted(name: str) -> tuple[str, str, str]:
    """Parameters follow the name of an algorithm after a colon."""
    return name.partition(":")


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


def _draw_points(axes: Panel, curve: Curve, colour: str, aside: float) -> None:
    """Diamonds, each with a bar from the lowest to the highest seed; `aside`: of the steps, so that none is hidden."""
    step_N = curve.step_N + aside * max(np.ptp(curve.step_N), np.ptp(axes.dataLim.intervalx))
    many = len(axes.containers) > _FEW or len(curve.step_N) > _MARKED_APART
    bar_2N = np.nan_to_num(np.abs(np.array([curve.low_N, curve.high_N]) - curve.value_N))
    axes.errorbar(
        step_N, curve.value_N, yerr=bar_2N, color=colour, linestyle="none", marker="D",
        markersize=3.5 if many else 5.5, markeredgecolor=axes.theme.page, elinewidth=1, zorder=3,
    )  # fmt: skip


def _marked(value_N: np.ndarray, *, long: bool) -> list[int]:
    """The points that get a mark: all where there are few, and those without a neighbour, which no line shows."""
    marked_N = np.isfinite(value_N)
    if long or marked_N.sum() > _MARKED_UP_TO:
        beside_N = np.pad(marked_N, 1)
        marked_N &= ~beside_N[:-2] & ~beside_N[2:]
    return [int(place) for place in np.flatnonzero(marked_N)]


def _scale(axes: Panel, chart: Chart) -> None:
    """Room for lines and bands; 0 is marked where it lies between them."""
    if chart.log:
        value_N = axes.drawn_values()
        value_N = value_N[np.isfinite(value_N) & (value_N > 0)]
        axes.set_ylim(value_N.min() / 1.5, value_N.max() * 1.5)
        axes.logarithmic("y")
        return
    low, high = map(float, axes.dataLim.intervaly)
    short = (max(chart.least, _NARROWEST * max(abs(low), abs(high))) or _NARROWEST) - (high - low)
    if short > 0:
        low, high = low - short / 2, high + short / 2
    margin = _MARGIN * (high - low)
    axes.set_ylim(0 if chart.from_0 and low >= 0 else low - margin, high + margin)
    if low < 0 < high:
        axes.axhline(0, color=axes.theme.muted, linewidth=0.8, zorder=1)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(_labels(high - low, 100 if chart.percent else 1))


def _labels(span: float, factor: float) -> Callable[..., str]:
    """Short labels of ticks in full, as far as they fit beside a panel: `0.0005`, `2e−6`, `1.5e6`."""

    def label(value: float, _position: float = 0) -> str:
        shown = 0.0 if abs(value) < 1e-9 * span else factor * value
        if abs(shown) >= _MOST_IN_FULL:
            return f"{shown:.3g}".replace("e+0", "e").replace("-", "−")
        return plain_label(float(f"{shown:.5g}"))

    return label


def _share_steps(panels: Sequence[Panel]) -> None:
    """The same steps in every panel, whatever was recorded when; one step alone stands in the middle."""
    limit_P2 = np.array([axes.dataLim.intervalx for axes in panels])
    low, high = limit_P2[:, 0].min(), limit_P2[:, 1].max()
    margin = 0.03 * (high - low) or 0.5
    for axes in panels:
        axes.set_xlim(low - margin, high + margin)
