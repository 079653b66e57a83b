"""A figure drawn once, as SVG and as pixels: to go through its parts takes longer than to draw them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.transforms import Affine2D, Bbox
from PIL import Image

from mismatch_cli.report.plots._style import CSS_PX
from mismatch_cli.report.plots._svg import SvgRenderer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def to_svg_and_pixels(figure: Figure, dpi: float) -> tuple[str, Image.Image]:
    """The figure as `to_svg` gives it, and on white with so many dots per inch."""
    renderer = _Both(figure, dpi)
    figure.set_dpi(1 / CSS_PX)
    figure.draw(renderer)
    return renderer.finish(), renderer.image()


class _Both(SvgRenderer):
    """What is drawn as SVG goes on to Agg, larger."""

    def __init__(self, figure: Figure, dpi: float) -> None:
        super().__init__(figure, themed=True)
        self._scale = dpi * CSS_PX
        self._larger = Affine2D().scale(self._scale)
        width, height = figure.get_size_inches() * dpi
        self._pixels: Any = RendererAgg(round(width), round(height), dpi)
        np.asarray(self._pixels.buffer_rgba())[:] = 255

    def image(self) -> Image.Image:
        return Image.fromarray(np.asarray(self._pixels.buffer_rgba())).convert("RGB")

    def draw_path(self, gc: Any, path: Any, transform: Any, rgbFace: Any = None) -> None:
        super().draw_path(gc, path, transform, rgbFace)
        self._pixels.draw_path(self._enlarged(gc), path, transform + self._larger, rgbFace)

    def draw_markers(
        self, gc: Any, marker_path: Any, marker_trans: Any, path: Any, trans: Any, rgbFace: Any = None
    ) -> None:
        super().draw_markers(gc, marker_path, marker_trans, path, trans, rgbFace)
        larger = self._larger.frozen()
        self._pixels.draw_markers(
            self._enlarged(gc), marker_path, (marker_trans + larger).frozen(), path, trans + larger, rgbFace
        )

    def draw_image(self, gc: Any, x: float, y: float, im: Any, transform: Any = None) -> None:
        super().draw_image(gc, x, y, im, transform)
        (left, bottom), (right, top) = (transform + self._larger).transform([[0, 0], [1, 1]])
        size = round(right - left), round(top - bottom)
        dots = Image.fromarray(np.ascontiguousarray(im)).resize(size, Image.Resampling.NEAREST)
        self._pixels.draw_image(
            self._enlarged(gc), round(left + x * self._scale), round(bottom + y * self._scale), np.array(dots)
        )

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, ismath: Any = False, mtext: Any = None
    ) -> None:
        super().draw_text(gc, x, y, s, prop, angle, ismath, mtext)
        self._pixels.draw_text(self._enlarged(gc), x * self._scale, y * self._scale, s, prop, angle, ismath, mtext)

    def _enlarged(self, gc: Any) -> Any:
        """Widths of lines are in points, which Agg counts itself; only where a panel ends is in pixels."""
        box = gc.get_clip_rectangle()
        if box is None:
            return gc
        copy = self.new_gc()
        copy.copy_properties(gc)
        copy.set_clip_rectangle(Bbox(box.get_points() * self._scale))
        return copy
