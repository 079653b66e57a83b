"""The share of tokens that each algorithm blocks, by bin of the rollout probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
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
_SIGNS = (("positive", ">"), ("negative", "<"))


def needs(data: ClippingPlotData) -> bool:
    return any(_shares([row], key).any() for row in data.blocking for key, _ in _SIGNS)


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    style = figure.style
    masks = style.pick(data.masks(data.blocking), distinct_masks(data, data.blocking, _MOST))
    rows = [mask.row for mask in masks]
    names = short_names(
        [mask.label for mask in masks], style.pick(280, style.width - 30), style.small
    )
    beside = style.pick(max(LEFT, 14 + max(width_of(name, style.small) for name in names)), 8)
    columns = style.pick(2, 1)
    width = (style.width - beside - RIGHT - (columns - 1) * _GAP) / columns
    height = len(rows) * heat_row(style)
    places = [divmod(index, columns) for index in range(len(_SIGNS))]
    top, row = TOP + HEAT_LEGEND, TOP + HEAT_LEGEND + height + _BELOW
    boxes = [
        Box(beside + j * (width + _GAP), top + i * row, width, height, HEAT_LEGEND)
        for i, j in places
    ]
    shares = [_shares(rows, key) for key, _ in _SIGNS]
    # A cube root separates 1 % from 0 on a scale to 100 %
    scale = Scale(style.theme.orange, reach_of(*shares), 3)
    for axes, (_, column), share_RC, (_, sign) in zip(
        figure.place(boxes, _BELOW), places, shares, _SIGNS, strict=True
    ):
        axes.flush = 0
        draw_heat(
            axes,
            share_RC,
            scale,
            f"{data.when(sign)}: blocked, %",
            names,
            named=not column,
        )
        axes.label_bins([bin_["mu_low"] for bin_ in rows[0]["by_mu"]] + [1.0])
        axes.set_xlabel(style.pick("rollout probability μ, bin edges", "μ, bin edges"))
    shown = sum(1 + len(mask.others) for mask in masks)
    note_left_out(figure, len(data.rows) - len(data.blocking), len(data.blocking) - shown)


def _shares(rows: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Algorithms × bins."""
    return np.array([values_of(cell["blocked"][key] for cell in row["by_mu"]) for row in rows])
