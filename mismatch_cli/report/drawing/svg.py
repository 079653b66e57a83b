"""A figure as SVG: real text, few bytes, and the colours of the reader's theme.

A figure is drawn in the light theme; on the page its colours are CSS variables, so that one drawing
serves both themes. Equal looks share a class, equal markers a definition.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from math import cos, radians, sin
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import numpy as np
from matplotlib.backend_bases import RendererBase
from matplotlib.colors import to_hex
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.path import Path
from matplotlib.transforms import Affine2D
from PIL import Image, ImageFont

from mismatch_cli.report.drawing.style import CSS_PX, DARK, LIGHT, Theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

MARK = "<!-- mismatch-cli -->"  # marks a file as written by mismatch-cli

_DPI = 1 / CSS_PX  # a unit of the drawing is a CSS pixel
_PX = _DPI / 72  # pixels per point
_FINE = 32  # text is measured at this many times its size, where letters are not fitted to pixels
_FONTS = (
    "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','Liberation Sans',Arial,sans-serif"
)
_LETTER = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C"}
_MORE = {Path.CURVE3: 1, Path.CURVE4: 2}  # points of a curve after its first
_ANCHOR = {"left": "", "center": "text-anchor:middle", "right": "text-anchor:end"}
_SHADES = 16  # four bits per pixel of a layer of dots
_NAME_OF = {colour: name for name, colour in asdict(LIGHT).items()}


def to_svg(figure: Figure, *, themed: bool = True) -> str:
    """The figure in CSS pixels, in the reader's light or dark colours, or always in light ones."""
    renderer = SvgRenderer(figure, themed=themed)
    figure.set_dpi(_DPI)
    figure.draw(renderer)
    return renderer.finish()


class SvgRenderer(RendererBase):
    """The renderer that matplotlib draws on."""

    def __init__(self, figure: Figure, *, themed: bool) -> None:
        super().__init__()
        self._width, self._height = (float(inches) * _DPI for inches in figure.get_size_inches())
        self._flip = Affine2D().scale(1, -1).translate(0, self._height)
        self._themed = themed
        self._class_of: dict[str, str] = {}
        self._defined: dict[str, str] = {}
        self._body: list[str] = []

    def finish(self) -> str:
        """The finished SVG."""
        rules = [
            _variables() if self._themed else "",
            f"text{{font-family:{_FONTS};white-space:pre}}",
        ]
        rules += [f".{name}{{{look}}}" for look, name in self._class_of.items()]
        definitions = "".join(content.format(id=name) for content, name in self._defined.items())
        width, height = _short(self._width), _short(self._height)
        size = str(round(self._width)), str(round(self._height))
        if not self._themed:
            size = f"{self._width / _DPI:g}in", f"{self._height / _DPI:g}in"
            self._body.insert(0, f'<rect width="{width}" height="{height}" fill="{LIGHT.page}"/>')
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}"'
            f' viewBox="0 0 {width} {height}">'
            f"{MARK}<style>{''.join(rules)}</style><defs>{definitions}</defs>{''.join(self._body)}</svg>"
        )

    def draw_path(self, gc: Any, path: Path, transform: Any, rgbFace: Any = None) -> None:
        look = self._look(gc, rgbFace)
        if look is None:
            return
        codes: Any = path.codes
        is_line = rgbFace is None and (codes is None or codes.max(initial=0) <= Path.LINETO)
        # Lines are cut at the panel, surfaces are clipped
        corners = self._corners(gc) if is_line else None
        if d := _d(
            path, transform + self._flip, corners, simplify=is_line and path.should_simplify
        ):
            self._body.append(f'<path {look}{"" if is_line else self._clip(gc)} d="{d}"/>')

    def draw_markers(
        self,
        gc: Any,
        marker_path: Path,
        marker_trans: Any,
        path: Path,
        trans: Any,
        rgbFace: Any = None,
    ) -> None:
        places = trans.transform(path.vertices)
        # matplotlib also draws single surfaces this way, such as the band of a line
        if len(places) == 1:
            place = marker_trans + Affine2D().translate(*places[0])
            self.draw_path(gc, marker_path, place, rgbFace)
            return
        look = self._look(gc, rgbFace)
        marker = self._define(
            f'<path id="{{id}}" d="{_d(marker_path, marker_trans + Affine2D().scale(1, -1))}"/>'
        )
        left, top, right, bottom = self._corners(gc)
        uses = [
            f'<use href="#{marker}" x="{_short(x)}" y="{_short(y)}"/>'
            for x, y in self._flip.transform(places)
            if left - 0.5 <= x <= right + 0.5 and top - 0.5 <= y <= bottom + 0.5
        ]
        if look and uses:
            self._body.append(f"<g {look}>{''.join(uses)}</g>")

    def draw_image(self, gc: Any, x: float, y: float, im: Any, transform: Any = None) -> None:  # noqa: ARG002
        """Draw a layer in one colour as a mask on that colour, so that it follows the theme."""
        rows, columns = im.shape[:2]
        corners = (
            [[0, 0], [columns, rows]]
            if transform is None
            else transform.transform([[0, 0], [1, 1]])
        )
        (left, bottom), (right, top) = np.add(corners, [x, y])
        box = f'x="{_short(left)}" y="{_short(self._height - top)}" width="{_short(right - left)}"'
        box += f' height="{_short(top - bottom)}"'
        alpha, seen = im[::-1, :, 3], im[im[..., 3] > 0][:, :3]
        if not len(seen):
            return
        if (seen != seen[0]).any():
            raise ValueError(
                "A layer of a figure has more than one colour, so it cannot follow the page's "
                "theme."
            )
        picture = f'<image {box} preserveAspectRatio="none" style="image-rendering:pixelated" href="{_png(alpha)}"/>'
        mask = self._define(f'<mask id="{{id}}">{picture}</mask>')
        self._body.append(
            f'<rect {self._class(f"fill:{self._colour(seen[0] / 255)}")} {box} mask="url(#{mask})"/>'
        )

    def draw_text(
        self,
        gc: Any,
        x: float,
        y: float,
        s: str,
        prop: FontProperties,
        angle: float,
        ismath: Any = False,  # noqa: ARG002
        mtext: Text | None = None,
    ) -> None:
        style = [
            f"font-size:{_short(prop.get_size_in_points() * _PX)}px",
            f"fill:{self._colour(gc.get_rgb())}",
        ]
        if prop.get_weight() in ("bold", 700):
            style.append("font-weight:700")
        if mtext is not None and (angle == 0 or mtext.get_rotation_mode() == "anchor"):
            # Readers' fonts are narrower than the measured one: anchors keep text right-aligned or
            # centred.
            style.append(_ANCHOR[str(mtext.get_horizontalalignment())])
            place_x, place_y = (mtext.get_transform() + self._flip).transform(
                mtext.get_unitless_position()
            )
            along = cos(radians(angle)), -sin(radians(angle))
            shift = (place_x - x) * along[0] + (place_y - y) * along[1]
            x, y = x + shift * along[0], y + shift * along[1]
        turn = f' transform="rotate({_short(-angle)} {_short(x)} {_short(y)})"' if angle else ""
        look = self._class(";".join(filter(None, style)))
        self._body.append(f'<text {look} x="{_short(x)}" y="{_short(y)}"{turn}>{escape(s)}</text>')

    def get_text_width_height_descent(
        self,
        s: str,
        prop: FontProperties,
        ismath: Any,  # noqa: ARG002
    ) -> tuple[float, float, float]:
        return measured(s, prop.get_size_in_points(), prop.get_weight() in ("bold", 700))

    def _get_font_height_metrics(self, prop: FontProperties) -> tuple[float, float, float]:
        """Heights of a font, which matplotlib would otherwise look up for each text."""
        return _heights(prop.get_size_in_points(), prop.get_weight() in ("bold", 700))

    def get_canvas_width_height(self) -> tuple[float, float]:
        return self._width, self._height

    def points_to_pixels(self, points: Any) -> Any:
        return points * _PX

    def flipy(self) -> bool:
        return True

    def option_scale_image(self) -> bool:
        return True  # the browser stretches it

    def option_image_nocomposite(self) -> bool:
        return True  # layers in different colours stay apart

    def _look(self, gc: Any, face: Any) -> str | None:
        """The class of a path; None if it is invisible."""
        line, width = gc.get_rgb(), gc.get_linewidth() * _PX
        opacity = gc.get_alpha() if gc.get_forced_alpha() else None
        has_line = width > 0 and (opacity or line[3]) > 0
        has_face = face is not None and (len(face) < 4 or opacity is not None or face[3] > 0)
        if not has_line and not has_face:
            return None
        style = [f"fill:{self._colour(face) if has_face else 'none'}"]
        if has_face and opacity is None and len(face) == 4 and face[3] != 1:
            style.append(f"fill-opacity:{_short(face[3])}")
        if has_line:
            style += [f"stroke:{self._colour(line)}", f"stroke-width:{_short(width)}"]
            if opacity is None and line[3] != 1:
                style.append(f"stroke-opacity:{_short(line[3])}")
            style += _line_style(gc)
        if opacity not in (None, 1):
            style.append(f"opacity:{_short(opacity)}")
        return self._class(";".join(style))

    def _class(self, style: str) -> str:
        return f'class="{self._class_of.setdefault(style, f"c{len(self._class_of)}")}"'

    def _define(self, content: str) -> str:
        return self._defined.setdefault(content, f"d{len(self._defined)}")

    def _colour(self, rgb: Sequence[float]) -> str:
        colour = to_hex(tuple(rgb[:3]))
        return f"var(--{_NAME_OF[colour]})" if self._themed and colour in _NAME_OF else colour

    def _corners(self, gc: Any) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of the drawing area."""
        box = gc.get_clip_rectangle()
        if box is None:
            return 0, 0, self._width, self._height
        return box.x0, self._height - box.y1, box.x1, self._height - box.y0

    def _clip(self, gc: Any) -> str:
        if gc.get_clip_rectangle() is None:
            return ""
        left, top, right, bottom = self._corners(gc)
        rectangle = f'<rect x="{_short(left)}" y="{_short(top)}" width="{_short(right - left)}"'
        clip = self._define(
            f'<clipPath id="{{id}}">{rectangle} height="{_short(bottom - top)}"/></clipPath>'
        )
        return f' clip-path="url(#{clip})"'


def _short(value: float) -> str:
    return f"{round(float(value), 2):g}"


def _d(path: Path, transform: Any, corners: Any = None, *, simplify: bool = False) -> str:
    """The path commands, to a hundredth of a pixel."""
    cleaned: Any = path.cleaned(
        transform=transform, remove_nans=True, clip=corners, simplify=simplify
    )
    parts, pending = [], 0
    for (x, y), code in zip(
        cleaned.vertices.round(2).tolist(), cleaned.codes.tolist(), strict=True
    ):
        if code == Path.CLOSEPOLY:
            parts.append("Z")
        elif code != Path.STOP:
            parts.append(f"{' ' if pending else _LETTER[code]}{x:g} {y:g}")
            pending = pending - 1 if pending else _MORE.get(code, 0)
    return "".join(parts)


def _line_style(gc: Any) -> list[str]:
    style = []
    offset, dashes = gc.get_dashes()
    if dashes is not None:
        style.append(f"stroke-dasharray:{' '.join(_short(dash * _PX) for dash in dashes)}")
        if offset:
            style.append(f"stroke-dashoffset:{_short(offset * _PX)}")
    if gc.get_joinstyle() != "miter":
        style.append(f"stroke-linejoin:{gc.get_joinstyle()}")
    if gc.get_capstyle() != "butt":
        style.append(
            f"stroke-linecap:{ {'projecting': 'square'}.get(gc.get_capstyle(), gc.get_capstyle()) }"
        )
    return style


def _png(alpha: np.ndarray) -> str:
    """The opacity of a layer as a grey PNG in a data URI."""
    shades = np.ceil(np.arange(256) * ((_SHADES - 1) / 255)).astype(np.uint8)
    image = Image.fromarray(shades[alpha], "P")
    image.putpalette(
        [grey for level in range(_SHADES) for grey in [round(255 * level / (_SHADES - 1))] * 3]
    )
    buffer = io.BytesIO()
    image.save(buffer, format="png", bits=4, compress_level=7)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@cache
def font_of(pixels: float, bold: bool) -> Any:
    """The font in Pillow, which lays out text in a tenth of matplotlib's time."""
    return ImageFont.truetype(_font_file(bold), pixels)


@cache
def _font_file(bold: bool) -> str:
    return str(findfont(FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")))


@cache
def _heights(points: float, bold: bool) -> tuple[float, float, float]:
    """Ascent, descent and line gap of the font, in pixels."""
    font = get_font(_font_file(bold))
    table: Any = font.get_sfnt_table("OS/2")
    scale = points * _PX / font.units_per_EM
    return (
        table["sTypoAscender"] * scale,
        -table["sTypoDescender"] * scale,
        table["sTypoLineGap"] * scale,
    )


@cache
def measured(text: str, points: float, bold: bool) -> tuple[float, float, float]:
    """Width, height and descent of a text in pixels."""
    left, top, right, bottom = font_of(points * _PX * _FINE, bold).getbbox(text, anchor="ls")
    return (right - left) / _FINE, (bottom - top) / _FINE, bottom / _FINE


def _variables() -> str:
    """CSS variables with the colours of both themes; print uses the light one."""

    def colours(theme: Theme) -> str:
        return ";".join(
            f"--{name}:{colour}" for name, colour in asdict(theme).items() if name != "name"
        )

    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{{colours(DARK)}}}}}"
    return f":root{{{colours(LIGHT)}}}{dark}"
