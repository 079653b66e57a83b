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
from mismatch_cli.report.view import Facts, Priority, Profile, ReportView, Screen, Table, Verdict

STATUS_STYLES = {"good": "bold green", "mixed": "bold yellow", "bad": "bold red", "": "bold"}
_SIGNS = {"good": "✔ ", "mixed": "! ", "bad": "✘ ", "": ""}


_WIDTH = 100  # characters per line of a screen as text
_MOST_LINES, _FITTED_WIDTH = 40, 80  # of a screen, whatever the terminal has


def print_view(view: ReportView, console: Console, *, full: bool = False) -> None:
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


def screen_of(view: ReportView) -> Screen | None:
    """As much of a page as a screen holds, the most important first; None without a verdict."""
    return None if view.brief is None else _fitted(view.brief)


def as_text(screen: Screen, width: int = _WIDTH) -> str:
    """What `print_screen` prints, without colours."""
    out = StringIO()
    console = Console(
        file=out, width=width, color_system=None, highlight=False, emoji=False, markup=False
    )
    print_screen(screen, console)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _fitted(screen: Screen) -> Screen:
    """The screen with what fits: notes give way first, then rows, excerpts, curves and remarks."""
    fewer_notes = _with_first_note(screen)
    for smaller in (screen, fewer_notes, *_with_fewer_rows(fewer_notes)):
        shown = replace(smaller, tables=tuple(map(_brief, smaller.tables)))
        if _lines(shown) <= _MOST_LINES:
            return shown
    for part in ("excerpts", "profiles", "remarks"):
        while getattr(shown, part) and _lines(shown) > _MOST_LINES:
            shown = replace(shown, **{part: getattr(shown, part)[:-1]})
    return shown


def _lines(screen: Screen) -> int:
    return as_text(screen, _FITTED_WIDTH).count("\n") + 1


def _with_first_note(screen: Screen) -> Screen:
    left = len(screen.notes) - 1
    if left < 1:
        return screen
    return replace(screen, notes=(screen.notes[0], f"{numbers.things(left, 'more note')}: --full"))


def _with_fewer_rows(screen: Screen) -> Iterator[Screen]:
    """The screen with one row less in the table that can spare most, again and again."""
    while True:
        spare = [_spare_rows(table) for table in screen.tables]
        longest = max(range(len(spare)), key=spare.__getitem__, default=0)
        if not any(spare):
            return
        tables = list(screen.tables)
        brief = tables[longest].brief
        assert brief is not None
        tables[longest] = replace(tables[longest], brief=replace(brief, rows=brief.rows[:-1]))
        screen = replace(screen, tables=tuple(tables))
        yield screen


def _spare_rows(table: Table) -> int:
    return max(0, len(table.brief.rows) - table.brief.fewest) if table.brief else 0


def _brief(table: Table) -> Table:
    """The rows and columns of a table that a screen shows."""
    if table.brief is None:
        return table
    columns = [n for n, column in enumerate(table.columns) if column.priority < Priority.FULL]
    rows = sorted(n for n in table.brief.rows if n < len(table.rows))
    left = (len(table.rows) - len(rows)) * table.brief.counts_rest
    rest = f"… {left:,} more: --full" if left else ""
    heads = (table.columns[n] for n in columns)
    return Table(
        title=table.brief.title,
        columns=tuple(replace(head, title=head.short or head.title) for head in heads),
        rows=tuple(tuple(table.rows[n][column] for column in columns) for n in rows),
        note="   ".join(filter(None, (rest, table.brief.note))),
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
        (_SIGNS[verdict.status] + visible(verdict.words), style), "  ", visible(verdict.text)
    )
