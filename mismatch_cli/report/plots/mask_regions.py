"""Blocked regions of two algorithms in the plane of π and μ, with the trace's tokens (DPPO
paper, figure 1).
"""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
from contourpy import contour_generator
from matplotlib import rcParams
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from mismatch_cli.base import numbers
from mismatch_cli.report.drawing.fills import draw_points, thin
from mismatch_cli.report.drawing.panels import LEGEND, Panel, Sheet, short_names, width_of
from mismatch_cli.report.drawing.scales import HIGHEST, lowest_of, spread_probability
from mismatch_cli.studies.clipping_result import SIGNS

if TYPE_CHECKING:
    from collections.abc import Callable

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

_NODES = 128  # of the grid, along each axis
_HALVINGS = 8  # bisections of the step between two nodes
_LABEL = 18  # pixels for the label of the vertical axis


def needs(data: ClippingPlotData) -> bool:
    return bool(data.compared) and bool(np.isfinite(data.logp_2N[0]).any())


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    panels = figure.panels(2 * len(data.compared), height=(400, 270), legend=LEGEND, label=_LABEL)
    lowest = lowest_of(data.logp_2N.ravel())
    cells = [(sign, algorithm) for sign in SIGNS for algorithm in data.compared]
    for axes, (sign, algorithm) in zip(panels, cells, strict=True):
        spread_probability(axes, lowest, "xy")
        region = _draw_region(axes, data, algorithm, sign, lowest)
        axes.plot(
            [lowest, HIGHEST], [lowest, HIGHEST], color=axes.theme.muted, linewidth=0.8, zorder=3
        )
        _draw_tokens(axes, data, algorithm, sign)
        _write(axes, data, algorithm, sign, region)


def alternative(data: ClippingPlotData) -> str:
    """How many tokens each panel shows, and the share that is blocked."""
    parts = [_of_panel(data, algorithm, sign) for sign in SIGNS for algorithm in data.compared]
    return (
        f"{numbers.things(len(parts), 'panel')} of points, with the blocked region shaded. "
        "Horizontal: probability when sampled. Vertical: trainer probability π. Both are stretched "
        f"near 0 and 1. {'; '.join(parts)}."
    )


def _of_panel(data: ClippingPlotData, algorithm: Algorithm, sign: str) -> str:
    tokens = numbers.count(int(data.of_sign(sign).sum()))
    blocked = _blocked_share(data, algorithm, sign)
    return f"{data.result.when(sign)}, {algorithm.name}: {tokens} tokens, {blocked} blocked"


def _draw_region(
    axes: Panel, data: ClippingPlotData, algorithm: Algorithm, sign: str, lowest: float
) -> bool:
    """Shade where the masks block; returns whether there is such a region."""
    region = _region(data.blocked_at, algorithm, sign, lowest)
    if region is not None:
        axes.add_artist(
            PathPatch(
                region,
                transform=axes.transAxes,
                facecolor=axes.theme.orange,
                alpha=0.17,
                linewidth=0,
                zorder=1.5,
            )
        )
    return region is not None


@lru_cache(maxsize=8)
def _region(
    blocked_at: Callable[..., Any], algorithm: Algorithm, sign: str, lowest: float
) -> Path | None:
    """The outline of what the masks block, in axes coordinates: found on a grid, then refined to
    the pixel.

    Each point of the outline is between a blocked node of the grid and one that is kept; bisection
    moves it to where the decision changes.
    """

    def blocked(node_N2: np.ndarray) -> Any:
        low, high = (np.log(end / (1 - end)) for end in (lowest, HIGHEST))
        logp_anchor_N, logp_N = -np.log1p(np.exp(-(low + (high - low) * node_N2.T / (_NODES - 1))))
        return blocked_at(algorithm, logp_anchor_N, logp_N, sign)

    grid_N2 = np.stack(np.meshgrid(np.arange(_NODES), np.arange(_NODES)), axis=-1).reshape(-1, 2)
    blocked_N = blocked(grid_N2)
    if blocked_N is None:
        return None
    outlines: Any = contour_generator(
        z=blocked_N.reshape(_NODES, _NODES).astype(float), fill_type="OuterOffset"
    )
    rings = []
    for point_N2, offset_R1 in zip(*outlines.filled(0.5, 1.5), strict=True):
        one_N2, other_N2 = np.floor(point_N2), np.ceil(point_N2)
        as_one_N = blocked(one_N2)
        for _ in range(_HALVINGS):
            middle_N2 = (one_N2 + other_N2) / 2
            alike_N = (blocked(middle_N2) == as_one_N)[:, None]
            one_N2, other_N2 = (
                np.where(alike_N, middle_N2, one_N2),
                np.where(alike_N, other_N2, middle_N2),
            )
        rings += [_simple(ring_N2 / (_NODES - 1)) for ring_N2 in np.split(one_N2, offset_R1[1:-1])]
    return Path.make_compound_path(*rings) if rings else Path(np.zeros((0, 2)))


def _simple(ring_N2: np.ndarray) -> Path:
    """A closed outline without collinear points, to a ten thousandth of the panel."""
    kept: Any = Path(1000 * ring_N2).cleaned(simplify=True).vertices
    return Path(kept[:-1] / 1000, closed=True)  # the last vertex only closes the path


def _draw_tokens(axes: Panel, data: ClippingPlotData, algorithm: Algorithm, sign: str) -> None:
    chosen_N, blocked_N = data.of_sign(sign), data.blocked(algorithm)
    x_N, y_N = (np.clip(np.exp(logp_N), *axes.get_xlim()) for logp_N in data.coordinates(algorithm))
    for is_blocked, colour in ((False, axes.theme.blue), (True, axes.theme.orange)):
        shown = np.flatnonzero(chosen_N & (blocked_N == is_blocked))[
            thin(int(chosen_N.sum()), axes.style)
        ]
        draw_points(
            axes, x_N[shown], y_N[shown], colour, *((2.7, 0.7) if is_blocked else (1.4, 0.3))
        )


def _write(
    axes: Panel, data: ClippingPlotData, algorithm: Algorithm, sign: str, region: bool
) -> None:
    theme, style = axes.theme, axes.style
    dots: dict[str, Any] = {
        "linestyle": "none",
        "markeredgewidth": 0,
        "marker": "o",
        "markersize": 5.0,
    }
    axes.plot([], [], color=theme.blue, label="kept", **dots)
    axes.plot([], [], color=theme.orange, label=_blocked_label(data, algorithm, sign), **dots)
    if region:
        area = {"marker": "s", "markersize": 10.0, "alpha": 0.17}
        axes.plot(
            [], [], color=theme.orange, label=style.pick("the mask blocks", "mask"), **dots | area
        )
    if note := _left_out(algorithm, region):
        axes.text(
            0.03,
            0.97,
            note,
            transform=axes.transAxes,
            va="top",
            color=theme.muted,
            fontsize=style.small,
        )
    axes.headline(_title(axes, data.result.when(sign), algorithm), is_axis=False)
    recomputed = algorithm.limiting.anchor == "recomputed"
    axes.set_xlabel("recomputed probability π′" if recomputed else "rollout probability μ")
    axes.set_ylabel("trainer probability π")


def _title(axes: Panel, when: str, algorithm: Algorithm) -> str:
    """The sign, the algorithm's name, and its thresholds if there is room for them."""
    points, name = rcParams["axes.titlesize"], algorithm.name.partition(":")[0]
    settings = "  " + ", ".join(mask.settings for mask in algorithm.limiting.masks if mask.settings)
    room = axes.headline_room - width_of(f"{when}:  ", points, bold=True)
    rooms = (inf, room - width_of(settings, points, bold=True), room)
    whole, with_settings, bare = (
        short_names([name], width, points, bold=True)[0] for width in rooms
    )
    return f"{when}:  {whole}{settings}" if with_settings == whole else f"{when}:  {bare}"


def _left_out(algorithm: Algorithm, region: bool) -> str:
    """What the shaded region does not show."""
    if not algorithm.masks:
        return "no mask: nothing is blocked"
    if not region:
        return "no region: the mask needs more\nthan these two probabilities"
    return "" if algorithm.limiting == algorithm else "its mask on the engine gap\nis not shaded"


def _blocked_label(data: ClippingPlotData, algorithm: Algorithm, sign: str) -> str:
    blocked = _blocked_share(data, algorithm, sign)
    return "blocked" if blocked == numbers.MISSING else f"blocked, {blocked}"


def _blocked_share(data: ClippingPlotData, algorithm: Algorithm, sign: str) -> str:
    """The share over the whole trace, a dash if it is missing."""
    rows = {row.name: row for row in data.result.algorithms}
    return numbers.share(rows[algorithm.name].blocked.of(sign).value)[0]
