"""Blocked regions of two algorithms in the plane of π and μ, with the trace's tokens (DPPO
paper, figure 1).
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.base import numbers
from mismatch_cli.report.drawing.marks import draw_points, thin
from mismatch_cli.report.drawing.panels import (
    HIGHEST,
    LEFT,
    LEGEND,
    Panel,
    Sheet,
    lowest_of,
    short_names,
)
from mismatch_cli.studies.clipping_result import SIGNS

if TYPE_CHECKING:
    from mismatch_cli.rules.algorithms.algorithm import Algorithm
    from mismatch_cli.studies.clipping import ClippingPlotData

STUDY = "clipping"
SECTION = "What each algorithm blocks"
PLACE = 1
TITLE = "Where the masks block"
DATA = "two algorithms to compare, and tokens scored by both sides"
CAPTION = (
    "Each dot is a token (at most 10,000, chosen at random) at its probability when sampled "
    "(horizontal) and now (vertical). Both axes are stretched towards 0 and 1; dots beyond them "
    "are at the edge. The mask blocks the shaded region. On the diagonal nothing has moved: a "
    "ratio clip keeps only a thin strip around it at low μ; a limit on total variation keeps "
    "improbable tokens and blocks those that move much probability."
)

_NODES = 480  # of the grid along each axis, one for each pixel or so
_LABEL = 18  # pixels for the label of the vertical axis


def needs(data: ClippingPlotData) -> bool:
    return bool(data.compared) and bool(np.isfinite(data.logp_2N[0]).any())


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    cells = list(product(SIGNS, data.compared))
    panels = figure.panels(len(cells), height=(400, 270), legend=LEGEND, left=LEFT + _LABEL)
    lowest = lowest_of(data.logp_2N.ravel())
    for axes, (sign, algorithm) in zip(panels, cells, strict=True):
        axes.spread_probability(lowest, "xy")
        ends = [lowest, HIGHEST]
        axes.plot(ends, ends, color=axes.theme.muted, linewidth=0.8, zorder=3)
        _draw_tokens(axes, data, algorithm, sign)
        _draw_region(axes, data, algorithm, sign, lowest)
        _label_panel(axes, data, algorithm, sign)


def alternative(data: ClippingPlotData) -> str:
    """How many tokens each panel shows, and the share that is blocked."""
    panels = [_describe_panel(data, *cell) for cell in product(SIGNS, data.compared)]
    return (
        f"{numbers.things(len(panels), 'panel')} of points, with the blocked region shaded. "
        "Horizontal: probability when sampled. Vertical: trainer probability π. Both are stretched "
        f"near 0 and 1. {'; '.join(panels)}."
    )


def _describe_panel(data: ClippingPlotData, sign: str, algorithm: Algorithm) -> str:
    tokens = numbers.count(int(data.of_sign(sign).sum()))
    blocked = _blocked_share(data, algorithm, sign)
    return f"{data.result.when(sign)}, {algorithm.name}: {tokens} tokens, {blocked} blocked"


def _draw_tokens(axes: Panel, data: ClippingPlotData, algorithm: Algorithm, sign: str) -> None:
    """Kept and blocked tokens; those beyond the axes are at their edge."""
    low, high = axes.get_xlim()
    x_N, y_N = (np.clip(np.exp(logp_N), low, high) for logp_N in data.coordinates(algorithm))
    of_sign_N = data.of_sign(sign)
    blocked_N = data.blocked(algorithm)
    # Both are thinned alike, or the few blocked tokens would look like many.
    every = thin(int(of_sign_N.sum()))
    passing = np.flatnonzero(of_sign_N & ~blocked_N)[every]
    blocked = np.flatnonzero(of_sign_N & blocked_N)[every]
    share = _blocked_share(data, algorithm, sign)
    label = "blocked" if share == numbers.MISSING else f"blocked, {share}"
    theme = axes.theme
    draw_points(axes, x_N[passing], y_N[passing], theme.blue, label="kept", s=2, alpha=0.3)
    draw_points(axes, x_N[blocked], y_N[blocked], theme.orange, label=label, s=7, alpha=0.7)


def _draw_region(
    axes: Panel, data: ClippingPlotData, algorithm: Algorithm, sign: str, lowest: float
) -> None:
    """Shade where the masks block, and write what the shade does not show."""
    probability_N = _grid(lowest)
    # The mask itself decides at every node, so no formula of its boundary can be wrong here.
    logp_anchor_NN, logp_NN = np.log(np.meshgrid(probability_N, probability_N))
    blocked: Any = data.blocked_at(algorithm, logp_anchor_NN.ravel(), logp_NN.ravel(), sign)
    if blocked is not None and blocked.any():
        blocked_NN = blocked.reshape(logp_NN.shape).astype(float)
        shade: dict[str, Any] = {"colors": [axes.theme.orange], "alpha": 0.17, "zorder": 1.5}
        axes.contourf(probability_N, probability_N, blocked_NN, levels=[0.5, 1.5], **shade)
    place: dict[str, Any] = {"transform": axes.transAxes, "va": "top", "color": axes.theme.muted}
    note = _region_note(algorithm, blocked is not None)
    axes.text(0.03, 0.97, note, fontsize=axes.style.small, **place)


def _grid(lowest: float) -> np.ndarray:
    """Probabilities at equal distances on the stretched axis."""
    low, high = np.log(lowest / (1 - lowest)), np.log(HIGHEST / (1 - HIGHEST))
    log_odds_N = np.linspace(float(low), float(high), _NODES)
    return np.asarray(1 / (1 + np.exp(-log_odds_N)))


def _label_panel(axes: Panel, data: ClippingPlotData, algorithm: Algorithm, sign: str) -> None:
    title = _title(axes, data.result.when(sign), algorithm)
    axes.headline(title, is_axis=False, markerscale=2.5, handlelength=1.0)
    recomputed = algorithm.limiting.anchor == "recomputed"
    axes.set_xlabel("recomputed probability π′" if recomputed else "rollout probability μ")
    axes.set_ylabel("trainer probability π")


def _title(axes: Panel, when: str, algorithm: Algorithm) -> str:
    """The sign, the algorithm's name, and its thresholds if there is room for them."""
    name = algorithm.name.partition(":")[0]
    (short,) = short_names([name], axes.title_letters - len(f"{when}:  "))
    settings = ", ".join(mask.settings for mask in algorithm.limiting.masks if mask.settings)
    title = f"{when}:  {short}"
    fits = len(f"{title}  {settings}") <= axes.title_letters
    return f"{title}  {settings}" if fits else title


def _region_note(algorithm: Algorithm, has_region: bool) -> str:
    """What the shaded region does not show."""
    if not algorithm.masks:
        return "no mask: nothing is blocked"
    if not has_region:
        return "no region: the mask needs more\nthan these two probabilities"
    if algorithm.limiting != algorithm:
        return "its mask on the engine gap\nis not shaded"
    return ""


def _blocked_share(data: ClippingPlotData, algorithm: Algorithm, sign: str) -> str:
    """The share over the whole trace, a dash if it is missing."""
    row_of = {row.name: row for row in data.result.algorithms}
    return numbers.share(row_of[algorithm.name].blocked.of(sign).value)[0]
