"""Tables of a report on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from mismatch_cli.report.terminal import table_grid
from mismatch_cli.report.view import Column, Table


def test_a_narrow_table_gives_up_intervals_but_no_part_of_a_label():
    table = Table(
        "",
        (Column("metric", kind="text"), Column("value")),
        (("outside [0.8, 1.25]", "0.43 [0.1, 0.9]"),),
        shrinks=True,
    )
    printed = Console(file=io.StringIO(), width=30)
    printed.print(table_grid(table, printed))
    assert "outside [0.8, 1.25]  0.43 " in printed.file.getvalue()  # type: ignore[attr-defined]
    assert "0.9" not in printed.file.getvalue()  # type: ignore[attr-defined]
