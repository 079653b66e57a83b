"""Expert routing: which layers flip, the gap of flipped tokens, and whether flips are near ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.metrics.route_flips import FlipsRow, LayerRow, Margins
from mismatch_cli.report.drawing.marks import draw_line, estimate_array
from mismatch_cli.report.drawing.panels import LEGEND, Panel, Sheet

if TYPE_CHECKING:
    from mismatch_cli.studies.mismatch import PlotData

STUDY = "mismatch"
SECTION = "Routing"
PLACE = 2
TITLE = "Routing of engine and trainer"
DATA = "the experts that both sides chose, of a mixture of experts"
CAPTION = (
    "Share of tokens that each layer sends to different experts in trainer and engine (flips); "
    "mean |log π − log μ| by number of layers that flip a token; margin between the logits of "
    "the last chosen and the first rejected expert, where routers agree and where they flip. "
    "With 95 % intervals over prompts where there are enough (hollow marks: too few). Flips at "
    "smaller margins are near ties that rounding decides."
)


def needs(data: PlotData) -> bool:
    return data.routing is not None and data.routing.tokens > 0


def draw(figure: Sheet, data: PlotData) -> None:
    assert data.routing is not None
    margins = data.routing.margins
    # Routers that choose by biased scores have no margins of logits.
    has_margins = any(margins.agreeing.counts) or any(margins.flipped.counts)
    number = 3 if has_margins else 2
    panels = figure.panels(number, height=(240, 210), legend=LEGEND, columns=3)
    _draw_layers(panels[0], data.routing.layers)
    _draw_flips(panels[1], [row for row in data.routing.by_flips if row.tokens])
    if has_margins:
        _draw_margins(panels[2], margins)


def _draw_layers(axes: Panel, rows: Sequence[LayerRow]) -> None:
    place_M = np.array([row.layer for row in rows])
    flipped = [row.flipped for row in rows]
    draw_line(axes, place_M, flipped, axes.theme.blue, marker="o", markersize=3.5)
    axes.set_ylim(bottom=0)
    axes.in_percent()
    axes.whole_steps()
    axes.set_xlabel("layer")
    axes.headline("Tokens flipped, %", is_axis=False)


def _draw_flips(axes: Panel, rows: Sequence[FlipsRow]) -> None:
    estimate_B3 = estimate_array(row.abs_d_mean for row in rows)
    value_B = estimate_B3[:, 0]
    x_B = np.arange(len(rows))
    filled_B = np.isfinite(estimate_B3[:, 2])
    look: dict[str, Any] = {"color": axes.theme.orange, "markersize": 5}
    ends_2B = estimate_B3[filled_B, 1:].T
    axes.vlines(x_B[filled_B], *ends_2B, color=axes.theme.orange, linewidth=1.4)
    axes.plot(x_B[filled_B], value_B[filled_B], "o", **look)
    axes.plot(x_B[~filled_B], value_B[~filled_B], "o", markerfacecolor=axes.theme.page, **look)
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.set_xticks(x_B, list(map(_span, rows)))
    if (value_B > 0).all():
        axes.logarithmic("y")
    axes.set_xlabel("layers that flip a token")
    axes.headline("Mean |Δlog p|, nats", is_axis=False)


def _span(row: FlipsRow) -> str:
    if row.high is None:
        return f"{row.low}+"
    if row.low == row.high:
        return str(row.low)
    return f"{row.low}–{row.high}"


def _draw_margins(axes: Panel, margins: Margins) -> None:
    """Draw each side as shares of its own total, or flips would be invisible."""
    edges = _with_ends(np.array(margins.edges))
    counts_2B = np.array([margins.agreeing.counts, margins.flipped.counts], dtype=np.float64)
    looks = ("agreeing", axes.theme.blue), ("flipped", axes.theme.orange)
    for counts_B, (name, colour) in zip(counts_2B, looks, strict=True):
        if counts_B.sum():
            share_B = counts_B / counts_B.sum()
            axes.stairs(share_B, edges, color=colour, fill=True, alpha=0.35)
            axes.stairs(share_B, edges, color=colour, linewidth=1.2, label=name)
    # The margins of a router span few of the bins, which have to hold those of any model.
    occupied = np.flatnonzero(counts_2B.sum(axis=0))
    axes.set_xlim(edges[occupied[0]], edges[occupied[-1] + 1])
    axes.logarithmic("x")
    axes.set_ylim(bottom=0)
    axes.in_percent()
    axes.set_xlabel("router margin, logits")
    axes.headline("Routers, % of each", is_axis=False)


def _with_ends(edges: np.ndarray) -> np.ndarray:
    """The edges of bins, and of a bin beyond each end that is as wide on a logarithmic axis."""
    below = edges[:1] ** 2 / edges[1:2]
    above = edges[-1:] ** 2 / edges[-2:-1]
    return np.concatenate([below, edges, above])
