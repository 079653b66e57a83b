"""The pages of the guide: files, and the options of each command, which are made from its
settings.
"""

from __future__ import annotations

from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import typer

from mismatch_cli.app.cli import COMMANDS, build_app
from mismatch_cli.app.help import HelpLine, keys, panels
from mismatch_cli.base import registry
from mismatch_cli.base.places import guide_pages

OPTIONS = "options"  # the folder of what is made
_KEYS = "Keys of --config"
_PAGE = """# Options of `{name}`

What the command does: [{name}](../{name}.md).

{tables}
"""
_HEAD = ("| | default | |", "|---|---|---|")


class Page(NamedTuple):
    """A page: its file in the guide's folder, such as json/gate.md, and where that is; None for
    one that is made.
    """

    file: str
    path: Path | None

    @property
    def text(self) -> str:
        """Its Markdown."""
        if self.path is None:
            return options_page(Path(self.file).stem)
        return self.path.read_text(encoding="utf-8")


def all_pages() -> dict[str, Page]:
    """The pages by the names that users type; empty where an installation lacks the guide."""
    paths = guide_pages()
    if not paths:
        return {}
    folder = paths["README"].parent
    pages: dict[str, Page] = {}
    for name, path in paths.items():
        pages[name] = Page(path.relative_to(folder).as_posix(), path)
    for command in registry.names(COMMANDS):
        name = f"{OPTIONS}/{command}"
        pages[name] = Page(f"{name}.md", None)
    return pages


def options_page(name: str) -> str:
    """The page about the options of a command: the tables of its help, and its keys, of which the
    help gives only the names.
    """
    group: Any = typer.main.get_command(build_app())
    command = group.get_command(None, name)
    # Lenient parsing: the context of a command without its arguments.
    parameters = command.get_params(command.make_context(name, [], resilient_parsing=True))
    tables = panels(parameters) | {_KEYS: keys(parameters)}
    text = "\n".join(filter(None, starmap(_table, tables.items())))
    return _PAGE.format(name=name, tables=text.strip())


def _table(title: str, lines: list[HelpLine]) -> str:
    """A table in Markdown under its title, without `--help`; empty if nothing else is in it."""
    rows = [_row(line) for line in lines if "--help" not in line.names]
    if not rows:
        return ""
    head = f"\n**{title}**\n\n" if title else ""
    return head + "\n".join([*_HEAD, *rows])


def _row(line: HelpLine) -> str:
    typed = f"{line.names} {line.value}".strip()
    return f"| `{_escaped(typed)}` | {_escaped(line.default)} | {_escaped(line.does)} |"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
