"""What another threshold would block: blocked share and lost weight as functions of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mismatch_cli.report.plots._lines import DASHED, draw_line, positive, values_of
from mismatch_cli.report.plots._panels import LEGEND, in_percent, legend_above, logarithmic, panels, power_label, title
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from mismatch_cli.studies.clipping import ClippingPlotData

STUDY = "clipping"
SECTION = "What if"
TITLE = "What another threshold would block"
CAPTION = (
    "Share of tokens that a mask blocks and share of the update's weight that is lost with them, as functions of the "
    "threshold, with 95 % intervals over prompts; for the cap, the share of tokens above it and the weight that it "
    "takes away. Vertical lines: published thresholds."
)

_DECADES = 4  # of the vertical axis, at most: below, there are hardly any tokens


class _Panel(NamedTuple):
    title: str
    axis: str
    solid: str  # the sweep drawn with solid lines
    dashed: str  # another one on the same thresholds, if any
    published: tuple[float, ...]


_PANELS = (
    _Panel("Ratio clip", "ε: A > 0 and r > 1 + ε, A < 0 and r < 1 − ε", "ratio_clip", "", (0.2, 0.28)),
    _Panel("Total variation", "δ of the TV mask", "binary_tv", "top_k_tv", (0.15, 0.2)),
    _Panel("KL divergence", "δ of the KL mask, nats", "binary_kl", "top_k_kl", (0.05,)),
    _Panel("Cap on the weight", "C: the weight is min(r, C)", "cap", "", (3, 5)),
)


def needs(data: ClippingPlotData) -> bool:
    return any(_is_drawn(data, panel) for panel in _PANELS)


def draw(figure: Figure, data: ClippingPlotData, style: Style) -> None:
    drawn = [panel for panel in _PANELS if _is_drawn(data, panel)]
    for axes, panel in zip(
        panels(figure, style, len(drawn), height=250 if style.wide else 215, legend=LEGEND), drawn, strict=True
    ):
        _draw_sweep(axes, data, panel, style)


def _rows(data: ClippingPlotData, sweep: str) -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = data.result.get("sweeps", {}).get(sweep) or ()
    return rows


def _columns(sweep: str) -> tuple[str, str]:
    """What stands on the horizontal axis, and what counts as blocked."""
    return ("cap", "share") if sweep == "cap" else ("threshold", "blocked")


def _is_drawn(data: ClippingPlotData, panel: _Panel) -> bool:
    """Whether anything is blocked at two thresholds at least: one makes no line."""
    count = _columns(panel.solid)[1]
    shares = [values_of(row[count] for row in _rows(data, sweep)) for sweep in (panel.solid, panel.dashed)]
    return any((share_B > 0).sum() >= 2 for share_B in shares)


def _draw_sweep(axes: Axes, data: ClippingPlotData, panel: _Panel, style: Style) -> None:
    threshold, count = _columns(panel.solid)
    names = {count: "tokens above C" if panel.solid == "cap" else "tokens blocked", "lost": "weight lost"}
    for sweep, line in ((panel.solid, "-"), (panel.dashed, DASHED)):
        rows = _rows(data, sweep)
        x_B = np.array([row[threshold] for row in rows])
        for (key, name), colour in zip(names.items(), (style.theme.orange, style.theme.blue), strict=True):
            label = name if line == "-" or not _rows(data, panel.solid) else None
            estimates = positive([row[key] for row in rows])
            draw_line(axes, x_B, estimates, colour, band=0.17 * (line == "-"), linestyle=line, label=label)
    _set_scales(axes, panel.published)
    _draw_published(axes, panel.published, style)
    axes.set_xlabel(panel.axis)
    title(axes, f"{panel.title}: share, %", style, LEGEND, "dashed: top-K" if _rows(data, panel.dashed) else "")
    legend_above(axes, style)


def _set_scales(axes: Axes, published: tuple[float, ...]) -> None:
    """The horizontal axis goes on as long as anything is blocked, and to the published thresholds."""
    x, y = (np.concatenate(columns) for columns in zip(*(line.get_data() for line in axes.lines), strict=True))
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    axes.set_xlim(min(x.min(), published[0] / 1.3), max(x.max(), 1.3 * published[-1]))
    axes.set_ylim(max(y.min() / 1.5, 1.9 * y.max() * 10.0**-_DECADES), 1.9 * y.max())
    logarithmic(axes, "x")
    logarithmic(axes, "y")
    in_percent(axes.yaxis, power_label)


def _draw_published(axes: Axes, thresholds: tuple[float, ...], style: Style) -> None:
    for index, threshold in enumerate(thresholds):
        axes.axvline(threshold, color=style.theme.muted, linewidth=0.9, zorder=1)
        left = index == 0 and len(thresholds) > 1
        axes.annotate(
            f"{threshold:g}", (threshold, 1), xycoords=("data", "axes fraction"), xytext=(-2 if left else 2, -2),
            textcoords="offset points", ha="right" if left else "left", va="top", color=style.theme.muted,
            fontsize=style.small, zorder=6,
        )  # fmt: skip
