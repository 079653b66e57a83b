"""Heat maps of shares: a colour for each cell, and the percentage where it fits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap, PowerNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mismatch_cli.report.plots._panels import RIGHT
from mismatch_cli.report.plots._style import CSS_PX, Style

_KEY = (1e-4, 1e-3, 0.01, 0.1, 0.5)  # the shares whose colours the key shows, and the highest
TITLE_PAD = 20  # points from a panel to its title, with one line for a key between them
_FEWEST_PIXELS = 29  # of a cell that holds a number


class Scale(NamedTuple):
    """From shares to colours: (share / reach) to the power of `gamma`, towards `colour`."""

    colour: str
    reach: float
    gamma: float


def reach_of(*shares: np.ndarray) -> float:
    """The share that gets the full colour: a round one that none exceeds."""
    highest = max(float(np.nanmax(share, initial=0)) for share in shares)
    return min(
        round_ for power in range(-4, 1) for digit in (1, 2, 5) if (round_ := digit * 10.0**power) >= min(highest, 1)
    )


def draw_heat(axes: Axes, style: Style, share_RC: np.ndarray, scale: Scale) -> None:
    """Fill the panel with cells, first row on top; NaN stays empty."""
    rows, columns = share_RC.shape
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    norm, colours = PowerNorm(scale.gamma, 0, scale.reach), _ramp(style, scale.colour)
    axes.pcolormesh(
        np.arange(columns + 1), np.arange(rows + 1), np.ma.masked_invalid(share_RC), cmap=colours, norm=norm,
        edgecolors=style.theme.page, linewidth=0.8,
    )  # fmt: skip
    if axes.get_window_extent().width / axes.figure.dpi / CSS_PX / columns < _FEWEST_PIXELS:
        return
    for (row, column), share in np.ndenumerate(share_RC):
        if np.isfinite(share):
            ink = style.theme.muted if share == 0 else _readable(style, colours(norm(share)))
            axes.text(
                column + 0.5, row + 0.52, percent(share), ha="center", va="center_baseline", color=ink,
                fontsize=style.small,
            )  # fmt: skip


def draw_key(axes: Axes, style: Style, scale: Scale, x: float) -> None:
    """What the colours mean, in one line between title and panel, from `x` in the panel's own coordinates on."""
    colours, reach = _ramp(style, scale.colour), scale.reach
    shares = [0.0, *[share for share in _KEY if 1.5e-3 * reach < share < 0.8 * reach], reach]
    patches = [Patch(color=colours((share / reach) ** scale.gamma), label=f"{100 * share:.3g}") for share in shares]
    patches[-1].set_label(f"{100 * reach:.3g} %")
    axes.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(x, 1.0), ncols=len(patches), borderaxespad=0.3,
        borderpad=0.1, handlelength=1.1, handletextpad=0.35, columnspacing=0.9,
    )  # fmt: skip


def note_silent(figure: Figure, style: Style, count: int) -> None:
    """Say at the upper right how many algorithms block nothing, and are not drawn."""
    if count:
        text = f"{count} block{'s' * (count == 1)} nothing" + (": left out" if style.wide else "")
        width, height = figure.get_size_inches() / CSS_PX
        figure.text(
            (width - RIGHT) / width, (height - 27) / height, text, ha="right", fontsize=style.small,
            color=style.theme.muted,
        )  # fmt: skip


def percent(share: float) -> str:
    """A share in percent, in at most four characters."""
    value = 100 * share
    if value == 0:
        return "0"
    if value < 0.01:
        return "<.01"
    decimals = 2 if value < 0.995 else 1 if value < 9.95 else 0
    return f"{value:.{decimals}f}"


def _ramp(style: Style, colour: str) -> Colormap:
    return LinearSegmentedColormap.from_list("share", [style.theme.grid, colour])


def _readable(style: Style, background: tuple[float, ...]) -> str:
    """Ink or page, whichever stands out more."""

    def luminance(rgb: tuple[float, ...]) -> float:
        channels = np.array(rgb[:3])
        linear = np.where(channels <= 0.03928, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    behind = luminance(background)

    def contrast(colour: str) -> float:
        low, high = sorted((luminance(to_rgb(colour)), behind))
        return (high + 0.05) / (low + 0.05)

    return max((style.theme.ink, style.theme.page), key=contrast)
