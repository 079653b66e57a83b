"""NeMo-RL's training data: wrapped values, padding on the right, and faults."""

from __future__ import annotations

from typing import Any

import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing.rows import BEYOND, TOO_LONG, UNEQUAL
from mismatch_cli.frameworks.importing.sources import OTHER_TYPES
from mismatch_cli.frameworks.nemo_rl.importer import SKIPPED, UNWRAPPABLE
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.trace.reader import Trace
from tests.frameworks.importing.layouts import (
    assert_holds,
    column,
    imported,
    nemo_records,
    nemo_rl,
    real_rows,
    same_bits,
    write_lines,
)

NAME = "train_data_step1.jsonl"


def unwrapped(record: dict) -> dict:
    return {name: value if name == "idx" else value[0] for name, value in record.items()}


CHANGES = {
    "none": lambda record: record,
    "unwrapped": unwrapped,
    "scalar advantage": lambda record: record | {"advantages": [record["advantages"][0][0]]},
    "true and false": lambda record: (
        record | {"token_loss_mask": [list(map(bool, record["token_loss_mask"][0]))]}
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_column_arrives_to_the_bit(tmp_path, change):
    rows = real_rows(8)
    path = tmp_path / "log" / "train_data_step7.jsonl"
    write_lines(path, map(change, nemo_records(rows)))
    table, about = imported(tmp_path / "log", into=tmp_path / "trace")
    names = ("prompt_ids", "response_ids", "loss_mask", "logp_rollout")
    assert_holds(table, rows, *names, logp_trainer="logp_recomputed")
    assert same_bits(
        table, "advantage", [[row["advantage"][0]] * len(row["advantage"]) for row in rows]
    )
    assert table.column("reward").to_pylist() == column(rows, "reward")
    assert table.column("step").to_pylist() == [7] * 8
    assert (about["format"], about["left_out"], about["noted"]) == ("nemo-rl", {}, {})
    assert list(analyse_mismatch([Trace.open(tmp_path / "trace")], 1).pairs) == ["mismatch"]


def test_padding_on_the_left_and_wrong_lengths_are_left_out(tmp_path):
    records = nemo_records(real_rows(5))
    _, left, long, short, two = records
    (size,) = left["input_lengths"]
    for name in ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs"):
        (values,) = left[name]
        left[name] = [values[size:] + values[:size]]
    long["input_lengths"][0] += 1000
    short["prev_logprobs"][0].pop()
    two["token_ids"] *= 2
    table, about = imported(write_lines(tmp_path / NAME, records), into=tmp_path / "trace")
    assert table.num_rows == 1
    assert about["left_out"] == {
        BEYOND: 1,
        TOO_LONG: 1,
        UNEQUAL.format(name="logp_trainer"): 1,
        UNWRAPPABLE: 1,
    }


def test_a_mask_that_ends_one_token_late_is_beyond_the_length(tmp_path):
    records = nemo_records(real_rows(3))
    (size,) = records[1]["input_lengths"]
    records[1]["token_loss_mask"][0][size] = 1
    _, about = imported(write_lines(tmp_path / NAME, records), into=tmp_path / "trace")
    assert about["left_out"] == {BEYOND: 1}


def zeroed(rows: list[dict], name: str) -> list[dict]:
    """Records whose log-probabilities are all 0."""
    records = nemo_records(rows)
    return [record | {name: [[0.0] * len(record[name][0])]} for record in records]


def test_a_skipped_pass_is_not_a_policy(tmp_path):
    path = write_lines(tmp_path / NAME, zeroed(real_rows(3), "prev_logprobs"))
    table, about = imported(path, into=tmp_path / "trace")
    assert table.column("logp_trainer").null_count == 3
    assert about["noted"] == {SKIPPED: 3} and about["rows_with_trainer"] == 0


def test_zero_filled_rollout_log_probs_are_counted(tmp_path):
    rows = real_rows(3)
    path = write_lines(tmp_path / NAME, zeroed(rows, "generation_logprobs"))
    _, about = imported(path, into=tmp_path / "trace")
    (note,) = about["noted"].items()
    assert "rollout log-probability of exactly 0 where the other side's is below −1" in note[0]
    assert note[1] == sum(value < -1 for row in rows for value in row["logp_recomputed"])


def test_dynamic_sampling_and_a_sample_that_is_not_trained_on(tmp_path):
    filtered = {"filtered_rewards": [0.25], "rewards": [], "sample_loss_mask": [0.0]}
    records = [record | filtered for record in nemo_records(real_rows(2))]
    table, _ = imported(write_lines(tmp_path / NAME, records), into=tmp_path / "trace")
    assert table.column("reward").to_pylist() == [0.25, 0.25]
    assert not any(any(row) for row in table.column("loss_mask").to_pylist())


def test_holes_in_the_mask_stay(tmp_path):
    rows = real_rows(2)
    records = nemo_records(rows)
    for record in records:
        (mask,) = record["token_loss_mask"]
        mask[mask.index(1) + 2] = 0
    table, _ = imported(write_lines(tmp_path / NAME, records), into=tmp_path / "trace")
    for mask, row in zip(table.column("loss_mask").to_pylist(), rows, strict=True):
        assert mask == [i != 2 for i in range(len(row["response_ids"]))]


def test_lines_without_token_ids(tmp_path):
    records = nemo_records(real_rows(3))
    del records[0]["token_ids"]
    table, about = imported(write_lines(tmp_path / NAME, records), into=tmp_path / "trace")
    assert table.num_rows == 2 and about["left_out"] == {"responses without token ids": 1}


def test_impossible_lengths_and_numbers(tmp_path):
    records = nemo_records(real_rows(3))
    records[0]["input_lengths"] = [1e300]
    records[1]["input_lengths"] = [float("nan")]
    records[2]["idx"] = -(2**40)
    table, about = imported(write_lines(tmp_path / NAME, records), into=tmp_path / "trace")
    assert about["left_out"] == {OTHER_TYPES: 2}
    # The row number: the dump's number is invalid
    assert table.column("sample_index").to_pylist() == [0]


def test_a_row_that_does_not_fit_is_not_repeated_in_full(tmp_path):
    path = nemo_rl(tmp_path / NAME, real_rows(2))
    with pytest.raises(MismatchError, match="values of the wrong type") as caught:
        imported(path, into=tmp_path / "out", format="prime-rl")
    assert len(str(caught.value)) < 600


def test_what_is_odd_is_counted_in_kept_responses_only(tmp_path):
    nemo_rl(tmp_path / "a" / NAME, real_rows(2))
    write_lines(tmp_path / "b" / NAME, zeroed(real_rows(2), "prev_logprobs"))
    _, about = imported(tmp_path / "a", tmp_path / "b", into=tmp_path / "out")
    assert "repeated responses" in str(about) and "exactly 0" not in str(about)


@pytest.mark.parametrize("is_per_token", [True, False])
def test_an_advantage_arrives_in_float32(tmp_path, is_per_token):
    """0.1 and 1000.5 are rounded in half precision."""
    values, rows = [0.1, 1000.5], real_rows(2)
    records = nemo_records(rows)
    for record, value in zip(records, values, strict=True):
        width = len(record["token_ids"][0])
        record["advantages"] = [[value] * width if is_per_token else value]
    table, _ = imported(write_lines(tmp_path / NAME, records), into=tmp_path / "trace")
    lengths = [len(row["response_ids"]) for row in rows]
    expected = [[value] * length for value, length in zip(values, lengths, strict=True)]
    assert same_bits(table, "advantage", expected)


def test_certain_responses_are_not_a_skipped_pass(tmp_path):
    """Zeros that the rollout agrees with, beside a response with values; not those that it doubts,
    and none without such a response.
    """
    rows = real_rows(3)
    records = nemo_records(rows)
    for record, sure in zip(records[1:], (-1.0, -1.25), strict=True):
        (logp,) = record["generation_logprobs"]
        record["generation_logprobs"] = [[sure if value else 0.0 for value in logp]]
        record["prev_logprobs"] = [[0.0] * len(logp)]
    path = write_lines(tmp_path / NAME, records)
    table, about = imported(path, into=tmp_path / "some")
    assert [values is None for values in column_of(table, "logp_trainer")] == [False, False, True]
    assert set(column_of(table, "logp_trainer")[1]) == {0.0}
    assert about["noted"] == {SKIPPED: 1} and about["rows_with_trainer"] == 2
    table, about = imported(write_lines(path, records[1:]), into=tmp_path / "none")
    assert table.column("logp_trainer").null_count == 2 and about["noted"] == {SKIPPED: 2}


def column_of(table: Any, name: str) -> list[Any]:
    return list(table.column(name).to_pylist())


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step3/train_data_step12.jsonl", 12),
        ("log_20251130step.jsonl", 0),
        (f"step{10**12}.jsonl", 0),
    ],
)
def test_the_step_is_in_the_name(tmp_path, name, step):
    table, _ = imported(nemo_rl(tmp_path / name, real_rows(1)), into=tmp_path / "trace")
    assert column_of(table, "step") == [step]


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([0, 2**24 + 1], [0, 2**24 + 1]),
        ([7, 2**31 - 1], [7, 2**31 - 1]),
        ([7, 2**31], [0, 1]),
        ([-1, 7], [0, 1]),
    ],
)
def test_samples_keep_their_numbers_if_all_are_in_range(tmp_path, indices, expected):
    records = nemo_records(real_rows(2))
    for record, index in zip(records, indices, strict=True):
        record["idx"] = index
    table, _ = imported(write_lines(tmp_path / NAME, records), into=tmp_path / "trace")
    assert column_of(table, "sample_index") == expected
