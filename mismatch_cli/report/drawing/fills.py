"""Panels filled with colour: many points as one transparent image, and heat maps of shares."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from typing import NamedTuple

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from mismatch_cli.report.drawing.axis import Words
from mismatch_cli.report.drawing.panels import RIGHT, HeatCells, Panel, Sheet, width_of
from mismatch_cli.report.drawing.style import CSS_PX, DARK, LIGHT, Style

_LEVELS = 15  # few alphas compress well, and more would look the same
_FAINTEST = 0.45
_KEY = (1e-4, 1e-3, 0.01, 0.1, 0.5)  # shares in the colour key, besides the highest
HEAT_LEGEND = 24  # pixels above a heat map for its colour key
_TITLE_PAD = 20  # points from a panel to its title, with a line for the key between them
_CELL, _NAME = 17, 15  # pixels of a row of cells and of the name above it
_ROOT = {2: "square-root", 3: "cube-root"}
_GAP = 1  # pixel between two cells


def thin(count: int, style: Style) -> slice:
    """Every k-th token of a sample: as many as the style draws."""
    return slice(None, None, max(1, -(-count // style.dots)))


def draw_points(
    axes: Panel,
    x_N: np.ndarray,
    y_N: np.ndarray,
    colour: str,
    side: float = 0,
    faintest: float = _FAINTEST,
) -> None:
    """Draw points inside the axes' limits, which must be final, as alpha-blended dots at the cost
    of a histogram.

    A point is a square of `side` CSS pixels, by default 1.4 and up to 4 if there are few. A single
    point has the opacity `faintest`; overlapping ones are more opaque.
    """
    columns, rows = _image_size(axes)
    side = side or (
        1.4 if len(x_N) > 30_000 else 2 if len(x_N) > 8_000 else 2.7 if len(x_N) > 1000 else 4
    )
    dot = max(2, round(axes.style.image_scale * side))
    position_N2 = axes.transAxes.inverted().transform(
        axes.transData.transform(np.column_stack([x_N, y_N]))
    )
    inside_N = (
        np.isfinite(position_N2).all(axis=1)
        & (position_N2 >= 0).all(axis=1)
        & (position_N2 <= 1).all(axis=1)
    )
    axes.dots.append((x_N[inside_N], y_N[inside_N]))
    column_N, row_N = (position_N2[inside_N] * [columns - dot, rows - dot]).astype(np.int64).T
    counts = np.bincount(row_N * columns + column_N, minlength=rows * columns).astype(np.int32)
    axes.imshow(
        _shade(_spread(_spread(counts.reshape(rows, columns), dot).T, dot).T, colour, faintest),
        extent=(0, 1, 0, 1),
        transform=axes.transAxes,
        origin="lower",
        aspect="auto",
        interpolation="none",
        zorder=2,
    )


def _image_size(axes: Panel) -> tuple[int, int]:
    """Columns and rows of pixels of an image that fills the panel."""
    box, scale = axes.get_window_extent(), axes.style.image_scale / CSS_PX / axes.figure.dpi
    return max(16, int(box.width * scale)), max(16, int(box.height * scale))


def _spread(counts: np.ndarray, dot: int) -> np.ndarray:
    """Repeat each count in `dot` rows."""
    spread = counts.copy()
    for row in range(1, dot):
        spread[row:] += counts[:-row]
    return spread


def _shade(counts: np.ndarray, colour: str, faintest: float) -> np.ndarray:
    """RGBA, uint8: opacity grows with the logarithm of the number of points."""
    occurs = np.bincount(counts.ravel())  # how often each count occurs
    occurs[0] = 0
    densest = np.searchsorted(np.cumsum(occurs), 0.995 * occurs.sum())
    strength = np.log1p(np.arange(len(occurs))) / np.log1p(max(densest, 8))
    levels = np.ceil(np.clip(strength, 0, 1) * _LEVELS) / _LEVELS
    opacity = faintest + (1 - faintest) * levels
    opacity[0] = 0
    rgba = np.array([to_rgba(colour, alpha) for alpha in opacity])
    return (
        np.round(rgba * 255).astype(np.uint8).view(np.uint32)[counts, 0][..., None].view(np.uint8)
    )


class Scale(NamedTuple):
    """From shares to colours: the opacity of `colour` over the grid colour is a root of share /
    reach.
    """

    colour: str
    reach: float
    root: int

    def strength(self, share: np.ndarray) -> np.ndarray:
        return (share / self.reach) ** (1 / self.root)


def reach_of(*shares: np.ndarray) -> float:
    """The share with the full colour: a round number that none exceeds."""
    highest = max(float(np.nanmax(share, initial=0)) for share in shares)
    return min(
        round_
        for power in range(-4, 1)
        for digit in (1, 2, 5)
        if (round_ := digit * 10.0**power) >= min(highest, 1)
    )


def percent(share: float) -> str:
    """A share in percent, in at most four characters."""
    value = 100 * share
    if value == 0:
        return "0"
    if value < 0.01:
        return "<.01"
    decimals = 2 if value < 0.995 else 1 if value < 9.95 else 0
    return f"{value:.{decimals}f}"


def heat_row(style: Style) -> int:
    """Pixels per row of a heat map, with names beside the cells if wide, above them if narrow."""
    return style.pick(21, _CELL + _NAME)


def middle_of_cell(style: Style) -> float:
    """The middle of a cell, as a fraction of its row from the top."""
    return 1 - 0.48 * (1 - _above(style))


def _above(style: Style) -> float:
    """The fraction of a row above its cells."""
    return style.pick(0.0, _NAME / heat_row(style))


def draw_heat(
    axes: Panel,
    share_RC: np.ndarray,
    scale: Scale,
    title: str,
    names: Sequence[str],
    label: Callable[[float], str] = percent,
    *,
    named: bool = True,
) -> None:
    """Fill the panel with cells, first row on top, under a title and a colour key; NaN stays
    empty. Names are drawn if `named`.
    """
    axes.cells = HeatCells(share_RC, names)
    rows, columns = share_RC.shape
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    _draw_cells(axes, share_RC, scale)
    _write_names(axes, names if named else [""] * rows)
    axes.set_title(title, x=axes.flush, pad=_TITLE_PAD)
    _draw_key(axes, scale)
    words = {place: label(share) for place, share in np.ndenumerate(share_RC) if np.isfinite(share)}
    if axes.box.width / columns < max(
        (width_of(word, axes.style.small) for word in {*words.values()}), default=0
    ):
        return
    theme, turns, written = axes.theme, _turns(scale.colour), defaultdict(list)
    for (row, column), word in words.items():
        share = share_RC[row, column]
        colour = (
            (theme.ink if scale.strength(share) < turns else theme.page) if share else theme.muted
        )
        written[colour].append((column + 0.5, row + middle_of_cell(axes.style), word))
    for colour, placed in written.items():
        axes.add_artist(
            Words(
                placed, ha="center", va="center_baseline", color=colour, fontsize=axes.style.small
            )
        )


def _draw_cells(axes: Panel, share_RC: np.ndarray, scale: Scale) -> None:
    """Draw the cells in two layers, which follow the theme: first all cells in the grid colour."""
    (rows, columns), above = share_RC.shape, _above(axes.style)
    gap = np.array([axes.box.width / columns, axes.box.height / rows]) ** -1 * _GAP / 2
    corners = (
        np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) * (1 - 2 * gap - [0, above]) + gap + [0, above]
    )
    (row_N, column_N), share_N = np.nonzero(np.isfinite(share_RC)), share_RC[np.isfinite(share_RC)]
    cells_N42 = np.column_stack([column_N, row_N])[:, None] + corners
    outline = Path(
        np.pad(cells_N42, ((0, 0), (0, 1), (0, 0))).reshape(-1, 2),
        np.tile([1, 2, 2, 2, 79], len(cells_N42)),
    )
    axes.add_artist(PathPatch(outline, facecolor=axes.theme.grid, linewidth=0))
    opacity_N = np.round(scale.strength(share_N), 2)
    colours = [to_rgba(scale.colour, alpha) for alpha in opacity_N[share_N > 0]]
    axes.add_collection(
        PolyCollection(cells_N42[share_N > 0], facecolors=colours, linewidths=0), autolim=False
    )


def _write_names(axes: Panel, names: Sequence[str]) -> None:
    """Write names beside the rows, or above them."""
    rows, small = len(names), axes.style.small
    axes.set_yticks(np.arange(rows) + 0.5, axes.style.pick(names, [""] * rows), fontsize=small)
    for row, name in enumerate(axes.style.pick((), names)):
        axes.annotate(
            name,
            (0, row),
            xytext=(1, -2),
            textcoords="offset points",
            va="top",
            fontsize=small,
            color=axes.theme.muted,
        )


def _draw_key(axes: Panel, scale: Scale) -> None:
    """The colour key, in one line between title and panel."""
    reach = scale.reach
    shares = np.array(
        [0.0, *[share for share in _KEY if 1.5e-3 * reach < share < 0.8 * reach], reach]
    )
    below = Patch(color=axes.theme.grid, linewidth=0)
    axes.legend(
        handles=[
            (below, Patch(color=scale.colour, alpha=alpha, linewidth=0))
            for alpha in scale.strength(shares)
        ],
        labels=[
            *(f"{100 * share:.3g}" for share in shares[:-1]),
            f"{100 * reach:.3g} %  ({_ROOT[scale.root]} scale)",
        ],
        handler_map={tuple: HandlerTuple(ndivide=1)},
        loc="lower left",
        bbox_to_anchor=(axes.flush, 1.0),
        ncols=len(shares),
        borderaxespad=0.3,
        borderpad=0.1,
        handlelength=1.1,
        handletextpad=0.35,
        columnspacing=0.9,
    )


def note_left_out(figure: Sheet, silent: int, duplicates: int = 0) -> None:
    """Note how many algorithms are not drawn because they block nothing, or the same as another."""
    if silent or duplicates:
        text = f"{silent + duplicates} left out"
        if not duplicates:
            text = f"{silent} block{'s' * (silent == 1)} nothing" + figure.style.pick(
                ": left out", ""
            )
        width, height = figure.get_size_inches() / CSS_PX
        figure.text(
            (width - RIGHT) / width,
            (height - 27) / height,
            text,
            ha="right",
            fontsize=figure.style.small,
            color=figure.theme.muted,
        )


@cache
def _turns(colour: str) -> float:
    """The opacity of a colour above which the page colour is more readable on it than ink, in
    the worse theme.
    """
    name = next(name for name, light in asdict(LIGHT).items() if light == colour)
    opacity_N = np.linspace(0, 1, 101)
    contrasts = []
    for theme in (LIGHT, DARK):
        cell_N3 = np.outer(1 - opacity_N, to_rgb(theme.grid)) + np.outer(
            opacity_N, to_rgb(getattr(theme, name))
        )
        contrasts.append(
            [_contrast_N(np.array(to_rgb(text)), cell_N3) for text in (theme.ink, theme.page)]
        )
    ink_N, page_N = np.min(contrasts, axis=0)
    return float(opacity_N[np.argmax(page_N > ink_N)])


def _contrast_N(rgb: np.ndarray, background_N3: np.ndarray) -> np.ndarray:
    """The contrast ratio of WCAG 2."""

    def luminance(rgb: np.ndarray) -> np.ndarray:
        linear = np.where(rgb <= 0.03928, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return np.asarray(linear @ [0.2126, 0.7152, 0.0722])

    both = luminance(rgb) + 0.05, luminance(background_N3) + 0.05
    return np.asarray(np.maximum(*both) / np.minimum(*both))
