"""The files in `plots/`: their formats and width, and how each is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mismatch_cli.base import registry
from mismatch_cli.base.errors import UsageError
from mismatch_cli.report.drawing.style import CSS_PX, LIGHT, WIDE, Style, paper
from mismatch_cli.trace.files import replacing, write_atomically

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

_UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}  # inches; pt is the PDF point
_NARROWEST, _WIDEST = 2.5, 12.0  # inches
_PNG_DPI, _PAPER_DPI = 192, 300  # twice the page's pixels; what printing needs
_CREATOR = "mismatch-cli"


@dataclass(frozen=True)
class PictureFiles:
    """Which files are written for each figure."""

    formats: tuple[str, ...] = ("png",)
    width: float | None = None  # inches

    @classmethod
    def asked(cls, formats: str | None, width: str | None) -> PictureFiles:
        """From what the user typed; raises a `UsageError` for what cannot be drawn."""
        names = tuple(dict.fromkeys(name.strip().lower() for name in (formats or "png").split(",")))
        for name in names:
            if name not in _WRITERS:
                raise UsageError(f"plots: {registry.unknown('format', name, _WRITERS)}")
        return cls(names, None if width is None else _inches(width))

    @property
    def style(self) -> Style:
        """The style of the page, or of a paper: narrower, with a label on each axis."""
        return WIDE if self.width is None else paper(self.width / CSS_PX)

    def for_page(self, wide: Figure) -> tuple[str, np.ndarray | None]:
        """The page's figure as SVG, and its pixels if they are to be written: both are drawn at
        once.
        """
        from mismatch_cli.report.drawing.both import to_svg_and_pixels
        from mismatch_cli.report.drawing.svg import to_svg

        if self.style is WIDE and "png" in self.formats:
            return to_svg_and_pixels(wide, _PNG_DPI)
        return to_svg(wide), None

    def write(
        self,
        folder: Path,
        name: str,
        draw: Callable[[Style], Figure],
        wide: Figure,
        pixels: np.ndarray | None,
    ) -> list[Path]:
        """Write a figure, and return its files; `draw` draws it in a style, and `wide` is the
        page's figure.
        """
        figure = wide if self.style is WIDE else draw(self.style)
        paths = self.paths(folder, name)
        for format_, path in zip(self.formats, paths, strict=True):
            _WRITERS[format_](figure, path, pixels)
        return paths

    def paths(self, folder: Path, name: str) -> list[Path]:
        """The files of a figure."""
        return [folder / f"{name}.{format_}" for format_ in self.formats]


def _inches(width: str) -> float:
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(in|cm|mm|pt)\s*", width.lower())
    if match is None:
        raise UsageError(
            f"plot_width = {width} is not a width. Type a number with in, cm, mm or pt, such as "
            "3.25in."
        )
    inches = float(match[1]) * _UNITS[match[2]]
    if not _NARROWEST <= inches <= _WIDEST:
        raise UsageError(
            f"plot_width = {width} cannot be drawn. Choose {_NARROWEST:g}in to {_WIDEST:g}in."
        )
    return inches


def _write_png(figure: Figure, path: Path, pixels: np.ndarray | None) -> None:
    from mismatch_cli.report.drawing.both import to_png, to_svg_and_pixels

    dpi = _PAPER_DPI if pixels is None else _PNG_DPI
    pixels = to_svg_and_pixels(figure, dpi)[1] if pixels is None else pixels
    with replacing(path) as temporary:
        temporary.write_bytes(to_png(pixels, dpi, _CREATOR))


def _write_svg(figure: Figure, path: Path, _pixels: np.ndarray | None) -> None:
    from mismatch_cli.report.drawing.svg import to_svg

    write_atomically(path, to_svg(figure, themed=False))


def _write_pdf(figure: Figure, path: Path, _pixels: np.ndarray | None) -> None:
    from matplotlib import rc_context

    about = {"Creator": _CREATOR, "Producer": _CREATOR, "CreationDate": None}
    # TrueType, which journals require
    with replacing(path) as temporary, rc_context({"pdf.fonttype": 42}):
        figure.savefig(temporary, format="pdf", facecolor=LIGHT.page, metadata=about)


_WRITERS: dict[str, Callable[[Figure, Path, np.ndarray | None], None]] = {
    "png": _write_png,
    "svg": _write_svg,
    "pdf": _write_pdf,
}
