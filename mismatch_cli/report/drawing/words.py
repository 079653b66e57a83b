"""What a drawn figure shows, in words, for readers who do not see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from textwrap import shorten
from typing import Any, NamedTuple, TypeVar

import numpy as np
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import StepPatch
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator

from mismatch_cli.base import numbers
from mismatch_cli.report.drawing.panels import Panel, plain_label

MOST, _AIM = 600, 500  # characters
_SCALES = {"log": "logarithmic", "logit": "stretched near 0 and 1", "asinh": "stretched near 0"}
_THRESHOLD, _SETTING = ("data", "axes fraction"), "axes fraction"  # the coordinates of names
_CLOSE = 1e-9  # to a tick
_FAINT = 0.5  # opacity: fainter lines without a name only accompany others
_NOTHING = "nothing to draw"
_OWN_LABELS = "_child", "_container", "_nolegend", "_line"  # how matplotlib's own begin


class DrawnSeries(NamedTuple):
    """A line, bars or steps from left to right; the name is empty where nothing has one."""

    name: str
    x_N: np.ndarray
    y_N: np.ndarray  # as labelled: in percent where the axis is


T = TypeVar("T")
Describe = Callable[[Panel, DrawnSeries], str]


def in_words(figure: Figure) -> str:
    """A few short sentences of at most `MOST` characters: kinds, axes, and the values of each
    panel, in as much detail as there is room for.
    """
    # A second vertical axis is a panel of its own, at the position of the first.
    panels_at: dict[Any, list[Panel]] = {}
    for axes in figure.axes:
        if isinstance(axes, Panel):
            panels_at.setdefault(axes.get_position().bounds, []).append(axes)
    panels = list(panels_at.values())
    text = ""
    for shown in range(len(panels), 0, -1):
        for describe in (partial(_describe_course, extremes=True), _describe_course, None):
            text = " ".join(_sentences(panels, shown, describe))
            text = " ".join(text.split())
            if len(text) <= _AIM:
                return text
    return shorten(text, MOST, placeholder="…")


def _sentences(
    panels: Sequence[list[Panel]], shown: int, describe: Describe | None
) -> Iterator[str]:
    """One sentence on all panels, then one for each of the first `shown`; without `describe`, a
    panel has the range of all its lines.
    """
    firsts = [stack[0] for stack in panels]
    labels = {axes.get_xlabel() for axes in firsts}
    yield _kinds_of_figure(firsts)
    if len(labels) == 1 and labels != {""}:
        yield f"Horizontal: {_describe_axis(firsts)}."
    for stack in panels[:shown]:
        content = "; ".join(_contents(stack, describe)) or _NOTHING
        if len(panels) > 1:
            yield f"{_title(stack[0], with_horizontal=len(labels) > 1)}: {content}."
        else:
            yield _describe_only_panel(stack[0], content)
    remaining = len(panels) - shown
    if remaining:
        yield f"And {numbers.things(remaining, 'more panel')}."


def _describe_only_panel(axes: Panel, content: str) -> str:
    """The panel of a figure that has one: its title and its content as two sentences."""
    # A title names the vertical axis, but not that of a heat map or of named rows.
    names_axis = not axes.images and not _has_named_ticks(axes.yaxis)
    title = f"Vertical: {_title(axes)}" if names_axis else _title(axes)
    if content.startswith("from "):
        content = content.replace("from", "From", 1)
    return f"{title}. {content}."


def _kinds_of_figure(panels: Sequence[Panel]) -> str:
    kinds = dict.fromkeys(chain.from_iterable(map(_kinds, panels))) or [_NOTHING]
    if len(panels) > 1:
        return f"{numbers.things(len(panels), 'panel')}: {' and '.join(kinds)}."
    return f"{' and '.join(kinds)}.".capitalize()


def _kinds(axes: Panel) -> Iterator[str]:
    if axes.images:
        yield "heat map"
        return
    lines = _data_lines(axes)
    # matplotlib draws dots as lines, too: of one point each, or without a line between rows.
    are_dots = all(np.size(line.get_xdata()) == 1 for line in lines) or _has_named_ticks(axes.yaxis)
    if _dots(axes) or (lines and are_dots):
        yield "points"
    if _bars(axes):
        yield "bars"
    if _outlines(axes):
        yield "steps"
    if lines and not are_dots:
        yield "lines"


def _data_lines(axes: Panel) -> list[Line2D]:
    """Lines through values; others mark a place along one of the axes."""
    lines = []
    for line in axes.lines:
        # A line from `axhline` has data on one axis and a share of the panel on the other.
        in_data = all(line.get_transform().contains_branch_seperately(axes.transData))
        if in_data and np.size(line.get_xdata()):
            lines.append(line)
    return lines


def _outlines(axes: Panel) -> list[StepPatch]:
    """Steps without the bands around them."""
    return [step for step in _of_kind(axes.patches, StepPatch) if not step.get_fill()]


def _bars(axes: Panel) -> list[BarContainer]:
    return _of_kind(axes.containers, BarContainer)


def _dots(axes: Panel) -> list[np.ndarray]:
    """x and y of the points of each scatter within the panel, [N, 2]."""
    scatters = _of_kind(axes.collections, PathCollection)
    return [_inside(axes, np.ma.filled(scatter.get_offsets(), np.nan)) for scatter in scatters]


def _of_kind(artists: Iterable[Any], kind: type[T]) -> list[T]:
    return [artist for artist in artists if isinstance(artist, kind)]


def _inside(axes: Panel, point_N2: np.ndarray) -> np.ndarray:
    low_2, high_2 = np.sort([axes.get_xlim(), axes.get_ylim()], axis=1).T
    return point_N2[((point_N2 >= low_2) & (point_N2 <= high_2)).all(axis=1)]


def _series(axes: Panel) -> list[DrawnSeries]:
    """The named series; if nothing has a name, all as one, unless dots are what is shown."""
    points_of: dict[str, list[np.ndarray]] = {}
    for name, points in (*_line_points(axes), *_step_points(axes), *_bar_points(axes)):
        points_of.setdefault(name, []).append(points)
    if len(points_of) > 1 or _dots(axes):
        points_of.pop("", None)
    all_series = []
    for name, arrays in points_of.items():
        series = _join_points(name, arrays, axes.factor)
        if len(series.x_N):
            all_series.append(series)
    return all_series


def _line_points(axes: Panel) -> Iterator[tuple[str, np.ndarray]]:
    # The label of an error bar belongs to its container; its line has one of matplotlib's own.
    error_bars = _of_kind(axes.containers, ErrorbarContainer)
    label_of = {bars.lines[0]: bars.get_label() for bars in error_bars}
    for line in _data_lines(axes):
        name = _name(label_of.get(line, line.get_label()))
        if name or (line.get_alpha() or 1) >= _FAINT:
            yield name, np.column_stack(line.get_data()).astype(np.float64)


def _step_points(axes: Panel) -> Iterator[tuple[str, np.ndarray]]:
    for step in _outlines(axes):
        value_B, edge_B, _ = step.get_data()
        middle_B = (edge_B[:-1] + edge_B[1:]) / 2
        yield _name(step.get_label()), np.column_stack([middle_B, value_B])


def _bar_points(axes: Panel) -> Iterator[tuple[str, np.ndarray]]:
    for bars in _bars(axes):
        tops = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in bars]
        yield _name(bars.get_label()), np.array(tops)


def _name(label: object) -> str:
    """The name in a label, empty for matplotlib's own; those that a legend leaves out begin with an
    underscore, too.
    """
    text = "" if label is None else str(label)
    if text.startswith(_OWN_LABELS):
        return ""
    return text.removeprefix("_")


def _join_points(name: str, points: Sequence[np.ndarray], factor: float) -> DrawnSeries:
    point_N2 = np.concatenate(points)
    point_N2 = point_N2[np.isfinite(point_N2).all(axis=1)]
    x_N, y_N = point_N2[np.argsort(point_N2[:, 0], kind="stable")].T
    return DrawnSeries(name, x_N, factor * y_N)


def _title(axes: Panel, *, with_horizontal: bool = False) -> str:
    """The title, which names the vertical axis, what is written below it, and the scale."""
    settings = map(Annotation.get_text, _names_at(axes, _SETTING))
    title = ", ".join([axes.get_title("left"), *settings])
    notes = [_SCALES.get(axes.get_yscale(), "")]
    if with_horizontal:
        notes.append(f"horizontal: {_describe_axis([axes])}")
    note = "; ".join(filter(None, notes))
    return f"{title} ({note})" if note else title


def _describe_axis(panels: Sequence[Panel]) -> str:
    """The label of the horizontal axis, its range in the data, and its scale."""
    axes = panels[0]
    x_N = np.concatenate(list(map(_drawn_x, panels)))
    if not len(x_N):
        return axes.get_xlabel()
    # Marks of several algorithms are beside their step, so that none hides another.
    whole_N = x_N[x_N == np.round(x_N)]
    if axes.whole and len(whole_N):
        x_N = whole_N
    first, last = (_describe_place(axes.xaxis, end) for end in (x_N.min(), x_N.max()))
    reach = first if first == last else f"from {first} to {last}"
    scale = _SCALES.get(axes.get_xscale(), "")
    return ", ".join(filter(None, (axes.get_xlabel(), reach, scale)))


def _drawn_x(axes: Panel) -> np.ndarray:
    """Every x that is drawn, or the ends of a heat map."""
    if axes.images:
        return np.array(axes.get_xlim())
    # A short trace leaves panels empty, and numpy cannot concatenate an empty list.
    drawn = [np.empty(0)]
    drawn += [series.x_N for series in _series(axes)]
    drawn += [dots[:, 0] for dots in _dots(axes)]
    x_N = np.concatenate(drawn)
    return x_N[np.isfinite(x_N)]


def _contents(stack: Sequence[Panel], describe: Describe | None) -> Iterator[str]:
    """What a panel and its second axis show, and the thresholds that they name; nothing where
    both are empty.
    """
    axes = stack[0]
    if axes.images:
        yield _describe_heat_map(axes)
        return
    for dots in _dots(axes):
        yield _describe_dots(axes.factor * dots[:, 1])
    for all_series in map(_series, stack):
        if describe is None and len(all_series) > 1:
            yield _describe_ends(all_series)
            continue
        for series in all_series:
            yield (describe or _describe_course)(axes, series)
    thresholds = list(map(_describe_threshold, _names_at(axes, _THRESHOLD)))
    if thresholds:
        yield f"marked: {', '.join(thresholds)}"


def _describe_heat_map(axes: Panel) -> str:
    """The size of a heat map, and its largest cell."""
    share_RC: np.ndarray = np.ma.filled(np.ma.asarray(axes.images[0].get_array()), np.nan)
    rows, columns = share_RC.shape
    size = f"{numbers.things(rows, 'row')} × {numbers.things(columns, 'column')}"
    if not np.isfinite(share_RC).any():
        return f"{size}, without a value"
    row, column = np.unravel_index(np.nanargmax(share_RC), share_RC.shape)
    name = _describe_place(axes.yaxis, row)
    value = numbers.number(100 * float(share_RC[row, column]))
    return f"{size}, largest {value} for {name} at {_describe_place(axes.xaxis, column + 0.5)}"


def _describe_dots(y_N: np.ndarray) -> str:
    """How many dots there are, and between which values."""
    points = numbers.things(len(y_N), "point")
    if not len(y_N):
        return points
    return f"{points}, from {_number(y_N.min())} to {_number(y_N.max())}"


def _describe_ends(all_series: Sequence[DrawnSeries]) -> str:
    """Where many lines end: the lowest and the highest."""
    ordered = sorted(all_series, key=lambda series: float(series.y_N[-1]))
    lowest, highest = ordered[0], ordered[-1]
    low, high = _number(lowest.y_N[-1]), _number(highest.y_N[-1])
    if low == high:
        return f"{len(ordered)} lines, all at {low} at the right"
    ends = f"from {low} ({lowest.name}) to {high} ({highest.name})"
    return f"{len(ordered)} lines, at the right {ends}"


def _describe_course(axes: Panel, series: DrawnSeries, *, extremes: bool = False) -> str:
    """The first and last value of a line, and its extremes with their places if they are inside."""
    name = f"{series.name}: " if series.name else ""
    if _has_named_ticks(axes.yaxis):
        return name + _describe_rows(axes, series)
    values = list(map(_number, series.y_N))
    first, last = values[0], values[-1]
    if len(values) == 1:
        return f"{name}{first} at {_describe_place(axes.xaxis, series.x_N[0])}"
    # Equal as printed: a reader is not told of differences that no digit shows.
    if len(set(values)) == 1:
        return f"{name}{first} throughout"
    text = f"{name}from {first} to {last}"
    for extreme, index in (("highest", series.y_N.argmax()), ("lowest", series.y_N.argmin())):
        if extremes and values[index] not in (first, last):
            text += (
                f", {extreme} {values[index]} at {_describe_place(axes.xaxis, series.x_N[index])}"
            )
    return text


def _describe_rows(axes: Panel, series: DrawnSeries) -> str:
    """The extremes of values in named rows; several series are beside each other in a row."""

    def value_and_row(index: int) -> str:
        row = _describe_place(axes.yaxis, np.round(series.y_N[index]))
        return f"{_number(series.x_N[index])} for {row}"

    largest = value_and_row(int(series.x_N.argmax()))
    smallest = value_and_row(int(series.x_N.argmin()))
    return f"largest {largest}, smallest {smallest}"


def _names_at(axes: Panel, coordinates: Any) -> list[Annotation]:
    return [text for text in _of_kind(axes.texts, Annotation) if text.xycoords == coordinates]


def _describe_threshold(text: Annotation) -> str:
    """The name of a threshold, with its value if the name does not have it."""
    name = text.get_text()
    value = float(text.xy[0])
    if f"{value:g}" in name:
        return name
    return f"{name} at {numbers.number(value)}"


def _number(value: Any) -> str:
    return numbers.number(float(value))


def _named_ticks(axis: Any) -> list[tuple[float, str]]:
    """The ticks of an axis and their labels, if those are names, not numbers on a scale."""
    if axis.get_scale() != "linear" or not isinstance(axis.get_major_locator(), FixedLocator):
        return []
    ticks = list(map(float, axis.get_majorticklocs()))
    labels = axis.get_major_formatter().format_ticks(ticks)
    if labels == list(map(plain_label, ticks)):
        return []
    return list(zip(ticks, labels, strict=True))


def _has_named_ticks(axis: Any) -> bool:
    return bool(_named_ticks(axis))


def _describe_place(axis: Any, place: Any) -> str:
    """A place on an axis: the name of its tick, the names around it, or a number."""
    value = float(place)
    ticks = _named_ticks(axis)
    if ticks:
        below = [name for tick, name in ticks if tick <= value + _CLOSE][-1:]
        above = [name for tick, name in ticks if tick >= value - _CLOSE][:1]
        # On a named tick, both are its name.
        return "–".join(dict.fromkeys(below + above))
    if value.is_integer():
        return numbers.count(int(value)).replace("-", "−")
    return numbers.number(value)
