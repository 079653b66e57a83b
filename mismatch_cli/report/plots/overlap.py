"""How much the blocked tokens of two algorithms overlap."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.report.drawing.marks import (
    OpacityScale,
    draw_heat,
    heat_height,
    left_out_note,
    names_beside,
    reach_of,
    values_of,
)
from mismatch_cli.report.drawing.panels import Panel, Sheet

if TYPE_CHECKING:
    from mismatch_cli.metrics.clipping.overlap import OverlapCounts
    from mismatch_cli.studies.clipping import ClippingPlotData

STUDY = "clipping"
SECTION = "Overlap"
TITLE = "Which algorithms block the same tokens"
DATA = "two algorithms that block tokens"
CAPTION = (
    "Tokens that both algorithms block ÷ tokens that at least one of them blocks, in percent "
    "(Jaccard index). Each row compares its algorithm with those above it, by their numbers. "
    "Similar algorithms are next to each other. Algorithms that decide alike on every token of "
    "this trace share a row; those that block nothing are left out."
)
_NUMBERS = 8  # of columns, on a narrow figure


def needs(data: ClippingPlotData) -> bool:
    return len(data.result.masks(data.result.blocking)) >= 2


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    result = data.result
    style = figure.style
    masks = result.masks(result.blocking)
    jaccard = _matrix(result.overlap, [mask.row.name for mask in masks])
    order = side_by_side(jaccard)
    # The matrix is symmetric, so the half below the diagonal has all of it.
    below = np.tri(len(order), k=-1, dtype=bool)
    below_NN = np.where(below, jaccard[np.ix_(order, order)], np.nan)
    labels = [f"{number}  {masks[index].label}" for number, index in enumerate(order, 1)]
    names, beside = names_beside(labels, style)
    (axes,) = figure.panels(1, height=heat_height(len(names)), names=beside, left=12)
    scale = OpacityScale(axes.theme.blue, reach_of(below_NN))
    draw_heat(axes, below_NN, scale, names)
    _number_columns(axes, len(names))
    note = style.pick(left_out_note(len(result.algorithms) - len(result.blocking)), scale.note)
    axes.headline("Blocked by both, % of blocked by either", "Jaccard index, %", note)


def _number_columns(axes: Panel, count: int) -> None:
    """The number of each column, or of some if they are narrow."""
    numbers = range(1, count + 1, axes.style.pick(1, ceil(count / _NUMBERS)))
    axes.set_xticks(np.array(numbers) - 0.5, map(str, numbers))


def _matrix(overlap: OverlapCounts, names: list[str]) -> np.ndarray:
    """The Jaccard index of each pair; NaN where there is none."""
    indices = [overlap.names.index(name) for name in names]
    return np.array([values_of(overlap.jaccard[index])[indices] for index in indices])


def side_by_side(jaccard: np.ndarray) -> np.ndarray:
    """An order that puts similar algorithms together: by the Fiedler vector of the graph of
    their similarities.
    """
    # 0.01 connects algorithms that share nothing, or their order would be arbitrary.
    similar = np.nan_to_num(jaccard) + 0.01
    laplacian = np.diag(similar.sum(axis=1)) - similar
    # Rounded, because equal algorithms, which keep their order, differ in the last digits.
    fiedler = np.linalg.eigh(laplacian)[1][:, 1].round(6)
    # The sign of an eigenvector is arbitrary: this one keeps the first algorithm near the top.
    if fiedler[0] > fiedler[-1]:
        fiedler = -fiedler
    return np.argsort(fiedler, kind="stable")
