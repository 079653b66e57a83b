"""Many points as one transparent picture: what alpha-blended dots look like, at the price of a histogram."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEVELS = 24  # few different alphas compress well, and more cannot be told apart
_FAINTEST, _STRONGEST = 0.45, 1.0


def thin(count: int, style: Style) -> slice:
    """Every k-th token of a sample, so that no more are drawn than the layout can show."""
    return slice(None, None, max(1, -(-count // style.layout.dots)))


def draw_points(axes: Axes, style: Style, x_N: np.ndarray, y_N: np.ndarray, colour: str) -> None:
    """Draw points inside the axes' limits, which must be final; where many overlap the picture is more opaque.

    A point covers 2 × 2 pixels of the rasterised layer.
    """
    columns, rows = _size(axes, style)
    position_N2 = axes.transAxes.inverted().transform(axes.transData.transform(np.column_stack([x_N, y_N])))
    inside_N = np.isfinite(position_N2).all(axis=1) & (position_N2 >= 0).all(axis=1) & (position_N2 <= 1).all(axis=1)
    column_N, row_N = (position_N2[inside_N] * [columns - 2, rows - 2]).astype(np.int64).T
    counts = np.bincount(row_N * columns + column_N, minlength=rows * columns).reshape(rows, columns)
    counts[:, 1:] += counts[:, :-1].copy()
    counts[1:] += counts[:-1].copy()
    axes.imshow(
        _shade(counts, colour), extent=(0, 1, 0, 1), transform=axes.transAxes, origin="lower", aspect="auto",
        interpolation="none", zorder=2,
    )  # fmt: skip


def _size(axes: Axes, style: Style) -> tuple[int, int]:
    width, height = axes.get_position().size * axes.figure.get_size_inches() * 96 * style.layout.image_scale
    return max(3, int(width)), max(3, int(height))


def _shade(counts: np.ndarray, colour: str) -> np.ndarray:
    """RGBA, uint8: opacity grows with the logarithm of the number of points."""
    from matplotlib.colors import to_rgb

    densest = np.percentile(counts[counts > 0], 99.5) if counts.any() else 1
    strength = np.log1p(counts) / np.log1p(max(densest, 8))
    levels = np.ceil(np.clip(strength, 0, 1) * _LEVELS) / _LEVELS
    alpha = np.where(counts > 0, _FAINTEST + (_STRONGEST - _FAINTEST) * levels, 0)
    image = np.empty((*counts.shape, 4), dtype=np.uint8)
    image[..., :3] = np.round(np.array(to_rgb(colour)) * 255)
    image[..., 3] = np.round(alpha * 255)
    return image
