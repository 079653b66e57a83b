"""The share of tokens that each algorithm blocks, by bin of the rollout probability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.report.drawing.fills import (
    HEAT_LEGEND,
    Scale,
    draw_heat,
    heat_row,
    note_left_out,
    reach_of,
)
from mismatch_cli.report.drawing.lines import values_of
from mismatch_cli.report.drawing.masks import distinct_masks
from mismatch_cli.report.drawing.panels import LEFT, RIGHT, TOP, Box, Sheet, short_names, width_of
from mismatch_cli.studies.clipping_result import SIGNS

if TYPE_CHECKING:
    from mismatch_cli.metrics.clipping.blocked_rows import AlgorithmRow
    from mismatch_cli.studies.clipping import ClippingPlotData

STUDY = "clipping"
SECTION = "What each algorithm blocks"
TITLE = "Blocked tokens by rollout probability"
DATA = "tokens that one of the algorithms blocks"
CAPTION = (
    "The share of tokens that each algorithm blocks, in percent, by bin of the rollout "
    "probability μ; empty where there are no tokens. Algorithms that decide alike on every token "
    "of this trace share a row; those that block nothing are left out, and on a narrow figure "
    "also those that block nearly the same as one above (Jaccard index above 0.65). A ratio clip "
    "is tighter at smaller μ; binary TV never exceeds max(π, μ), so a limit on it leaves rare "
    "tokens alone."
)

_GAP, _BELOW = 26, 44
_MOST = 10  # masks on a narrow figure


def needs(data: ClippingPlotData) -> bool:
    return any(_shares(data.result.blocking, sign).any() for sign in SIGNS)


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    style, result = figure.style, data.result
    blocking = result.blocking
    masks = style.pick(result.masks(blocking), distinct_masks(result, blocking, _MOST))
    rows = [mask.row for mask in masks]
    names = short_names(
        [mask.label for mask in masks], style.pick(280, style.width - 30), style.small
    )
    beside = style.pick(max(LEFT, 14 + max(width_of(name, style.small) for name in names)), 8)
    columns = style.pick(2, 1)
    width = (style.width - beside - RIGHT - (columns - 1) * _GAP) / columns
    height = len(rows) * heat_row(style)
    places = [divmod(index, columns) for index in range(len(SIGNS))]
    top, row = TOP + HEAT_LEGEND, TOP + HEAT_LEGEND + height + _BELOW
    boxes = [
        Box(beside + j * (width + _GAP), top + i * row, width, height, HEAT_LEGEND)
        for i, j in places
    ]
    shares = [_shares(rows, sign) for sign in SIGNS]
    # A cube root separates 1 % from 0 on a scale to 100 %
    scale = Scale(style.theme.orange, reach_of(*shares), 3)
    for axes, (_, column), share_RC, sign in zip(
        figure.place(boxes, _BELOW), places, shares, SIGNS, strict=True
    ):
        axes.flush = 0
        draw_heat(
            axes,
            share_RC,
            scale,
            f"{result.when(sign)}: blocked, %",
            names,
            named=not column,
        )
        axes.label_bins([each.mu_low for each in rows[0].by_mu] + [1.0])
        axes.set_xlabel(style.pick("rollout probability μ, bin edges", "μ, bin edges"))
    shown = sum(1 + len(mask.others) for mask in masks)
    note_left_out(figure, len(result.algorithms) - len(blocking), len(blocking) - shown)


def _shares(rows: Sequence[AlgorithmRow], sign: str) -> np.ndarray:
    """Algorithms × bins."""
    return np.array([_shares_of(row, sign) for row in rows])


def _shares_of(row: AlgorithmRow, sign: str) -> np.ndarray:
    return values_of(each.blocked.of(sign) for each in row.by_mu)
