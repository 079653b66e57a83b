"""Two algorithms as regions in the plane of both probabilities, with the trace's tokens (DPPO paper, figure 1)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure

from mismatch_cli.algorithms.algorithm import Algorithm, Mask, keep_T
from mismatch_cli.numbers import share
from mismatch_cli.policies import Policies
from mismatch_cli.report.plots._panels import LEGEND, legend_above, panels, short_names, title
from mismatch_cli.report.plots._points import draw_points, image_size, lay_image, thin
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
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

_SIGNS = {">": 1.0, "<": -1.0}
_TICKS = (1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
_LABELS = ("10⁻⁵", "10⁻⁴", "0.001", "0.01", "0.1", "0.5", "0.9", "0.99", "0.999")
_CROWDED = (1e-4, 0.01, 0.999)  # have no room for their label on a narrow axis
_HIGHEST = 0.9995
_AXES = {"rollout": "rollout probability μ", "recomputed": "recomputed probability π′"}


def needs(data: ClippingPlotData) -> bool:
    return bool(data.compared) and bool(np.isfinite(data.logp_rollout_N).any())


def draw(figure: Figure, data: ClippingPlotData, style: Style) -> None:
    compared = {algorithm.name: (algorithm, place) for place, algorithm in enumerate(data.compared)}
    axes = panels(figure, style, 2 * len(compared), height=400 if style.wide else 270, legend=LEGEND)
    lowest = _lowest(data)
    cells = [(sign, *pair) for sign in _SIGNS for pair in compared.values()]
    for panel, (sign, algorithm, place) in zip(axes, cells, strict=True):
        _draw_panel(panel, data, algorithm, place, sign, lowest, style)


def _lowest(data: ClippingPlotData) -> float:
    """Where the axes begin: at a power of ten below nearly all tokens."""
    logp_N = np.concatenate([data.logp_rollout_N, data.logp_trainer_N])
    exponent = np.floor(np.quantile(logp_N[np.isfinite(logp_N)], 2e-3) / np.log(10))
    return float(10.0 ** np.clip(exponent, -5, -3))


def _draw_panel(
    axes: Axes, data: ClippingPlotData, algorithm: Algorithm, place: int, sign: str, lowest: float, style: Style
) -> None:
    _set_scales(axes, lowest, style)
    region = _draw_region(axes, algorithm, _SIGNS[sign], style)
    axes.plot([lowest, _HIGHEST], [lowest, _HIGHEST], color=style.theme.muted, linewidth=0.8, zorder=3)
    chosen_N, blocked_N = _of_sign(data, sign), _is_blocked(data, algorithm, place, sign)
    x_N, y_N = (np.clip(np.exp(logp_N), lowest, _HIGHEST) for logp_N in _coordinates(data, algorithm))
    for blocked, colour in ((False, style.theme.blue), (True, style.theme.orange)):
        shown = np.flatnonzero(chosen_N & (blocked_N == blocked))[thin(int(chosen_N.sum()), style)]
        draw_points(axes, style, x_N[shown], y_N[shown], colour)
    _write(axes, data, algorithm, sign, region, style)


def _set_scales(axes: Axes, lowest: float, style: Style) -> None:
    for which in ("x", "y"):
        getattr(axes, f"set_{which}scale")("logit")
        getattr(axes, f"set_{which}lim")(lowest, _HIGHEST)
        ticks = [(tick, label) for tick, label in zip(_TICKS, _LABELS, strict=True) if tick >= lowest]
        if not style.wide and which == "x":
            ticks = [(tick, label) for tick, label in ticks if tick == lowest or tick not in _CROWDED]
        getattr(axes, f"set_{which}ticks")(*zip(*ticks, strict=True))
    axes.minorticks_off()


def _draw_region(axes: Axes, algorithm: Algorithm, sign: float, style: Style) -> bool:
    """Shade where the masks block, on a grid as fine as the picture; whether there is such a region to ask for."""
    columns, rows = image_size(axes, style)
    place_x, place_y = np.meshgrid((np.arange(columns) + 0.5) / columns, (np.arange(rows) + 0.5) / rows)
    grid = axes.transAxes.transform(np.column_stack([place_x.ravel(), place_y.ravel()]))
    logp = np.log(axes.transData.inverted().transform(grid))
    blocked = blocked_T(algorithm, logp[:, 0].copy(), logp[:, 1].copy(), sign)
    if blocked is None:
        return False
    colours = to_rgba_array([style.theme.orange, style.theme.orange], [0.0, 0.17])
    image = np.round(255 * colours[blocked.astype(int)]).astype(np.uint8).reshape(rows, columns, 4)
    lay_image(axes, image, zorder=1.5)
    return True


def _of_sign(data: ClippingPlotData, sign: str) -> np.ndarray:
    if data.advantage_N is None:
        return np.ones(len(data.logp_rollout_N), dtype=bool)
    return data.advantage_N > 0 if sign == ">" else data.advantage_N < 0


def _is_blocked(data: ClippingPlotData, algorithm: Algorithm, place: int, sign: str) -> np.ndarray:
    """As the sample says; without advantages the sign is only supposed, and the masks are asked again for each."""
    asked_N = None
    if data.advantage_N is None:
        asked_N = blocked_T(algorithm, *_coordinates(data, algorithm), _SIGNS[sign])
    recorded_N: np.ndarray = data.blocked_NA[:, place]
    return recorded_N if asked_N is None else asked_N


def _coordinates(data: ClippingPlotData, algorithm: Algorithm) -> tuple[np.ndarray, np.ndarray]:
    """log of the anchor's probability, and log π."""
    recomputed = anchor_of(algorithm) == "recomputed" and data.logp_recomputed_N is not None
    anchor_N = data.logp_recomputed_N if recomputed else data.logp_rollout_N
    assert anchor_N is not None
    return anchor_N.astype(np.float64), data.logp_trainer_N.astype(np.float64)


def _write(axes: Axes, data: ClippingPlotData, algorithm: Algorithm, sign: str, region: bool, style: Style) -> None:
    theme = style.theme
    entries = [
        ("kept", theme.blue, "o", 5.0, 1.0),
        (_blocked_label(data, algorithm, sign), theme.orange, "o", 5.0, 1.0),
    ]
    if region:
        entries.append(("the mask blocks" if style.wide else "mask", theme.orange, "s", 10.0, 0.3))
    for label, colour, marker, size, alpha in entries:
        look: dict[str, Any] = {"marker": marker, "markersize": size, "alpha": alpha, "markeredgewidth": 0}
        axes.plot([], [], linestyle="none", color=colour, label=label, **look)
    if note := _left_out(algorithm, region):
        axes.text(0.03, 0.97, note, transform=axes.transAxes, va="top", color=theme.muted, fontsize=style.small)
    legend_above(axes, style)
    room = 390 if style.wide else 240
    (name,) = short_names([algorithm.name], room, rcParams["axes.titlesize"], bold=True)
    title(axes, f"{data.when(sign)}:  {name}", style, LEGEND)
    axes.set_xlabel(f"→ {_AXES[anchor_of(algorithm)]}" + ("      ↑ trainer probability π" if style.wide else "    ↑ π"))


def _left_out(algorithm: Algorithm, region: bool) -> str:
    """What the shaded region does not show."""
    if not algorithm.masks:
        return "no mask: nothing is blocked"
    if not region:
        return "no region: the mask needs more\nthan these two probabilities"
    return "" if limiting(algorithm) == algorithm.masks else "its mask on the engine gap\nis not shaded"


def _blocked_label(data: ClippingPlotData, algorithm: Algorithm, sign: str) -> str:
    key = "positive" if sign == ">" else "negative"
    found = [row["blocked"][key]["value"] for row in data.rows if row["name"] == algorithm.name]
    return "blocked" if not found or found[0] is None else f"blocked, {share(found[0])[0]}"


def limiting(algorithm: Algorithm) -> tuple[Mask, ...]:
    """The masks that limit the trainer; those on the engine gap say nothing about π."""
    return tuple(mask for mask in algorithm.masks if mask.ratio.current == "trainer")


def anchor_of(algorithm: Algorithm) -> str:
    """The policy from which the masks measure: the horizontal axis of the plane."""
    anchors = {mask.ratio.anchor for mask in limiting(algorithm)}
    return anchors.pop() if len(anchors) == 1 else "rollout"


def blocked_T(algorithm: Algorithm, logp_anchor_T: np.ndarray, logp_T: np.ndarray, sign: float) -> np.ndarray | None:
    """Whether the limiting masks block a token with these log-probabilities (nats) and an advantage of that sign.

    None where there is no such mask, or where two probabilities do not decide: top-K masks need more columns, and
    a mask on whole responses answers otherwise when the same tokens form one response instead of many.
    """
    masks = limiting(algorithm)
    if not masks or len({mask.ratio.anchor for mask in masks}) > 1:
        return None
    anchor_T, current_T = torch.from_numpy(logp_anchor_T), torch.from_numpy(logp_T)
    advantage_T = torch.full_like(anchor_T, sign)
    answers = []
    for offset_S1 in (torch.arange(len(anchor_T) + 1), torch.tensor([0, len(anchor_T)])):
        policies = Policies(anchor_T, current_T, anchor_T, offset_S1)
        try:
            answers.append(~keep_T(replace(algorithm, masks=masks), policies, advantage_T))
        except Exception:  # a user's own mask can ask for anything that a bare pair of probabilities does not have
            return None
    return answers[0].numpy() if torch.equal(*answers) else None
