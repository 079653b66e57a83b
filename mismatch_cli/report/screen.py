"""The answer on a terminal: what was measured, the numbers that decide, the verdict, and what to
type next.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from io import StringIO
from itertools import compress
from typing import Any, TypeGuard

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from mismatch_cli.base import numbers
from mismatch_cli.base.text import for_terminal, visible
from mismatch_cli.report.outline import (
    SIGNS,
    Brief,
    Facts,
    Outline,
    Priority,
    Profile,
    Screen,
    Table,
    Verdict,
)
from mismatch_cli.report.terminal import excerpt_line, print_report, print_table, prose_width

STATUS_STYLES = {"good": "bold green", "mixed": "bold yellow", "bad": "bold red", "": "bold"}
_WIDTH = 100  # characters per line of a screen as text
_MOST_LINES, _FITTED_WIDTH = 40, 80  # of a screen, whatever the terminal has


def print_view(view: Outline, console: Console, *, full: bool = False) -> None:
    """Print the screen of a page, or the page if it has none; `full` prints the page and ends as
    a screen.
    """
    screen = screen_of(view)
    if full or screen is None:
        print_report(view, console)
    if screen is None:
        return
    if full:
        # The command that shows everything has just been typed.
        others = [line for line in screen.next if not line[0].endswith(" --full")]
        print_ending(replace(screen, next=tuple(others)), console)
    else:
        print_screen(screen, console)


def screen_of(view: Outline) -> Screen | None:
    """As much of a page as a screen holds, the most important first, and what was asked for; None
    without a verdict.
    """
    screen = view.screen
    if screen is None:
        return None
    staying = tuple(excerpt for excerpt in screen.excerpts if excerpt.stays)
    others = tuple(excerpt for excerpt in screen.excerpts if not excerpt.stays)
    fitted = _fitted(replace(screen, excerpts=others))
    return replace(fitted, excerpts=(*staying, *fitted.excerpts))


def as_text(screen: Screen, width: int | None = None) -> str:
    """What `print_screen` prints, without colours; without a width, what Python's `print` shows."""
    out = StringIO()
    console = Console(
        file=out,
        width=width or _WIDTH,
        color_system=None,
        highlight=False,
        emoji=False,
        markup=False,
    )
    print_screen(screen, console, has_width=width is not None)
    return "\n".join(map(str.rstrip, out.getvalue().splitlines()))


def _fitted(screen: Screen) -> Screen:
    """The screen with what fits into its lines; what does not is counted or named."""
    # Lines are counted on a printed screen, as only rich knows where a text wraps.
    # One step leaves out at most as many rows as there are lines too many: none goes in vain.
    excess = _lines_too_many(screen)
    while excess:
        smaller = _smaller(screen, excess)
        if smaller is None:
            break
        screen = smaller
        excess = _lines_too_many(screen)
    return _shown(screen)


def _lines_too_many(screen: Screen) -> int:
    lines = as_text(_shown(screen), _FITTED_WIDTH).count("\n") + 1
    return max(0, lines - _MOST_LINES)


def _smaller(screen: Screen, most: int) -> Screen | None:
    """The screen without some rows, else a note, an excerpt, a curve or a remark, the last one
    first; None if nothing else may go.
    """
    fewer = _with_fewer_rows(screen, most)
    if fewer is not None:
        return fewer
    if len(screen.notes) > 1:
        return replace(screen, notes=screen.notes[:-1], more_notes=screen.more_notes + 1)
    if screen.excerpts:
        return _leaving_out("tokens in context", screen, excerpts=screen.excerpts[:-1])
    if screen.profiles:
        *others, last = screen.profiles
        return _leaving_out(last.title, screen, profiles=tuple(others))
    if screen.remarks:
        *remarks, (label, _) = screen.remarks
        return _leaving_out(label, screen, remarks=tuple(remarks))
    return None


def _leaving_out(name: str, screen: Screen, **smaller: Any) -> Screen:
    """The screen with less in some of its fields, and the name of what that leaves out."""
    names = dict.fromkeys((*screen.left_out, name))
    return replace(screen, left_out=tuple(names), **smaller)


def _with_fewer_rows(screen: Screen, most: int) -> Screen | None:
    """The screen with at most so many rows less in its longest table; None if all rows have to
    stay.
    """
    spare = {n: table.brief for n, table in enumerate(screen.tables) if _can_shrink(table.brief)}
    if not spare:
        return None
    longest = max(spare, key=lambda n: len(spare[n].rows))
    tables, brief = list(screen.tables), spare[longest]
    stay = max(brief.fewest, len(brief.rows) - most)
    if not stay:
        gone = tables.pop(longest)
        return _leaving_out(gone.title, screen, tables=tuple(tables))
    left_out = brief.left_out + len(brief.rows) - stay
    fewer = replace(brief, rows=brief.rows[:stay], left_out=left_out)
    tables[longest] = replace(tables[longest], brief=fewer)
    return replace(screen, tables=tuple(tables))


def _can_shrink(brief: Brief | None) -> TypeGuard[Brief]:
    return brief is not None and len(brief.rows) > brief.fewest


def _shown(screen: Screen) -> Screen:
    """The screen with its tables in brief, and the names of what it leaves out."""
    notes, remarks = screen.notes, screen.remarks
    if screen.more_notes:
        more = numbers.things(screen.more_notes, "more note")
        notes = (*notes, f"{more}: {screen.everything}")
    if screen.left_out:
        names = ", ".join(screen.left_out)
        remarks = (*remarks, ("No room for", f"{names}: {screen.everything}"))
    tables = [_brief_table(table, screen.everything) for table in screen.tables]
    return replace(screen, notes=notes, remarks=remarks, tables=tuple(tables))


def _brief_table(table: Table, everything: str) -> Table:
    """The rows and columns of a table that a screen shows."""
    brief = table.brief
    if brief is None:
        return table
    on_screen = [column.priority < Priority.FULL for column in table.columns]
    heads = [replace(head, title=head.short or head.title) for head in table.columns]
    rows = [tuple(compress(table.rows[n], on_screen)) for n in sorted(brief.rows)]
    left_out = len(table.rows) - len(rows) if brief.counts_rest else brief.left_out
    rest = f"… {left_out:,} more: {everything}" if left_out else ""
    return Table(
        title=brief.title,
        columns=tuple(compress(heads, on_screen)),
        rows=tuple(rows),
        note="   ".join(filter(None, (rest, brief.note))),
    )


def print_screen(screen: Screen, console: Console, *, has_width: bool = True) -> None:
    """Print a screen; token text is escaped, colours follow the console. `has_width`: the reader
    can choose it.
    """
    width = prose_width(console)
    style = "bold"
    for line in screen.subject:
        console.print(Text(visible(line), style=style), width=width)
        style = "dim"
    for note in screen.notes:
        console.print(Text.assemble(("! ", "yellow"), for_terminal(note)), width=width)
    for table in screen.tables:
        console.print()
        print_table(table, console, has_width=has_width)
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
    yield _labelled(map(curve_fact, screen.profiles))
    excerpts: list[RenderableType] = []
    for excerpt in screen.excerpts:
        excerpts += excerpt_line(excerpt, width)
    yield excerpts


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
    widest = 0  # of the commands that have their comment beside them
    for line, shows in lines:
        if shows and len(line) + len(shows) + 4 <= width:
            widest = max(widest, len(line))
    for line, shows in lines:
        command = Text(visible(line), style="cyan")
        comment = f"# {visible(shows)}"
        begin = max(widest, len(line))
        if not shows:
            yield command
        elif begin + len(shows) + 4 <= width:
            spaces = " " * (begin - len(line))
            yield Text.assemble(command, spaces, (f"  {comment}", "dim"))
        else:
            yield Text(comment, style="dim")
            yield command


def curve_fact(profile: Profile) -> tuple[str, str]:
    """A profile in one line, under its title: `0 ▂▁█ 128  mean |Δlog p|`."""
    return profile.title, f"{curve(profile)}  {profile.note}"


def curve(profile: Profile) -> str:
    """`0 ▂▁█ 128`, from 0 to the largest value."""
    measured = [value for value in profile.values if value is not None]
    bars = numbers.sparkline(profile.values, 0, max(measured, default=0.0))
    return f"{profile.first} {bars} {profile.last}"


def _verdict(verdict: Verdict) -> RenderableType:
    style = STATUS_STYLES[verdict.status]
    return Text.assemble(
        (SIGNS[verdict.status] + visible(verdict.words), style), "  ", visible(verdict.text)
    )
