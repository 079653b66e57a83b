"""The gap along the response: from its first token, and from its last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.report.plots._panels import add_subject, panels, title
from mismatch_cli.report.plots._style import Style
from mismatch_cli.studies.mismatch import PlotData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STUDY = "mismatch"
SECTION = "Along the response"
TITLE = "Gap by position in the response"
CAPTION = (
    "Mean |log π − log μ| over the tokens at each distance from the first token and from the last, in octaves, "
    "with 95 % intervals over prompts. A level line is healthy; a rise with position points to positional "
    "encoding or caches, a jump at the last token to end-of-sequence handling."
)


def needs(data: PlotData) -> bool:
    return any(_value(row) is not None for row in data.summary.get("positions", []))


def draw(figure: Figure, data: PlotData, style: Style) -> None:
    start, end = panels(figure, style, 2, height=250 if style.wide else 200)
    sides = ((start, "positions", "from the first token"), (end, "from_end", "from the last token"))
    for axes, key, name in sides:
        rows = [row for row in data.summary.get(key, []) if _value(row) is not None]
        if rows:
            draw_profile(axes, rows, style.theme.blue)
            label_positions(axes, rows, style)
        title(axes, f"Mean |log π − log μ| {name}" if style.wide else f"Mean |d| {name}, nats", style)
        axes.set_xlabel(f"tokens {name}")
    highest = max(start.get_ylim()[1], end.get_ylim()[1])
    for axes, *_ in sides:
        axes.set_ylim(0, highest)
    end.invert_xaxis()
    add_subject(figure, style, data.subject)


def _value(row: Mapping[str, Any]) -> float | None:
    value: float | None = row["abs_d_mean"]["value"]
    return value


def draw_profile(axes: Axes, rows: Sequence[Mapping[str, Any]], colour: str, label: str = "") -> None:
    """Mean |d| in each row with its band; the axis reaches above all that were drawn."""
    estimates = [row["abs_d_mean"] for row in rows]
    value_B, low_B, high_B = (
        np.array([np.nan if e[part] is None else e[part] for e in estimates]) for part in ("value", "low", "high")
    )
    place_B = np.arange(len(rows))
    axes.fill_between(place_B, low_B, high_B, color=colour, alpha=0.2, linewidth=0)
    axes.plot(place_B, value_B, color=colour, marker="o", markersize=4.5, label=label)
    before = axes.get_ylim()[1] if len(axes.lines) > 1 else 0.0
    axes.set_ylim(0, max(before, 1.15 * float(np.nanmax([value_B, high_B]))) or 1.0)


def label_positions(axes: Axes, rows: Sequence[Mapping[str, Any]], style: Style) -> None:
    """A tick at each row, with its first distance."""
    labels = [f"{row['first']}" for row in rows]
    axes.set_xticks(range(len(rows)), [label if style.wide or i % 2 == 0 else "" for i, label in enumerate(labels)])
    axes.set_xlim(-0.4, max(len(rows) - 0.6, 0.6))
