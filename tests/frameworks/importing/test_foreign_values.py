"""Invalid values: every format leaves out and counts the responses that hold one, and changes no
other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from lab.makers.make_dump import export_record
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing.rows import NO_REWARD, STRANGE_IDS
from mismatch_cli.frameworks.importing.samples import NO_NUMBER
from mismatch_cli.trace import foreign_values
from tests.frameworks.importing.layouts import (
    Row,
    column,
    imported,
    nemo_record,
    open_instruct_record,
    plain_record,
    real_rows,
    slime_sample,
    slime_samples,
    write_lines,
    write_parquet,
    write_records,
)
from tests.frameworks.importing.test_nemo_rl import unwrapped

NAN = float("nan")
NO_ID = (3.7, -1, "5", True, NAN, 2**40, 2**70, -(2**31), [1], {"a": 1})
NO_LOGP = ("-0.5", True, False, [1.0], {}, -1e300)
NO_FLAG = (2, 0.5, -1, "1", NAN)


def plain(row: Row, _index: int = 0) -> Row:
    return plain_record(row) | {"loss_mask": [1] * len(row["response_ids"]), "reward": 1.0}


def plain_records(count: int) -> list[Row]:
    return list(map(plain, real_rows(count)))


def prime(row: Row, index: int) -> Row:
    return export_record(row, 0, index)


def nemo(row: Row, index: int) -> Row:
    """Without padding, and with unwrapped values, which are read too."""
    return unwrapped(nemo_record(row, index, len(row["prompt_ids"]) + len(row["response_ids"])))


FORMATS: dict[str, tuple[str, Callable[[Row, int], Row], str, str, str]] = {
    "plain": ("jsonl", plain, "response_ids", "logp_rollout", "loss_mask"),
    "prime-rl": ("jsonl", prime, "token_ids", "inference_logprobs", "loss_mask"),
    "nemo-rl": ("jsonl", nemo, "token_ids", "generation_logprobs", "token_loss_mask"),
    "open-instruct": ("jsonl", open_instruct_record, "response_tokens", "logprobs", ""),
    "slime": ("pt", slime_sample, "tokens", "rollout_log_probs", "loss_mask"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_invalid_values_are_left_out_and_counted(tmp_path, name):
    suffix, record, *keys = FORMATS[name]
    rows = real_rows(3)
    expected = [row["response_ids"] for row in (rows[0], rows[2])]
    for key, values in zip(keys, (NO_ID, NO_LOGP, NO_FLAG), strict=True):
        for number, value in enumerate(values if key else ()):
            records = [record(row, i) for i, row in enumerate(rows)]
            # Most formats join prompt and response: this is in the response
            records[1][key][-2] = value
            folder = tmp_path / f"{key}-{number}"
            path = write_records(folder / f"d_step1.{suffix}", records)
            table, about = imported(path, into=folder / "trace", format=name)
            assert table.column("response_ids").to_pylist() == expected, (key, value)
            assert sum(about["left_out"].values()) == 1, (key, value, about["left_out"])


def test_whole_numbers_are_ids_however_they_are_written(tmp_path):
    records = plain_records(2)
    records[0]["response_ids"] = [float(i) for i in records[0]["response_ids"]]
    records[1]["loss_mask"] = [1.0] * len(records[1]["response_ids"])
    table, about = imported(write_lines(tmp_path / "d.jsonl", records), into=tmp_path / "trace")
    assert table.num_rows == 2 and not about["left_out"]


def test_numbers_of_rows_are_not_truncated(tmp_path):
    for key, value in (
        ("step", 1.5),
        ("prompt_id", 2.5),
        ("sample_index", "3"),
        ("version_rollout", True),
    ):
        records = [
            record | {"prompt_id": 1, "sample_index": i}
            for i, record in enumerate(plain_records(2))
        ]
        records[1][key] = value
        folder = tmp_path / key
        table, about = imported(write_lines(folder / "d.jsonl", records), into=folder / "trace")
        assert table.num_rows == 1 and sum(about["left_out"].values()) == 1, key
    sample = slime_sample(real_rows(1)[0], 0)
    for key, value in (("response_length", 3.7), ("index", "0"), ("response_length", True)):
        folder = tmp_path / f"pt-{key}-{value}"
        samples = [slime_sample(real_rows(1)[0], 1), sample | {key: value}]
        table, _ = imported(write_records(folder / "0.pt", samples), into=folder / "trace")
        assert table.num_rows == 1, key


@pytest.mark.parametrize(
    ("name", "bad", "kind"),
    [
        ("response_ids", 3.7, pa.float64()),
        ("response_ids", -1, pa.int64()),
        ("response_ids", 2**40, pa.int64()),
        ("response_ids", NAN, pa.float32()),
        ("loss_mask", 0.5, pa.float64()),
        ("loss_mask", 2, pa.int8()),
    ],
)
def test_a_parquet_loses_the_rows_that_hold_one(tmp_path, name, bad, kind):
    records = plain_records(3)
    columns = {key: column(records, key) for key in records[0]}
    columns[name][1][0] = bad
    columns[name] = pa.array(columns[name], pa.list_(kind))
    table, about = imported(
        write_parquet(tmp_path / "d.parquet", pa.table(columns)), into=tmp_path / "trace"
    )
    assert table.num_rows == 2 and sum(about["left_out"].values()) == 1


@pytest.mark.parametrize(
    ("name", "convert"), [("response_ids", bool), ("response_ids", str), ("logp_rollout", str)]
)
def test_a_parquet_of_the_wrong_type_is_one_sentence(tmp_path, name, convert):
    records = plain_records(2)
    columns = {key: column(records, key) for key in records[0]}
    columns[name] = [list(map(convert, values)) for values in columns[name]]
    with pytest.raises(MismatchError, match=rf"column {name} is list.*--schema"):
        imported(write_parquet(tmp_path / "d.parquet", pa.table(columns)), into=tmp_path / "trace")


def test_tensors_follow_the_same_rules(tmp_path):
    rows = real_rows(4)
    samples = slime_samples(rows)
    samples[0]["tokens"] = torch.tensor(samples[0]["tokens"], dtype=torch.float32)
    samples[1]["tokens"] = torch.tensor(samples[1]["tokens"]) + 0.5
    samples[2]["tokens"] = torch.tensor(samples[2]["tokens"]) > 0
    samples[3]["loss_mask"] = torch.tensor(samples[3]["loss_mask"]) * 3
    table, about = imported(write_records(tmp_path / "0.pt", samples), into=tmp_path / "trace")
    assert table.column("response_ids").to_pylist() == [rows[0]["response_ids"]]
    assert sum(about["left_out"].values()) == 3


def test_miles_columns_follow_the_same_rules(tmp_path):
    samples = slime_samples(real_rows(3))
    tokens = [[float(i) for i in sample["tokens"]] for sample in samples]
    tokens[0][-1] = 3.7
    tokens[1][-1] = -4.0
    columns = {
        "tokens": tokens,
        "rollout_log_probs": column(samples, "rollout_log_probs"),
        "response_length": column(samples, "response_length"),
        "sample_index": [0, 1, 2],
    }
    path = write_parquet(tmp_path / "dashboard_columns" / "rollout_0.parquet", pa.table(columns))
    table, about = imported(path, into=tmp_path / "trace")
    assert table.num_rows == 1 and sum(about["left_out"].values()) == 2


def rewarded(records: list[Row], *rewards: Any) -> list[Row]:
    pairs = zip(records, rewards, strict=True)
    return [record | {"reward": reward} for record, reward in pairs]


def test_rewards_that_are_not_numbers_are_left_empty_and_counted(tmp_path):
    strange = (NAN, float("inf"), -float("inf"))
    records = rewarded(plain_records(4), *strange, 1.0)
    table, about = imported(write_lines(tmp_path / "d.jsonl", records), into=tmp_path / "trace")
    assert table.column("reward").to_pylist() == [None, None, None, 1.0] and about["noted"] == {
        NO_REWARD: 3
    }
    records = rewarded(plain_records(3), "good", "1.0", 1)
    table, about = imported(write_lines(tmp_path / "e.jsonl", records), into=tmp_path / "e")
    assert table.num_rows == 1 and sum(about["left_out"].values()) == 2
    values = ("1.0", NAN, torch.tensor(1.0), np.float32(0.5), [1.0], True, torch.tensor([1.0, 2.0]))
    samples = rewarded(slime_samples(real_rows(7)), *values)
    table, about = imported(write_records(tmp_path / "0.pt", samples), into=tmp_path / "f")
    assert table.column("reward").to_pylist() == [None, None, 1.0, 0.5, None, 1.0, None]
    assert about["noted"] == {NO_NUMBER: 4}


def test_ids_beyond_a_known_vocabulary(tmp_path):
    records = plain_records(3)
    records[1]["prompt_ids"][0] = 5000
    records[2]["response_ids"][0] = 4999
    path = write_lines(tmp_path / "d.jsonl", records)
    table, about = imported(path, into=tmp_path / "a", vocabulary=5000)
    assert table.num_rows == 2 and about["left_out"] == {STRANGE_IDS.format(name="prompt_ids"): 1}
    assert imported(path, into=tmp_path / "b")[0].num_rows == 3


def test_a_dump_that_was_still_being_written_makes_a_partial_trace(tmp_path):
    from mismatch_cli.trace.reader import Trace

    path = write_lines(tmp_path / "d.jsonl", plain_records(3))
    path.write_bytes(path.read_bytes()[:-20])
    imported(path, into=tmp_path / "trace")
    assert "1 truncated last line" in Trace.open(tmp_path / "trace").completeness.reasons[0]
    for step, marked in ((0, True), (1, False)):
        folder = tmp_path / "token_exports" / f"step_{step}"
        write_lines(
            folder / "rank_0.jsonl",
            [prime(row | {"step": step}, i) for i, row in enumerate(real_rows(2))],
        )
        if marked:
            (folder / "STABLE").touch()
    imported(tmp_path / "token_exports", into=tmp_path / "prime")
    (reason,) = Trace.open(tmp_path / "prime").completeness.reasons
    assert "steps without a STABLE file: 1, the first step_1" in reason


def test_a_server_returns_whole_ids_of_the_vocabulary():
    assert foreign_values.are_token_ids([0, 9], 10)
    for ids in ([3.0], [True], ["3"], [-1], [10], [None], "12", None, {"a": 1}):
        assert not foreign_values.are_token_ids(ids, 10), ids


def test_a_fuzz_of_json_values_never_changes_one():
    """Whatever Arrow makes of a list has the same values as the list, or raises an error."""
    pool: list[Any] = [0, 1, 2, -1, 3.7, 1.0, 0.0, True, False, "1", None, NAN, 2**31, 2**70, 1e300]
    rng = np.random.default_rng(0)
    for kind in (pa.int32(), pa.float32(), pa.bool_()):
        for _ in range(400):
            row = [pool[i] for i in rng.integers(0, len(pool), rng.integers(0, 4))]
            try:
                value = foreign_values.from_python([row], pa.list_(kind)).to_pylist()[0]
            except (pa.ArrowException, OverflowError):
                continue
            assert json.dumps(np.float32(value).tolist()) == json.dumps(np.float32(row).tolist()), (
                row,
                value,
            )
            flags = pa.types.is_boolean(kind)
            assert all(v is None or isinstance(v, bool) <= flags for v in row), row


@pytest.mark.parametrize("value", [True, "3", None, 2.5, NAN, float("inf"), 2**63, [3]])
def test_what_is_not_a_whole_number_is_refused(value):
    with pytest.raises(foreign_values.WRONG_VALUE):
        foreign_values.whole_number(value)
    for three in (3, 3.0, np.int32(3), torch.tensor(3)):
        assert foreign_values.whole_number(three) == 3


def test_an_integer_beyond_64_bits_is_a_number_if_a_float_holds_it():
    assert foreign_values.finite_number(2**70) == 2.0**70
    assert foreign_values.finite_number(-(2**64)) == -(2.0**64)
    for value in (10**400, float("inf"), float("nan"), "1", None):
        with pytest.raises(foreign_values.WRONG_VALUE, match="where a number belongs"):
            foreign_values.finite_number(value)
