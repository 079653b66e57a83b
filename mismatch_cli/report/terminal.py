"""The report on a terminal: the same view as the HTML page, as rich tables that fit the width of
the console.

A table that is too wide loses empty columns, optional ones, intervals, then columns from the right;
never its names. A note below it names what is hidden. A pipe has no width: nothing is hidden there,
and prose keeps a readable width.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from mismatch_cli.base.numbers import FEW, MISSING
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
    several = len(groups) > 1
    columns = [Column("", kind="text"), Column("value"), Column("95 % interval")]
    if any(group.has_floor for group in groups):
        columns += [Column("× noise"), Column("noise", priority=Priority.SPARE)]
    if any(logged_by(row.metric) for group in groups for row in group.rows):
        columns += [Column("logged by", kind="text", priority=Priority.SPARE)]
    return Table("", tuple(columns), tuple(_metric_rows(groups, columns, indent="  " * several)))


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
            shown = (cells[column.title] for column in columns[1:])
            yield (
                indent + (row.name or row.metric.label),
                *("" if cell == MISSING else cell for cell in shown),
            )


def print_table(table: Table, console: Console) -> None:
    """Print a table as far as it fits, with a note on what is hidden."""
    fitting, hidden = _fitted(replace(table, rows=table.rows[: table.terminal_rows]), console)
    console.print(_grid(fitting, console.width))
    left = len(table.rows) - len(fitting.rows)
    notes = [table.note] * bool(table.note) + [f"{left} more rows in report.html."] * (left > 0)
    if hidden:
        notes.append(
            f"Hidden at {console.width} characters: {', '.join(hidden)}. Widen the terminal or "
            "pipe it."
        )
    for note in notes:
        console.print(Text(visible(note), style="dim"), width=prose_width(console))


def _filled(table: Table) -> Table:
    """The table without empty columns."""
    columns = range(1, len(table.columns))
    return _without(
        table,
        *(n for n in columns if table.rows and all(row[n] in ("", MISSING) for row in table.rows)),
    )


def _fitted(table: Table, console: Console) -> tuple[Table, list[str]]:
    """The table as far as it fits the console, and the names of what does not fit."""
    hidden: list[str] = []
    if _needed(table, console, wrapped=False) > console.width:
        table = _filled(table)
    while (
        _needed(table, console, wrapped=False) > console.width
        and (n := _last_optional(table)) is not None
    ):
        hidden.append(table.columns[n].title)
        table = _without(table, n)
    if _needed(table, console, wrapped=False) > console.width and table != (
        bare := _without_intervals(table)
    ):
        hidden.append("intervals")
        table = bare
    while _needed(table, console, wrapped=True) > console.width and len(table.columns) > 2:
        last = [n for n in range(1, len(table.columns)) if table.columns[n].priority][-1]
        hidden.append(table.columns[last].title)
        table = _without(table, last)
    return table, hidden


def _needed(table: Table, console: Console, *, wrapped: bool) -> int:
    """Characters of the widest line; `wrapped` if text may continue on the next one."""
    unlimited = console.options.update(max_width=_UNLIMITED)
    found = Measurement.get(console, unlimited, _grid(table, console.width))
    return found.minimum if wrapped else found.maximum


def _last_optional(table: Table) -> int | None:
    columns = range(len(table.columns))
    spare = [n for n in columns if table.columns[n].priority >= Priority.SPARE]
    return max(spare, default=None)


def _without(table: Table, *gone: int) -> Table:
    kept = [n for n in range(len(table.columns)) if n not in gone]
    rows = tuple(tuple(row[n] for n in kept) for row in table.rows)
    return replace(table, columns=tuple(table.columns[n] for n in kept), rows=rows)


def _without_intervals(table: Table) -> Table:
    """Numbers without intervals, and no columns of intervals; text such as `outside [0.8, 1.25]`
    stays.
    """
    columns = range(1, len(table.columns))
    intervals = [n for n in columns if _holds_intervals([row[n] for row in table.rows])]
    bare = _without(table, *intervals)
    rows = tuple(
        tuple(
            cell if column.kind == "text" else _HALF_WIDTH.sub("", cell)
            for column, cell in zip(bare.columns, row, strict=True)
        )
        for row in bare.rows
    )
    return replace(bare, rows=rows)


def _holds_intervals(cells: Sequence[str]) -> bool:
    values = [cell for cell in cells if cell not in ("", MISSING)]
    return bool(values) and all(_INTERVAL.fullmatch(cell) for cell in values)


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
    heads = [for_terminal(column.title) for column in table.columns]
    cells = [[_signed(cell) for cell in row[1:]] for row in _aligned(table)]
    widths = [max(map(_width, column)) for column in zip(heads[1:], *cells, strict=True)]
    room = max(int(_NAMES * width), width - sum(widths) - len(widths))
    rows = [[_name(row[0], room), *rest] for row, rest in zip(table.rows, cells, strict=True)]
    widths.insert(0, max(map(_width, [heads[0], *(row[0] for row in rows)])))
    for n, column in enumerate(table.columns):
        whole = column.kind == "number" or n == 0
        if column.kind == "number":
            _push_right([heads[n], *(row[n] for row in rows)], widths[n])
        rich.add_column(
            heads[n],
            overflow="fold",
            no_wrap=whole,
            min_width=widths[n] if whole else None,
        )
    for row in rows:
        rich.add_row(*row, style=_row_style([cell.plain for cell in row[1:]]))
    return rich


def _row_style(values: Sequence[str]) -> str | None:
    """The style of a row by its cells: bold for a heading of the rows that follow, red for a
    limit that does not hold.
    """
    if values and not any(values):
        return "bold"
    return "red" if any(status_of(value) == "bad" for value in values) else None


def _push_right(cells: Sequence[Text], width: int) -> None:
    """Right-align cells in place; rich would drop the spaces after the values."""
    for cell in cells:
        cell.pad_left(width - cell_len(cell.plain))


def _signed(cell: str) -> Text:
    """A cell in the colour of its sign, if it begins with one."""
    text = for_terminal(cell)
    text.stylize(_STATUS_STYLES[status_of(cell)])
    return text


def _aligned(table: Table) -> list[tuple[str, ...]]:
    """The rows, with values below values where a column has both `± x` and `[a, b]`."""
    columns = [list(cells) for cells in zip(*table.rows, strict=True)]
    for n, cells in enumerate(columns):
        lopsided = [bool(_LOPSIDED.search(cell)) for cell in cells]
        if table.columns[n].kind == "number" and any(lopsided) and not all(lopsided):
            columns[n] = _values_below_values(cells)
    return list(zip(*columns, strict=True))


def _value_and_interval(cell: str) -> tuple[str, str]:
    """A cell in two, before its interval."""
    interval = _HALF_WIDTH.search(cell)
    begin = interval.start() if interval else len(cell)
    return cell[:begin], cell[begin:]


def _values_below_values(cells: list[str]) -> list[str]:
    """Each value, then its interval, which begins at the same place in all of them; cells as
    they are where some hold more than a value.
    """
    values, rests = zip(*map(_value_and_interval, cells), strict=True)
    if any(" " in value for value in values):
        return cells
    widest, longest = max(map(cell_len, values)), max(map(cell_len, rests))
    return [
        " " * (widest - cell_len(value)) + value + rest + " " * (longest - cell_len(rest))
        for value, rest in zip(values, rests, strict=True)
    ]


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
    return [line.rstrip() for line in lines]


def _excerpt(excerpt: Excerpt) -> RenderableType:
    facts = "  ".join(f"{label} {value}" for label, value in excerpt.facts)
    text = Text.assemble(*(_piece(piece) for piece in excerpt.pieces))
    return Padding(
        Group(
            Text.assemble(for_terminal(excerpt.title), "  ", (facts, "dim")),
            Padding(text, (0, 0, 0, 2)),
        ),
        (1, 0, 0, 0),
    )


_LINE_FACTS = 3  # facts of an excerpt on its line


def excerpt_line(excerpt: Excerpt, width: int) -> list[RenderableType]:
    """The title of an excerpt, and a line of its context around the marked token."""
    title, facts = (
        visible(excerpt.title),
        (f"{label} {value}  " for label, value in excerpt.facts[:_LINE_FACTS]),
    )
    head = Text("\n".join(_lines([f"{title}  ", *map(visible, facts)], width)), "dim")
    head.stylize("not dim bold", 0, len(title))
    context = Text.assemble(*(_piece(piece) for piece in excerpt.pieces))
    marked = next((span for span in context.spans if span.style == _WEIGHT_STYLES[-1]), None)
    room = width - 4
    first = (
        0
        if marked is None
        else max(0, min((marked.start + marked.end - room) // 2, len(context) - room))
    )
    return [head, Text("  ").append_text(_between_ids(context, first, first + room))]


def _between_ids(text: Text, first: int, end: int) -> Text:
    """A slice without halves of ids, which are there for tokens whose text was not recorded."""
    for known in _ID.finditer(text.plain):
        if known.start() < first < known.end():
            first = known.end()
        if known.start() < end < known.end():
            end = known.start()
    return text[first:end]


def _piece(piece: TokenText) -> tuple[str, str]:
    text = visible(piece.text)
    # Visible without colours too
    marked = f"»{text}«" if piece.weight == len(_WEIGHT_STYLES) - 1 else text
    return marked, _WEIGHT_STYLES[piece.weight]
