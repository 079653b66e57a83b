"""The files in `plots/`: their formats and width, and how a figure is written."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.base import registry
from mismatch_cli.base.errors import UsageError
from mismatch_cli.report.drawing.style import CSS_PX, DARK, LIGHT, WIDE, Style, Theme, paper
from mismatch_cli.trace.files import replacing, write_atomically

if TYPE_CHECKING:
    from mismatch_cli.report.drawing.panels import Sheet

FORMATS = ("png", "svg", "pdf")
_UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}  # inches; pt is the PDF point
_NARROWEST, _WIDEST = 2.5, 12.0  # inches
_SCREEN_DPI, _PAPER_DPI = 192, 300  # twice the page's pixels; what printing needs
_DOTS_DPI = 144  # of dots on the page
_MAKER = "mismatch-cli"
_MARK = "<!-- mismatch-cli -->"  # marks a file as written by mismatch-cli
_FONTS = (
    "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','Liberation Sans',Arial,sans-serif"
)
_NAME_OF = {colour: name for name, colour in asdict(LIGHT).items()}
# What a file says of its maker; no date, so that the same data gives the same bytes
_ABOUT: dict[str, dict[str, Any]] = {
    "png": {"Software": _MAKER},
    "pdf": {"Creator": _MAKER, "Producer": _MAKER, "CreationDate": None},
}


@dataclass(frozen=True)
class PictureFiles:
    """Which files are written for each figure."""

    formats: tuple[str, ...] = ()
    width: float | None = None  # inches

    @classmethod
    def asked(cls, formats: str | None, width: str | None) -> PictureFiles:
        """From what the user typed; raises a `UsageError` for what cannot be drawn."""
        if not formats:
            formats = "png" if width else ""
        names = dict.fromkeys(name.strip().lower() for name in formats.split(",") if name)
        for name in names:
            if name not in FORMATS:
                raise UsageError(f"plots: {registry.unknown_name('format', name, FORMATS)}")
        return cls(tuple(names), None if width is None else _inches(width))

    @property
    def style(self) -> Style:
        """The style of the page, or of a paper: narrower, with a label on each axis."""
        return WIDE if self.width is None else paper(self.width / CSS_PX)

    def write(self, folder: Path, name: str, figure: Sheet) -> list[Path]:
        """Write a figure, drawn in `style`, in every format; returns its files."""
        folder.mkdir(exist_ok=True)
        dpi = _SCREEN_DPI if self.width is None else _PAPER_DPI
        paths = []
        for format_ in self.formats:
            path = folder / f"{name}.{format_}"
            _write(figure, path, dpi)
            paths.append(path)
        return paths


def page_svg(figure: Sheet) -> str:
    """The figure as the page has it: in the reader's fonts, and light or dark as the reader is.

    It is drawn in light colours, and those of the theme become CSS variables. Pixels, which dots
    are, keep their colours. Coordinates have two decimals, which halves the size.
    """
    svg = re.sub(r"<[^>]*>", _for_page, figure.svg(dpi=_DOTS_DPI))
    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{{_colours(DARK)}}}}}"
    look = f":root{{{_colours(LIGHT)}}}{dark}text{{font-family:{_FONTS}!important}}"
    return svg.replace("<defs>", f"<style>{look}</style><defs>", 1)


def _for_page(tag: re.Match[str]) -> str:
    """A tag with short numbers and variable colours; texts between tags stay as they are."""
    short = re.sub(r"(\.\d\d)\d+", r"\1", tag[0])
    return re.sub(r"(?<=: )#[0-9a-f]{6}", _variable, short)


def _variable(colour: re.Match[str]) -> str:
    name = _NAME_OF.get(colour[0])
    if name is None:
        return colour[0]
    return f"var(--{name})"


def _colours(theme: Theme) -> str:
    """The colours of a theme as CSS variables; its name becomes one too, which nothing uses."""
    return ";".join(f"--{name}:{colour}" for name, colour in asdict(theme).items())


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


def _write(figure: Sheet, path: Path, dpi: int) -> None:
    format_ = path.suffix.removeprefix(".")
    look: dict[str, Any] = {"facecolor": LIGHT.page, "dpi": dpi}
    if format_ == "svg":
        # A mark in each SVG, as in the other formats, tells our files from a user's own:
        # only ours are replaced with the next report.
        write_atomically(path, figure.svg(**look).replace("<defs>", f"{_MARK}<defs>", 1))
        return
    with replacing(path) as temporary:
        figure.save(temporary, format_, metadata=_ABOUT[format_], **look)
