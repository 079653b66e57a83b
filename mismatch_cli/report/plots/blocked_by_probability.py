"""The share of tokens that each algorithm blocks, by bin of the rollout probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from mismatch_cli.report.plots._heat import TITLE_PAD, Scale, draw_heat, draw_key, note_silent, reach_of
from mismatch_cli.report.plots._lines import values_of
from mismatch_cli.report.plots._panels import LEFT, RIGHT, Box, label_bins, place_boxes, short_names, width_of
from mismatch_cli.report.plots._style import Style

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


def draw(figure: Figure, data: ClippingPlotData, style: Style) -> None:
    rows = data.blocking
    names = short_names([row["name"] for row in rows], 280 if style.wide else 152, style.small)
    beside = max(LEFT, 14 + max(width_of(name, style.small) for name in names))
    axes = place_boxes(figure, style, _boxes(len(rows), beside, style), _BELOW)
    shares = [_shares(rows, key) for key, _ in _SIGNS]
    scale = Scale(style.theme.orange, reach_of(*shares), 0.38)  # a percent can be told from nothing below a hundred
    for panel, share_RC, (_, sign) in zip(axes, shares, _SIGNS, strict=True):
        draw_heat(panel, style, share_RC, scale)
        label_bins(panel, rows[0]["by_mu"], style, every=3)
        panel.set_xlabel("rollout probability μ, edges of the bins" if style.wide else "μ, edges of the bins")
        labelled = panel is axes[0] or not style.wide
        panel.set_yticks(np.arange(len(rows)) + 0.5, names if labelled else [""] * len(rows), fontsize=style.small)
        flush = 0 if style.wide else (8 - beside) / (panel.get_position().width * style.layout.width)
        panel.set_title(f"{data.when(sign)}: blocked, %", x=flush, pad=TITLE_PAD)
        draw_key(panel, style, scale, flush)
    note_silent(figure, style, len(data.rows) - len(rows))


def _boxes(rows: int, beside: float, style: Style) -> list[Box]:
    height = rows * (21 if style.wide else 17)
    if not style.wide:
        width = style.layout.width - beside - RIGHT
        return [Box(beside, _HEAD + index * (height + _HEAD + _BELOW), width, height) for index in range(2)]
    width = (style.layout.width - beside - RIGHT - _GAP) / 2
    return [Box(beside + index * (width + _GAP), _HEAD, width, height) for index in range(2)]


def _shares(rows: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Algorithms × bins."""
    return np.array([values_of(cell["blocked"][key] for cell in row["by_mu"]) for row in rows])
