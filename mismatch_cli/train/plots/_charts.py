"""Curves of training runs in panels over the same steps, a line per algorithm."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import repeat
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from mismatch_cli.report.drawing.marks import DASHED, DASHES, LineStyle, looks
from mismatch_cli.report.drawing.panels import (
    LEGEND,
    RIGHT,
    Panel,
    Sheet,
    legend_below_height,
    short_names,
)
from mismatch_cli.report.drawing.style import Style
from mismatch_cli.train.studies.paper_runs import PaperValue
from mismatch_cli.train.studies.run_settings import SEPARATOR
from mismatch_cli.train.studies.training import SMOOTHED_FROM, Curve, envelope, smoothed, thinned

BANDS = (
    "Colours are algorithms; a dash-dotted line is the mask of its colour with π′ (recomputed by "
    "the trainer at the weights that sampled) instead of μ; relaxations of the clip are dashed "
    "if other algorithms are shown. With several seeds, lines are means and bands the range from "
    f"lowest to highest. Curves of more than {SMOOTHED_FROM} steps are smoothed by a Gaussian, "
    "with the raw curves faint behind them if there are few."
)
AS_ABOVE = "Lines and bands as in the training curves."
OF_PAPER = (
    "Grey: where the paper’s curves start and end, read off its figure 3 by eye (± 3 %), for runs "
    "that have every setting of --preset paper."
)

_POINTS, _COLUMNS = 200, 120  # points of a smoothed line, and of the raw one behind it
_MARKED_UP_TO = 40  # points up to which a line marks each
_MARKED_APART = 12  # evaluations up to which diamonds are large
_NARROWEST = 0.01  # of the value: the smallest range of a vertical axis
_MARGIN = 0.05  # of the range of values, above and below
_MARGIN_OF_PAPER = 0.1  # the same with values of the paper, whose names need a line of text
_FEW = 4  # lines up to which bands are strong
_FLAT = 0.3  # of a shared axis: the least that each panel has to fill
_RELAXED = "relax-"  # how the names of relaxed clips begin
_REACH = 1.0  # of the range of values: how far outside it a limit is drawn
_ASIDE = 0.018  # of the steps: offset between the marks of two algorithms
_TWIN = (0, (5, 1.5, 1.2, 1.5))  # dashes of no other line


class Chart(NamedTuple):
    """A titled panel with the curves of one or more quantities, by the names of their looks."""

    title: str
    curves: Sequence[Mapping[str, Curve]]
    points: Mapping[str, Curve] = {}  # separate marks, without a line
    note: str = ""
    log: bool = False
    from_0: bool = False  # the axis begins at 0
    percent: bool = False
    least: float = 0.0  # the smallest range of the axis: less is noise
    ideal: bool = False  # 0 is ideal, and has a line
    setting: str = ""  # below the title
    quantities: Sequence[str] = ()  # the name of each of `curves`, for the description in words
    of_paper: Sequence[PaperValue] = ()  # grey, for runs that repeat the paper's
    limits: Sequence[float] = ()  # lines, as far as they are near the values
    alarms: Sequence[tuple[float, float]] = ()  # first and last steps of each, marked


def has_curves(charts: Iterable[Chart]) -> bool:
    return any(any(chart.curves) for chart in charts)


def draw_charts(figure: Sheet, charts: Iterable[Chart], names: Iterable[str]) -> None:
    """Draw the charts that have curves, over the same steps, with one legend below if there are
    several lines.
    """
    charts = [chart for chart in charts if any(chart.curves)]
    look_of = _looks_in_use(charts, looks_of(names, figure.style))
    panels = equal_panels(figure, len(charts), look_of, height=(210, 170))
    for axes, chart in zip(panels, charts, strict=True):
        draw_chart(axes, chart, look_of)
    share_steps(panels)
    draw_legend(figure, look_of)


def draw_grid(
    figure: Sheet, rows: Sequence[Sequence[Chart]], names: Iterable[str], columns: int
) -> None:
    """A row of charts per quantity, one chart per setting; unmeasured places stay empty.

    Panels of a row share their axis unless one of them would be flat on it; panels of a setting
    share the steps.
    """
    # Each quantity begins a line of panels, though it may need several of them.
    width = columns * ceil(max(map(len, rows)) / columns)  # cells per quantity
    chart_at = _chart_cells(rows, width)
    look_of = _looks_in_use(chart_at.values(), looks_of(names, figure.style))
    panels = figure.panels(
        len(chart_at),
        columns=columns,
        height=(180, 160),
        legend=LEGEND,
        below=room_for_legend(figure, look_of),
        cells=list(chart_at),
    )
    for axes, chart in zip(panels, chart_at.values(), strict=True):
        draw_chart(axes, chart, look_of)
        _name_setting(axes, chart.setting)
    _share_axes(dict(zip(chart_at, panels, strict=True)), width)
    draw_legend(figure, look_of)


def _chart_cells(rows: Sequence[Sequence[Chart]], width: int) -> dict[int, Chart]:
    """The charts that have curves by their cell, in rows of `width` cells."""
    chart_at = {}
    for row, charts in enumerate(rows):
        for cell, chart in enumerate(charts, start=width * row):
            if any(chart.curves):
                chart_at[cell] = chart
    return chart_at


def _share_axes(panel_at: Mapping[int, Panel], width: int) -> None:
    """Panels of a quantity share their values, those of a setting their steps; by cell, in rows of
    `width` cells.
    """
    of_quantity: dict[int, list[Panel]] = {}
    of_setting: dict[int, list[Panel]] = {}
    for cell, axes in panel_at.items():
        quantity, setting = divmod(cell, width)
        of_quantity.setdefault(quantity, []).append(axes)
        of_setting.setdefault(setting, []).append(axes)
    for panels in of_quantity.values():
        _share_values(panels)
    for panels in of_setting.values():
        share_steps(panels)


def _looks_in_use(
    charts: Iterable[Chart], look_of: Mapping[str, LineStyle]
) -> dict[str, LineStyle]:
    """The looks of the names that the charts draw."""
    drawn: set[str] = set()
    for chart in charts:
        drawn.update(chart.points, *chart.curves)
    return {name: look for name, look in look_of.items() if name in drawn}


def room_for_legend(figure: Sheet, names: Collection[str]) -> int:
    """Pixels for the legend that `draw_legend` draws; a single name needs none."""
    if len(names) <= 1:
        return 0
    return legend_below_height(len(names), _legend_columns(figure, names))


def draw_legend(figure: Sheet, look_of: Mapping[str, LineStyle]) -> None:
    """A legend below all panels, if there are several names."""
    if len(look_of) > 1:
        lines = {name: look.of_line for name, look in look_of.items()}
        figure.legend_below(lines, _legend_columns(figure, look_of))


def _legend_columns(figure: Sheet, names: Collection[str]) -> int:
    """Two columns for long names, such as algorithms in several settings."""
    most = 2 if any(SEPARATOR in name for name in names) else 4
    return figure.style.pick(min(len(names), most), 1)


def draw_chart(axes: Panel, chart: Chart, look_of: Mapping[str, LineStyle]) -> None:
    """Draw the curves of a chart, its marks, and its lines for orientation; scale and title the
    panel.
    """
    faint = len(look_of) > _FEW
    for curves, quantity in zip(chart.curves, chart.quantities or repeat(""), strict=False):
        for name, curve in curves.items():
            series = f"{quantity} with {name}" if quantity else name
            draw_curve(axes, curve, look_of[name], log=chart.log, faint=faint, name=series)
    middle = (len(chart.points) - 1) / 2
    for number, (name, curve) in enumerate(chart.points.items()):
        # The diamonds of a few algorithms fit beside each other; many would leave their step.
        shift = _ASIDE * (number - middle) if len(chart.points) <= _FEW else 0.0
        _draw_points(axes, curve, look_of[name].colour, shift, f"{name}, evaluated")
    draw_paper_values(axes, chart.of_paper)
    _scale(axes, chart)
    if chart.limits:
        _draw_limits(axes, chart.limits)
    _mark_alarms(axes, chart.alarms)
    axes.whole_steps(axes.style.pick(6, 5))
    axes.headline(chart.title, note=chart.note)


def equal_panels(
    figure: Sheet, count: int, names: Collection[str], height: tuple[int, int], right: int = RIGHT
) -> list[Panel]:
    """Panels in three columns, or in two if those are filled, with room for the legend of these
    names.
    """
    columns = 2 if count in (2, 4) else 3
    below = room_for_legend(figure, names)
    return figure.panels(count, columns=columns, height=height, below=below, right=right)


def draw_paper_values(axes: Panel, values: Sequence[PaperValue]) -> None:
    """Grey bands, named where curves leave room: a start above its right end, an end below its
    left one.
    """
    for value in values:
        grey: dict[str, Any] = {"color": axes.theme.muted, "alpha": 0.25, "linewidth": 0}
        axes.axhspan(value.low, value.high, zorder=0.5, **grey)
        look: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "color": axes.theme.muted}
        if value.is_start:
            above: dict[str, Any] = {"ha": "right", "va": "bottom"}
            axes.annotate_beside(value.words, (1.0, value.high), (-3, 1), **above, **look)
        else:
            axes.annotate_beside(value.words, (0.0, value.low), (3, -1), va="top", **look)


def _draw_limits(axes: Panel, limits: Sequence[float]) -> None:
    """A dashed line for each limit near the values, for which the axis makes room."""
    low, high = axes.get_ylim()
    reach = _REACH * (high - low)
    margin = _MARGIN * (high - low)
    # A limit far away would flatten the values; the note beside the title has its number.
    near = [limit for limit in limits if low - reach <= limit <= high + reach]
    for limit in near:
        axes.axhline(limit, color=axes.theme.orange, linewidth=1.2, linestyle=DASHED, zorder=1)
    lowest, highest = min(near, default=low), max(near, default=high)
    axes.set_ylim(min(low, lowest - margin), max(high, highest + margin))


def _mark_alarms(axes: Panel, alarms: Sequence[tuple[float, float]]) -> None:
    """A band over the steps of each alarm, with a cross above the step at which it begins."""
    colour = axes.theme.orange
    top = axes.get_ylim()[1]
    for first, last in alarms:
        axes.axvspan(first - 0.5, last + 0.5, color=colour, alpha=0.15, linewidth=0, zorder=0.5)
    if alarms:
        begin_N = np.array(alarms)[:, 0]
        (crosses,) = axes.plot(begin_N, np.full(len(begin_N), top), "X", color=colour, markersize=6)
        # At the top of the panel, half of a cross is outside it.
        crosses.set(clip_on=False, zorder=3, label="an alarm begins")


def _name_setting(axes: Panel, setting: str) -> None:
    (short,) = short_names([setting], axes.title_letters)
    look: dict[str, Any] = {"xycoords": "axes fraction", "color": axes.theme.muted}
    axes.annotate_beside(short, (axes.flush, 1), (0, 5), **look)


def _share_values(panels: Sequence[Panel]) -> None:
    """Share one vertical axis, unless a panel would fill too little of it."""
    limit_P2 = np.array([axes.get_ylim() for axes in panels])
    low, high = limit_P2[:, 0].min(), limit_P2[:, 1].max()
    same_scale = len({axes.get_yscale() for axes in panels}) == 1
    smallest_range = np.ptp(limit_P2, axis=1).min()
    if same_scale and smallest_range >= _FLAT * (high - low):
        for axes in panels:
            axes.set_ylim(low, high)


def looks_of(names: Iterable[str], style: Style) -> dict[str, LineStyle]:
    """The look of each name; with several settings, colours are algorithms and dashes are
    settings.
    """
    algorithm_and_setting = {}
    for name in names:
        algorithm, _, setting = name.partition(SEPARATOR)
        algorithm_and_setting[name] = algorithm, setting
    algorithms = list(dict.fromkeys(algorithm for algorithm, _ in algorithm_and_setting.values()))
    settings = list(dict.fromkeys(setting for _, setting in algorithm_and_setting.values()))
    if len(settings) < 2:
        look_of = _looks_of_algorithms(algorithms, style)
        return {name: look_of[algorithm] for name, (algorithm, _) in algorithm_and_setting.items()}
    # Too many for a dash per setting and a colour per algorithm: names only have to differ.
    if len(settings) > len(DASHES) or len(algorithms) > len(style.theme.accents):
        return looks(algorithm_and_setting, style)
    colour_of = dict(zip(algorithms, style.theme.accents, strict=False))
    dash_of = dict(zip(settings, DASHES, strict=False))
    look_of = {}
    for name, (algorithm, setting) in algorithm_and_setting.items():
        look_of[name] = LineStyle(colour_of[algorithm], dash_of[setting])
    return look_of


def _looks_of_algorithms(names: Sequence[str], style: Style) -> dict[str, LineStyle]:
    """A mask on the recomputed policy has the colour of the same mask on the rollout.

    If other algorithms are shown, relaxations are dashed, and nothing else.
    """
    twin_of = {}
    for name in names:
        algorithm, colon, parameters = name.partition(":")
        twin_of[f"{algorithm}-recompute{colon}{parameters}"] = name
    look_of = looks([name for name in names if name not in twin_of], style)
    relaxed = [name for name in look_of if name.startswith(_RELAXED)]
    # With more lines than colours, dashes are needed to tell algorithms apart.
    if relaxed and len(look_of) <= len(style.theme.accents):
        for name, look in look_of.items():
            look_of[name] = LineStyle(look.colour, DASHED if name in relaxed else "-")
    all_looks = {}
    for name in names:
        twin = twin_of.get(name)
        all_looks[name] = LineStyle(look_of[twin].colour, _TWIN) if twin else look_of[name]
    return all_looks


def draw_curve(
    axes: Panel,
    curve: Curve,
    look: LineStyle,
    *,
    log: bool = False,
    faint: bool = False,
    name: str = "",
) -> None:
    """A line with its band; a long one is smoothed, with the raw curve behind it if there are
    few lines. The name is not drawn.
    """
    if curve.is_long:
        if not faint:
            raw: dict[str, Any] = {"color": look.colour, "alpha": 0.22, "linewidth": 0.8}
            axes.plot(*envelope(curve, _COLUMNS), zorder=1.5, **raw)
        curve = thinned(smoothed(curve), _POINTS)
    low_N, value_N = curve.low_N, curve.value_N
    if log:
        # A logarithmic axis has no 0: the band reaches far below its line, the line has a gap.
        low_N = np.where(low_N > 0, low_N, 1e-3 * value_N)
        value_N = np.where(value_N > 0, value_N, np.nan)
    if np.isfinite(curve.high_N).any():
        band: dict[str, Any] = {"color": look.colour, "alpha": 0.06 if faint else 0.15}
        axes.fill_between(curve.step_N, low_N, curve.high_N, linewidth=0, **band)
    line: dict[str, Any] = {"marker": "o", "markersize": 3.5, "label": f"_{name}", **look.of_line}
    axes.plot(curve.step_N, value_N, markevery=_marked(value_N), **line)


def _draw_points(axes: Panel, curve: Curve, colour: str, shift: float, name: str) -> None:
    """Diamonds with bars from the lowest to the highest seed, shifted by a share of the steps so
    that none is hidden.
    """
    step_N = curve.step_N + shift * max(np.ptp(curve.step_N), np.ptp(axes.dataLim.intervalx))
    is_crowded = len(axes.containers) > _FEW or len(curve.step_N) > _MARKED_APART
    bar_2N = np.nan_to_num(np.abs(np.array([curve.low_N, curve.high_N]) - curve.value_N))
    diamonds: dict[str, Any] = {"marker": "D", "markersize": 3.5 if is_crowded else 5.5}
    diamonds |= {"color": colour, "markeredgecolor": axes.theme.page, "linestyle": "none"}
    axes.errorbar(step_N, curve.value_N, bar_2N, elinewidth=1, zorder=3, label=name, **diamonds)


def _marked(value_N: np.ndarray) -> list[int]:
    """The points to mark: all if there are few, else those without a neighbour, which no line
    shows.
    """
    marked_N = np.isfinite(value_N)
    if marked_N.sum() > _MARKED_UP_TO:
        padded_N = np.pad(marked_N, 1)
        marked_N &= ~padded_N[:-2] & ~padded_N[2:]
    return np.flatnonzero(marked_N).tolist()


def _scale(axes: Panel, chart: Chart) -> None:
    """Make room for lines and bands, and mark 0 if it is among them."""
    if chart.log:
        value_N = axes.drawn_values()
        value_N = value_N[np.isfinite(value_N) & (value_N > 0)]
        axes.set_ylim(value_N.min() / 1.5, value_N.max() * 1.5)
        axes.logarithmic("y")
        return
    low, high = map(float, axes.dataLim.intervaly)
    axes.set_ylim(*_limits(chart, low, high))
    if chart.ideal:
        axes.axhline(0, color=axes.theme.muted, linewidth=1.2, linestyle=DASHES[2], zorder=1)
    elif low < 0 < high:
        axes.axhline(0, color=axes.theme.muted, linewidth=0.8, zorder=1)
    if chart.percent:
        axes.in_percent()


def _limits(chart: Chart, low: float, high: float) -> tuple[float, float]:
    """The ends of a linear axis around the drawn values: wide enough that noise looks small."""
    least = max(chart.least, _NARROWEST * max(abs(low), abs(high))) or _NARROWEST
    widened = max(0.0, (least - (high - low)) / 2)
    low, high = low - widened, high + widened
    bottom = min(low, 0.0) if chart.from_0 or chart.ideal else low
    margin = (_MARGIN_OF_PAPER if chart.of_paper else _MARGIN) * (high - bottom)
    if chart.from_0 and low >= 0:
        return 0.0, high + margin
    return bottom - margin, high + margin


def share_steps(panels: Sequence[Panel]) -> None:
    """Give all panels the same range of steps; a single step is in the middle."""
    limit_P2 = np.array([axes.dataLim.intervalx for axes in panels])
    low, high = limit_P2[:, 0].min(), limit_P2[:, 1].max()
    margin = 0.03 * (high - low) or 0.5
    for axes in panels:
        axes.set_xlim(low - margin, high + margin)
