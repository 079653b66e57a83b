"""What is left out counts once, under its first reason, with where that first occurred."""

from __future__ import annotations

import numpy as np

from mismatch_cli.frameworks.importing.omissions import Tally


def flags(*values: int) -> np.ndarray:
    return np.array(values, dtype=bool)


def test_each_row_counts_once_under_its_first_reason():
    tally = Tally()
    bad_S = {
        "late": flags(0, 0, 1, 1, 0),
        "odd": flags(0, 1, 1, 0, 0),
        "never": flags(0, 0, 1, 0, 0),
    }
    keep_S = tally.sift(bad_S, "a file", lambda reason, row: f": {reason} at {row}")
    assert keep_S.tolist() == [True, False, False, False, True]
    assert tally.left_out == {"late": 2, "odd": 1}
    assert tally.first == {"late": "a file: late at 2", "odd": "a file: odd at 1"}
    assert tally.sift({"odd": flags(1, 1, 1)}, "another").tolist() == [False] * 3
    tally.sift({"empty": flags(1)}, "", lambda reason, row: "a detail of no file")
    assert tally.left_out == {"late": 2, "odd": 4, "empty": 1}
    assert tally.first == {"late": "a file: late at 2", "odd": "a file: odd at 1"}


def test_the_most_frequent_reason_comes_first():
    tally = Tally()
    tally.leave_out("rows without a name", 2, "b")
    tally.leave_out("rows without a name", 1, "c")
    tally.leave_out("rows of another\x1b kind", 4)
    tally.leave_out("rows that are none", 0, "d")
    tally.note("rows are odd", 0)
    tally.note("rows are odd", 2)
    tally.note("rows are odd", 3)
    assert tally.left_out_lines() == [
        "4 rows of another\\x1b kind",
        "3 rows without a name (first: b)",
    ]
    assert tally.noted == {"rows are odd": 5}
