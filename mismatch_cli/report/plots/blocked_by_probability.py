"""The share of tokens that each algorithm blocks, by bin of the rollout probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.report.plots._fills import Scale, draw_heat, note_silent, reach_of
from mismatch_cli.report.plots._lines import values_of
from mismatch_cli.report.plots._panels import LEFT, RIGHT, Box, Sheet, short_names, width_of

if TYPE_CHECKING:
    from mismatch_cli.studies.clipping import ClippingPlotData

STUDY = "clipping"
SECTION = "What each algorithm throws away"
TITLE = "Blocked tokens by rollout probability"
CAPTION = (
    "For each algorithm the share of tokens that it blocks, in percent, by bin of the rollout probability μ; empty "
    "where there are no tokens. Algorithms that block nothing are left out. The limit of a ratio clip is the "
    "narrower the smaller μ is; binary TV is below μ or π, so a limit on it cannot reach tokens that both call rare."
)

_HEAD, _GAP, _BELOW = 54, 26, 44
_SIGNS = (("positive", ">"), ("negative", "<"))


def needs(data: ClippingPlotData) -> bool:
    return any(_shares([row], key).any() for row in data.blocking for key, _ in _SIGNS)


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    rows, style = data.blocking, figure.style
    names = short_names([row["name"] for row in rows], style.pick(280, 152), style.small)
    beside = max(LEFT, 14 + max(width_of(name, style.small) for name in names))
    columns, row_height, flush = style.pick((2, 21, 0.0), (1, 17, 8 - beside))
    width = (style.width - beside - RIGHT - (columns - 1) * _GAP) / columns
    height = len(rows) * row_height
    places = [divmod(index, columns) for index in range(len(_SIGNS))]
    boxes = [Box(beside + j * (width + _GAP), _HEAD + i * (height + _HEAD + _BELOW), width, height) for i, j in places]
    shares = [_shares(rows, key) for key, _ in _SIGNS]
    scale = Scale(style.theme.orange, reach_of(*shares), 0.38)  # a percent can be told from nothing below a hundred
    for axes, (_, column), share_RC, (_, sign) in zip(figure.place(boxes, _BELOW), places, shares, _SIGNS, strict=True):
        axes.flush = flush / width
        draw_heat(axes, share_RC, scale, f"{data.when(sign)}: blocked, %")
        axes.label_bins(rows[0]["by_mu"], every=3)
        axes.set_xlabel(style.pick("rollout probability μ, edges of the bins", "μ, edges of the bins"))
        axes.set_yticks(np.arange(len(rows)) + 0.5, [""] * len(rows) if column else names, fontsize=style.small)
    note_silent(figure, len(data.rows) - len(rows))


def _shares(rows: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Algorithms × bins."""
    return np.array([values_of(cell["blocked"][key] for cell in row["by_mu"]) for row in rows])
