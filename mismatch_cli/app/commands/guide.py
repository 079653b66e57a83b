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


def _names() -> list[str]:
    """The names of all pages."""
    from mismatch_cli.app.guide_pages import all_pages

    return list(all_pages())


@dataclass(frozen=True, kw_only=True)
class GuideSettings:
    """The page, or where it is."""

    page: list[str] | None = setting(
        None,
        "Page to show: a command, or another name from the list; other words search the pages.",
        argument=True,
        show_default="the list of pages",
        completes=_names,
    )
    path: bool = setting(False, "Print the path of the page, for an editor or a browser.")


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

    pages, page, path = all_pages(), guide.page, guide.path
    if not pages:
        raise UsageError(
            "This installation lacks the guide. Reinstall mismatch-cli from a wheel or a checkout."
        )
    if not page:
        print(_place(pages[CONTENTS]).parent) if path else print_parts(*_contents(pages))
        return
    words = " ".join(page)
    if not path and not _named(words, pages) and (hits := _hits(words, pages)):
        print_parts(*hits)
        return
    found = _found(words, pages)
    if path:
        print(_place(found))
    else:
        _show(found.text, found.file)


def _place(page: Page) -> Path:
    """The file of a page; a `UsageError` for one that is made."""
    if page.path is None:
        raise UsageError(
            f"{page.file} has no path: it is made from the settings of the command. Leave out "
            "--path."
        )
    return page.path


def _named(name: str, pages: Mapping[str, Page]) -> list[str]:
    """The pages behind a name, as links and messages write it: `gate`, `gate.md`, `docs/gate.md`,
    `json/gate`.

    The last part is enough if it is unique: `summary` is `json/summary`.
    """
    folder, _, inside = name.partition("/")
    asked = page_name(inside if folder == "docs" else name)
    if asked in pages:
        return [asked]
    return [page for page in pages if page.rpartition("/")[2] == asked]


def _found(name: str, pages: Mapping[str, Page]) -> Page:
    """The only page behind a name."""
    from mismatch_cli.base.registry import unknown_name

    same = _named(name, pages)
    if len(same) != 1:
        raise UsageError(
            f"{unknown_name('page', name, same or pages)} All of them: mismatch-cli guide"
        )
    return pages[same[0]]


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
    names = dict.fromkeys(name for name in (CONTENTS, *pages) if name in pages)
    titles = [(name, _title(pages[name].text)) for name in names]
    return [*_rows(titles), *_use()]


def _title(text: str) -> str:
    return text.partition("\n")[0].lstrip("# ").replace("`", "")


def _show(text: str, file: str) -> None:
    if not sys.stdout.isatty():
        print(text, end="")
        return
    screen, laid_out = console(), _laid_out(for_reading(text, file))
    screen.width = min(screen.width, _WIDEST)
    with screen.capture() as shown:
        screen.print(laid_out)
    if shown.get().count("\n") < screen.height:
        screen.print(laid_out)
        return
    os.environ.setdefault("LESS", "FRX")
    with screen.pager(styles=screen.color_system is not None):
        screen.print(laid_out)


def _laid_out(text: str) -> RenderableType:
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
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    typed = partial(_typed, folder=file.rpartition("/")[0])
    return "".join(
        part if n % 2 else _LINK.sub(typed, _COMMENT.sub("", part)) for n, part in enumerate(parts)
    )


def _typed(link: re.Match[str], folder: str) -> str:
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
    return label if page == label else f"{label} (guide {page})"
