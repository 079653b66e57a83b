"""The pages of the guide: files, and the options of each command, which are made from its
settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import typer

from mismatch_cli.app.cli import COMMANDS, build_app
from mismatch_cli.app.help import HelpLine, keys, panels
from mismatch_cli.base import registry
from mismatch_cli.base.places import guide_pages

OPTIONS = "options"  # the folder of what is made
_KEYS = "Without a flag: keys of the file of --config"
_PAGE = """# Options of `{name}`

As `mismatch-cli {name} --help` prints them; what the command does: [{name}](../{name}.md).

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
    files = {name: Page(path.relative_to(folder).as_posix(), path) for name, path in paths.items()}
    names = (f"{OPTIONS}/{name}" for name in registry.names(COMMANDS))
    return files | {name: Page(f"{name}.md", None) for name in names}


def options_page(name: str) -> str:
    """What the options of a command are: the tables of its help, and its keys, of which the help
    gives only the names.
    """
    group: Any = typer.main.get_command(build_app())
    command = group.get_command(None, name)
    parameters = command.get_params(command.make_context(name, [], resilient_parsing=True))
    tables = panels(parameters) | {_KEYS: keys(parameters)}
    parts = [part for title, rows in tables.items() for part in _table(title, rows)]
    return _PAGE.format(name=name, tables="\n".join(parts).strip())


def _table(title: str, rows: list[HelpLine]) -> list[str]:
    cells = [_cells(row) for row in rows if "--help" not in row.names]
    if not cells:
        return []
    head = [f"\n**{title}**\n"] if title else []
    return [*head, *_HEAD, *cells]


def _cells(row: HelpLine) -> str:
    typed = f"{row.names} {row.value}".strip()
    return f"| `{_escaped(typed)}` | {_escaped(row.default)} | {_escaped(row.does)} |"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
