"""Many points as one transparent picture: what alpha-blended dots look like, at the price of a histogram."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from mismatch_cli.report.plots._style import CSS_PX, Style

_LEVELS = 24  # few different alphas compress well, and more cannot be told apart
_FAINTEST, _STRONGEST = 0.45, 1.0


def thin(count: int, style: Style) -> slice:
    """Every k-th token of a sample, so that no more are drawn than the layout can show."""
    return slice(None, None, max(1, -(-count // style.layout.dots)))


def draw_points(axes: Axes, style: Style, x_N: np.ndarray, y_N: np.ndarray, colour: str) -> None:
    """Draw points inside the axes' limits, which must be final; where many overlap the picture is more opaque.

    A point is a square of 1.4 CSS pixels, and larger where there are few.
    """
    columns, rows = image_size(axes, style)
    dot = max(2, round(style.layout.image_scale * (1.4 if len(x_N) > 30_000 else 2 if len(x_N) > 8_000 else 2.7)))
    position_N2 = axes.transAxes.inverted().transform(axes.transData.transform(np.column_stack([x_N, y_N])))
    inside_N = np.isfinite(position_N2).all(axis=1) & (position_N2 >= 0).all(axis=1) & (position_N2 <= 1).all(axis=1)
    column_N, row_N = (position_N2[inside_N] * [columns - dot, rows - dot]).astype(np.int64).T
    counts = np.bincount(row_N * columns + column_N, minlength=rows * columns).reshape(rows, columns)
    lay_image(axes, _shade(_spread(_spread(counts, dot).T, dot).T, colour), zorder=2)


def lay_image(axes: Axes, image: np.ndarray, zorder: float) -> None:
    """Fill the panel with a picture, its first row at the bottom."""
    axes.imshow(
        image, extent=(0, 1, 0, 1), transform=axes.transAxes, origin="lower", aspect="auto", interpolation="none",
        zorder=zorder,
    )  # fmt: skip


def _spread(counts: np.ndarray, dot: int) -> np.ndarray:
    """Each count stands in `dot` rows."""
    spread = counts.copy()
    for row in range(1, dot):
        spread[row:] += counts[:-row]
    return spread


def image_size(axes: Axes, style: Style) -> tuple[int, int]:
    """Columns and rows of pixels of a picture that fills the panel."""
    box, scale = axes.get_window_extent(), style.layout.image_scale / CSS_PX / axes.figure.dpi
    return max(16, int(box.width * scale)), max(16, int(box.height * scale))


def _shade(counts: np.ndarray, colour: str) -> np.ndarray:
    """RGBA, uint8: opacity grows with the logarithm of the number of points."""
    densest = np.percentile(counts[counts > 0], 99.5) if counts.any() else 1
    strength = np.log1p(counts) / np.log1p(max(densest, 8))
    levels = np.ceil(np.clip(strength, 0, 1) * _LEVELS) / _LEVELS
    alpha = np.where(counts > 0, _FAINTEST + (_STRONGEST - _FAINTEST) * levels, 0)
    image = np.empty((*counts.shape, 4), dtype=np.uint8)
    image[..., :3] = np.round(np.array(to_rgb(colour)) * 255)
    image[..., 3] = np.round(alpha * 255)
    return image
