"""Which tokens two algorithms block together, and which only one of them blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from mismatch_cli import numbers
from mismatch_cli.metrics.update_table import CLIPPING
from mismatch_cli.report.pages.clipping_cells import Row, plain, value_of
from mismatch_cli.report.pages.clipping_subject import Subject
from mismatch_cli.report.view import Column, Excerpt, Section, Table

_PAIRS_ON_TERMINAL, _PAIRS_ON_PAGE = 10, 20
_TEXT = (
    "The Jaccard index of two algorithms is the share of tokens that both block among those that at least one of them "
    "blocks: 1 where they agree on every token, 0 where they block different ones."
)


def overlap_section(subject: Subject, examples: Sequence[Excerpt]) -> Section:
    overlap = subject.result["overlap"]
    names = [row["name"] for row in subject.blocking if row["name"] in overlap["names"]]
    tables = (_pairs(subject, overlap, names), _jaccard(overlap, names)) if len(names) > 1 else ()
    return Section("Overlap", _TEXT, tables=tables, excerpts=tuple(examples))


def _pairs(subject: Subject, overlap: Row, names: Sequence[str]) -> Table:
    place = {name: number for number, name in enumerate(overlap["names"])}
    pairs = sorted(combinations(names, 2), key=lambda pair: _interest(subject, overlap, place[pair[0]], place[pair[1]]))
    rows = []
    for first, second in pairs[:_PAIRS_ON_PAGE]:
        i, j = place[first], place[second]
        counts = (overlap["both"][i][j], overlap["only_row"][i][j], overlap["only_row"][j][i])
        rows.append((first, second, *map(numbers.count, counts), plain(overlap["jaccard"][i][j])))
    left = len(pairs) - len(rows)
    return Table(
        "Pairs of algorithms, in tokens" + ("" if subject.advantages else ", each for both signs"),
        (
            Column("first", kind="text"), Column("second", kind="text"), Column("both", CLIPPING["both"]),
            Column("only first", CLIPPING["only_row"]), Column("only second", CLIPPING["only_row"]),
            Column("Jaccard", CLIPPING["jaccard"]),
        ),
        tuple(rows),
        note="The compared pair first, then pairs with one of the two, then the others, each by disagreement"
        + (f"; {left} more pairs are in the JSON." if left else "."),
        shrinks=True,
        terminal_rows=_PAIRS_ON_TERMINAL,
    )  # fmt: skip


def _interest(subject: Subject, overlap: Row, i: int, j: int) -> tuple[int, int]:
    """Smaller is more interesting: pairs of the leading algorithms, then those that disagree on many tokens."""
    leading = {row["name"] for row in subject.leading}
    found = sum(overlap["names"][place] in leading for place in (i, j))
    return -found, -(overlap["only_row"][i][j] + overlap["only_row"][j][i])


def _jaccard(overlap: Row, names: Sequence[str]) -> Table:
    place = {name: number for number, name in enumerate(overlap["names"])}
    return Table(
        "Jaccard index of every two algorithms",
        (Column("", kind="text"), *(Column(name, CLIPPING["jaccard"]) for name in names)),
        tuple(
            (row, *(numbers.number(value_of(overlap["jaccard"][place[row]][place[column]])) for column in names))
            for row in names
        ),
        note="Algorithms that block nothing are left out. Intervals are in the JSON.",
        fold="Jaccard index of every two algorithms",
        terminal_rows=0,
    )
