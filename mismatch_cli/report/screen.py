"""The answer on a terminal: what was measured, the numbers that decide, the verdict, and what to
type next.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from mismatch_cli.base import numbers
from mismatch_cli.base.text import for_terminal, visible
from mismatch_cli.report.terminal import excerpt_line, print_report, print_table, prose_width
from mismatch_cli.report.view import Facts, Profile, ReportView, Screen, Verdict

STATUS_STYLES = {"good": "bold green", "mixed": "bold yellow", "bad": "bold red", "": "bold"}
_SIGNS = {"good": "✔ ", "mixed": "! ", "bad": "✘ ", "": ""}


_WIDTH = 100  # characters per line of a screen as text


def print_view(view: ReportView, console: Console, *, full: bool = False) -> None:
    """Print the screen of a page, or the page if it has none; `full` prints the page and ends as
    a screen.
    """
    if full or view.screen is None:
        print_report(view, console)
    if view.screen is not None and full:
        others = tuple(
            (line, shows) for line, shows in view.screen.next if not line.endswith(" --full")
        )
        print_ending(replace(view.screen, next=others), console)
    elif view.screen is not None:
        print_screen(view.screen, console)


def as_text(screen: Screen) -> str:
    """What `print_screen` prints, without colours."""
    out = StringIO()
    print_screen(
        screen,
        Console(
            file=out, width=_WIDTH, color_system=None, highlight=False, emoji=False, markup=False
        ),
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def print_screen(screen: Screen, console: Console) -> None:
    """Print a screen; token text is escaped, colours follow the console."""
    width = prose_width(console)
    for number, line in enumerate(screen.subject):
        console.print(Text(visible(line), style="dim" if number else "bold"), width=width)
    for note in screen.notes:
        console.print(Text.assemble(("! ", "yellow"), for_terminal(note)), width=width)
    for table in screen.tables:
        console.print()
        print_table(table, console)
    for block in filter(None, _blocks(screen, width)):
        console.print()
        console.print(Group(*block), width=width)
    print_ending(screen, console)


def print_ending(screen: Screen, console: Console) -> None:
    """Print the verdict and what to type next, which always come last."""
    width = prose_width(console)
    console.print()
    console.print(_verdict(screen.verdict), width=width)
    if screen.next:
        console.print()
        for command in _commands(screen.next, width):
            console.print(command, soft_wrap=True)


def _blocks(screen: Screen, width: int) -> Iterator[list[RenderableType]]:
    """Groups of lines, to be separated by blank lines."""
    yield _labelled(screen.remarks)
    yield _profiles(screen.profiles)
    yield [line for excerpt in screen.excerpts for line in excerpt_line(excerpt, width)]


def _labelled(facts: Iterable[tuple[str, str]]) -> list[RenderableType]:
    """Labels with their values."""
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", overflow="fold")
    grid.add_column(overflow="fold")
    for label, value in facts:
        grid.add_row(for_terminal(label), for_terminal(value))
    return [grid] if grid.row_count else []


def _commands(lines: Facts, width: int) -> Iterator[RenderableType]:
    """Commands that can be pasted; what a command shows is a comment beside it, or above if
    there is no room.
    """
    widest = max(
        (len(line) for line, what in lines if what and len(line) + len(what) + 4 <= width),
        default=0,
    )
    for line, what in lines:
        command = Text(visible(line), style="cyan")
        if not what:
            yield command
        elif len(what) + 4 + max(widest, len(line)) <= width:
            yield Text.assemble(
                command, " " * (max(widest, len(line)) - len(line)), (f"  # {visible(what)}", "dim")
            )
        else:
            yield Text(f"# {visible(what)}", style="dim")
            yield command


def _profiles(profiles: Iterable[Profile]) -> list[RenderableType]:
    return _labelled((profile.title, f"{curve(profile)}  {profile.note}") for profile in profiles)


def curve(profile: Profile) -> str:
    """`0 ▂▁█ 128`, from 0 to the largest value."""
    most = max((value for value in profile.values if value is not None), default=0.0)
    return f"{profile.first} {numbers.sparkline(profile.values, 0, most)} {profile.last}"


def _verdict(verdict: Verdict) -> RenderableType:
    style = STATUS_STYLES[verdict.status]
    return Text.assemble(
        (_SIGNS[verdict.status] + visible(verdict.words), style), "  ", visible(verdict.text)
    )
