"""How much the blocked tokens of two algorithms overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.report.drawing.fills import (
    HEAT_LEGEND,
    Scale,
    draw_heat,
    heat_row,
    middle_of_cell,
    note_left_out,
    reach_of,
)
from mismatch_cli.report.drawing.lines import values_of
from mismatch_cli.report.drawing.panels import LEFT, RIGHT, TOP, Box, Sheet, short_names, width_of

if TYPE_CHECKING:
    from mismatch_cli.metrics.clipping.overlap import OverlapCounts
    from mismatch_cli.studies.clipping import ClippingPlotData

STUDY = "clipping"
SECTION = "Overlap"
TITLE = "Which algorithms block the same tokens"
DATA = "two algorithms that block tokens"
CAPTION = (
    "Tokens that both algorithms block ÷ tokens that at least one of them blocks, in percent "
    "(Jaccard index). Each row compares its algorithm with those above it; a column begins below "
    "the number of its algorithm. Similar algorithms are next to each other. Algorithms that "
    "decide alike on every token of this trace share a row; those that block nothing are left "
    "out."
)

_BELOW = 14


def needs(data: ClippingPlotData) -> bool:
    return len(data.result.masks(data.result.blocking)) >= 2


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    result, style = data.result, figure.style
    masks = result.masks(result.blocking)
    jaccard = _matrix(result.overlap, [mask.row.name for mask in masks])
    order = _side_by_side(jaccard)
    jaccard = jaccard[np.ix_(order, order)]
    labels = [f"{number}  {masks[place].label}" for number, place in enumerate(order, 1)]
    names = short_names(labels, style.pick(280, style.width - 30), style.small)
    beside = style.pick(max(LEFT, 14 + max(width_of(name, style.small) for name in names)), 8)
    width = min(64.0 * len(names), style.width - beside - RIGHT)
    (axes,) = figure.place(
        [Box(beside, TOP + HEAT_LEGEND, width, len(names) * heat_row(style), HEAT_LEGEND)], _BELOW
    )
    below_NN = np.where(np.tri(len(names), k=-1, dtype=bool), jaccard, np.nan)
    title = style.pick("Blocked by both, % of blocked by either", "Jaccard index, %")
    axes.flush = 0
    draw_heat(
        axes,
        below_NN,
        Scale(figure.theme.blue, reach_of(below_NN), 2),
        title,
        names,
        lambda share: f"{100 * share:.0f}",
    )
    axes.set_xticks([])
    for place in range(len(names)):
        axes.text(
            place + 0.5,
            place + middle_of_cell(style),
            str(place + 1),
            ha="center",
            va="center_baseline",
            fontsize=style.small,
            fontweight="bold",
            color=figure.theme.ink,
        )
    note_left_out(figure, len(result.algorithms) - len(result.blocking))


def _matrix(overlap: OverlapCounts, names: list[str]) -> np.ndarray:
    """The Jaccard index of each pair; NaN where there is none."""
    places = [overlap.names.index(name) for name in names]
    return np.array([values_of(overlap.jaccard[place])[places] for place in places])


def _side_by_side(jaccard: np.ndarray) -> np.ndarray:
    """An order that puts similar algorithms together: by the Fiedler vector of the graph of
    their similarities.
    """
    # Connects algorithms that share nothing, or their order would be arbitrary
    similar = np.nan_to_num(jaccard) + 0.01
    laplacian = np.diag(similar.sum(axis=1)) - similar
    fiedler = np.linalg.eigh(laplacian)[1][:, 1].round(6)  # equal algorithms keep their order
    return np.argsort(fiedler if fiedler[0] <= fiedler[-1] else -fiedler, kind="stable")
