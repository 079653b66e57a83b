"""From plots to pictures: each plot wide and narrow for the page, and as files."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Protocol

from mismatch_cli.base import registry
from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.report.drawing.style import CSS_PX, NARROW, WIDE, Style
from mismatch_cli.report.picture_files import PictureFiles, page_svg

if TYPE_CHECKING:
    from mismatch_cli.report.drawing.panels import Sheet


PLOTS = "mismatch_cli.*.plots.NAME"
_STUDY = "mismatch"  # of a plot that names none


class Drawable(Protocol):
    """What plots draw; it names the study that the plots are for."""

    STUDY: ClassVar[str]

    @property
    def subject(self) -> str:
        """What is compared or shown, in one line below each figure."""


@dataclass(frozen=True)
class Picture:
    """One drawing of a plot as a data URI, sized in CSS pixels."""

    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class FigureView:
    """A plot as the page shows it: on a desktop and on a phone, both in the reader's light or
    dark colours.
    """

    name: str
    title: str
    caption: str
    sections: tuple[str, ...]  # titles: the figure is in the first of them that the page has
    wide: Picture
    narrow: Picture
    alt: str  # what the picture shows, in words


def plot_names() -> list[str]:
    """The plots of all studies; imports nothing."""
    return registry.names(PLOTS)


def first_lines() -> dict[str, str]:
    """What each plot draws, as its file begins; imports none of them."""
    lines = {}
    for name, source in registry.files(PLOTS).items():
        lines[name] = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return lines


def studies_of(name: str) -> tuple[str, ...]:
    """The studies that a plot belongs to."""
    return _listed(getattr(registry.load(PLOTS, name, "plot"), "STUDY", _STUDY))


def plots_of(study: str) -> dict[str, ModuleType]:
    """The plots of a study by name; those with a `PLACE` come first, in its order."""
    plots = {}
    for name in registry.names(PLOTS):
        plot = registry.load(PLOTS, name, "plot")
        if study in _listed(getattr(plot, "STUDY", _STUDY)):
            plots[name] = plot
    return dict(sorted(plots.items(), key=lambda item: (getattr(item[1], "PLACE", inf), item[0])))


def text_of(plot: ModuleType, name: str, study: str) -> str:
    """The `TITLE` or `CAPTION` of a plot; a plot of several studies may have one for each."""
    text: str | dict[str, str] = getattr(plot, name)
    return text[study] if isinstance(text, dict) else text


def _listed(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def plots_for(data: Drawable) -> Iterator[tuple[str, ModuleType]]:
    """The plots of a study that its data suffices for, in page order."""
    for name, plot in plots_of(data.STUDY).items():
        if plot.needs(data):
            yield name, plot


def figure_views(
    data: Drawable,
    folder: Path | None = None,
    files: PictureFiles = PictureFiles(),
    *,
    explored: bool = False,
    on_drawn: Callable[[int], None] = lambda _count: None,
) -> list[FigureView]:
    """Every plot that the data suffices for, as `report.html` shows it; with a folder, also as
    files in it.

    Plots of `EXPLORED` dots are not on a page whose explorer draws the same ones. `on_drawn` gets
    the number of figures just drawn.
    """
    views = []
    for name, plot in plots_for(data):
        if folder is not None and files.formats:
            files.write(folder, name, draw(plot, data, files.style))
        if not (explored and getattr(plot, "EXPLORED", False)):
            views.append(_figure_view(name, plot, data))
        on_drawn(1)
    return views


def figure_of(data: Drawable, name: str) -> Sheet:
    """One plot of a study; raises a `UsageError` for an unknown name, a `MismatchError` if there
    is nothing to draw.
    """
    plots = plots_of(data.STUDY)
    if name not in plots:
        raise UsageError(registry.lacks_name(data.STUDY, "plot", name, plots))
    if not plots[name].needs(data):
        raise lacking(data, name)
    return draw(plots[name], data, WIDE)


def lacking(data: Drawable, name: str) -> MismatchError:
    """The error for a plot of a study whose data does not suffice: what it needs, and what can be
    drawn.
    """
    drawable = ", ".join(drawn for drawn, _ in plots_for(data)) or "none"
    return MismatchError(
        f"There is nothing to draw for {name}: it needs {plots_of(data.STUDY)[name].DATA}. The "
        f"data suffices for: {drawable}."
    )


def write_figure(data: Drawable, name: str, folder: Path, files: PictureFiles) -> list[Path]:
    """Write one plot of a study, whose data suffices, into a folder, as PNG unless `files` has
    formats; returns its files.
    """
    files = replace(files, formats=files.formats or ("png",))
    plot = plots_of(data.STUDY)[name]
    return files.write(folder, name, draw(plot, data, files.style))


def _figure_view(name: str, plot: ModuleType, data: Drawable) -> FigureView:
    """A figure on the page."""
    wide, narrow = draw(plot, data, WIDE), draw(plot, data, NARROW)
    return FigureView(
        name=name,
        title=text_of(plot, "TITLE", data.STUDY),
        caption=text_of(plot, "CAPTION", data.STUDY),
        sections=_listed(getattr(plot, "SECTION", ())),
        wide=_picture(wide),
        narrow=_picture(narrow),
        alt=alternative_text(plot, data, wide),
    )


def alternative_text(plot: ModuleType, data: Drawable, figure: Sheet) -> str:
    """What a drawn plot shows: in the plot's own words, or read off the figure."""
    from mismatch_cli.report.drawing.words import MOST, in_words

    own: Callable[[Drawable], str] | None = getattr(plot, "alternative", None)
    if own is None:
        return in_words(figure)
    return shorten(own(data), MOST, placeholder="…")


def draw(plot: ModuleType, data: Drawable, style: Style) -> Sheet:
    """Draw one plot on a figure without window or global state."""
    from matplotlib import rc_context

    from mismatch_cli.report.drawing.panels import Sheet

    with rc_context(style.rc()):
        figure = Sheet(style)
        plot.draw(figure, data)
        figure.add_subject(data.subject)
    return figure


def _picture(figure: Sheet) -> Picture:
    from mismatch_cli.report.drawing.panels import as_uri

    width, height = (round(inches / CSS_PX) for inches in figure.get_size_inches())
    return Picture(as_uri(page_svg(figure)), width, height)
