"""A mean along the response as a step over each bin, a line for each trace: by position, by turn."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mismatch_cli.report.plots._lines import Look, label_in_units, looks, parts_of, run_labels, values_of
from mismatch_cli.report.plots._panels import Panel

Rows = Sequence[Mapping[str, Any]]

_SPAN = 20  # between the largest values of two traces
_BEYOND = 2  # times the largest value: where bands are cut, or one would flatten the lines


def measured(rows_of: Mapping[str, Rows], key: str) -> dict[str, Rows]:
    """Of each trace, the rows up to the last one that has a value."""
    found = {}
    for trace, rows in rows_of.items():
        last = max((place for place, row in enumerate(rows) if row[key]["value"] is not None), default=-1)
        found[trace] = rows[: last + 1]
    return found


def draw_steps(axes: Panel, rows_of: Mapping[str, Rows], key: str) -> None:
    """A step over each bin, in a band for its interval; each bin is as wide as the others."""
    labels = run_labels(list(rows_of), axes.style)
    for trace, look in looks(rows_of, axes.style).items():
        if rows_of[trace]:
            _draw(axes, rows_of[trace], key, look, labels[trace])
    axes.set_xlim(0, max(map(len, rows_of.values())) or 1)


def _draw(axes: Panel, rows: Rows, key: str, look: Look, label: str) -> None:
    edges = np.arange(len(rows) + 1)
    value_B, low_B, high_B = parts_of(row[key] for row in rows).T
    axes.stairs(value_B, edges, baseline=None, color=look.colour, linestyle=look.dash, linewidth=1.8, label=label)
    axes.stairs(high_B, edges, baseline=low_B, fill=True, color=look.colour, alpha=0.2, linewidth=0)


def share_vertical(panels: Sequence[Panel], rows_of: Mapping[str, Rows], key: str) -> str:
    """One scale for all panels: from 0, or logarithmic where one of these traces would lie flat on the axis.

    Answers with the unit of its labels as a note, which is empty where it is 1.
    """
    values = [values_of(row[key] for row in rows) for rows in rows_of.values()]
    above_0 = [value_B[value_B > 0] for value_B in values if (value_B > 0).any()]
    largest = [value_B.max() for value_B in above_0]
    apart = len(largest) > 1 and max(largest) >= _SPAN * min(largest)
    top = max(float(axes.dataLim.y1) for axes in panels if axes.patches)
    unit = ""
    for axes in panels:
        if apart:
            axes.set_yscale("log")
            axes.set_ylim(min(value_B.min() for value_B in above_0) / 2, 1.5 * top)
            axes.logarithmic("y")
        else:
            axes.set_ylim(0, 1.1 * min(top, _BEYOND * max(largest, default=1.0)) or 1.0)
            unit = label_in_units(axes, 1)
    return unit
