"""What `--help` prints: panels of two columns, in which names, choices and defaults are never
cut off.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mismatch_cli.app.progress import colour_system
from mismatch_cli.base.configuration import has_flag, key_of, setting_of
from mismatch_cli.base.options import RUNNING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

_WIDEST = 100  # characters: longer lines of prose read worse
_COLUMN = 28  # for flags and values; longer ones get a line of their own
_NO_BREAK = "\N{NO-BREAK SPACE}"


class HelpLine(NamedTuple):
    """A line of a panel: what to type, the placeholder of its value, what it does, and its
    default.
    """

    names: str
    value: str
    does: str
    default: str = ""


_LAST = (RUNNING, "Output")  # panels, after those of what a command does


def panels(parameters: Iterable[Any]) -> dict[str, list[HelpLine]]:
    """Arguments and options by panel title, in the order in which they are declared: untitled ones
    first, those that many commands have last.
    """
    by_title: dict[str, list[HelpLine]] = {"": []}
    helps: list[HelpLine] = []
    for parameter in sorted(parameters, key=lambda each: not is_argument(each)):
        if parameter.name == "help":
            helps.append(row_of(parameter))
        elif has_flag(parameter):
            title = "" if is_argument(parameter) else _about(parameter).get("panel") or ""
            by_title.setdefault(title, []).append(row_of(parameter))
    for title in _LAST:
        by_title[title] = by_title.pop(title, [])
    filled = {title: rows for title, rows in by_title.items() if rows}
    last = next(reversed(filled), "")
    return filled | {last: [*filled.get(last, []), *helps]}


def keys(parameters: Iterable[Any]) -> list[HelpLine]:
    """What has no flag: lines of a file for `--config`."""
    return [row_of(parameter) for parameter in parameters if not has_flag(parameter)]


def row_of(parameter: Any) -> HelpLine:
    """The line of a parameter: what to type, such as `[TRACES]...` or `--output, -o PATH`, and
    what it does.
    """
    value, does = parameter.metavar or "", parameter.help or ""
    if is_argument(parameter):
        several = "..." if parameter.nargs == -1 else ""
        name = value or f"[{parameter.name.upper()}]{several}"
        return HelpLine(name, "", does, _default(parameter))
    if not has_flag(parameter):
        key = key_of(parameter).replace("-", "_")
        return HelpLine(f"{key} = {value or 'true|false'}", "", does, _default(parameter))
    names = (
        ", ".join(sorted(names, key=len, reverse=True))
        for names in (parameter.opts, parameter.secondary_opts)
    )
    return HelpLine(" / ".join(filter(None, names)), value, does, _default(parameter))


def _about(parameter: Any) -> Mapping[str, Any]:
    """What is declared of the setting behind a parameter."""
    setting = setting_of(parameter)
    return {} if setting is None else setting.about


def _default(parameter: Any) -> str:
    """The default in words, or its value; nothing for what is off or unset."""
    about = _about(parameter)
    default = about.get("show_default", about.get("default"))
    if default is None or default is False or callable(default):
        return ""
    if default is True:
        return str(parameter.opts[0])
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def summary(described: Any) -> str:
    """The first sentence of a command's help."""
    return " ".join((inspect.getdoc(described) or "").split("\n\n")[0].split())


def print_help(
    command: Any,
    ctx: Any,
    rows: Mapping[str, Sequence[HelpLine]],
    without_flag: Sequence[HelpLine] = (),
) -> None:
    """Print a command's usage, its description, its panels, and the names of its keys."""
    from rich.console import Console
    from rich.text import Text

    console = Console(color_system=colour_system(), highlight=False, emoji=False, markup=False)
    console.width = min(console.width, _WIDEST)
    column = _column([row for members in rows.values() for row in members], console.width)
    console.print(Text(command.get_usage(ctx), style="bold"))
    for line in (*_prose(command.help, console.width), Text()):
        console.print(line, soft_wrap=True)  # never break a line that users copy
    for title, members in rows.items():
        console.print(_panel(title, members, column, console))
    for line in _prose(_of_keys(str(command.name), without_flag), console.width):
        console.print(line)
    for line in _prose(command.epilog, console.width):
        console.print(line, soft_wrap=True)


def _column(rows: Sequence[HelpLine], width: int) -> int:
    """Where descriptions begin: right of all but the longest flags."""
    lengths = [len(_typed(row)) for row in rows]
    longest = max((length for length in lengths if length + 2 <= _COLUMN), default=0)
    return min(width // 2, 2 + longest)


def _of_keys(command: str, rows: Sequence[HelpLine]) -> str:
    """The paragraph about what has no flag."""
    if not rows:
        return ""
    named = ", ".join(row.names.partition(" = ")[0] for row in rows)
    return (
        f"Without a flag, as keys of the file of --config (`mismatch-cli guide options/{command}` "
        f"describes them): {named}."
    )


def is_argument(parameter: Any) -> bool:
    """Whether it is a positional argument."""
    return bool(parameter.param_type_name == "argument")


def _typed(row: HelpLine) -> Text:
    from rich.text import Text

    return Text.assemble((row.names, "bold cyan"), (f" {row.value}" if row.value else "", "yellow"))


def _prose(text: str | None, width: int) -> Iterator[Text]:
    """Paragraphs; an indented line is a command to copy, broken with backslashes so that a shell
    reads one line.
    """
    from rich.text import Text

    for paragraph in inspect.cleandoc(text or "").split("\n\n"):
        lines = paragraph.splitlines()
        if prose := " ".join(line for line in lines if not line.startswith(" ")):
            yield Text("\n" + textwrap.fill(prose, width))
        for line in (line.strip() for line in lines if line.startswith(" ")):
            command, dash, flags = line.partition(" -")
            # A flag stays with its values
            unbroken = command + dash + re.sub(" (?!-)", _NO_BREAK, flags)
            broken = textwrap.wrap(
                unbroken, width - 6, break_long_words=False, break_on_hyphens=False
            )
            shown = "  " + " \\\n      ".join(broken).replace(_NO_BREAK, " ")
            yield Text(shown, style="cyan")


def _panel(title: str, rows: Iterable[HelpLine], column: int, console: Console) -> RenderableType:
    from rich.console import Group
    from rich.rule import Rule
    from rich.text import Text

    lines = Text("\n").join(line for row in rows for line in _lines(row, column, console))
    return Group(Rule(title, align="left", style="dim"), lines) if title else lines


def _lines(row: HelpLine, column: int, console: Console) -> Iterator[Text]:
    """The description beside the flag, or below a long flag; then the default, on one line if it
    fits.
    """
    from rich.text import Text

    typed, room = _typed(row), console.width - column
    does = list(Text(row.does).wrap(console, room))
    if row.default:
        default = Text(f"[default: {row.default}]", style="dim")
        if does[-1].cell_len + 1 + default.cell_len <= room:
            does[-1] = Text.assemble(does[-1], " ", default)
        else:
            does += default.wrap(console, room)
    if typed.cell_len + 2 > column:
        yield typed
        typed = Text()
    for line in does:
        yield Text.assemble(typed, " " * (column - typed.cell_len), line)
        typed = Text()
