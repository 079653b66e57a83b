"""The report on a terminal: the same view as the HTML page, as rich tables that fit the width of
the console.

A table that is too wide loses empty columns, optional ones, intervals, then columns from the right;
never its names. A note below it names what is hidden. A pipe has no width: nothing is hidden there,
and prose keeps a readable width.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import compress

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from mismatch_cli.base.numbers import FEW, MISSING, things
from mismatch_cli.base.text import for_terminal, visible
from mismatch_cli.report.outline import (
    Column,
    Excerpt,
    Facts,
    MetricGroup,
    Outline,
    Priority,
    Section,
    Table,
    TokenText,
    status_of,
)
from mismatch_cli.report.tables import frameworks, logged_by

WIDEST_PROSE = 100  # characters per line
_STATUS_STYLES = {"good": "green", "mixed": "yellow", "bad": "bold red", "": ""}
_WEIGHT_STYLES = ("", "yellow", "bold yellow", "bold red", "bold white on red")
# The mark that few prompts decide stays with the number
_HALF_WIDTH = re.compile(rf" (± [^\s{FEW}]+|\[\S+ \S+\])")
_LOPSIDED = re.compile(r" \[\S+ \S+\]")
_INTERVAL = re.compile(r"\[\S+ \S+\]( %)?")
_ID = re.compile(r"⟨\d+⟩")
_UNLIMITED = 100_000  # columns
_NAMES = 0.6  # of the width, for names


def print_report(view: Outline, console: Console) -> None:
    """Print a view; token text is escaped, colours follow the console."""
    width = prose_width(console)
    console.print(Text(visible(view.title), style="bold"))
    console.print(_facts(view.about), width=width)
    for note in view.notes:
        console.print(Text.assemble(("! ", "yellow"), for_terminal(note)), width=width)
    if view.headline:
        console.print()
        console.print(Text(visible(view.headline), style="bold"), width=width)
    for section in view.sections:
        shown = replace(section, excerpts=section.excerpts[: section.terminal_excerpts])
        if shown.has_content:
            console.print()
            _print_section(shown, console)


def prose_width(console: Console) -> int:
    """The width of everything but tables, which may be as wide as the console."""
    return min(console.width, WIDEST_PROSE)


def _print_section(section: Section, console: Console) -> None:
    width = prose_width(console)
    console.print(Text(section.title, style="bold underline"))
    if section.text:
        console.print(Text(visible(section.text), style="dim"), width=width)
    if section.groups:
        print_table(_metrics(section.groups), console)
    for table in section.tables:
        if table.terminal_rows != 0:
            console.print()
            print_table(table, console)
    for excerpt in section.excerpts:
        console.print(_excerpt(excerpt), width=width)


def _facts(facts: Facts) -> RenderableType:
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in facts:
        grid.add_row(label, for_terminal(value))
    return grid


def _metrics(groups: Sequence[MetricGroup]) -> Table:
    """One table for all groups of a section, so that their columns align."""
    columns = [Column("", kind="text"), Column("value"), Column("95 % interval")]
    if any(group.has_floor for group in groups):
        columns += [Column("× noise"), Column("noise", priority=Priority.SPARE)]
    metrics = [row.metric for group in groups for row in group.rows]
    if any(map(logged_by, metrics)):
        columns.append(Column("logged by", kind="text", priority=Priority.SPARE))
    indent = "  " if len(groups) > 1 else ""
    return Table("", tuple(columns), tuple(_metric_rows(groups, columns, indent)))


def _metric_rows(
    groups: Sequence[MetricGroup], columns: Sequence[Column], indent: str
) -> Iterator[tuple[str, ...]]:
    for group in groups:
        if indent:
            yield (group.title, *[""] * (len(columns) - 1))
        for row in group.rows:
            cells = {
                "value": row.value,
                "95 % interval": row.interval,
                "× noise": row.times_floor,
                "noise": row.floor,
                "logged by": frameworks(row.metric),
            }
            printed = [indent + (row.name or row.metric.label)]
            for column in columns[1:]:
                cell = cells[column.title]
                printed.append("" if cell == MISSING else cell)
            yield tuple(printed)


def print_table(table: Table, console: Console, *, has_width: bool = True) -> None:
    """Print a table as far as it fits, with a note on what is hidden, unless nobody chose the
    console's width.
    """
    fitting, hidden = _fitted(replace(table, rows=table.rows[: table.terminal_rows]), console)
    console.print(_grid(fitting, console.width))
    notes = []
    if table.note:
        notes.append(table.note)
    left_out = len(table.rows) - len(fitting.rows)
    if left_out:
        notes.append(f"{things(left_out, 'more row')} in report.html.")
    if hidden and has_width:
        notes.append(
            f"Hidden at {console.width} characters: {', '.join(hidden)}. Widen the terminal or "
            "pipe it."
        )
    for note in notes:
        console.print(Text(visible(note), style="dim"), width=prose_width(console))


def _filled(table: Table) -> Table:
    """The table without empty columns; one without rows keeps them all."""
    empty = []
    for n, cells in enumerate(zip(*table.rows, strict=True)):
        if n > 0 and {"", MISSING}.issuperset(cells):
            empty.append(n)
    return _without(table, *empty)


def _fitted(table: Table, console: Console) -> tuple[Table, list[str]]:
    """The table as far as it fits the console, and the names of what does not fit."""
    hidden: list[str] = []

    def is_too_wide(table: Table) -> bool:
        return _needed(table, console, wrapped=False) > console.width

    if is_too_wide(table):
        table = _filled(table)
    optional = [n for n, column in enumerate(table.columns) if column.priority >= Priority.SPARE]
    for n in reversed(optional):
        if not is_too_wide(table):
            break
        hidden.append(table.columns[n].title)
        table = _without(table, n)
    if is_too_wide(table):
        bare = _without_intervals(table)
        if bare != table:
            hidden.append("intervals")
            table = bare
    # Only a table whose text would not fit even in several lines loses columns that it needs.
    while _needed(table, console, wrapped=True) > console.width:
        may_go = _columns_that_may_go(table)
        if not may_go:
            break
        hidden.append(table.columns[may_go[-1]].title)
        table = _without(table, may_go[-1])
    return table, hidden


def _columns_that_may_go(table: Table) -> list[int]:
    """The columns beside the names that a reader can do without; one of them stays.

    A status is not among them: a reader would take silence for good news.
    """
    if len(table.columns) <= 2:
        return []
    columns = range(1, len(table.columns))
    return [n for n in columns if table.columns[n].priority != Priority.ALWAYS]


def _needed(table: Table, console: Console, *, wrapped: bool) -> int:
    """Characters of the widest line; `wrapped` if text may continue on the next one."""
    unlimited = console.options.update(max_width=_UNLIMITED)
    measurement = Measurement.get(console, unlimited, _grid(table, console.width))
    return measurement.minimum if wrapped else measurement.maximum


def _without(table: Table, *gone: int) -> Table:
    stays = [n not in gone for n in range(len(table.columns))]
    rows = [tuple(compress(row, stays)) for row in table.rows]
    return replace(table, columns=tuple(compress(table.columns, stays)), rows=tuple(rows))


def _without_intervals(table: Table) -> Table:
    """Numbers without intervals, and no columns of intervals; text such as `outside [0.8, 1.25]`
    stays.
    """
    intervals = []
    for n, cells in enumerate(zip(*table.rows, strict=True)):
        if n > 0 and _holds_intervals(cells):
            intervals.append(n)
    bare = _without(table, *intervals)
    columns: list[Sequence[str]] = []
    for n, cells in enumerate(zip(*bare.rows, strict=True)):
        is_text = bare.columns[n].kind == "text"
        columns.append(cells if is_text else [_HALF_WIDTH.sub("", cell) for cell in cells])
    return replace(bare, rows=tuple(zip(*columns, strict=True)))


def _holds_intervals(cells: Sequence[str]) -> bool:
    values = set(cells) - {"", MISSING}
    return bool(values) and all(map(_INTERVAL.fullmatch, values))


def _grid(table: Table, width: int) -> RichTable:
    """A rich table in which long names wrap, to leave room for the rest."""
    rich = RichTable(
        title=for_terminal(table.title) if table.title else None,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        header_style="dim",
    )
    columns = _printed_columns(table, width)
    for column, texts in zip(table.columns, columns, strict=True):
        is_number = column.kind == "number"
        widest = max(map(_width, texts))
        if is_number:
            _push_right(texts, widest)
        is_whole = is_number or texts is columns[0]
        rich.add_column(
            texts[0], overflow="fold", no_wrap=is_whole, min_width=widest if is_whole else None
        )
    _, *rows = zip(*columns, strict=True)
    for row in rows:
        rich.add_row(*row, style=_row_style([cell.plain for cell in row[1:]]))
    return rich


def _printed_columns(table: Table, width: int) -> list[list[Text]]:
    """The title and the cells of each column; names wrap where the others leave too little of
    the width.
    """
    titles = [column.title for column in table.columns]
    names, *values = zip(titles, *table.rows, strict=True)
    columns = list(map(_texts, table.columns[1:], values))
    widths = [max(map(_width, texts)) for texts in columns]
    room = max(int(_NAMES * width), width - sum(widths) - len(widths))
    wrapped = [_name(name, room) for name in names[1:]]
    return [[for_terminal(names[0]), *wrapped], *columns]


def _texts(column: Column, title_and_cells: Sequence[str]) -> list[Text]:
    """A column as it is printed: its title, then its cells."""
    title, *cells = title_and_cells
    if column.kind == "number":
        cells = _aligned(cells)
    return [for_terminal(title), *map(_signed, cells)]


def _row_style(values: Sequence[str]) -> str | None:
    """The style of a row by its cells: bold for a heading of the rows that follow, red for a
    limit that does not hold.
    """
    if values and not any(values):
        return "bold"
    if "bad" in map(status_of, values):
        return "red"
    return None


def _push_right(cells: Sequence[Text], width: int) -> None:
    """Right-align cells in place; rich would drop the spaces after the values."""
    for cell in cells:
        cell.pad_left(width - cell_len(cell.plain))


def _signed(cell: str) -> Text:
    """A cell in the colour of its sign, if it begins with one."""
    text = for_terminal(cell)
    text.stylize(_STATUS_STYLES[status_of(cell)])
    return text


def _aligned(cells: list[str]) -> list[str]:
    """Numbers as they are, but with values below values where some have `± x` and others
    `[a, b]`: these intervals begin at the same place.
    """
    is_lopsided = {_LOPSIDED.search(cell) is not None for cell in cells}
    if len(is_lopsided) < 2:
        return cells
    values, intervals = zip(*map(_value_and_interval, cells), strict=True)
    # Where a cell holds two values, as `3 of 7`, they cannot all end at one place.
    if " " in "".join(values):
        return cells
    widest = max(map(cell_len, values))
    longest = max(map(cell_len, intervals))
    aligned = []
    for value, interval in zip(values, intervals, strict=True):
        before = " " * (widest - cell_len(value))
        after = " " * (longest - cell_len(interval))
        aligned.append(before + value + interval + after)
    return aligned


def _value_and_interval(cell: str) -> tuple[str, str]:
    """A cell in two, before its interval."""
    interval = _HALF_WIDTH.search(cell)
    begin = interval.start() if interval else len(cell)
    return cell[:begin], cell[begin:]


def _width(text: Text) -> int:
    return max(map(cell_len, text.plain.split("\n")))


def _name(name: str, room: int) -> Text:
    """A name in as many lines as it needs, broken between its parts."""
    parts = re.findall(rf".{{1,{room}}}?(?:[ /:_]+|$)|.{{{room}}}", visible(name))
    return Text("\n").join(map(Text, _lines(parts, room)))


def _lines(parts: Sequence[str], room: int) -> list[str]:
    """The parts joined into lines of at most `room` cells."""
    lines = [""]
    for part in parts:
        if lines[-1] and cell_len(lines[-1] + part.rstrip()) > room:
            lines.append("")
        lines[-1] += part
    return list(map(str.rstrip, lines))


def _excerpt(excerpt: Excerpt) -> RenderableType:
    facts = "  ".join(f"{label} {value}" for label, value in excerpt.facts)
    title = Text.assemble(for_terminal(excerpt.title), "  ", (facts, "dim"))
    context = Text.assemble(*map(_styled, excerpt.pieces))
    return Padding(Group(title, Padding(context, (0, 0, 0, 2))), (1, 0, 0, 0))


_LINE_FACTS = 3  # facts of an excerpt on its line


def excerpt_line(excerpt: Excerpt, width: int) -> list[RenderableType]:
    """The title of an excerpt, and a line of its context around the marked token."""
    title = visible(excerpt.title)
    facts = [visible(f"{label} {value}  ") for label, value in excerpt.facts[:_LINE_FACTS]]
    head = Text("\n".join(_lines([f"{title}  ", *facts], width)), "dim")
    head.stylize("not dim bold", 0, len(title))
    context = Text.assemble(*map(_styled, excerpt.pieces))
    room = width - 4
    first = 0
    for span in context.spans:
        if span.style == _WEIGHT_STYLES[-1]:
            centred = (span.start + span.end - room) // 2
            first = max(0, min(centred, len(context) - room))
            break
    return [head, Text("  ").append_text(_between_ids(context, first, first + room))]


def _between_ids(text: Text, first: int, end: int) -> Text:
    """A slice without halves of ids, which are there for tokens whose text was not recorded."""
    for token_id in _ID.finditer(text.plain):
        if token_id.start() < first < token_id.end():
            first = token_id.end()
        if token_id.start() < end < token_id.end():
            end = token_id.start()
    return text[first:end]


def _styled(piece: TokenText) -> tuple[str, str]:
    """Token text and its style."""
    text = visible(piece.text)
    # The token that the excerpt is about is marked by signs too: a pipe has no colours.
    if piece.weight == len(_WEIGHT_STYLES) - 1:
        text = f"»{text}«"
    return text, _WEIGHT_STYLES[piece.weight]
