"""The lines, bars and steps of a drawn panel as numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.lines import Line2D
from matplotlib.patches import StepPatch

from mismatch_cli.report.drawing.panels import Panel

_FAINT = 0.5  # opacity: fainter lines without a name only accompany others


class DrawnSeries(NamedTuple):
    """A line, bars or steps from left to right; the name is empty where nothing has one."""

    name: str
    x_N: np.ndarray
    y_N: np.ndarray  # as labelled: in percent where the axis is


def series_of(axes: Panel) -> list[DrawnSeries]:
    """The named series; if nothing has a name, all as one, unless dots are what is shown."""
    parts: dict[str, list[np.ndarray]] = {}
    for name, points in (*_lines(axes), *_steps(axes), *_bars(axes)):
        parts.setdefault(name, []).append(points)
    if len(parts) > 1 or axes.dots:
        parts.pop("", None)
    joined = [_joined(name, points, axes.factor) for name, points in parts.items()]
    return [series for series in joined if len(series.x_N)]


def data_lines(axes: Panel) -> list[Line2D]:
    """Lines through values; others mark a place along one of the axes."""
    return [line for line in axes.lines if np.size(line.get_xdata()) and _is_data(axes, line)]


def outlines(axes: Panel) -> list[StepPatch]:
    """Steps without the bands around them."""
    return [each for each in axes.patches if isinstance(each, StepPatch) and not each.get_fill()]


def bars_of(axes: Panel) -> list[BarContainer]:
    return [each for each in axes.containers if isinstance(each, BarContainer)]


def _is_data(axes: Panel, line: Line2D) -> bool:
    return all(line.get_transform().contains_branch_seperately(axes.transData))


def _lines(axes: Panel) -> Iterator[tuple[str, np.ndarray]]:
    means = [each for each in axes.containers if isinstance(each, ErrorbarContainer)]
    label_of = {each.lines[0]: each.get_label() for each in means}
    for line in data_lines(axes):
        name = _first_name(line.get_gid(), label_of.get(line), line.get_label())
        if name or (line.get_alpha() or 1) >= _FAINT:
            yield name, np.column_stack(line.get_data()).astype(np.float64)


def _steps(axes: Panel) -> Iterator[tuple[str, np.ndarray]]:
    for step in outlines(axes):
        value_B, edge_B, _ = step.get_data()
        name = _first_name(step.get_gid(), step.get_label())
        yield name, np.column_stack([(edge_B[:-1] + edge_B[1:]) / 2, value_B])


def _bars(axes: Panel) -> Iterator[tuple[str, np.ndarray]]:
    for bars in bars_of(axes):
        tops = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in bars]
        yield _first_name(bars.get_label()), np.array(tops)


def _first_name(*labels: Any) -> str:
    """The first label that is a name; matplotlib's own begin with an underscore."""
    return next((str(each) for each in labels if each and not str(each).startswith("_")), "")


def _joined(name: str, points: Sequence[np.ndarray], factor: float) -> DrawnSeries:
    point_N2 = np.concatenate(points)
    point_N2 = point_N2[np.isfinite(point_N2).all(axis=1)]
    x_N, y_N = point_N2[np.argsort(point_N2[:, 0], kind="stable")].T
    return DrawnSeries(name, x_N, factor * y_N)
