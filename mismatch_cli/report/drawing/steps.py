"""A mean along the response, by position or turn: a step per bin, a line per trace."""

from collections.abc import Mapping, Sequence

import numpy as np

from mismatch_cli.metrics.pair_summary import PlaceRow
from mismatch_cli.report.drawing.lines import (
    Look,
    label_in_units,
    looks,
    parts_of,
    run_labels,
    values_of,
)
from mismatch_cli.report.drawing.panels import Panel

Rows = Sequence[PlaceRow]

_SPAN = 20  # times between the largest values of two traces: from there on the axis is logarithmic
_BEYOND = 2  # times the largest value: bands are cut here, or they would flatten the lines


def measured(rows_of: Mapping[str, Rows], key: str) -> dict[str, Rows]:
    """The rows of each trace, up to the last one with a value."""
    found = {}
    for trace, rows in rows_of.items():
        value_B = values_of(getattr(row, key) for row in rows)
        last = max(np.flatnonzero(np.isfinite(value_B)), default=-1)
        found[trace] = rows[: last + 1]
    return found


def draw_steps(axes: Panel, rows_of: Mapping[str, Rows], key: str) -> None:
    """Draw a step over each bin, in a band for its interval; all bins are equally wide."""
    labels = run_labels(list(rows_of), axes.style)
    for trace, look in looks(rows_of, axes.style).items():
        if rows_of[trace]:
            _draw(axes, rows_of[trace], key, look, labels[trace])
    axes.set_xlim(0, max(map(len, rows_of.values())) or 1)


def _draw(axes: Panel, rows: Rows, key: str, look: Look, label: str) -> None:
    edges = np.arange(len(rows) + 1)
    value_B, low_B, high_B = parts_of(getattr(row, key) for row in rows).T
    axes.stairs(
        value_B,
        edges,
        baseline=None,
        color=look.colour,
        linestyle=look.dash,
        linewidth=1.8,
        label=label,
    )
    axes.stairs(high_B, edges, baseline=low_B, fill=True, color=look.colour, alpha=0.2, linewidth=0)


def share_vertical(panels: Sequence[Panel], rows_of: Mapping[str, Rows], key: str) -> str:
    """Give all panels one scale: from 0, or logarithmic if one of the traces would be flat on it.

    Returns the unit of its labels as a note, empty if it is 1.
    """
    values = [values_of(getattr(row, key) for row in rows) for rows in rows_of.values()]
    above_0 = [value_B[value_B > 0] for value_B in values if (value_B > 0).any()]
    largest = [value_B.max() for value_B in above_0]
    far_apart = len(largest) > 1 and max(largest) >= _SPAN * min(largest)
    top = max(float(axes.dataLim.y1) for axes in panels if axes.patches)
    unit = ""
    for axes in panels:
        if far_apart:
            axes.set_yscale("log")
            axes.set_ylim(min(value_B.min() for value_B in above_0) / 2, 1.5 * top)
            axes.logarithmic("y")
        else:
            axes.set_ylim(0, 1.1 * min(top, _BEYOND * max(largest, default=1.0)) or 1.0)
            unit = label_in_units(axes, 1)
    return unit
