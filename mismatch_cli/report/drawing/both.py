"""A figure drawn once, as SVG and as pixels: traversing its parts takes longer than drawing
them.
"""

from __future__ import annotations

import struct
import zlib
from functools import cache
from math import cos, radians, sin
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.transforms import Affine2D, Bbox
from PIL import Image, ImageDraw

from mismatch_cli.report.drawing.style import CSS_PX
from mismatch_cli.report.drawing.svg import SvgRenderer, font_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COMPRESSED = 3  # of 9: one more takes half as long again and saves a tenth


def to_svg_and_pixels(figure: Figure, dpi: float) -> tuple[str, np.ndarray]:
    """The figure as from `to_svg`, and as pixels on white at `dpi`."""
    renderer = _Both(figure, dpi)
    figure.set_dpi(1 / CSS_PX)
    figure.draw(renderer)
    return renderer.finish(), renderer.pixels()


def to_png(pixels: np.ndarray, dpi: float, creator: str) -> bytes:
    """The bytes of a PNG file.

    Pillow would try five filters per row, which takes longer and gains nothing.
    """
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # the first byte of a row: no filter
    for colour in range(3):
        rows[:, 1 + colour :: 3] = pixels[..., colour]
    per_metre = round(dpi / 0.0254)
    chunks = {
        # Eight bits each of red, green and blue
        b"IHDR": struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0),
        b"pHYs": struct.pack(">2IB", per_metre, per_metre, 1),
        b"tEXt": b"Software\0" + creator.encode(),
        b"IDAT": zlib.compress(rows.data, _COMPRESSED),
        b"IEND": b"",
    }
    parts = [
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks.items()
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


class _Both(SvgRenderer):
    """Draws everything twice: as SVG, and as enlarged pixels by Agg."""

    def __init__(self, figure: Figure, dpi: float) -> None:
        super().__init__(figure, themed=True)
        self._scale = dpi * CSS_PX
        self._larger = Affine2D().scale(self._scale)
        width, height = figure.get_size_inches() * dpi
        self._pixels: Any = RendererAgg(round(width), round(height), dpi)
        np.asarray(self._pixels.buffer_rgba())[:] = 255

    def pixels(self) -> np.ndarray:
        """Red, green and blue of each pixel, uint8."""
        return np.asarray(self._pixels.buffer_rgba())[..., :3]

    def draw_path(self, gc: Any, path: Any, transform: Any, rgbFace: Any = None) -> None:
        super().draw_path(gc, path, transform, rgbFace)
        self._pixels.draw_path(self._enlarged(gc), path, transform + self._larger, rgbFace)

    def draw_markers(
        self,
        gc: Any,
        marker_path: Any,
        marker_trans: Any,
        path: Any,
        trans: Any,
        rgbFace: Any = None,
    ) -> None:
        super().draw_markers(gc, marker_path, marker_trans, path, trans, rgbFace)
        larger = self._larger.frozen()
        self._pixels.draw_markers(
            self._enlarged(gc),
            marker_path,
            (marker_trans + larger).frozen(),
            path,
            trans + larger,
            rgbFace,
        )

    def draw_image(self, gc: Any, x: float, y: float, im: Any, transform: Any = None) -> None:
        super().draw_image(gc, x, y, im, transform)
        (left, bottom), (right, top) = (transform + self._larger).transform([[0, 0], [1, 1]])
        size = round(right - left), round(top - bottom)
        dots = Image.fromarray(np.ascontiguousarray(im)).resize(size, Image.Resampling.NEAREST)
        self._pixels.draw_image(
            self._enlarged(gc),
            round(left + x * self._scale),
            round(bottom + y * self._scale),
            np.array(dots),
        )

    def draw_text(
        self,
        gc: Any,
        x: float,
        y: float,
        s: str,
        prop: Any,
        angle: float,
        ismath: Any = False,
        mtext: Any = None,
    ) -> None:
        super().draw_text(gc, x, y, s, prop, angle, ismath, mtext)
        size = self.points_to_pixels(prop.get_size_in_points()) * self._scale
        ink, left, below = _inked(s, size, prop.get_weight() in ("bold", 700))
        right, up = cos(radians(angle)), sin(radians(angle))
        corner = (
            x * self._scale + left * right + below * up,
            y * self._scale - left * up + below * right,
        )
        self._pixels._renderer.draw_text_image(ink, *map(round, corner), angle, self._enlarged(gc))

    def _enlarged(self, gc: Any) -> Any:
        """Enlarge the clip rectangle, which is in pixels; line widths are in points, which Agg
        scales.
        """
        box = gc.get_clip_rectangle()
        if box is None:
            return gc
        copy = self.new_gc()
        copy.copy_properties(gc)
        copy.set_clip_rectangle(Bbox(box.get_points() * self._scale))
        return copy


@cache
def _inked(text: str, size: float, bold: bool) -> tuple[np.ndarray, int, int]:
    """The ink of a text, 0 to 255 per pixel, and the offset of its image right of and below its
    origin, in pixels.

    Pillow renders a text at once; matplotlib would render each letter again at each place.
    """
    font = font_of(size, bold)
    left, top, right, bottom = font.getbbox(text, anchor="ls")
    image = Image.new("L", (max(1, int(right - left)), max(1, int(bottom - top))))
    ImageDraw.Draw(image).text((-left, -top), text, fill=255, font=font, anchor="ls")
    return np.array(image), int(left), int(bottom)
