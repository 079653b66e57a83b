"""Repeated problems are left out before Arrow's rows become Python objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mismatch_cli.probe.tasks.prompts import PromptSource, answered_differently, load_problems
from mismatch_cli.probe.tasks.source_rows import first_of_each
from tests.frameworks.importing.layouts import write_records


def dapo_row(number: int, answer: int | None = None, content: str = "") -> dict[str, Any]:
    """A row as in DAPO-Math-17k, which repeats each a hundred times, with the same index or a
    different one.
    """
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": content or f"What is {number} + 1?", "role": "user"}],
        "ability": "MATH",
        "reward_model": {
            "ground_truth": str(number + 1 if answer is None else answer),
            "style": "rule",
        },
        "extra_info": {"index": f"id-{number}-{answer}"},
    }


ROWS = [
    dapo_row(0),
    dapo_row(1),
    dapo_row(0),
    dapo_row(2),
    dapo_row(1),
    dapo_row(1, 7),
    dapo_row(0),
    dapo_row(1, 7),
]


def saved(folder: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    """The same rows in a file of this kind, or in a folder laid out like a data set."""
    if kind == "folder":
        return str(write_records(folder / "rows" / "train.parquet", rows).parent)
    return str(write_records(folder / f"rows.{kind}", rows))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_each_problem_occurs_once_under_the_number_of_its_first_row(tmp_path, kind):
    where = saved(tmp_path, kind, ROWS)
    everything = load_problems(PromptSource(where))
    assert [p.prompt_id for p in everything] == list(range(8))
    problems = load_problems(PromptSource(where, unique=True))
    assert [(p.prompt_id, p.answer) for p in problems] == [(0, "1"), (1, "2"), (3, "3"), (5, "7")]
    assert [p for p in everything if p.prompt_id in (0, 1, 3, 5)] == problems
    assert answered_differently(problems) == 2  # What is 1 + 1?
    assert len(load_problems(PromptSource(where, unique=True, limit=3))) == 3


def test_other_fields_do_not_tell_rows_apart(tmp_path):
    rows = [dapo_row(0) | {"solution": str(i), "extra_info": {"index": str(i)}} for i in range(3)]
    assert len(load_problems(PromptSource(saved(tmp_path, "parquet", rows), unique=True))) == 1
    source = PromptSource(saved(tmp_path, "jsonl", rows), answer_field="solution", unique=True)
    assert len(load_problems(source)) == 3


def test_texts_are_not_mistaken_for_each_other():
    """Values whose plain concatenations would be equal; absent values; numbers; nesting."""
    rows = [
        {"problem": "a", "answer": "bc"}, {"problem": "ab", "answer": "c"},
        {"problem": "abc", "answer": None},
        {"problem": "abc", "answer": ""}, {"problem": None, "answer": "abc"},
        {"problem": "1:a", "answer": "b"},
        {"problem": "-", "answer": "-"}, {"problem": None, "answer": None},
    ]  # fmt: skip
    tables = [pa.Table.from_pylist(rows), pa.Table.from_pylist(rows[::-1])]
    assert [n for n, _ in first_of_each(tables, ["problem", "answer"])] == list(range(8))
    nested = [[["a"], ["b"]], [["a", "b"]], [["ab"]], [[], ["ab"]], None, [["a"], ["b"]], [None]]
    table = pa.table({"problem": pa.array(nested, pa.list_(pa.list_(pa.string())))})
    assert [n for n, _ in first_of_each([table], ["problem"])] == [0, 1, 2, 3, 4, 6]
    assert [n for n, _ in first_of_each([table.slice(3), table.slice(5)], ["problem"])] == [
        0,
        1,
        2,
        3,
    ]
    numbers = pa.table({"problem": ["p"] * 4, "answer": [1.5, 1.5, None, 2.0]})
    assert [n for n, _ in first_of_each([numbers], ["problem", "answer"])] == [0, 2, 3]
    assert [n for n, _ in first_of_each([numbers], ["absent"])] == [0, 1, 2, 3]


def test_lists_of_one_length():
    pairs = pa.array([["a", "b"], ["ab", ""], ["a", "b"], None], pa.list_(pa.string(), 2))
    table = pa.table({"problem": pairs})
    assert [n for n, _ in first_of_each([table], ["problem"])] == [0, 1, 3]


def test_many_repeated_rows():
    """Of 200,000 rows with 2,000 problems, each batch of 65,536 makes objects only of the new
    ones.
    """
    contents = [f"What is {i} + 1? " + "x" * 200 for i in range(2000)]
    rows = pa.Table.from_pylist([dapo_row(i, content=contents[i]) for i in range(2000)])
    table = pa.concat_tables([rows] * 100).combine_chunks()
    portions = [table.slice(start, 2**16) for start in range(0, len(table), 2**16)]
    firsts = list(first_of_each(portions, ["prompt", "reward_model.ground_truth"]))
    made = [n for n, _ in firsts]
    assert made == list(range(2000)) and firsts[7][1] == dapo_row(7, content=contents[7])
