"""`mismatch-cli guide`: shows the pages of docs/, which the wheel includes, and the options of each
command.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.app.command import Command
from mismatch_cli.app.common import Common, console, print_parts
from mismatch_cli.app.flags import flags
from mismatch_cli.base.errors import UsageError, suggest
from mismatch_cli.base.options import setting, settings_group
from mismatch_cli.base.places import page_name
from mismatch_cli.base.text import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mismatch_cli.app.guide_pages import Page

PANEL, PLACE = "Explain", 5

CONTENTS = "README"
_WIDEST = 110  # characters: tables need more than prose
_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
_COMMENT = re.compile(r"^<!-- .* -->\n", re.MULTILINE)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_NOT_IN_ANCHOR = re.compile(r"[^\w\- ]")


class TakesFlags(Command):
    """A command to which the flags of others are words."""

    ignore_unknown_options = True


COMMAND = TakesFlags


def _names() -> list[str]:
    """The names of all pages."""
    from mismatch_cli.app.guide_pages import all_pages

    return list(all_pages())


@dataclass(frozen=True, kw_only=True)
class GuideSettings:
    """The page, or where it is."""

    page: list[str] | None = setting(
        None,
        "A command or other name from the list; other words search the pages.",
        argument=True,
        show_default="the list of pages",
        completes=_names,
    )
    path: bool = setting(False, "Print the page's path.")


@flags()
def command(
    *,
    guide: GuideSettings = settings_group(GuideSettings),
    common: Common = settings_group(Common, "debug"),
) -> None:
    """Show a page of the guide: what a command measures, its examples, its options, what can go
    wrong.

    On a terminal the page is formatted, and shown in $PAGER if it is longer than the screen; a file
    or a pipe gets Markdown. Words that name no page find the pages that say most about them. It
    works offline.

    Examples:
      mismatch-cli guide
      mismatch-cli guide which-knob
      mismatch-cli guide top_p on one side
      mismatch-cli guide gate > gate.md
    """
    from mismatch_cli.app.guide_pages import all_pages

    pages = all_pages()
    if not pages:
        raise UsageError(
            "This installation lacks the guide. Reinstall mismatch-cli from a wheel or a checkout."
        )
    if not guide.page:
        if guide.path:
            print(_path_of(pages[CONTENTS]).parent)
        else:
            print_parts(*_contents(pages))
        return
    words = " ".join(guide.page)
    name, _, anchor = words.partition("#")
    if guide.path:
        print(_path_of(_only_page(name, pages)))
        return
    if not _pages_called(name, pages):
        hits = _hits(words, pages)
        if hits:
            print_parts(*hits)
            return
    page = _only_page(name, pages)
    text = page.text
    _show(text[_start_of(anchor, text) :] if anchor else text, page.file)


def _start_of(anchor: str, text: str) -> int:
    """Where the section of a page begins that links call `#anchor`; a `UsageError` without it."""
    from mismatch_cli.base.registry import unknown_name

    starts: dict[str, int] = {}
    for heading in _HEADING.finditer(text):
        title = _NOT_IN_ANCHOR.sub("", _LINK.sub(r"\1", heading[1]))
        starts.setdefault(title.lower().replace(" ", "-"), heading.start())
    if anchor not in starts:
        raise UsageError(unknown_name("section", anchor, starts))
    return starts[anchor]


def _path_of(page: Page) -> Path:
    """The file of a page; a `UsageError` for one that is made."""
    if page.path is None:
        raise UsageError(
            f"{page.file} has no path: it is made from the settings of the command. Leave out "
            "--path."
        )
    return page.path


def _pages_called(typed: str, pages: Mapping[str, Page]) -> list[str]:
    """The pages behind a name, as links and messages write it: `gate`, `gate.md`, `docs/gate.md`,
    `json/gate`.

    The last part is enough if it is unique: `summary` is `json/summary`.
    """
    name = page_name(typed.removeprefix("docs/"))
    if name in pages:
        return [name]
    return [page for page in pages if page.rpartition("/")[2] == name]


def _only_page(name: str, pages: Mapping[str, Page]) -> Page:
    """The only page behind a name; a `UsageError` if there is none, or several."""
    from mismatch_cli.base.registry import unknown_name

    called = _pages_called(name, pages)
    if len(called) != 1:
        raise UsageError(
            f"{unknown_name('page', name, called or pages)} All of them: mismatch-cli guide"
        )
    return pages[called[0]]


def _hits(words: str, pages: Mapping[str, Page]) -> list[RenderableType]:
    """The pages that say most about some words, each with its line; empty if none says anything."""
    from rich.text import Text

    from mismatch_cli.app.guide_search import search

    hits, absent = search(words, {name: page.text for name, page in pages.items()})
    if not hits:
        return []
    rows = _rows([(hit.page, visible(hit.line)) for hit in hits])
    if absent:
        rows.append(Text(f"On no page: {', '.join(map(visible, absent))}", style="dim"))
    head = Text(f"No page is called {visible(words)}. These say most about it:\n")
    return [head, *rows, *_use()]


def _rows(pairs: Sequence[tuple[str, str]]) -> list[RenderableType]:
    """Names of pages, each with a line about it."""
    from rich.text import Text

    widest = max(len(name) for name, _ in pairs)
    return [Text.assemble((f"{name:<{widest}}  ", "bold cyan"), line) for name, line in pairs]


def _use() -> list[RenderableType]:
    from rich.text import Text

    return [Text(""), Text(f"Use: {suggest('guide')} NAME")]


def _contents(pages: Mapping[str, Page]) -> list[RenderableType]:
    """Every page with its title, the overview first."""
    names = dict.fromkeys((CONTENTS, *pages))
    titles = [(name, _title(pages[name].text)) for name in names]
    return [*_rows(titles), *_use()]


def _title(text: str) -> str:
    return text.partition("\n")[0].lstrip("# ").replace("`", "")


def _show(text: str, file: str) -> None:
    if not sys.stdout.isatty():
        print(text, end="")
        return
    screen = console()
    screen.width = min(screen.width, _WIDEST)
    page = _without_cut_cells(for_reading(text, file))
    with screen.capture() as printed:
        screen.print(page)
    if printed.get().count("\n") < screen.height:
        screen.print(page)
        return
    # `less` shows colours (R), and neither waits for a short page (F) nor clears it (X).
    os.environ.setdefault("LESS", "FRX")
    with screen.pager(styles=screen.color_system is not None):
        screen.print(page)


def _without_cut_cells(text: str) -> RenderableType:
    """The page in rich's Markdown, except that no table cell is cut."""
    from rich.markdown import Markdown, TableElement

    class Folded(TableElement):
        def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
            for table in super().__rich_console__(console, options):
                for column in getattr(table, "columns", ()):
                    column.overflow = "fold"
                yield table

    class FoldedMarkdown(Markdown):
        elements = Markdown.elements | {"table_open": Folded}

    return FoldedMarkdown(text, hyperlinks=False, code_theme="ansi_dark")


def for_reading(text: str, file: str) -> str:
    """The page for a terminal, which cannot follow links: a link says what to type, a picture
    what it shows.
    """
    # Splitting keeps the blocks of code, at odd places: nothing in them is a link.
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    as_text = partial(_link_as_text, folder=file.rpartition("/")[0])
    for i in range(0, len(parts), 2):
        parts[i] = _LINK.sub(as_text, _COMMENT.sub("", parts[i]))
    return "".join(parts)


def _link_as_text(link: re.Match[str], folder: str) -> str:
    label, target = link.groups()
    if link.group().startswith("!"):
        return f"(Figure: {label})"
    if target.startswith(("http:", "https:")):
        return f"{label} <{target}>"
    if target.startswith("#"):
        return label
    name = posixpath.normpath(posixpath.join(folder, target.partition("#")[0]))
    if name.startswith("../"):
        return f"{label} ({name.removeprefix('../')} in the source code)"
    page = page_name(name)
    if page == label:
        return label
    return f"{label} (guide {page})"
