"""What `--help` prints: panels of two columns, in which names, choices and defaults are never
cut off.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
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
            helps.append(help_line(parameter))
        elif has_flag(parameter):
            by_title.setdefault(_panel_title(parameter), []).append(help_line(parameter))
    for title in _LAST:
        by_title[title] = by_title.pop(title, [])
    filled = {title: lines for title, lines in by_title.items() if lines}
    # `--help` comes last of all, in whichever panel that is.
    last = list(filled)[-1] if filled else ""
    filled.setdefault(last, []).extend(helps)
    return filled


def _panel_title(parameter: Any) -> str:
    if is_argument(parameter):
        return ""
    return _about(parameter).get("panel") or ""


def keys(parameters: Iterable[Any]) -> list[HelpLine]:
    """What has no flag: lines of a file for `--config`."""
    return [help_line(parameter) for parameter in parameters if not has_flag(parameter)]


def help_line(parameter: Any) -> HelpLine:
    """The line of a parameter: what to type, such as `[TRACES]...` or `--output, -o PATH`, and
    what it does.
    """
    value = parameter.metavar or ""
    does = parameter.help or ""
    default = _default(parameter)
    if is_argument(parameter):
        several = "..." if parameter.nargs == -1 else ""
        name = value or f"[{parameter.name.upper()}]{several}"
        return HelpLine(name, "", does, default)
    if not has_flag(parameter):
        key = key_of(parameter).replace("-", "_")
        return HelpLine(f"{key} = {value or 'true|false'}", "", does, default)
    names = _longest_first(parameter.opts)
    if parameter.secondary_opts:
        names += f" / {_longest_first(parameter.secondary_opts)}"
    return HelpLine(names, value, does, default)


def _longest_first(flags: Iterable[str]) -> str:
    return ", ".join(sorted(flags, key=len, reverse=True))


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
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return str(default)


def summary(described: Any) -> str:
    """The first sentence of a command's help."""
    return " ".join((inspect.getdoc(described) or "").split("\n\n")[0].split())


def print_help(
    command: Any,
    ctx: Any,
    panels: Mapping[str, Sequence[HelpLine]],
    without_flag: Sequence[HelpLine] = (),
) -> None:
    """Print a command's usage, its description, its panels, and the names of its keys."""
    from rich.console import Console
    from rich.text import Text

    console = Console(color_system=colour_system(), highlight=False, emoji=False, markup=False)
    console.width = min(console.width, _WIDEST)
    column = _column(chain.from_iterable(panels.values()), console.width)
    console.print(Text(command.get_usage(ctx), style="bold"))
    for line in (*_prose(command.help, console.width), Text()):
        console.print(line, soft_wrap=True)  # never break a line that users copy
    for title, lines in panels.items():
        console.print(_panel(title, lines, column, console))
    for line in _prose(_keys_paragraph(str(command.name), without_flag), console.width):
        console.print(line)
    for line in _prose(command.epilog, console.width):
        console.print(line, soft_wrap=True)


def _column(lines: Iterable[HelpLine], width: int) -> int:
    """Where descriptions begin: right of all but the longest flags."""
    column = 2
    for line in lines:
        needed = len(_typed(line)) + 2
        if needed <= _COLUMN:
            column = max(column, needed)
    return min(width // 2, column)


def _keys_paragraph(command: str, lines: Sequence[HelpLine]) -> str:
    """The paragraph about what has no flag."""
    if not lines:
        return ""
    names = ", ".join(line.names.partition(" = ")[0] for line in lines)
    return (
        f"Without a flag, as keys of the file of --config (`mismatch-cli guide options/{command}` "
        f"describes them): {names}."
    )


def is_argument(parameter: Any) -> bool:
    """Whether it is a positional argument."""
    return bool(parameter.param_type_name == "argument")


def _typed(line: HelpLine) -> Text:
    from rich.text import Text

    value = f" {line.value}" if line.value else ""
    return Text.assemble((line.names, "bold cyan"), (value, "yellow"))


def _prose(text: str | None, width: int) -> Iterator[Text]:
    """Paragraphs; an indented line is a command to copy, broken with backslashes so that a shell
    reads one line.
    """
    from rich.text import Text

    for paragraph in inspect.cleandoc(text or "").split("\n\n"):
        lines = paragraph.splitlines()
        prose = [line for line in lines if not line.startswith(" ")]
        if prose:
            yield Text("\n" + textwrap.fill(" ".join(prose), width))
        for line in lines:
            if line.startswith(" "):
                yield Text(_folded_command(line.strip(), width), style="cyan")


def _folded_command(typed: str, width: int) -> str:
    """A command on lines that end with backslashes, each flag on a line with its values."""
    command, dash, flags = typed.partition(" -")
    unbroken = command + dash + re.sub(" (?!-)", _NO_BREAK, flags)
    lines = textwrap.wrap(unbroken, width - 6, break_long_words=False, break_on_hyphens=False)
    return "  " + " \\\n      ".join(lines).replace(_NO_BREAK, " ")


def _panel(title: str, lines: Iterable[HelpLine], column: int, console: Console) -> RenderableType:
    from rich.console import Group
    from rich.rule import Rule
    from rich.text import Text

    printed = chain.from_iterable(_layout(line, column, console) for line in lines)
    text = Text("\n").join(printed)
    if not title:
        return text
    return Group(Rule(title, align="left", style="dim"), text)


def _layout(line: HelpLine, column: int, console: Console) -> Iterator[Text]:
    """The description beside the flag, or below a long flag; then the default, on one line if it
    fits.
    """
    from rich.text import Text

    typed = _typed(line)
    room = console.width - column
    does = list(Text(line.does).wrap(console, room))
    if line.default:
        default = Text(f"[default: {line.default}]", style="dim")
        if does[-1].cell_len + 1 + default.cell_len <= room:
            does[-1] = Text.assemble(does[-1], " ", default)
        else:
            does += default.wrap(console, room)
    if typed.cell_len + 2 > column:
        yield typed
        typed = Text()
    # Only the first line of a description has the flag beside it.
    for described in does:
        yield Text.assemble(typed, " " * (column - typed.cell_len), described)
        typed = Text()
