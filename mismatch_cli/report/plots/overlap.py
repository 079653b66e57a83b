"""How far two algorithms block the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mismatch_cli.report.plots._heat import TITLE_PAD, Scale, draw_heat, draw_key, note_silent, reach_of
from mismatch_cli.report.plots._lines import values_of
from mismatch_cli.report.plots._panels import LEFT, RIGHT, Box, place_boxes, short_names, width_of
from mismatch_cli.report.plots._style import Style

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


def draw(figure: Figure, data: ClippingPlotData, style: Style) -> None:
    names, jaccard = _matrix(data)
    order = _side_by_side(jaccard)
    names, jaccard = [names[place] for place in order], jaccard[np.ix_(order, order)]
    shown = short_names(names, 280 if style.wide else 152, style.small)
    panel = _place(figure, shown, style)
    below_NN = np.where(np.tri(len(names), k=-1, dtype=bool), jaccard, np.nan)
    scale = Scale(style.theme.blue, reach_of(below_NN), 0.6)
    draw_heat(panel, style, below_NN[:, :-1], scale)
    _draw_names(panel, shown, style)
    what = "Blocked by both, of what either blocks, %" if style.wide else "Jaccard index, %"
    panel.set_title(what, x=0, pad=TITLE_PAD)
    draw_key(panel, style, scale, 0)
    note_silent(figure, style, len(data.rows) - len(names))


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


def _place(figure: Figure, names: list[str], style: Style) -> Axes:
    """Cells as large as the names at the right of the diagonal allow."""
    count = len(names)
    left = LEFT if style.wide else 8
    beyond = max(width_of(name, style.small) for name in names) + 10
    height = 24 if style.wide else 17
    cell = min(64.0, (style.layout.width - left - RIGHT - beyond) / (count - 1))
    return place_boxes(figure, style, [Box(left, _HEAD, cell * (count - 1), count * height)], _BELOW)[0]


def _draw_names(axes: Axes, names: list[str], style: Style) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for row, name in enumerate(names):
        axes.annotate(
            name, (row, row + 0.52), xytext=(4, 0), textcoords="offset points", va="center_baseline",
            fontsize=style.small, annotation_clip=False,
        )  # fmt: skip
