"""The answer on a terminal: what was measured, the numbers that decide, the verdict, and what to
type next.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from io import StringIO
from typing import TypeGuard

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
    if screen is not None and full:
        others = tuple((line, shows) for line, shows in screen.next if not line.endswith(" --full"))
        print_ending(replace(screen, next=others), console)
    elif screen is not None:
        print_screen(screen, console)


def screen_of(view: Outline) -> Screen | None:
    """As much of a page as a screen holds, the most important first; None without a verdict."""
    return None if view.screen is None else _fitted(view.screen)


def as_text(screen: Screen, width: int = _WIDTH) -> str:
    """What `print_screen` prints, without colours."""
    out = StringIO()
    console = Console(
        file=out, width=width, color_system=None, highlight=False, emoji=False, markup=False
    )
    print_screen(screen, console)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _fitted(screen: Screen) -> Screen:
    """The screen with what fits into its lines; what does not is counted or named."""
    most = _lines_too_many(screen)
    while most:
        smaller = _smaller(screen, most)
        if smaller is None:
            break
        screen, most = smaller, _lines_too_many(smaller)
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
        return replace(_naming(screen, "tokens in context"), excerpts=screen.excerpts[:-1])
    if screen.profiles:
        return replace(_naming(screen, screen.profiles[-1].title), profiles=screen.profiles[:-1])
    if screen.remarks:
        return replace(_naming(screen, screen.remarks[-1][0]), remarks=screen.remarks[:-1])
    return None


def _naming(screen: Screen, name: str) -> Screen:
    """The screen with a name more among what it leaves out."""
    return replace(screen, left_out=tuple(dict.fromkeys((*screen.left_out, name))))


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
        return replace(_naming(screen, gone.title), tables=tuple(tables))
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
    tables = tuple(_brief_table(table, screen.everything) for table in screen.tables)
    return replace(screen, notes=notes, remarks=remarks, tables=tables)


def _brief_table(table: Table, everything: str) -> Table:
    """The rows and columns of a table that a screen shows."""
    brief = table.brief
    if brief is None:
        return table
    columns = [n for n, column in enumerate(table.columns) if column.priority < Priority.FULL]
    rows = sorted(brief.rows)
    left = len(table.rows) - len(rows) if brief.counts_rest else brief.left_out
    rest = f"… {left:,} more: {everything}" if left else ""
    heads = (table.columns[n] for n in columns)
    return Table(
        title=brief.title,
        columns=tuple(replace(head, title=head.short or head.title) for head in heads),
        rows=tuple(tuple(table.rows[n][column] for column in columns) for n in rows),
        note="   ".join(filter(None, (rest, brief.note))),
    )


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
        (SIGNS[verdict.status] + visible(verdict.words), style), "  ", visible(verdict.text)
    )
