"""Each command has a page with its flags as `--help` has them.

To renew the tables: python -m tests.docs.test_help
"""

from __future__ import annotations

from typing import Any

import pytest
import typer

from mismatch_cli.app.cli import COMMANDS, build_app
from mismatch_cli.app.help import Row, keys, panels, summary
from mismatch_cli.base import registry
from tests.docs.pages import DOCS, is_renewed, renewed

NAMES = registry.names(COMMANDS)
CONTENTS, OPTIONS = DOCS / "README.md", DOCS / "options"
KEYS = "Without a flag: keys of the file of --config"
_NEW = """# Options of `{name}`

As `mismatch-cli {name} --help` prints them; what the command does: [{name}](../{name}.md).

<!-- options -->
<!-- /options -->
"""
IN_ORDER = typer.main.get_command(build_app()).list_commands(None)  # type: ignore[attr-defined]


def the_command(name: str) -> Any:
    group = typer.main.get_command(build_app())
    return group.get_command(None, name)  # type: ignore[attr-defined]


def rows_of(name: str) -> dict[str, list[Row]]:
    """The panels of the help of a command, and its keys, of which the help gives only the names."""
    command = the_command(name)
    parameters = command.get_params(command.make_context(name, [], resilient_parsing=True))
    return panels(parameters) | {KEYS: keys(parameters)}


def options(name: str) -> str:
    """The arguments and options of a command as tables, in the order and under the titles of its
    help.
    """
    shown = rows_of(name)
    parts = []
    for title, rows in shown.items():
        cells = [_cells(row) for row in rows if "--help" not in row.names]
        if cells:
            parts += [f"\n**{title}**\n"] * bool(title) + [
                "| | default | |",
                "|---|---|---|",
                *cells,
            ]
    return "\n".join(parts).strip() + "\n"


def _cells(row: Row) -> str:
    typed = f"{row.names} {row.value}".strip()
    return f"| `{_escaped(typed)}` | {_escaped(row.default)} | {_escaped(row.does)} |"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def contents() -> str:
    """The commands with the first sentence of their help, each linked to its page."""
    rows = [f"| [{name}]({name}.md) | {summary(the_command(name).callback)} |" for name in IN_ORDER]
    return "\n".join(["| command | |", "|---|---|", *rows]) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_the_flags_of_the_page_are_those_of_the_help(name):
    assert is_renewed(OPTIONS / f"{name}.md", "options", options(name)), (
        "renew it: python -m tests.docs.test_help"
    )
    assert f"](options/{name}.md)" in (DOCS / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_says_what_it_does(name):
    for parameter in the_command(name).params:
        assert parameter.help, f"{name} {parameter.name}"


def test_the_contents_list_every_command_and_every_page():
    assert is_renewed(CONTENTS, "commands", contents()), "renew it: python -m tests.docs.test_help"
    for contents_page in (CONTENTS, *DOCS.glob("*/README.md")):
        text, folder = contents_page.read_text(encoding="utf-8"), contents_page.parent
        unlinked = [
            page.name
            for page in folder.glob("*.md")
            if page != contents_page and f"]({page.name}" not in text
        ]
        assert not unlinked


def renew() -> None:
    for name in NAMES:
        page = OPTIONS / f"{name}.md"
        if not page.is_file():
            page.write_text(_NEW.format(name=name), encoding="utf-8")
        renewed(page, "options", options(name))
    renewed(CONTENTS, "commands", contents())


if __name__ == "__main__":
    renew()
