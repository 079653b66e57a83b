"""What a drawn figure shows, in words, for readers who do not see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from textwrap import shorten
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from mismatch_cli.base import numbers
from mismatch_cli.report.drawing.panels import Box, HeatCells, Panel
from mismatch_cli.report.drawing.series import DrawnSeries, bars_of, data_lines, outlines, series_of

MOST, _AIM = 600, 500  # characters
_SCALES = {"log": "logarithmic", "logit": "stretched near 0 and 1", "asinh": "stretched near 0"}
_THRESHOLD, _SETTING = ("data", "axes fraction"), "axes fraction"  # the coordinates of names
_CLOSE = 1e-9  # to a tick
_NOTHING = "nothing to draw"

Words = Callable[[Panel, DrawnSeries], str]


def in_words(figure: Figure) -> str:
    """A few short sentences of at most `MOST` characters: kinds, axes, and the values of each
    panel, in as much detail as there is room for.
    """
    parts_of: dict[Box, list[Panel]] = {}  # a second axis belongs to its panel
    for axes in figure.axes:
        if isinstance(axes, Panel):
            parts_of.setdefault(axes.box, []).append(axes)
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
        vertical = "" if axes.cells or _has_names(axes.yaxis) else "Vertical: "
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
    lines = data_lines(axes)
    apart = all(np.size(line.get_xdata()) == 1 for line in lines) or _has_names(axes.yaxis)
    if axes.cells:
        yield "heat map"
        return
    if axes.dots or (lines and apart):
        yield "points"
    if bars_of(axes):
        yield "bars"
    if outlines(axes):
        yield "steps"
    if lines and not apart:
        yield "lines"


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
    whole_N = x_N[x_N == np.round(x_N)]
    if axes.whole and len(whole_N):
        x_N = whole_N  # marks may be beside their step
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
    if axes.cells:
        return np.array(axes.get_xlim())
    drawn = [*(series.x_N for series in series_of(axes)), *(x_N for x_N, _ in axes.dots)]
    x_N = np.concatenate([np.empty(0), *drawn])  # a short trace leaves panels empty
    return x_N[np.isfinite(x_N)]


def _content(parts: Sequence[Panel], words: Words | None) -> str:
    """What one panel shows, which may be nothing."""
    return "; ".join(_contents(parts, words)) or _NOTHING


def _contents(parts: Sequence[Panel], words: Words | None) -> Iterator[str]:
    """What the axes of one panel show, and the thresholds that they name."""
    axes = parts[0]
    if axes.cells:
        yield _largest(axes, axes.cells)
    for _, y_N in axes.dots:
        yield _spread(axes.factor * y_N)
    for series in map(series_of, parts):
        if words is None and len(series) > 1:
            yield _range(series)
        else:
            yield from ((words or _course)(axes, each) for each in series)
    if marks := list(map(_mark, _names_at(axes, _THRESHOLD))):
        yield f"marked: {', '.join(marks)}"


def _largest(axes: Panel, cells: HeatCells) -> str:
    rows, columns = cells.share_RC.shape
    size = f"{numbers.things(rows, 'row')} × {numbers.things(columns, 'column')}"
    if not np.isfinite(cells.share_RC).any():
        return f"{size}, without a value"
    row, column = divmod(int(np.nanargmax(cells.share_RC)), columns)
    value = numbers.number(100 * float(cells.share_RC[row, column]))
    largest = f"{size}, largest {value} for {cells.names[row]}"
    if len(axes.get_xticks()):
        return f"{largest} at {_place(axes.xaxis, column + 0.5)}"
    return f"{largest} and {cells.names[column]}"  # as many columns as rows


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
    return [
        text for text in axes.texts if isinstance(text, Annotation) and text.xycoords == coordinates
    ]


def _mark(text: Annotation) -> str:
    """A threshold, with its value if the name does not have it."""
    word, place = text.get_text(), float(text.xy[0])
    return word if f"{place:g}" in word else f"{word} at {numbers.number(place)}"


def _number(value: Any) -> str:
    return numbers.number(float(value))


def _has_names(axis: Any) -> bool:
    """Whether ticks have names, rather than numbers on a scale of probabilities."""
    return axis.get_scale() == "linear" and any(axis.names)


def _place(axis: Any, place: Any) -> str:
    """A place on an axis: the name of its tick, the names around it, or a number."""
    value = float(place)
    if _has_names(axis):
        ticks = zip(axis.get_majorticklocs(), axis.names, strict=True)
        named = [(tick, name) for tick, name in ticks if name]
        below = [name for tick, name in named if tick <= value + _CLOSE][-1:]
        above = [name for tick, name in named if tick >= value - _CLOSE][:1]
        return "–".join(dict.fromkeys(below + above))
    if value.is_integer():
        return numbers.count(int(value)).replace("-", "−")
    return numbers.number(value)
