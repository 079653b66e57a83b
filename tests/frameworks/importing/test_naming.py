"""`--columns ours=theirs,…`: an invalid mapping gets one sentence, and a valid one reads like
our own names.
"""

from __future__ import annotations

import pytest

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.frameworks.importing.naming import kind_and_length, parse_columns
from mismatch_cli.frameworks.importing.rows import WRONG_LENGTH
from tests.frameworks.importing.layouts import (
    assert_holds,
    column,
    imported,
    ones,
    padded,
    plain_record,
    real_rows,
    write_lines,
    write_records,
)

THEIRS = {
    "prompt_ids": "ctx",
    "response_ids": "out",
    "logp_rollout": "lp engine",
    "logp_trainer": "step",
}


def records(count: int = 4):
    return [
        {THEIRS[name]: value for name, value in plain_record(row).items()}
        for row in real_rows(count)
    ]


@pytest.mark.parametrize("way", ["jsonl", "parquet"])
def test_named_columns_are_read_as_ours(tmp_path, way):
    """One of them has the name of another column of ours, which is then not read under that
    name.
    """
    rows = real_rows(4)
    path = tmp_path / f"d.{way}"
    longer = [
        record | {"reward": i, "logp_recomputed": "a note"} for i, record in enumerate(records())
    ]
    write_records(path, longer)
    columns = THEIRS | {"logp_recomputed": "reward"}  # wrong on purpose
    with pytest.raises(
        MismatchError,
        match=r"reward of .* is a number, but logp_recomputed must be a list of numbers",
    ):
        imported(path, into=tmp_path / "trace", columns=columns)
    table, about = imported(
        path, into=tmp_path / "trace", columns=THEIRS | {"finish_reason": "logp_recomputed"}
    )
    assert_holds(table, rows, *THEIRS)
    assert table.column("step").to_pylist() == [0] * 4 and table.column("reward").to_pylist() == [
        0,
        1,
        2,
        3,
    ]
    assert set(table.column("finish_reason").to_pylist()) == {"a note"} and about["left_out"] == {}


def test_batches_and_padding_under_other_names(tmp_path):
    rows = real_rows(3)
    responses = column(rows, "response_ids")
    batch = {
        "x": column(rows, "prompt_ids"),
        "y": padded(responses),
        "z": padded(column(rows, "logp_rollout")),
        "m": padded(ones(responses)),
    }
    columns = {"prompt_ids": "x", "response_ids": "y", "logp_rollout": "z", "response_mask": "m"}
    table, _ = imported(
        write_lines(tmp_path / "d.jsonl", [batch]), into=tmp_path / "trace", columns=columns
    )
    assert_holds(table, rows, "response_ids", "logp_rollout")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--columns is empty"),
        ("response_ids", "'response_ids' is not ours=theirs"),
        ("response_ids=", "is not ours=theirs"),
        ("respons_ids=out", "Did you mean response_ids"),
        ("out=response_ids", "Our name comes first: response_ids=out"),
        ("response_ids=out,response_ids=ctx", "names response_ids twice, out and ctx"),
        ("response_ids=out,prompt_ids=out", "maps out to both response_ids and prompt_ids"),
    ],
)
def test_invalid_mappings_are_refused_without_a_file(text, message):
    with pytest.raises(UsageError, match=message):
        parse_columns(text)


def test_spaces_and_equal_signs_in_names():
    assert parse_columns(" response_ids = my tokens , logp_rollout=a=b") == {
        "response_ids": "my tokens",
        "logp_rollout": "a=b",
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"reward": "scor"}, UsageError, "d.jsonl has no column 'scor'. Did you mean score"),
        (
            {"reward": "?"},
            UsageError,
            "does not say which column of .* is reward: replace [?] .*, or leave reward out",
        ),
        (
            {"response_ids": "?"},
            UsageError,
            "which column of .* is response_ids.*Available: ctx, fractions, lp engine",
        ),
        (
            {"response_ids": "text"},
            MismatchError,
            "text of .* is text, but response_ids .*not what was sampled",
        ),
        ({"response_ids": "nested"}, MismatchError, "nested of .* is a list of lists, but"),
        (
            {"response_ids": "fractions"},
            MismatchError,
            "list with a number, but response_ids must be a list of whole",
        ),
        ({"loss_mask": "lp engine"}, MismatchError, "but loss_mask must be a list of 0 and 1"),
        ({"step": "nan"}, MismatchError, "nan of .* is a number, but step must be a whole number"),
        ({"reward": "odd"}, MismatchError, "odd of .* is an object, but reward must be a number"),
    ],
)
def test_columns_that_the_file_does_not_hold(tmp_path, change, error, message):
    odd = {
        "score": 1,
        "text": "yes",
        "nested": [[[1]]],
        "fractions": [0.5],
        "nan": float("nan"),
        "odd": {"a": 1},
    }
    path = write_lines(tmp_path / "d.jsonl", [record | odd for record in records()])
    with pytest.raises(error, match=message):
        imported(path, into=tmp_path / "trace", columns=THEIRS | change)


def test_later_lines_may_be_worse_and_are_counted(tmp_path):
    rows = records(6)
    rows[1]["lp engine"][0] = float("nan")
    rows[2]["lp engine"].append(-1.0)
    rows[3]["out"][0] = 10**7
    rows[4]["out"] = None
    rows += [rows[5] | {"out": ["a"]} for _ in range(70)]
    path = write_lines(tmp_path / "d.jsonl", [*rows[:6], *rows[:1] * 60, *rows[6:]])
    table, about = imported(path, into=tmp_path / "trace", columns=THEIRS, vocabulary=10**6)
    assert table.num_rows == 3 + 60
    assert about["left_out"] == {
        WRONG_LENGTH.format(name="logp_rollout"): 1,
        "responses whose response_ids holds numbers that are not token ids": 1,
        "responses without token ids": 1,
        "lines with values of the wrong type": 70,
    }


def test_an_empty_file_and_other_files_beside_it(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(MismatchError, match=r"empty.jsonl is empty\."):
        imported(tmp_path / "empty.jsonl", into=tmp_path / "trace", columns=THEIRS)
    write_lines(tmp_path / "run" / "dump.jsonl", records())
    write_lines(tmp_path / "run" / "notes.jsonl", [{"a": 1}])
    table, about = imported(tmp_path / "run", into=tmp_path / "trace", columns=THEIRS)
    assert table.num_rows == 4 and about["left_out"] == {"files of another layout": 1}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1, 2, 3], "3 whole numbers"),
        ([[0.5, 1.5], [2.5, 3.5]], "2 lists of 2 numbers"),
        ([[0.5], [1.5, 2.5, 3.5]], "2 lists of 1 to 3 numbers"),
    ],
)
def test_a_value_is_described_by_its_kind_and_length(value, words):
    assert kind_and_length(value) == words
