"""The share of tokens that each algorithm blocks, by bin of the rollout probability."""

from __future__ import annotations

from collections.abc import Sequence
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
from mismatch_cli.report.drawing.panels import Sheet
from mismatch_cli.report.drawing.style import Style
from mismatch_cli.studies.clipping_result import SIGNS

if TYPE_CHECKING:
    from mismatch_cli.metrics.clipping.blocked_rows import AlgorithmRow
    from mismatch_cli.studies.clipping import ClippingPlotData
    from mismatch_cli.studies.clipping_result import ClippingResult, OneMask

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

_MOST = 10  # masks on a narrow figure


def needs(data: ClippingPlotData) -> bool:
    return any(_shares(data.result.blocking, sign).any() for sign in SIGNS)


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    style = figure.style
    masks = _masks(data.result, style)
    names, beside = names_beside([mask.label for mask in masks], style)
    panels = figure.panels(len(SIGNS), height=heat_height(len(masks)), names=beside, left=12)
    rows = [mask.row for mask in masks]
    shares = {sign: _shares(rows, sign) for sign in SIGNS}
    scale = OpacityScale(style.theme.orange, reach_of(*shares.values()))
    edges = [mu_bin.mu_low for mu_bin in rows[0].by_mu] + [1.0]
    for axes, (sign, share_RC) in zip(panels, shares.items(), strict=True):
        draw_heat(axes, share_RC, scale, names)
        axes.label_bins(edges, every=4)
        axes.set_xlabel("rollout probability μ, bin edges")
        note = scale.note if axes is panels[-1] else _left_out_note(data.result, masks)
        axes.headline(f"{data.result.when(sign)}: blocked, %", note=note, is_axis=False)
    # Beside each other, one column of names serves both.
    panels[-1].tick_params(labelleft=style.pick(False, True))


def _masks(result: ClippingResult, style: Style) -> list[OneMask]:
    """All that differ if wide, fewer if narrow."""
    if style.pick(True, False):
        return result.masks(result.blocking)
    return result.distinct_masks(result.blocking, _MOST)


def _left_out_note(result: ClippingResult, masks: Sequence[OneMask]) -> str:
    drawn = sum(1 + len(mask.others) for mask in masks)
    silent = len(result.algorithms) - len(result.blocking)
    return left_out_note(silent, len(result.blocking) - drawn)


def _shares(rows: Sequence[AlgorithmRow], sign: str) -> np.ndarray:
    """The blocked share by algorithm and bin of μ, [R, C]; NaN where a bin has no tokens."""
    shares = []
    for row in rows:
        shares.append(values_of(mu_bin.blocked.of(sign) for mu_bin in row.by_mu))
    return np.array(shares)
