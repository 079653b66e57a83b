"""Which rows a trace takes, and what it notes of them: small cases by hand."""

from __future__ import annotations

import pyarrow as pa
import pytest

from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.rows import (
    LATER_IDS,
    NO_PROMPT,
    ONLY_LOGP,
    SHIFTED,
    TOP_K_WITHOUT_IDS,
    Completer,
    prompt_hash,
    text_key,
)
from tests.frameworks.importing.layouts import Row, imported, write_lines, write_records

PAIR = {"logp_rollout": [-1.0, -2.0], "logp_trainer": [-1.5, -2.5]}


@pytest.mark.parametrize("name", ["prompt_ids", "response_ids"])
def test_rows_without_ids_stay_beside_one_that_has_them_too_late(tmp_path, name):
    """In a trace of pairs, a file where one row has ids: its others are like those before."""
    write_lines(tmp_path / "0.jsonl", [PAIR])
    write_lines(tmp_path / "1.jsonl", [PAIR | {name: [5, 6]}, PAIR, PAIR])
    paths = (tmp_path / "0.jsonl", tmp_path / "1.jsonl")
    table, about = imported(*paths, into=tmp_path / "trace")
    assert table.column("logp_trainer").to_pylist() == [[-1.5, -2.5]] * 3
    assert len(set(table.column("prompt_id").to_pylist())) == 3
    assert name not in table.column_names
    assert about["left_out"] == {LATER_IDS.format(name=name): 1}
    assert about["noted"] == {ONLY_LOGP: 3, NO_PROMPT: 3}


def test_top_k_columns_of_rows_without_ids_are_dropped_beside_a_row_with_ids(tmp_path):
    ranks = {"topk_ids": [5, 6], "topk_logp_rollout": [-1.0, -2.0]}
    write_lines(tmp_path / "0.jsonl", [PAIR])
    write_lines(tmp_path / "1.jsonl", [PAIR | ranks, PAIR | ranks | {"response_ids": [5, 6]}])
    paths = (tmp_path / "0.jsonl", tmp_path / "1.jsonl")
    table, about = imported(*paths, into=tmp_path / "trace")
    assert table.num_rows == 2 and table.column_names.count("topk_ids") == 0
    assert about["noted"][TOP_K_WITHOUT_IDS] == 2


@pytest.mark.parametrize(
    ("before", "last", "shifted"),
    [(-0.5, 0.0, 1), (-0.5, -0.25, 0), (0.0, 0.0, 0), (None, 0.0, 0), (1.0, 0.0, 0)],
)
def test_only_a_log_probability_before_the_response_shows_a_shift(tmp_path, before, last, shifted):
    """A certain last token has log 1, whatever fills the places of the prompt."""
    sequence = {"token_ids": [1, 2, 5, 6], "loss_mask": [0, 0, 1, 1]}
    path = write_lines(
        tmp_path / "d.jsonl", [sequence | {"logp_rollout": [before, before, -1.0, last]}]
    )
    _, about = imported(path, into=tmp_path / "trace")
    assert about["noted"].get(SHIFTED, 0) == shifted


def test_a_row_without_log_mu_hides_no_shift_of_another(tmp_path):
    """The null row is longer than the shifted one behind it; the last row is not shifted."""
    longer = {"token_ids": [1, 2, 3, 5, 6], "loss_mask": [0, 0, 0, 1, 1], "logp_rollout": None}
    row = {"token_ids": [1, 2, 5], "loss_mask": [0, 0, 1]}
    shifted = row | {"logp_rollout": [0.0, -1.0, 0.0]}
    lines = [longer, shifted, longer, row | {"logp_rollout": [0.0, 0.0, -1.0]}]
    _, about = imported(write_lines(tmp_path / "d.jsonl", lines), into=tmp_path / "trace")
    assert about["noted"][SHIFTED] == 1


def test_a_zero_is_doubted_by_the_first_other_side_that_its_token_has(tmp_path):
    """The recomputed one where there is one, and the trainer's in the second response."""
    records = [
        {"logp_rollout": [0.0, 0.0], "logp_trainer": [-3.0, -3.0], "logp_recomputed": [-0.5, -1.5]},
        {"logp_rollout": [0.0, 0.0], "logp_trainer": [-1.0, -1.25]},
    ]
    _, about = imported(write_lines(tmp_path / "d.jsonl", records), into=tmp_path / "trace")
    ((note, count),) = [item for item in about["noted"].items() if "exactly 0" in item[0]]
    assert count == 2 and "rollout log-probability of exactly 0 where the other side's" in note


@pytest.mark.parametrize("way", ["jsonl", "parquet"])
def test_a_row_has_the_prompt_of_the_other_name_where_it_lacks_the_first(tmp_path, way):
    """Also where one of the two is a text, and the other a number."""
    record = PAIR | {"response_ids": [5, 6], "prompt_ids": [1]}
    names = [(7, None), ("7", 8), (None, None), (None, 9)]
    if way == "parquet":
        names[0] = ("7", None)
    records = [record | {"group_id": group, "prompt_id": prompt} for group, prompt in names]
    path = write_records(tmp_path / f"d.{way}", records)
    table, _ = imported(path, into=tmp_path / "trace")
    first = 7 if way == "jsonl" else text_key("7")
    of_tokens = int(prompt_hash(pa.array([[1]], pa.list_(pa.int32())))[0])
    assert table.column("prompt_id").to_pylist() == [first, 8, of_tokens, 9]


def test_rows_without_a_number_take_free_ones(tmp_path):
    """Their positions, 0 to 5; 1 and 4 are taken, by rows that leave 3 and 5 free."""
    record = PAIR | {"response_ids": [5, 6], "prompt_ids": [1]}
    numbers = [None, None, 2, 4, None, 1]
    records = [record | {"sample_index": number} for number in numbers]
    table, about = imported(write_lines(tmp_path / "d.jsonl", records), into=tmp_path / "trace")
    assert table.column("sample_index").to_pylist() == [0, 3, 2, 4, 5, 1]
    assert about["rows"] == 6


def test_the_ids_of_prompts_are_those_of_older_traces():
    """A trace that grows, and another machine, must give a prompt the same id."""
    assert text_key("a") == 2340832890917691671
    prompts = pa.array([[1], [], [1, 2], [2, 1], [1]], pa.list_(pa.int32()))
    one, none, two, turned, again = prompt_hash(prompts).tolist()
    assert (one, two) == (871958892221420579, 5892233047461338336)
    assert len({one, none, two, turned}) == 4 and again == one
    assert min(one, none, two, turned) >= 0


def test_facts_count_the_rows_and_what_they_lack():
    """Of two tables; a repeated response counts nowhere."""
    tally = Tally()
    completer = Completer(tally, newer_trainer=False)
    row = {"prompt_ids": [1], "response_ids": [5, 6], "logp_rollout": [-1.0, -2.0]}
    scored = row | {"logp_trainer": [-1.0, -2.0]}
    first = [
        scored | {"step": 3, "minibatch": 0, "finish_reason": "stop"},
        scored | {"step": 3, "version_trainer": 1, "prompt_id": 7},
        row | {"step": 5, "version_trainer": 1, "minibatch": 1, "prompt_id": None},
    ]
    longer = {"response_ids": [5, 6, 7], "logp_rollout": [-1.0, -2.0, -3.0]}
    second = [
        row | longer | {"step": 4, "sample_index": 9, "version_rollout": 2},
        row | {"step": 3, "sample_index": 0},  # once more
    ]
    tables = [
        completer.complete(pa.table(pa.Table.from_pylist(rows)), "a file")
        for rows in (with_all_keys(first), with_all_keys(second))
    ]
    assert [table.num_rows for table in tables] == [3, 1]
    assert completer.facts() == {
        "rows": 4,
        "tokens": 2 + 2 + 2 + 3,
        "rows_with_trainer": 2,
        "rows_with_newer_trainer": 1,
        "rows_with_unknown_finish": 3,
        "rows_without_minibatch": 2,
    }
    assert completer.steps == {3, 4, 5}
    assert tables[0].column("version_trainer").to_pylist() == [0, 1, 1]
    assert tables[1].column("version_trainer").to_pylist() == [2]
    assert tally.left_out == {"repeated responses (same step, prompt and sample index)": 1}
    assert tally.first == {"repeated responses (same step, prompt and sample index)": "a file"}


def with_all_keys(rows: list[Row]) -> list[Row]:
    """The rows with every key that one of them has."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]
