"""The gap of each trace by turn, and the length of turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch_cli.report.drawing.marks import (
    RUNS,
    Rows,
    draw_steps,
    share_vertical,
    trim_unmeasured,
)
from mismatch_cli.report.drawing.panels import Panel, Sheet, legend_height

if TYPE_CHECKING:
    from mismatch_cli.studies.comparison import ComparisonPlotData
    from mismatch_cli.studies.mismatch import PlotData

STUDY = ("mismatch", "comparison")
SECTION = "By position in the response"
TITLE = "Gap by turn"
_TURNS = (
    "Mean |log π − log μ| over the tokens of each turn, and the mean number of tokens in it, "
    "with 95 % intervals over prompts where enough have such a turn. A turn is a run of trained "
    "tokens; tool output and user messages between turns are not trained. "
)
_REBUILT = (
    "how the conversation is rebuilt between turns (chat template, tool output, dropped thoughts)"
)
DATA = "responses of several turns"
CAPTION = {
    "mismatch": (
        f"{_TURNS}A level line is healthy; a jump at the second turn points to {_REBUILT}, a "
        "steady rise to context length."
    ),
    "comparison": (
        f"{_TURNS}Curves that diverge at the second turn point to {_REBUILT}, curves that "
        "diverge slowly to context length."
    ),
}

_PANELS = {
    "abs_d_mean": ("Mean |log π − log μ| of the turn, nats", "Mean |d| of the turn, nats"),
    "length_mean": ("Mean length of the turn, tokens", "Mean length, tokens"),
}


def needs(data: PlotData | ComparisonPlotData) -> bool:
    return any(len(rows) > 1 for rows in _turns(data).values())


def draw(figure: Sheet, data: PlotData | ComparisonPlotData) -> None:
    rows_of = _turns(data)
    panels = figure.panels(2, height=(250, 200), legend=legend_height(list(rows_of), RUNS))
    for axes, (key, titles) in zip(panels, _PANELS.items(), strict=True):
        draw_steps(axes, rows_of, key)
        _label_turns(axes, max(rows_of.values(), key=len))
        share_vertical([axes], rows_of, key)
        axes.headline(*titles, ncols=RUNS)
        axes.set_xlabel("turn")


def _turns(data: PlotData | ComparisonPlotData) -> dict[str, Rows]:
    rows_of = {trace: summary.turns for trace, summary in data.by_trace.items()}
    return trim_unmeasured(rows_of, "abs_d_mean")


def _label_turns(axes: Panel, rows: Rows) -> None:
    """Number each turn below the middle of its step; of many turns, some and always the last."""
    every = 1 + len(rows) // axes.style.pick(13, 9)
    last = len(rows) - 1
    label_at = {}
    for number in (*range(0, last + 1 - every, every), last):
        row = rows[number]
        end = "+" if row.last is None else f"–{row.last}"
        label_at[number + 0.5] = f"{row.first}" if row.last == row.first else f"{row.first}{end}"
    axes.set_xticks(list(label_at), list(label_at.values()))
