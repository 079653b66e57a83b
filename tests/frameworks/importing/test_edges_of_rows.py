"""Which rows a trace takes, and what it notes of them: small cases by hand."""

from __future__ import annotations

import pyarrow as pa
import pytest

from mismatch_cli.frameworks.importing.rows import (
    LATER_IDS,
    NO_PROMPT,
    ONLY_LOGP,
    SHIFTED,
    TOP_K_WITHOUT_IDS,
    prompt_hash,
    text_key,
)
from tests.frameworks.importing.layouts import imported, write_lines, write_records

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
