"""Two algorithms as regions in the plane of both probabilities, with the trace's tokens (DPPO paper, figure 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rcParams
from matplotlib.colors import to_rgba_array

from mismatch_cli.numbers import share
from mismatch_cli.report.plots._fills import draw_points, image_size, lay_image, thin
from mismatch_cli.report.plots._panels import LEGEND, Panel, Sheet, short_names

if TYPE_CHECKING:
    from mismatch_cli.algorithms.algorithm import Algorithm
    from mismatch_cli.studies.clipping import ClippingPlotData

STUDY = "clipping"
SECTION = "What each algorithm throws away"
PLACE = 1
TITLE = "Where the masks block"
CAPTION = (
    "Each dot is a token (of at most 10,000, drawn at random) at its probability when it was sampled (across) and now "
    "(up); both axes are stretched "
    "towards 0 and 1, and dots beyond them stand at their edge. In the shaded region the mask blocks. On the diagonal "
    "nothing has moved: a ratio clip leaves only a thin strip beside it at low μ; a limit on the total variation "
    "leaves improbable tokens alone, and stops those that move much probability."
)

_TICKS = (1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
_LABELS = ("10⁻⁵", "10⁻⁴", "0.001", "0.01", "0.1", "0.5", "0.9", "0.99", "0.999")
_CROWDED = (1e-4, 0.01, 0.999)  # have no room for their label on a narrow axis
_HIGHEST = 0.9995


def needs(data: ClippingPlotData) -> bool:
    return bool(data.compared) and bool(np.isfinite(data.sample["logp_rollout"]).any())


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    panels = figure.panels(2 * len(data.compared), height=(400, 270), legend=LEGEND)
    lowest = _lowest(data)
    cells = [(sign, algorithm) for sign in ("><") for algorithm in data.compared]
    for axes, (sign, algorithm) in zip(panels, cells, strict=True):
        _set_scales(axes, lowest)
        region = _draw_region(axes, data, algorithm, sign)
        axes.plot([lowest, _HIGHEST], [lowest, _HIGHEST], color=axes.theme.muted, linewidth=0.8, zorder=3)
        _draw_tokens(axes, data, algorithm, sign)
        _write(axes, data, algorithm, sign, region)


def _lowest(data: ClippingPlotData) -> float:
    """Where the axes begin: at a power of ten below nearly all tokens."""
    logp_N = np.concatenate([data.sample["logp_rollout"], data.sample["logp_trainer"]])
    exponent = np.floor(np.quantile(logp_N[np.isfinite(logp_N)], 2e-3) / np.log(10))
    return float(10.0 ** np.clip(exponent, -5, -3))


def _set_scales(axes: Panel, lowest: float) -> None:
    ticks = {tick: label for tick, label in zip(_TICKS, _LABELS, strict=True) if tick >= lowest}
    crowded = axes.style.pick((), _CROWDED)
    axes.set(xscale="logit", yscale="logit", xlim=(lowest, _HIGHEST), ylim=(lowest, _HIGHEST))
    axes.set_yticks(list(ticks), ticks.values())
    ticks = {tick: label for tick, label in ticks.items() if tick == lowest or tick not in crowded}
    axes.set_xticks(list(ticks), ticks.values())
    axes.minorticks_off()


def _draw_region(axes: Panel, data: ClippingPlotData, algorithm: Algorithm, sign: str) -> bool:
    """Shade where the masks block, on a grid as fine as the picture; whether there is such a region to ask for."""
    columns, rows = image_size(axes)
    place_x, place_y = np.meshgrid((np.arange(columns) + 0.5) / columns, (np.arange(rows) + 0.5) / rows)
    grid = axes.transAxes.transform(np.column_stack([place_x.ravel(), place_y.ravel()]))
    logp_anchor_N, logp_N = np.log(axes.transData.inverted().transform(grid)).T
    blocked_N = data.blocked_at(algorithm, logp_anchor_N, logp_N, sign)
    if blocked_N is None:
        return False
    colours = to_rgba_array([axes.theme.orange, axes.theme.orange], [0.0, 0.17])
    image = np.round(255 * colours[blocked_N.astype(int)]).astype(np.uint8).reshape(rows, columns, 4)
    lay_image(axes, image, zorder=1.5)
    return True


def _draw_tokens(axes: Panel, data: ClippingPlotData, algorithm: Algorithm, sign: str) -> None:
    chosen_N, blocked_N = data.of_sign(sign), data.blocked(algorithm)
    x_N, y_N = (np.clip(np.exp(logp_N), *axes.get_xlim()) for logp_N in data.coordinates(algorithm))
    for is_blocked, colour in ((False, axes.theme.blue), (True, axes.theme.orange)):
        shown = np.flatnonzero(chosen_N & (blocked_N == is_blocked))[thin(int(chosen_N.sum()), axes.style)]
        draw_points(axes, x_N[shown], y_N[shown], colour)


def _write(axes: Panel, data: ClippingPlotData, algorithm: Algorithm, sign: str, region: bool) -> None:
    theme, style = axes.theme, axes.style
    dots: dict[str, Any] = {"linestyle": "none", "markeredgewidth": 0, "marker": "o", "markersize": 5.0}
    axes.plot([], [], color=theme.blue, label="kept", **dots)
    axes.plot([], [], color=theme.orange, label=_blocked_label(data, algorithm, sign), **dots)
    if region:
        area = {"marker": "s", "markersize": 10.0, "alpha": 0.3}
        axes.plot([], [], color=theme.orange, label=style.pick("the mask blocks", "mask"), **dots | area)
    if note := _left_out(algorithm, region):
        axes.text(0.03, 0.97, note, transform=axes.transAxes, va="top", color=theme.muted, fontsize=style.small)
    (name,) = short_names([algorithm.name], style.pick(390, 240), rcParams["axes.titlesize"], bold=True)
    axes.headline(f"{data.when(sign)}:  {name}")
    anchor = "recomputed probability π′" if algorithm.limiting.anchor == "recomputed" else "rollout probability μ"
    axes.set_xlabel(f"→ {anchor}" + style.pick("      ↑ trainer probability π", "    ↑ π"))


def _left_out(algorithm: Algorithm, region: bool) -> str:
    """What the shaded region does not show."""
    if not algorithm.masks:
        return "no mask: nothing is blocked"
    if not region:
        return "no region: the mask needs more\nthan these two probabilities"
    return "" if algorithm.limiting == algorithm else "its mask on the engine gap\nis not shaded"


def _blocked_label(data: ClippingPlotData, algorithm: Algorithm, sign: str) -> str:
    key = "positive" if sign == ">" else "negative"
    found = [row["blocked"][key]["value"] for row in data.rows if row["name"] == algorithm.name]
    return "blocked" if not found or found[0] is None else f"blocked, {share(found[0])[0]}"
