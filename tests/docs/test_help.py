"""Each command has a page, and one that is made with its flags as `--help` has them.

To renew the list of commands: python -m tests.docs.test_help
"""

from __future__ import annotations

from typing import Any

import pytest
import typer

from mismatch_cli.app.cli import COMMANDS, build_app
from mismatch_cli.app.guide_pages import options_page
from mismatch_cli.app.help import help_line
from mismatch_cli.base import registry
from tests.docs.pages import DOCS, is_renewed, renewed

NAMES = registry.names(COMMANDS)
CONTENTS = DOCS / "README.md"
IN_ORDER = typer.main.get_command(build_app()).list_commands(None)  # type: ignore[attr-defined]


def the_command(name: str) -> Any:
    group = typer.main.get_command(build_app())
    return group.get_command(None, name)  # type: ignore[attr-defined]


def contents() -> str:
    """The commands in the order of `--help`, which says what each does, linked to their pages."""
    links = ", ".join(f"[{name}]({name}.md)" for name in IN_ORDER)
    return f"All commands, as `mismatch-cli --help` explains them: {links}.\n"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_options_has_every_parameter_once(name):
    rows = [line for line in options_page(name).splitlines() if line.startswith("| `")]
    parameters = [each for each in the_command(name).params if each.name != "help"]
    assert len(rows) == len(parameters)
    for parameter in parameters:
        typed = help_line(parameter).names.replace("|", "\\|")
        assert sum(row.startswith((f"| `{typed}`", f"| `{typed} ")) for row in rows) == 1, typed
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


if __name__ == "__main__":
    renewed(CONTENTS, "commands", contents())
