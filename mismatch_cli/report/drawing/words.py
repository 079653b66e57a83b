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
Words = Callable[[Panel, DrawnSeries], str]


def in_words(figure: Figure) -> str:
    """A few short sentences of at most `MOST` characters: kinds, axes, and the values of each
    panel, in as much detail as there is room for.
    """
    parts_of: dict[Any, list[Panel]] = {}  # a second axis belongs to its panel
    for axes in figure.axes:
        if isinstance(axes, Panel):
            parts_of.setdefault(axes.get_position().bounds, []).append(axes)
    panels, text = list(parts_of.values()), ""
    for shown in range(len(panels), 0, -1):
        for words in (partial(_course, extremes=True), _course, None):
            text = " ".join(" ".join(_sentences(panels, shown, words)).split())
            if len(text) <= _AIM:
                return text
    return shorten(text, MOST, placeholder="…")


def _sentences(panels: Sequence[list[Panel]], shown: int, words: Words | None) -> Iterator[str]:
    """All panels in one sentence, then `shown` of them; without `words` for a line, a range for
    all lines.
    """
    firsts = [parts[0] for parts in panels]
    labels = {axes.get_xlabel() for axes in firsts}
    yield _kinds_of(firsts)
    if len(labels) == 1 and labels != {""}:
        yield f"Horizontal: {_axis(firsts)}."
    for parts in panels[:shown]:
        axes, content = parts[0], _content(parts, words)
        if len(panels) > 1:
            yield f"{_title(axes, with_horizontal=len(labels) > 1)}: {content}."
            continue
        vertical = "" if axes.images or _has_names(axes.yaxis) else "Vertical: "
        begin = content.replace("from", "From", 1) if content.startswith("from ") else content
        yield f"{vertical}{_title(axes)}. {begin}."
    if left := len(panels) - shown:
        yield f"And {numbers.things(left, 'more panel')}."


def _kinds_of(panels: Sequence[Panel]) -> str:
    kinds = dict.fromkeys(chain.from_iterable(map(_kinds, panels))) or [_NOTHING]
    if len(panels) > 1:
        return f"{numbers.things(len(panels), 'panel')}: {' and '.join(kinds)}."
    return f"{' and '.join(kinds)}.".capitalize()


def _kinds(axes: Panel) -> Iterator[str]:
    lines = _data_lines(axes)
    apart = all(np.size(line.get_xdata()) == 1 for line in lines) or _has_names(axes.yaxis)
    if axes.images:
        yield "heat map"
        return
    if _dots(axes) or (lines and apart):
        yield "points"
    if _bars(axes):
        yield "bars"
    if _outlines(axes):
        yield "steps"
    if lines and not apart:
        yield "lines"


def _data_lines(axes: Panel) -> list[Line2D]:
    """Lines through values; others mark a place along one of the axes."""
    return [
        line
        for line in axes.lines
        if np.size(line.get_xdata())
        and all(line.get_transform().contains_branch_seperately(axes.transData))
    ]


def _outlines(axes: Panel) -> list[StepPatch]:
    """Steps without the bands around them."""
    return [step for step in _of_kind(axes.patches, StepPatch) if not step.get_fill()]


def _bars(axes: Panel) -> list[BarContainer]:
    return _of_kind(axes.containers, BarContainer)


def _dots(axes: Panel) -> list[np.ndarray]:
    """x and y of the points of each scatter within the panel, [N, 2]."""
    scatters = _of_kind(axes.collections, PathCollection)
    return [_inside(axes, np.ma.filled(each.get_offsets(), np.nan)) for each in scatters]


def _of_kind(artists: Iterable[Any], kind: type[T]) -> list[T]:
    return [each for each in artists if isinstance(each, kind)]


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
    joined = [_joined(name, points, axes.factor) for name, points in points_of.items()]
    return [series for series in joined if len(series.x_N)]


def _line_points(axes: Panel) -> Iterator[tuple[str, np.ndarray]]:
    means = _of_kind(axes.containers, ErrorbarContainer)
    label_of = {each.lines[0]: each.get_label() for each in means}
    for line in _data_lines(axes):
        name = _name(label_of.get(line, line.get_label()))
        if name or (line.get_alpha() or 1) >= _FAINT:
            yield name, np.column_stack(line.get_data()).astype(np.float64)


def _step_points(axes: Panel) -> Iterator[tuple[str, np.ndarray]]:
    for step in _outlines(axes):
        value_B, edge_B, _ = step.get_data()
        yield _name(step.get_label()), np.column_stack([(edge_B[:-1] + edge_B[1:]) / 2, value_B])


def _bar_points(axes: Panel) -> Iterator[tuple[str, np.ndarray]]:
    for bars in _bars(axes):
        tops = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in bars]
        yield _name(bars.get_label()), np.array(tops)


def _name(label: object) -> str:
    """The name in a label, empty for matplotlib's own; those that a legend leaves out begin with an
    underscore, too.
    """
    text = "" if label is None else str(label)
    return "" if text.startswith(_OWN_LABELS) else text.removeprefix("_")


def _joined(name: str, points: Sequence[np.ndarray], factor: float) -> DrawnSeries:
    point_N2 = np.concatenate(points)
    point_N2 = point_N2[np.isfinite(point_N2).all(axis=1)]
    x_N, y_N = point_N2[np.argsort(point_N2[:, 0], kind="stable")].T
    return DrawnSeries(name, x_N, factor * y_N)


def _title(axes: Panel, *, with_horizontal: bool = False) -> str:
    """The title, which names the vertical axis, what is written below it, and the scale."""
    notes = [_SCALES.get(axes.get_yscale(), "")]
    if with_horizontal:
        notes.append(f"horizontal: {_axis([axes])}")
    below = map(Annotation.get_text, _names_at(axes, _SETTING))
    title, noted = ", ".join([axes.get_title("left"), *below]), "; ".join(filter(None, notes))
    return f"{title} ({noted})" if noted else title


def _axis(panels: Sequence[Panel]) -> str:
    """The label of the horizontal axis, its range in the data, and its scale."""
    axes, x_N = panels[0], np.concatenate(list(map(_horizontal, panels)))
    if not len(x_N):
        return axes.get_xlabel()
    if axes.whole and (x_N == np.round(x_N)).any():
        x_N = x_N[x_N == np.round(x_N)]  # marks may be beside their step
    ends = dict.fromkeys(_place(axes.xaxis, end) for end in (x_N.min(), x_N.max()))
    between = " to ".join(ends)
    parts = (
        axes.get_xlabel(),
        f"from {between}" if len(ends) > 1 else between,
        _SCALES.get(axes.get_xscale(), ""),
    )
    return ", ".join(filter(None, parts))


def _horizontal(axes: Panel) -> np.ndarray:
    """Every x that is drawn, or the ends of a heat map."""
    if axes.images:
        return np.array(axes.get_xlim())
    drawn = [series.x_N for series in _series(axes)] + [dots[:, 0] for dots in _dots(axes)]
    x_N = np.concatenate([np.empty(0), *drawn])  # a short trace leaves panels empty
    return x_N[np.isfinite(x_N)]


def _content(parts: Sequence[Panel], words: Words | None) -> str:
    """What one panel shows, which may be nothing."""
    return "; ".join(_contents(parts, words)) or _NOTHING


def _contents(parts: Sequence[Panel], words: Words | None) -> Iterator[str]:
    """What the axes of one panel show, and the thresholds that they name."""
    axes = parts[0]
    if axes.images:
        yield _largest(axes)
        return
    for dots in _dots(axes):
        yield _spread(axes.factor * dots[:, 1])
    for series in map(_series, parts):
        if words is None and len(series) > 1:
            yield _range(series)
        else:
            yield from ((words or _course)(axes, each) for each in series)
    if marks := list(map(_mark, _names_at(axes, _THRESHOLD))):
        yield f"marked: {', '.join(marks)}"


def _largest(axes: Panel) -> str:
    """The size of a heat map, and its largest cell."""
    share_RC: np.ndarray = np.ma.filled(np.ma.asarray(axes.images[0].get_array()), np.nan)
    rows, columns = share_RC.shape
    size = f"{numbers.things(rows, 'row')} × {numbers.things(columns, 'column')}"
    if not np.isfinite(share_RC).any():
        return f"{size}, without a value"
    row, column = np.unravel_index(np.nanargmax(share_RC), share_RC.shape)
    value, name = numbers.number(100 * float(share_RC[row, column])), _place(axes.yaxis, row)
    return f"{size}, largest {value} for {name} at {_place(axes.xaxis, column + 0.5)}"


def _spread(y_N: np.ndarray) -> str:
    points = numbers.things(len(y_N), "point")
    return f"{points}, from {_number(y_N.min())} to {_number(y_N.max())}" if len(y_N) else points


def _range(series: Sequence[DrawnSeries]) -> str:
    """Where many lines end: the lowest and the highest."""
    ordered = sorted(series, key=lambda each: float(each.y_N[-1]))
    low, high = (_number(each.y_N[-1]) for each in (ordered[0], ordered[-1]))
    if low == high:
        return f"{len(series)} lines, all at {low} at the right"
    ends = f"from {low} ({ordered[0].name}) to {high} ({ordered[-1].name})"
    return f"{len(series)} lines, at the right {ends}"


def _course(axes: Panel, series: DrawnSeries, *, extremes: bool = False) -> str:
    """The first and last value of a line, and its extremes with their places if they are inside."""
    name = f"{series.name}: " if series.name else ""
    if _has_names(axes.yaxis):
        return name + _of_rows(axes, series)
    values = list(map(_number, series.y_N))
    if len(values) == 1:
        return f"{name}{values[0]} at {_place(axes.xaxis, series.x_N[0])}"
    if len({*values}) == 1:
        return f"{name}{values[0]} throughout"
    text = f"{name}from {values[0]} to {values[-1]}"
    for word, place in (("highest", series.y_N.argmax()), ("lowest", series.y_N.argmin())):
        if extremes and values[place] not in (values[0], values[-1]):
            text += f", {word} {values[place]} at {_place(axes.xaxis, series.x_N[place])}"
    return text


def _of_rows(axes: Panel, series: DrawnSeries) -> str:
    """The extremes of values in named rows; several series are beside each other in a row."""

    def at(place: int) -> str:
        return f"{_number(series.x_N[place])} for {_place(axes.yaxis, np.round(series.y_N[place]))}"

    return f"largest {at(int(series.x_N.argmax()))}, smallest {at(int(series.x_N.argmin()))}"


def _names_at(axes: Panel, coordinates: Any) -> list[Annotation]:
    return [text for text in _of_kind(axes.texts, Annotation) if text.xycoords == coordinates]


def _mark(text: Annotation) -> str:
    """A threshold, with its value if the name does not have it."""
    word, place = text.get_text(), float(text.xy[0])
    return word if f"{place:g}" in word else f"{word} at {numbers.number(place)}"


def _number(value: Any) -> str:
    return numbers.number(float(value))


def _names(axis: Any) -> list[tuple[float, str]]:
    """The ticks of an axis and their labels, if those are names, not numbers on a scale."""
    if axis.get_scale() != "linear" or not isinstance(axis.get_major_locator(), FixedLocator):
        return []
    places = list(map(float, axis.get_majorticklocs()))
    labels = axis.get_major_formatter().format_ticks(places)
    named = list(zip(places, labels, strict=True))
    return named if labels != list(map(plain_label, places)) else []


def _has_names(axis: Any) -> bool:
    return bool(_names(axis))


def _place(axis: Any, place: Any) -> str:
    """A place on an axis: the name of its tick, the names around it, or a number."""
    value = float(place)
    if names := _names(axis):
        below = [name for tick, name in names if tick <= value + _CLOSE][-1:]
        above = [name for tick, name in names if tick >= value - _CLOSE][:1]
        return "–".join(dict.fromkeys(below + above))
    if value.is_integer():
        return numbers.count(int(value)).replace("-", "−")
    return numbers.number(value)
