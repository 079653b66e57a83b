"""From plots to pictures: every plot wide and narrow for the page, and as files beside it."""

from __future__ import annotations

import base64
import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import inf
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from mismatch_cli import registry
from mismatch_cli.recording.ours import remove_pictures
from mismatch_cli.report.picture_files import PictureFiles
from mismatch_cli.report.plots._style import CSS_PX, NARROW, WIDE, Style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLOTS = "mismatch_cli.report.plots"
_STUDY = "mismatch"  # of a plot that names none
_MOST_WORKERS = 8  # three pictures each, where a report has 24
_PATIENCE = 60.0  # seconds; a copy draws for two
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG

_Plot = TypeVar("_Plot")
_Drawn = TypeVar("_Drawn")


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
    """A plot as the page shows it: on a desk and on a phone; both follow the reader's light or dark."""

    name: str
    title: str
    caption: str
    sections: tuple[str, ...]  # titles; it stands in the first of them that the page has
    wide: Picture
    narrow: Picture


def plots_of(study: str) -> dict[str, ModuleType]:
    """Every plot of a study by its name: those with a `PLACE` first, in its order."""
    with _without_documentation():
        plots = {name: registry.load(_PLOTS, name, "plot") for name in registry.names(_PLOTS)}
    ordered = sorted(plots.items(), key=lambda item: (getattr(item[1], "PLACE", inf), item[0]))
    return {name: plot for name, plot in ordered if study in _listed(getattr(plot, "STUDY", _STUDY))}


@contextmanager
def _without_documentation() -> Iterator[None]:
    """matplotlib writes the documentation of every artist when it is imported, a fifth of that time."""
    from matplotlib import artist

    written, artist.kwdoc = artist.kwdoc, lambda artist: ""  # noqa: ARG005
    try:
        yield
    finally:
        artist.kwdoc = written


def said(plot: ModuleType, what: str, study: str) -> str:
    """The `TITLE` or `CAPTION` of a plot; one of several studies may have one for each."""
    text: str | dict[str, str] = getattr(plot, what)
    return text[study] if isinstance(text, dict) else text


def _listed(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def plots_for(data: Drawable) -> Iterator[tuple[str, ModuleType]]:
    """The plots of the data's study for which it has enough, in the order in which a page shows them."""
    yield from ((name, plot) for name, plot in plots_of(data.STUDY).items() if plot.needs(data))


def figure_views(
    data: Drawable,
    folder: Path | None = None,
    files: PictureFiles = PictureFiles(),
    on_drawn: Callable[[int], None] = lambda _count: None,
) -> list[FigureView]:
    """Every plot that the data has enough for, as `report.html` shows it; with a folder also the files in it.

    They take the place of all pictures of ours there. `on_drawn` is told how many more are drawn.
    """

    def draw_all(named: tuple[str, ModuleType]) -> tuple[FigureView, list[Path]]:
        return _figure_view(*named, data, folder, files)

    drawn = _shared_out(draw_all, list(plots_for(data)), on_drawn)
    if folder is not None:
        remove_pictures(folder, {path for _, written in drawn for path in written})
    return [view for view, _ in drawn]


def _shared_out(
    draw: Callable[[_Plot], _Drawn], plots: Sequence[_Plot], on_drawn: Callable[[int], None] = lambda _count: None
) -> list[_Drawn]:
    """`draw` of each, by as many processes as there are cores: copies of this one, which have read and imported all."""

    def draw_here(plot: _Plot) -> _Drawn:
        view = draw(plot)
        on_drawn(1)
        return view

    workers = min(_MOST_WORKERS, len(os.sched_getaffinity(0)), len(plots)) if sys.platform == "linux" else 1
    shares = [plots[first :: max(1, workers)] for first in range(max(1, workers))]
    with ExitStack() as stack:
        others = [stack.enter_context(_copy_drawing(draw, share)) for share in shares[1:]]
        parts = [list(map(draw_here, shares[0]))]
        for other, share in zip(others, shares[1:], strict=True):
            parts.append(other())
            on_drawn(len(parts[-1]))
            parts[-1] = parts[-1] or list(map(draw_here, share))
    return [view for row in zip_longest(*parts) for view in row if view is not None]


@contextmanager
def _copy_drawing(draw: Callable[[_Plot], _Drawn], plots: Sequence[_Plot]) -> Iterator[Callable[[], list[_Drawn]]]:
    """A copy of this process that draws; asked for its views it gives none if it failed, died or is stuck.

    Whoever asked then draws them, and meets the error. It does not outlive this process, or it might write an old
    picture over the new one of a run that follows.
    """
    receiver, sender = Pipe(duplex=False)
    system, parent = ctypes.CDLL(None), os.getpid()
    with warnings.catch_warnings():  # copying a process with threads is safe for one that needs none of their locks
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pid = os.fork()
        except OSError:  # no room for a copy
            for end in (receiver, sender):
                end.close()
            yield list
            return
    if pid == 0:  # it leaves without flushing what this process had still to print
        try:
            receiver.close()  # or nothing would tell it that nobody listens any more
            system.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            if os.getppid() == parent:
                sender.send([draw(plot) for plot in plots])
        finally:  # also of Ctrl-C, which reaches every process of a terminal
            os._exit(0)
    sender.close()

    def answer() -> list[_Drawn]:
        with suppress(EOFError, OSError):
            if receiver.poll(_PATIENCE):
                views: list[_Drawn] = receiver.recv()
                return views
        os.kill(pid, signal.SIGKILL)
        return []

    try:
        yield answer
    finally:
        receiver.close()
        os.waitpid(pid, 0)


def _figure_view(
    name: str, plot: ModuleType, data: Drawable, folder: Path | None, files: PictureFiles
) -> tuple[FigureView, list[Path]]:
    """A figure on the page, and its files."""
    from mismatch_cli.report.plots._svg import to_svg

    wide, narrow = draw(plot, data, WIDE), draw(plot, data, NARROW)
    svg, pixels = (to_svg(wide), None) if folder is None else files.for_page(wide)
    pictures = _picture(wide, svg), _picture(narrow, to_svg(narrow))
    title, caption = said(plot, "TITLE", data.STUDY), said(plot, "CAPTION", data.STUDY)
    view = FigureView(name, title, caption, _listed(getattr(plot, "SECTION", ())), *pictures)
    written = files.write(folder, name, partial(draw, plot, data), wide, pixels) if folder is not None else []
    return view, written


def draw(plot: ModuleType, data: Drawable, style: Style, only: int | None = None) -> Figure:
    """Draw one plot, or one panel of it; its figure belongs to no window and to no global state."""
    from matplotlib import rc_context

    from mismatch_cli.report.plots._panels import Sheet

    with rc_context(style.rc()):
        figure = Sheet(style, only)
        plot.draw(figure, data)
        figure.add_subject(data.subject)
    return figure


def _picture(figure: Figure, svg: str) -> Picture:
    """SVG with real text: as sharp as the page's, in its fonts, which are no wider than the one that was measured."""
    width, height = (round(inches / CSS_PX) for inches in figure.get_size_inches())
    return Picture(f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}", width, height)
