"""How far two algorithms block the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.report.plots._fills import Scale, draw_heat, note_silent, reach_of
from mismatch_cli.report.plots._lines import values_of
from mismatch_cli.report.plots._panels import RIGHT, Box, Panel, Sheet, short_names, width_of

if TYPE_CHECKING:
    from mismatch_cli.studies.clipping import ClippingPlotData

STUDY = "clipping"
SECTION = "Overlap"
TITLE = "Which algorithms block the same tokens"
CAPTION = (
    "Of the tokens that at least one of two algorithms blocks, the share that both block, in percent (Jaccard index). "
    "A name stands at the end of its row and on top of its column; similar algorithms stand beside each other, and "
    "those that block nothing are left out."
)

_HEAD, _BELOW = 54, 14


def needs(data: ClippingPlotData) -> bool:
    return len(_matrix(data)[0]) >= 2


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    names, jaccard = _matrix(data)
    order = _side_by_side(jaccard)
    jaccard = jaccard[np.ix_(order, order)]
    shown = short_names([names[place] for place in order], figure.style.pick(280, 152), figure.style.small)
    axes = _place(figure, shown)
    below_NN = np.where(np.tri(len(names), k=-1, dtype=bool), jaccard, np.nan)
    title = figure.style.pick("Blocked by both, of what either blocks, %", "Jaccard index, %")
    axes.flush = 0
    draw_heat(axes, below_NN[:, :-1], Scale(figure.theme.blue, reach_of(below_NN), 0.6), title)
    axes.set_xticks([])
    axes.set_yticks([])
    for row, name in enumerate(shown):
        axes.annotate(
            name, (row, row + 0.52), xytext=(4, 0), textcoords="offset points", va="center_baseline",
            fontsize=figure.style.small, annotation_clip=False,
        )  # fmt: skip
    note_silent(figure, len(data.rows) - len(names))


def _matrix(data: ClippingPlotData) -> tuple[list[str], np.ndarray]:
    """The algorithms that block something, and the Jaccard index of each two of them; NaN where there is none."""
    overlap = data.result.get("overlap") or {"names": (), "jaccard": ()}
    blocking = {row["name"] for row in data.blocking}
    chosen = [index for index, name in enumerate(overlap["names"]) if name in blocking]
    rows = [values_of(row) for row in overlap["jaccard"]]
    matrix = np.array(rows).reshape(len(rows), len(rows))
    return [overlap["names"][index] for index in chosen], matrix[np.ix_(chosen, chosen)]


def _side_by_side(jaccard: np.ndarray) -> np.ndarray:
    """An order that puts similar algorithms together: by the Fiedler vector of the graph of their similarities."""
    similar = np.nan_to_num(jaccard) + 0.01  # what shares nothing is connected, too, or the order would be arbitrary
    laplacian = np.diag(similar.sum(axis=1)) - similar
    fiedler = np.linalg.eigh(laplacian)[1][:, 1].round(6)  # equal algorithms keep their order
    return np.argsort(fiedler if fiedler[0] <= fiedler[-1] else -fiedler, kind="stable")


def _place(figure: Sheet, names: list[str]) -> Panel:
    """Cells as large as the names at the right of the diagonal allow."""
    style, left, count = figure.style, figure.flush, len(names)
    beyond = max(width_of(name, style.small) for name in names) + 10
    cell = min(64.0, (style.width - left - RIGHT - beyond) / (count - 1))
    return figure.place([Box(left, _HEAD, cell * (count - 1), count * style.pick(24, 17))], _BELOW)[0]
