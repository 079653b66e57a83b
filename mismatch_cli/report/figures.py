"""From plots to pictures: every plot in both layouts and both themes for the page, and as files beside it."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from mismatch_cli import registry
from mismatch_cli.report.plots._style import CSS_PX, DARK, LIGHT, NARROW, WIDE, Layout, Style
from mismatch_cli.trace.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLOTS = "mismatch_cli.report.plots"
_STUDY = "mismatch"  # of a plot that names none
_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"
_PNG_SCALE = 2  # pixels of a PNG file per CSS pixel
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_FONT_FAMILY = re.compile(r"'DejaVu Sans'(?:, sans-serif)?")


class Drawable(Protocol):
    """What plots draw: it names the study whose plots understand it."""

    STUDY: ClassVar[str]

    @property
    def subject(self) -> str:
        """Who is compared, or what is shown, in one line below every figure."""


@dataclass(frozen=True)
class Picture:
    """One drawing of a plot, sized in CSS pixels, as a URI that holds the picture itself."""

    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class FigureView:
    """A plot as the page shows it: one picture for each layout and theme."""

    name: str
    title: str
    caption: str
    sections: tuple[str, ...]  # titles; it stands in the first of them that the page has
    wide_light: Picture
    wide_dark: Picture
    narrow_light: Picture
    narrow_dark: Picture


def plots_of(study: str) -> dict[str, ModuleType]:
    """Every plot of a study by its name: those with a `PLACE` first, in its order."""
    plots = {name: registry.load(_PLOTS, name, "plot") for name in registry.names(_PLOTS)}
    ordered = sorted(plots.items(), key=lambda item: (getattr(item[1], "PLACE", inf), item[0]))
    return {name: plot for name, plot in ordered if study in _listed(getattr(plot, "STUDY", _STUDY))}


def said(plot: ModuleType, what: str, study: str) -> str:
    """The `TITLE` or `CAPTION` of a plot; one of several studies may have one for each."""
    text: str | dict[str, str] = getattr(plot, what)
    return text[study] if isinstance(text, dict) else text


def _listed(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def plots_for(data: Drawable) -> Iterator[tuple[str, ModuleType]]:
    """The plots of the data's study for which it has enough, in the order in which a page shows them."""
    yield from ((name, plot) for name, plot in plots_of(data.STUDY).items() if plot.needs(data))


def figure_views(data: Drawable, folder: Path | None = None) -> list[FigureView]:
    """Every plot that the data has enough for, in all variants for `report.html`; with a folder also NAME.png in it."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return [_figure_view(name, plot, data, folder) for name, plot in plots_for(data)]


def _figure_view(name: str, plot: ModuleType, data: Drawable, folder: Path | None) -> FigureView:
    pictures = []
    for style in (Style(layout, theme) for layout in (WIDE, NARROW) for theme in (LIGHT, DARK)):
        figure = draw(plot, data, style)
        pictures.append(picture(figure, style.layout))
        if folder is not None and style == Style(WIDE, LIGHT):
            _write_png(figure, folder / f"{name}.png")
    title, caption = said(plot, "TITLE", data.STUDY), said(plot, "CAPTION", data.STUDY)
    return FigureView(name, title, caption, _listed(getattr(plot, "SECTION", ())), *pictures)


def draw(plot: ModuleType, data: Drawable, style: Style) -> Figure:
    """Draw one plot; its figure belongs to no window and to no global state."""
    from matplotlib import rc_context

    from mismatch_cli.report.plots._panels import Sheet

    with rc_context(style.rc()):
        figure = Sheet(style)
        plot.draw(figure, data)
        figure.add_subject(data.subject)
    return figure


def picture(figure: Figure, layout: Layout) -> Picture:
    """SVG with real text: as sharp as the page's, in its fonts, which are no wider than the one that was measured."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "mismatch-cli"}):
        figure.savefig(buffer, format="svg", dpi=layout.image_scale / CSS_PX, metadata={"Date": None})
    svg = _FONT_FAMILY.sub(_FONTS, _METADATA.sub("", buffer.getvalue()))
    width, height = (round(inches / CSS_PX) for inches in figure.get_size_inches())
    return Picture(f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}", width, height)


def _write_png(figure: Figure, path: Path) -> None:
    """Twice the size, on white; who looks at a run that goes on never sees half a picture."""
    settings: dict[str, Any] = {
        "dpi": _PNG_SCALE / CSS_PX,
        "facecolor": LIGHT.page,
        "metadata": {"Software": "mismatch-cli"},
    }
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", **settings)
