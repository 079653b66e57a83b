"""Each command has a page with its flags as `--help` has them. To renew the tables: python -m tests.docs.test_help"""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest
import typer

from mismatch_cli import registry
from mismatch_cli.cli import build_app
from mismatch_cli.rl.train_config import load_config
from tests.docs.pages import DOCS, is_renewed, marked, renewed

COMMANDS = registry.names("mismatch_cli.commands")
CONTENTS = DOCS / "README.md"
_MACHINE = {"model": "the bundled model", "dataset": "the bundled problems"}


def the_command(name: str) -> Any:
    group = typer.main.get_command(build_app())
    return group.get_command(None, name)  # type: ignore[attr-defined]


def options(name: str) -> str:
    """The arguments and options of a command as a table, in the order and under the titles of its help."""
    command = the_command(name)
    parts = []
    shown = [p for p in command.params if p.name != "help"]
    panel = {p.name: getattr(p, "rich_help_panel", None) or "" for p in shown}
    order = list(dict.fromkeys(panel.values()))
    for title, rows in itertools.groupby(
        sorted(shown, key=lambda p: order.index(panel[p.name])), lambda p: panel[p.name]
    ):
        if title:
            parts.append(f"\n**{title}**\n")
        parts += ["| | default | |", "|---|---|---|"]
        parts += [f"| {_names(p)} | {_default(name, p)} | {_escaped(p.help or '')} |" for p in rows]
    return "\n".join(parts).strip() + "\n"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`" + (" …" if parameter.nargs == -1 else "")
    return ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])


def _default(command: str, parameter: Any) -> str:
    """What holds where the option is not given; a setting of `train` has the value of the default preset."""
    value = parameter.default() if callable(parameter.default) else parameter.default
    if command == "train" and value is None:
        settings = vars(load_config("miniature", {}))
        value = _MACHINE.get(parameter.name) or settings.get(parameter.name)
    if isinstance(parameter.show_default, str):
        return _escaped(parameter.show_default)
    if value is None or value == "" or value == () or value is False:
        return ""
    if value is True:
        return "on"
    return " ".join(str(one) for one in value) if isinstance(value, (tuple, list)) else f"{value}"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def contents() -> str:
    """The commands with the first sentence of their help, each linked to its page."""
    rows = [f"| [{name}]({name}.md) | {_first_sentence(the_command(name).help)} |" for name in COMMANDS]
    return "\n".join(["| command | |", "|---|---|", *rows]) + "\n"


def _first_sentence(text: str) -> str:
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_flags_of_the_page_are_those_of_the_help(name):
    assert is_renewed(DOCS / f"{name}.md", "options", options(name)), "renew it: python -m tests.docs.test_help"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_says_what_it_does(name):
    for parameter in the_command(name).params:
        assert parameter.help, f"{name} {parameter.name}"


def test_the_contents_list_every_command_and_every_page():
    assert is_renewed(CONTENTS, "commands", contents()), "renew it: python -m tests.docs.test_help"
    text = CONTENTS.read_text(encoding="utf-8")
    unlinked = [page.name for page in DOCS.glob("*.md") if page != CONTENTS and f"]({page.name}" not in text]
    assert not unlinked


def renew(folder: Path = DOCS) -> None:
    for name in COMMANDS:
        page = folder / f"{name}.md"
        if page.is_file() and "<!-- options -->" in page.read_text(encoding="utf-8"):
            marked(page.read_text(encoding="utf-8"), "options")
            renewed(page, "options", options(name))
    renewed(CONTENTS, "commands", contents())


if __name__ == "__main__":
    renew()
