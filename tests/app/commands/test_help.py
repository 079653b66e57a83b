"""`--help` as a newcomer reads it: full names, choices, defaults, and nothing of Python or a
checkout.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
from collections.abc import Iterator
from functools import cache

import pytest
import typer
from rich.cells import cell_len

from mismatch_cli.app.cli import build_app, run
from mismatch_cli.app.guide_pages import all_pages
from mismatch_cli.app.help import HelpLine, keys, panels
from mismatch_cli.base.options import settings_of, values_by_key
from mismatch_cli.train.train_config import TrainConfig
from tests import house
from tests.paths import PACKAGE

DOCS = PACKAGE.parent / "docs"
GROUP = typer.main.get_command(build_app())
COMMANDS = GROUP.list_commands(None)  # type: ignore[attr-defined,arg-type]
WIDTHS = (80, 120, 240)


@pytest.fixture(scope="module")
def helps() -> dict[tuple[str, int], str]:
    """The help of each command at each width, and of the program under an empty name."""
    return {(name, width): printed(name, width) for name in ("", *COMMANDS) for width in WIDTHS}


def printed(name: str, width: int) -> str:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("COLUMNS", str(width))
        assert run([*filter(None, [name]), "--help"]) == 0
    return out.getvalue()


def in_words(text: str) -> str:
    return " ".join(text.replace("─", " ").split())


@cache
def rows() -> list[tuple[str, HelpLine]]:
    """Every line of every panel, with its command."""
    return list(_rows())


def _rows() -> Iterator[tuple[str, HelpLine]]:
    for name in COMMANDS:
        command = GROUP.get_command(None, name)  # type: ignore[attr-defined,arg-type]
        context = command.make_context(name, [], resilient_parsing=True)
        for members in panels(command.get_params(context)).values():
            yield from ((name, row) for row in members)


def row_of(command: str, flag: str) -> HelpLine:
    return next(row for name, row in rows() if name == command and flag in row.names.split(", "))


def test_nothing_is_cut(helps):
    """No name, choice, default or word of a description."""
    for (name, row), width in ((line, width) for line in rows() for width in WIDTHS):
        text = in_words(helps[name, width])
        assert f"{row.names} {row.value}".strip() in text, (name, row.names, width)
        assert (
            in_words(f"{row.does} [default: {row.default}]" if row.default else row.does) in text
        ), (name, row.names)


def test_every_line_is_a_sentence():
    assert [
        (name, row.names) for name, row in rows() if not re.match(r"\S.*[.?]$", row.does, re.S)
    ] == []


def test_no_line_is_wider_than_the_terminal_or_than_reads_well(helps):
    for (name, width), text in helps.items():
        assert max(map(cell_len, text.splitlines())) <= min(width, 100), name


def test_no_type_of_python_and_no_folder_of_a_checkout(helps):
    for (name, _), text in helps.items():
        assert not re.search(r"<\w+|list\[|\bNone\b|\bTrue\b|\bFalse\b|range\]", text), name
        assert name == "" or "docs/" not in text, name
        assert "default: (" not in text, name


def test_examples_can_be_pasted(helps):
    for (name, width), text in helps.items():
        lines = (
            text.split("Examples:\n")[-1].split("\n\n")[0].replace("\\\n", "").splitlines()
            if name
            else []
        )
        assert all(re.match(r"  mismatch-cli ", line) for line in lines if line.strip()), (
            name,
            width,
        )


CHOICES = [
    (name, row) for name, row in rows() if re.fullmatch(r"[a-z0-9-]+(\|[a-z0-9-]+)+", row.value)
]


def test_few_choices_are_shown_as_such_and_others_are_named():
    shown = {(name, row.names.split(",")[0]) for name, row in CHOICES}
    assert {("probe", "--engine"), ("curate", "--engine"), ("train", "--engine")} <= shown
    for flag in ("report --export", "import --weights"):
        assert tuple(flag.split()) in shown
    assert row_of("probe", "--rollout-dtype").value == "DTYPE"
    assert row_of("train", "--prompt-template").value == "TEMPLATE"
    assert row_of("train", "--preset").value == "NAME|FILE.toml"


@pytest.mark.parametrize(
    ("command", "row"), CHOICES, ids=[f"{name} {row.names}" for name, row in CHOICES]
)
def test_an_invalid_choice_lists_all_of_them(command, row, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run([command, row.names.split(",")[0], "nonsense"]) == 2
    said = capfd.readouterr().err
    assert "Unknown" in said and all(choice in said for choice in row.value.split("|"))
    assert not list(tmp_path.iterdir())


def test_train_shows_the_values_of_its_default_preset_in_panels(helps):
    load_config = pytest.importorskip("mismatch_cli.train.train_config").load_config
    values = values_by_key(load_config("miniature", {}))
    command = GROUP.get_command(None, "train")  # type: ignore[attr-defined,arg-type]
    shown = {
        row.names.partition(" = ")[0] if key else row.names.partition(",")[0]: row.default
        for key, rows_ in ((False, panels(command.params).values()), (True, [keys(command.params)]))
        for group in rows_
        for row in group
    }
    for setting in settings_of(TrainConfig):
        default = shown[setting.as_flag if setting.has_flag else setting.key]
        value = values[setting.key]
        in_words_of_its_own = setting.about.get("show_default")
        unset = value is None or value is False
        assert default == (in_words_of_its_own or ("" if unset else str(value))), setting.key
    text = in_words(helps["train", 80])
    assert "The defaults below are those of the preset miniature" in text
    titles = re.findall(r"^([A-Z][\w ]+) ─", helps["train", 80], re.M)
    assert titles[0] == "Training" and titles[-2:] == ["Running", "Output"] and len(titles) > 7


@pytest.mark.parametrize("command", ["report", "clipstats", "compare", "diagnose", "import"])
def test_output_holds_what_its_help_names(command, tmp_path, capfd):
    folder = tmp_path / "out"
    assert run([command, "--quiet", "--output", str(folder)]) == 0
    named = re.findall(r"[\w-]+(?:\.\w+|/)", row_of(command, "--output").does)
    assert named and {name.rstrip("/") for name in named} == {
        path.name for path in folder.iterdir()
    } - {".lock"}


def test_commands_are_in_the_order_in_which_users_need_them(helps):
    listed = re.findall(r"^([a-z]+)  ", helps["", 80], re.M)
    assert listed == COMMANDS
    assert listed[:4] == ["probe", "report", "compare", "verdict"]
    files = PACKAGE.glob("*/commands/[a-z]*.py")
    assert sorted(listed) == sorted(path.stem for path in files)


@pytest.mark.slow
def test_messages_name_pages_that_the_command_guide_opens_and_the_help_says_so(helps):
    """A wheel has no docs/: messages name the command that shows a page, not a file."""
    said = [text for file in house.files() for text in printable(file)]
    files = "|".join(re.escape(path.name) for path in DOCS.rglob("*.md"))
    assert [
        text for text in said if re.search(rf"docs/\w|(?<![\w-])({files})|guide on ", text)
    ] == []
    others = [path for path in PACKAGE.rglob("*") if path.suffix in (".html", ".js", ".toml")]
    said += [path.read_text(encoding="utf-8") for path in others]
    pages = {
        page for text in said for page in re.findall(r"mismatch-cli guide ([\w/-]*\w)", text)
    } - {"NAME", "options"}  # options/NAME is made, for each command
    # The last part of a name is enough where it is unique
    names = [*all_pages(), *(name.rpartition("/")[2] for name in all_pages())]
    assert len(pages) >= 5 and pages <= set(names)
    assert in_words(str(GROUP.epilog)) in in_words(helps["", 80])


def printable(file: house.File) -> Iterator[str]:
    """The strings of a file except docstrings, with the parts of f-strings joined."""
    lone = (node for node in file.nodes if isinstance(node, ast.Expr))
    docstrings = {id(node.value) for node in lone}
    return (node.value for node in file.strings() if id(node) not in docstrings)
