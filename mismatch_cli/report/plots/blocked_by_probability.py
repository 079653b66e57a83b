"""The share of tokens that each algorithm blocks, by bin of the rollout probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.report.plots._fills import Scale, draw_heat, heat_row, note_left_out, reach_of
from mismatch_cli.report.plots._lines import values_of
from mismatch_cli.report.plots._masks import apart
from mismatch_cli.report.plots._panels import LEFT, RIGHT, Box, Sheet, short_names, width_of

if TYPE_CHECKING:
    from mismatch_cli.studies.clipping import ClippingPlotData

STUDY = "clipping"
SECTION = "What each algorithm blocks"
TITLE = "Blocked tokens by rollout probability"
CAPTION = (
    "For each algorithm the share of tokens that it blocks, in percent, by bin of the rollout probability μ; empty "
    "where there are no tokens. Algorithms that decide alike on every token of this trace are one row; those that "
    "block nothing are left out, and where there is little room those that block nearly what one above them blocks "
    "(Jaccard index above 0.65). The limit of a ratio clip is the narrower the smaller μ is; binary TV is below μ or "
    "π, so a limit on it cannot reach tokens that both call rare."
)

_HEAD, _GAP, _BELOW = 54, 26, 44
_MOST = 10  # masks where there is little room
_SIGNS = (("positive", ">"), ("negative", "<"))


def needs(data: ClippingPlotData) -> bool:
    return any(_shares([row], key).any() for row in data.blocking for key, _ in _SIGNS)


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    style = figure.style
    masks = style.pick(data.masks(data.blocking), apart(data, data.blocking, _MOST))
    rows = [mask.row for mask in masks]
    names = short_names([mask.label for mask in masks], style.pick(280, style.width - 30), style.small)
    beside = style.pick(max(LEFT, 14 + max(width_of(name, style.small) for name in names)), 8)
    columns = style.pick(2, 1)
    width = (style.width - beside - RIGHT - (columns - 1) * _GAP) / columns
    height = len(rows) * heat_row(style)
    places = [divmod(index, columns) for index in range(len(_SIGNS))]
    boxes = [Box(beside + j * (width + _GAP), _HEAD + i * (height + _HEAD + _BELOW), width, height) for i, j in places]
    shares = [_shares(rows, key) for key, _ in _SIGNS]
    scale = Scale(style.theme.orange, reach_of(*shares), 3)  # a percent can be told from nothing below a hundred
    for axes, (_, column), share_RC, (_, sign) in zip(figure.place(boxes, _BELOW), places, shares, _SIGNS, strict=True):
        axes.flush = 0
        draw_heat(axes, share_RC, scale, f"{data.when(sign)}: blocked, %", [""] * len(rows) if column else names)
        axes.label_bins(rows[0]["by_mu"])
        axes.set_xlabel(style.pick("rollout probability μ, edges of the bins", "μ, edges of the bins"))
    shown = sum(1 + len(mask.others) for mask in masks)
    note_left_out(figure, len(data.rows) - len(data.blocking), len(data.blocking) - shown)


def _shares(rows: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Algorithms × bins."""
    return np.array([values_of(cell["blocked"][key] for cell in row["by_mu"]) for row in rows])
