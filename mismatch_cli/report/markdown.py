"""A page as GitHub Markdown, for a job summary, a comment or an issue: the answer, its tables, and
what was measured.
"""

import re
from collections.abc import Iterable, Iterator

from mismatch_cli.base.text import visible
from mismatch_cli.report.outline import Outline, Status, Table

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~#&@$])")
_SIGNS: dict[Status, str] = {"good": "✅ ", "mixed": "❔ ", "bad": "❌ ", "": ""}


def as_markdown(view: Outline) -> str:
    """The Markdown of a page with a verdict; text of traces and files is escaped."""
    verdict = view.verdict
    assert verdict is not None
    sign, title = _SIGNS[verdict.status], _escaped(view.title)
    lines = [f"### {sign}{title} {_escaped(verdict.words.capitalize())}", ""]
    lines.append(_escaped(verdict.text))
    for section in view.parts:
        for table in section.tables:
            if not table.fold:
                lines += ["", *_table(table)]
    return "\n".join([*lines, "", *_facts(view)])


def _table(table: Table) -> Iterator[str]:
    yield f"**{_escaped(table.title)}**"
    yield ""
    yield _row(column.title for column in table.columns)
    yield "|" + "---|" * len(table.columns)
    yield from map(_row, table.rows)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _facts(view: Outline) -> Iterator[str]:
    """What to type next, what was left out and what was measured, as a list."""
    for line, shows in view.next:
        yield f"- {_escaped(shows)} {_escaped(line)}"
    for note in view.notes:
        yield f"- {_escaped(note)}"
    for label, value in (*view.remarks, *view.about):
        yield f"- {_escaped(label)}: {_escaped(value)}"
    yield ""


def _escaped(words: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", visible(words))
