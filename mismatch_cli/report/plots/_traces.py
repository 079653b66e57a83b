"""What the figures of a comparison share: a look for each trace, and the room for their names."""

from __future__ import annotations

from typing import Any

from mismatch_cli.report.plots._lines import Look, looks
from mismatch_cli.report.plots._style import Style
from mismatch_cli.studies.comparison import ComparisonPlotData, Row

_LINE, _NAMES = 20, 4  # pixels of a line of the legend, and how many names stand in it


def looks_of(data: ComparisonPlotData, style: Style) -> dict[str, Look]:
    """The colour and dash of each trace, by its name."""
    return looks(data.names, style)


def legend_height(data: ComparisonPlotData) -> int:
    """Pixels above a panel for the names of all traces."""
    return _LINE * -(-len(data.names) // _NAMES)


def has_value(row: Row, *keys: str) -> bool:
    return any(row[key]["value"] is not None for key in keys)


def ends(estimate: Row) -> tuple[Any, Any, Any]:
    return estimate["value"], estimate["low"], estimate["high"]
