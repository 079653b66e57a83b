"""Values inside objects: `--columns` names them by their path, and a line that names them is
proposed.
"""

from __future__ import annotations

import re

import pyarrow as pa
import pytest

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.frameworks.importing.guess import columns_in, guess_columns
from mismatch_cli.frameworks.importing.paths import paths_in, roots, value_at, with_paths
from tests.frameworks.importing.layouts import (
    assert_holds,
    imported,
    plain_record,
    real_rows,
    write_lines,
    write_records,
)
from tests.frameworks.importing.shapes import sglang, vllm_chat

COLUMNS = {
    "prompt_ids": "rollout.prompt.ids",
    "response_ids": "rollout.response.ids",
    "logp_rollout": "rollout.response.logprobs",
    "logp_trainer": "trainer.logprobs",
}


def nested(row):
    record = plain_record(row)
    response = {"ids": record["response_ids"], "logprobs": record["logp_rollout"]}
    return {
        "rollout": {"prompt": {"ids": record["prompt_ids"]}, "response": response},
        "trainer": {"logprobs": record["logp_trainer"]},
    }


@pytest.mark.parametrize("way", ["jsonl", "parquet"])
def test_paths_are_read_as_columns_are(tmp_path, way):
    rows = real_rows(4)
    path, records = tmp_path / f"d.{way}", list(map(nested, rows))
    write_records(path, records)
    table, about = imported(path, into=tmp_path / "trace", columns=COLUMNS)
    assert_holds(table, rows, *COLUMNS)
    assert not about["left_out"]
    with pytest.raises(UsageError, match=r"no column 'trainer.logprob'. Did you mean .*logprobs"):
        imported(path, into=tmp_path / "t", columns=COLUMNS | {"logp_trainer": "trainer.logprob"})
    with pytest.raises(MismatchError) as refused:
        imported(path, into=tmp_path / "t")
    assert ",".join(f"{ours}={its}" for ours, its in COLUMNS.items()) in str(refused.value)


def test_what_servers_answer_is_proposed_and_read(tmp_path):
    rows = real_rows(4)
    answers = {
        "choices.0.logprobs.content.*.logprob": [vllm_chat([row]) for row in rows],
        "meta_info.output_token_logprobs.*.0": [sglang(row) for row in rows],
    }
    for logp, records in answers.items():
        columns = guess_columns(columns_in(records), {})
        assert columns["logp_rollout"] == logp
        path = write_lines(tmp_path / f"{logp}.jsonl", records)
        table, _ = imported(path, into=tmp_path / logp, columns=columns)
        assert_holds(table, rows, "prompt_ids", "response_ids", "logp_rollout")


def test_proposals_look_at_the_values():
    """A list of messages is empty, ids are whole numbers, and nulls fit everything."""
    record = {
        "completion": [],
        "turn": {"completion_ids": [5, 6], "completion_logprobs": [-0.1, -0.2]},
        "prompt_ids": [1],
        "logprobs": [5, 6],
        "sampling_logprobs": [None, None],
    }
    assert guess_columns(columns_in([record]), {}) == {
        "response_ids": "turn.completion_ids",
        "logp_rollout": "turn.completion_logprobs",
    }


def test_a_path_that_leads_nowhere_has_no_value():
    record = {"a": [{"b": 1}, {"b": 2}], "c": {"d": "text"}, "a.b": 3}
    paths = {
        "a.*.b": [1, 2],
        "a.1.b": 2,
        "a.2.b": None,
        "c.d.e": None,
        "c.*.d": None,
        "a.*": record["a"],
    }
    for path, value in paths.items():
        assert value_at(record, path) == value, path
    assert paths_in(record) == {"a.*.b": [1, 2], "c.d": "text"}
    assert all(not re.search("[,=]", path) for path in paths_in({"a": {"b=c": 1, "d,e": 2}}))


def test_only_a_path_through_structs_to_a_field_is_a_column_of_a_parquet_file():
    """A column that is itself called like a path is read under its own name."""
    scores = pa.struct({"logp": pa.float32(), "top": pa.struct({"ids": pa.int32()})})
    schema = pa.schema({"scores": scores, "reward": pa.float32(), "reward.mean": pa.float32()})
    whole = {name: name for name in schema.names}
    nowhere = ["scores.logq", "scores.logp.x", "reward.x", "absent", "absent.logp"]
    assert roots(schema, [*nowhere, *schema.names]) == whole
    del whole["scores"]
    paths = {"scores.logp": "scores", "scores.top.ids": "scores"}
    assert roots(schema, paths) == whole | paths
    assert roots(schema, ["scores", "scores.logp"])["scores"] == "scores"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("turns.ids", [[5, 6], [7]]),
        ("turns.*.ids", [[5, 6], [7]]),
        ("turns.0.ids", [5, 6]),
        ("turns.1.ids.0", 7),
        ("turns.2.ids", None),
        ("turns.ids.0", [5, 7]),
        ("turns.score", [None, 0.5]),
        ("turns.absent", None),
        ("groups.turns.ids", [[1], [2, 3], [4]]),
        ("groups.0.turns.ids", [[1], [2, 3]]),
        ("pairs.*.0", [-0.5, -1.0]),
        ("pairs.0", [-0.5, 8, "a"]),
        ("none", []),
        ("none.ids", []),
        ("name.ids", None),
    ],
)
def test_a_path_enters_every_object_of_a_list(path, value):
    record = {
        "turns": [{"ids": [5, 6]}, {"ids": [7], "score": 0.5}],
        "groups": [{"turns": [{"ids": [1]}, {"ids": [2, 3]}]}, None, {"turns": [{"ids": [4]}]}],
        "pairs": [[-0.5, 8, "a"], [-1.0, 9, "b"]],
        "none": [],
        "name": "text",
    }
    assert value_at(record, path) == value


def test_paths_are_proposed_for_what_objects_lists_and_tuples_hold():
    """Up to three entries of different kinds are a tuple; a path has at most eight parts."""
    deep: dict = {"ids": [1]}
    for name in "hgfedcb":
        deep = {name: deep}
    record = {
        "top": [5],
        "one": [{"ids": [5, 6]}],
        "two": [{"ids": [5]}, {"ids": [6]}],
        "pairs": [[-0.5, 8, None], [-1.0, 9, None]],
        "long": [[-0.5, 8, None, None]],
        "numbers": [[-0.5, 8]],
        "texts": [["a", "b"]],
        "empty": {},
        "bad": {"": 1, "*": 2, "x.y": 3, "x=y": 4, "x,y": 5, "good": 6},
        "x": {"deep": deep["b"]},
    }
    assert paths_in(record) == {
        "one.0.ids": [5, 6],
        "two.*.ids": [[5], [6]],
        "pairs.*.0": [-0.5, -1.0],
        "pairs.*.1": [8, 9],
        "pairs.*.2": None,
        "bad.good": 6,
    }
    assert paths_in({"x": deep["b"]}) == {"x.c.d.e.f.g.h.ids": [1]}


def test_what_a_path_enters_is_not_a_column_of_its_own():
    record = {"a": {"b": [1], "c": 2}, "a.c": 3, "d": 4}
    entered = with_paths(record, ["a.b", "a.c", "d", "e.f"])
    assert entered == {"a.b": [1], "a.c": 3, "d": 4}
    assert with_paths(record, ["a", "a.b"]) == record | {"a.b": [1]}
    assert with_paths(record, ["a.absent"]) == {"a.c": 3, "d": 4}
