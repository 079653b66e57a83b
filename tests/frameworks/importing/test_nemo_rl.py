"""NeMo-RL's training data: wrapped values, padding on the right, and faults."""

from __future__ import annotations

import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing.rows import BEYOND, TOO_LONG, UNEQUAL
from mismatch_cli.frameworks.importing.sources import OTHER_TYPES
from mismatch_cli.frameworks.nemo_rl.importer import SKIPPED, UNWRAPPABLE
from mismatch_cli.studies.mismatch import analyse
from mismatch_cli.trace.reader import Trace
from tests.frameworks.importing.layouts import imported, nemo_rl, real_rows, same_bits


def unwrapped(record: dict) -> dict:
    return {name: value if name == "idx" else value[0] for name, value in record.items()}


def scalar_advantage(record: dict) -> dict:
    return record | {"advantages": [record["advantages"][0][0]]}


def true_and_false(record: dict) -> dict:
    return record | {"token_loss_mask": [[bool(m) for m in record["token_loss_mask"][0]]]}


@pytest.mark.parametrize("change", [lambda r: r, unwrapped, scalar_advantage, true_and_false])
def test_every_column_arrives_to_the_bit(tmp_path, change):
    rows = real_rows(8)
    nemo_rl(tmp_path / "log" / "train_data_step7.jsonl", rows, change)
    table, about = imported(tmp_path / "log", into=tmp_path / "trace")
    for name in ("prompt_ids", "response_ids", "loss_mask", "logp_rollout"):
        assert same_bits(table, name, [row[name] for row in rows]), name
    assert same_bits(table, "logp_trainer", [row["logp_recomputed"] for row in rows])
    assert same_bits(
        table, "advantage", [[row["advantage"][0]] * len(row["advantage"]) for row in rows]
    )
    assert table.column("reward").to_pylist() == [row["reward"] for row in rows]
    assert table.column("step").to_pylist() == [7] * 8
    assert (about["format"], about["left_out"], about["noted"]) == ("nemo-rl", {}, {})
    assert list(analyse([Trace.open(tmp_path / "trace")], 1).pairs) == ["mismatch"]


def test_padding_on_the_left_and_wrong_lengths_are_left_out(tmp_path):
    broken = iter(["", "left", "long", "short logp", "two"])

    def change(record: dict) -> dict:
        kind = next(broken)
        size = record["input_lengths"][0]
        if kind == "left":
            turned = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")
            return record | {n: [record[n][0][size:] + record[n][0][:size]] for n in turned}
        if kind == "long":
            return record | {"input_lengths": [size + 1000]}
        if kind == "short logp":
            return record | {"prev_logprobs": [record["prev_logprobs"][0][:-1]]}
        if kind == "two":
            return record | {"token_ids": record["token_ids"] * 2}
        return record

    path = nemo_rl(tmp_path / "train_data_step1.jsonl", real_rows(5), change)
    table, about = imported(path, into=tmp_path / "trace")
    assert table.num_rows == 1
    assert about["left_out"] == {
        BEYOND: 1,
        TOO_LONG: 1,
        UNEQUAL.format(name="logp_trainer"): 1,
        UNWRAPPABLE: 1,
    }


def test_a_mask_that_ends_one_token_late_is_beyond_the_length(tmp_path):
    def change(record: dict) -> dict:
        size = record["input_lengths"][0]
        mask = list(record["token_loss_mask"][0])
        mask[size:] = [1] + [0] * (len(mask) - size - 1)
        return record | {"token_loss_mask": [mask]}

    rows, changes = real_rows(3), iter((lambda record: record, change, lambda record: record))
    path = nemo_rl(tmp_path / "train_data_step1.jsonl", rows, lambda record: next(changes)(record))
    _, about = imported(path, into=tmp_path / "trace")
    assert about["left_out"] == {BEYOND: 1}


def test_a_skipped_pass_is_not_a_policy(tmp_path):
    def change(record: dict) -> dict:
        return record | {"prev_logprobs": [[0.0] * len(record["prev_logprobs"][0])]}

    table, about = imported(
        nemo_rl(tmp_path / "train_data_step1.jsonl", real_rows(3), change), into=tmp_path / "trace"
    )
    assert table.column("logp_trainer").null_count == 3
    assert about["noted"] == {SKIPPED: 3} and about["rows_with_trainer"] == 0


def test_zero_filled_rollout_log_probs_are_counted(tmp_path):
    def change(record: dict) -> dict:
        return record | {"generation_logprobs": [[0.0] * len(record["generation_logprobs"][0])]}

    rows = real_rows(3)
    _, about = imported(
        nemo_rl(tmp_path / "train_data_step1.jsonl", rows, change), into=tmp_path / "trace"
    )
    (note,) = about["noted"].items()
    assert "rollout log-probability of exactly 0 where the other side's is below −1" in note[0]
    assert note[1] == sum(value < -1 for row in rows for value in row["logp_recomputed"])


def test_dynamic_sampling_and_a_sample_that_is_not_trained_on(tmp_path):
    def change(record: dict) -> dict:
        return record | {"filtered_rewards": [0.25], "rewards": [], "sample_loss_mask": [0.0]}

    table, _ = imported(
        nemo_rl(tmp_path / "train_data_step1.jsonl", real_rows(2), change), into=tmp_path / "trace"
    )
    assert table.column("reward").to_pylist() == [0.25, 0.25]
    assert not any(any(row) for row in table.column("loss_mask").to_pylist())


def test_holes_in_the_mask_stay(tmp_path):
    def change(record: dict) -> dict:
        mask = list(record["token_loss_mask"][0])
        mask[mask.index(1) + 2] = 0
        return record | {"token_loss_mask": [mask]}

    rows = real_rows(2)
    table, _ = imported(
        nemo_rl(tmp_path / "train_data_step1.jsonl", rows, change), into=tmp_path / "trace"
    )
    for mask, row in zip(table.column("loss_mask").to_pylist(), rows, strict=True):
        assert mask == [i != 2 for i in range(len(row["response_ids"]))]


def test_lines_without_token_ids(tmp_path):
    seen = iter(range(3))

    def change(record: dict) -> dict:
        return (
            record
            if next(seen)
            else {name: value for name, value in record.items() if name != "token_ids"}
        )

    table, about = imported(
        nemo_rl(tmp_path / "train_data_step1.jsonl", real_rows(3), change), into=tmp_path / "trace"
    )
    assert table.num_rows == 2 and about["left_out"] == {"responses without token ids": 1}


def test_impossible_lengths_and_numbers(tmp_path):
    broken = iter(
        [{"input_lengths": [1e300]}, {"input_lengths": [float("nan")]}, {"idx": -(2**40)}]
    )
    rows = real_rows(3)
    path = nemo_rl(tmp_path / "train_data_step1.jsonl", rows, lambda record: record | next(broken))
    table, about = imported(path, into=tmp_path / "trace")
    assert about["left_out"] == {OTHER_TYPES: 2}
    # The row number: the dump's number is invalid
    assert table.column("sample_index").to_pylist() == [0]


def test_a_row_that_does_not_fit_is_not_repeated_in_full(tmp_path):
    path = nemo_rl(tmp_path / "train_data_step1.jsonl", real_rows(2))
    with pytest.raises(MismatchError, match="values of the wrong type") as caught:
        imported(path, into=tmp_path / "out", format="prime-rl")
    assert len(str(caught.value)) < 600


def test_what_is_odd_is_counted_in_kept_responses_only(tmp_path):
    def zeroed(record):
        return record | {"prev_logprobs": [[0.0] * len(record["prev_logprobs"][0])]}

    for name, change in (("a", lambda record: record), ("b", zeroed)):
        nemo_rl(tmp_path / name / "train_data_step1.jsonl", real_rows(2), change)
    _, told = imported(tmp_path / "a", tmp_path / "b", into=tmp_path / "out")
    assert "repeated responses" in str(told) and "exactly 0" not in str(told)


@pytest.mark.parametrize("is_per_token", [True, False])
def test_an_advantage_arrives_in_float32(tmp_path, is_per_token):
    """0.1 and 1000.5 are rounded in half precision."""
    values = [0.1, 1000.5]

    def change(record: dict) -> dict:
        value = values[record["idx"]]
        width = len(record["token_ids"][0])
        return record | {"advantages": [[value] * width if is_per_token else value]}

    rows = real_rows(2)
    nemo_rl(tmp_path / "log" / "train_data_step0.jsonl", rows, change)
    table, _ = imported(tmp_path / "log", into=tmp_path / "trace")
    lengths = [len(row["response_ids"]) for row in rows]
    expected = [[value] * length for value, length in zip(values, lengths, strict=True)]
    assert same_bits(table, "advantage", expected)
