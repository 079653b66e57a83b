"""Blocked tokens and lost update by threshold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mismatch_cli.report.drawing.marks import DASHED, draw_line, values_of
from mismatch_cli.report.drawing.panels import LEGEND, Panel, Sheet

if TYPE_CHECKING:
    from mismatch_cli.studies.clipping import ClippingPlotData

STUDY = "clipping"
SECTION = "Threshold sweeps"
TITLE = "Blocked tokens and lost update by threshold"
DATA = "tokens with an advantage, and two thresholds that block some"
CAPTION = (
    "Share of tokens that a mask blocks and share of the update that this loses, by threshold, "
    "with 95 % intervals over prompts where there are enough tokens; for the cap, the share of "
    "tokens above it and the share of the update that it removes. Dashed: the mask on top-K "
    "divergences. The vertical axis is logarithmic except near 0. Vertical lines: published "
    "thresholds."
)

_LINEAR = 1e-3  # of the highest share: below, the vertical axis is linear
_HEADROOM = 5  # times the highest share, for labels of thresholds


class _Sweep(NamedTuple):
    title: str
    axis: str
    solid: str  # the sweep drawn with solid lines
    dashed: str  # another one on the same thresholds, if any
    published: tuple[tuple[float, str], ...]
    counted: str = "tokens blocked"


_SWEEPS = (
    _Sweep(
        "Ratio clip",
        "ε: A > 0 and r > 1 + ε, A < 0 and r < 1 − ε",
        "ratio_clip",
        "",
        ((0.2, "PPO 0.2"), (0.28, "clip-higher 0.28")),
    ),
    _Sweep(
        "Total variation",
        "δ of the TV mask",
        "binary_tv",
        "top_k_tv",
        ((0.15, "DPPO 0.15"), (0.2, "DPPO top-K 0.2")),
    ),
    _Sweep(
        "KL divergence", "δ of the KL mask, nats", "binary_kl", "top_k_kl", ((0.05, "DPPO 0.05"),)
    ),
    _Sweep(
        "Cap on the weight",
        "C: the weight is min(r, C)",
        "cap",
        "",
        ((3, "PG-TIS 3"), (5, "DPPO top-K 5")),
        "tokens above C",
    ),
)


def needs(data: ClippingPlotData) -> bool:
    return any(_is_drawn(data, sweep) for sweep in _SWEEPS)


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    drawn = [sweep for sweep in _SWEEPS if _is_drawn(data, sweep)]
    panels = figure.panels(len(drawn), height=(250, 215), legend=LEGEND)
    for axes, sweep in zip(panels, drawn, strict=True):
        _draw_sweep(axes, data, sweep)


def _is_drawn(data: ClippingPlotData, sweep: _Sweep) -> bool:
    """Whether at least two thresholds block anything, since one does not make a line."""
    for name in (sweep.solid, sweep.dashed):
        share_B = values_of(row.blocked for row in data.result.sweeps.rows(name))
        if (share_B > 0).sum() >= 2:
            return True
    return False


def _draw_sweep(axes: Panel, data: ClippingPlotData, sweep: _Sweep) -> None:
    solid, dashed = map(data.result.sweeps.rows, (sweep.solid, sweep.dashed))
    for rows, dash, band in ((solid, "-", 0.17), (dashed, DASHED, 0)):
        threshold_B = np.array([row.threshold for row in rows])
        # Both dashes share the legend's entries, which are those of the first sweep there is.
        has_labels = rows is solid or not solid
        for estimates, label, colour in (
            ([row.blocked for row in rows], sweep.counted, axes.theme.ink),
            ([row.lost for row in rows], "update lost", axes.theme.green),
        ):
            look: dict[str, Any] = {"band": band, "linestyle": dash}
            if has_labels:
                look |= {"label": label}
            draw_line(axes, threshold_B, estimates, colour, **look)
    _set_scales(axes, sweep.published)
    _draw_published(axes, sweep.published)
    axes.set_xlabel(sweep.axis)
    axes.headline(f"{sweep.title}: share, %", note="dashed: top-K" if dashed else "")


def _set_scales(axes: Panel, published: Sequence[tuple[float, str]]) -> None:
    """The horizontal axis covers all thresholds that block anything, and the published ones."""
    points = [line.get_xydata() for line in axes.lines]
    x, y = np.concatenate(points).T
    x, highest = x[y > 0], np.nanmax(y)
    axes.set_xlim(min(x.min(), published[0][0] / 1.3), max(x.max(), 1.3 * published[-1][0]))
    axes.logarithmic("x")
    top = min(_HEADROOM * highest, max(1.0, 1.5 * highest))
    axes.in_percent()
    axes.stretch(_LINEAR * highest, (0, top))


def _draw_published(axes: Panel, thresholds: Sequence[tuple[float, str]]) -> None:
    """Mark each threshold with its name, one below the other."""
    for row, (threshold, name) in enumerate(thresholds):
        axes.axvline(threshold, color=axes.theme.muted, linewidth=0.9, linestyle=":", zorder=1)
        axes.name_threshold(name, threshold, row, side="left")
