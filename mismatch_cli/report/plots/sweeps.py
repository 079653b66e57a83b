"""What another threshold would block: blocked share and lost weight as functions of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mismatch_cli.report.plots._lines import DASHED, draw_line, positive, values_of
from mismatch_cli.report.plots._panels import LEGEND, Panel, Sheet, power_label

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


class _Sweep(NamedTuple):
    title: str
    axis: str
    solid: str  # the sweep drawn with solid lines
    dashed: str  # another one on the same thresholds, if any
    published: tuple[float, ...]
    threshold: str = "threshold"  # on the horizontal axis
    key: str = "blocked"
    counted: str = "tokens blocked"


_SWEEPS = (
    _Sweep("Ratio clip", "ε: A > 0 and r > 1 + ε, A < 0 and r < 1 − ε", "ratio_clip", "", (0.2, 0.28)),
    _Sweep("Total variation", "δ of the TV mask", "binary_tv", "top_k_tv", (0.15, 0.2)),
    _Sweep("KL divergence", "δ of the KL mask, nats", "binary_kl", "top_k_kl", (0.05,)),
    _Sweep("Cap on the weight", "C: the weight is min(r, C)", "cap", "", (3, 5), "cap", "share", "tokens above C"),
)


def needs(data: ClippingPlotData) -> bool:
    return any(_is_drawn(data, sweep) for sweep in _SWEEPS)


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    drawn = [sweep for sweep in _SWEEPS if _is_drawn(data, sweep)]
    for axes, sweep in zip(figure.panels(len(drawn), height=(250, 215), legend=LEGEND), drawn, strict=True):
        _draw_sweep(axes, data, sweep)


def _rows(data: ClippingPlotData, name: str) -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = data.result.get("sweeps", {}).get(name) or ()
    return rows


def _is_drawn(data: ClippingPlotData, sweep: _Sweep) -> bool:
    """Whether anything is blocked at two thresholds at least: one makes no line."""
    shares = [values_of(row[sweep.key] for row in _rows(data, name)) for name in (sweep.solid, sweep.dashed)]
    return any((share_B > 0).sum() >= 2 for share_B in shares)


def _draw_sweep(axes: Panel, data: ClippingPlotData, sweep: _Sweep) -> None:
    solid, dashed = _rows(data, sweep.solid), _rows(data, sweep.dashed)
    series = ((sweep.key, sweep.counted, axes.theme.orange), ("lost", "weight lost", axes.theme.blue))
    for rows, line, band in ((solid, "-", 0.17), (dashed, DASHED, 0)):
        x_B = np.array([row[sweep.threshold] for row in rows])
        for key, name, colour in series:
            label = name if line == "-" or not solid else None
            estimates = positive(row[key] for row in rows)
            draw_line(axes, x_B, estimates, colour, band=band, linestyle=line, label=label)
    _set_scales(axes, sweep.published)
    _draw_published(axes, sweep.published)
    axes.set_xlabel(sweep.axis)
    axes.headline(f"{sweep.title}: share, %", note="dashed: top-K" if dashed else "")


def _set_scales(axes: Panel, published: tuple[float, ...]) -> None:
    """The horizontal axis goes on as long as anything is blocked, and to the published thresholds."""
    x, y = (np.concatenate(columns) for columns in zip(*(line.get_data() for line in axes.lines), strict=True))
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    axes.set_xlim(min(x.min(), published[0] / 1.3), max(x.max(), 1.3 * published[-1]))
    axes.set_ylim(max(y.min() / 1.5, 1.9 * y.max() * 10.0**-_DECADES), 1.9 * y.max())
    axes.logarithmic("x")
    axes.logarithmic("y")
    axes.in_percent(power_label)


def _draw_published(axes: Panel, thresholds: tuple[float, ...]) -> None:
    for index, threshold in enumerate(thresholds):
        axes.axvline(threshold, color=axes.theme.muted, linewidth=0.9, zorder=1)
        left = index == 0 and len(thresholds) > 1
        axes.annotate(
            f"{threshold:g}", (threshold, 1), xycoords=("data", "axes fraction"), xytext=(-2 if left else 2, -2),
            textcoords="offset points", ha="right" if left else "left", va="top", color=axes.theme.muted,
            fontsize=axes.style.small, zorder=6,
        )  # fmt: skip
