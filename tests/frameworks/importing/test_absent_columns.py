"""A column that need not be there is absent from a file, from one row, or null in a row: the others
stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from mismatch_cli.base import registry
from mismatch_cli.frameworks import IMPORTERS
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.padded import PADDED
from mismatch_cli.frameworks.importing.rows import NO_VERSION, Completer
from mismatch_cli.frameworks.importing.sources import find
from tests.frameworks.importing import layouts
from tests.frameworks.importing.layouts import (
    Row,
    imported,
    real_rows,
    same_bits,
    slime_samples,
    write_records,
)
from tests.frameworks.importing.test_trl import single

TOKENS = 6


def short(row: Row) -> Row:
    """The beginning of prompt and response, whose second token is outside the loss."""
    size = len(row["response_ids"])
    lists = {name: values for name, values in row.items() if isinstance(values, list)}
    cut = {name: values[: TOKENS * len(values) // size] for name, values in lists.items()}
    return row | cut | {"loss_mask": [True, False, *[True] * (TOKENS - 2)]}


ROWS = [short(row) for row in real_rows(3)]
PLAIN = (
    "prompt_ids response_ids logp_rollout logp_trainer loss_mask advantage reward prompt_id "
    "version_rollout version_trainer finish_reason topk_ids topk_logp_rollout sample_index"
)
# What every format must have; the rest of its columns may be missing
NEEDED = {
    "verl": {"prompts", "responses", "rollout_log_probs"},
    "trl": {"prompt_ids", "completion_ids", "sampling_per_token_logps"},
    "plain": {"prompt_ids", "response_ids", "logp_rollout"},
    "prime-rl": {"token_ids", "inference_logprobs", "loss_mask"},
    "nemo-rl": {"token_ids", "generation_logprobs", "token_loss_mask", "input_lengths"},
    "open-instruct": {"prompt_tokens", "response_tokens", "logprobs"},
    "slime": {"tokens", "response_length", "rollout_log_probs"},
    "miles": {"tokens", "response_length", "rollout_log_probs"},
}


def verl_record(row: Row, index: int) -> Row:
    prompt, response = row["prompt_ids"], row["response_ids"]
    mask = [int(value) for value in row["loss_mask"]]
    scores = [*[0.0] * (len(response) - 1), row["reward"]]
    return {
        "prompts": prompt,
        "responses": response,
        "attention_mask": [1] * (len(prompt) + len(response)),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": row["logp_rollout"],
        "old_log_probs": row["logp_trainer"],
        "advantages": row["advantage"],
        "entropys": row["entropy_trainer"],
        "entropy": row["entropy_trainer"],
        "token_level_scores": scores,
        "rm_scores": scores,
        "uid": str(index),
    }


def verl_records() -> list[Row]:
    return [verl_record(row, i) for i, row in enumerate(ROWS)]


def plain_record(row: Row, _index: int) -> Row:
    columns = {name: row[name] for name in PLAIN.split()}
    return columns | {"response_mask": [1] * TOKENS}


RECORDS: dict[str, Callable[[Row, int], Row]] = {
    "verl": verl_record,
    "trl": lambda row, _: single(row),
    "plain": plain_record,
    "prime-rl": lambda row, index: layouts.export_record(row, 0, index),
    "nemo-rl": layouts.nemo_record,
    "open-instruct": layouts.open_instruct_record,
    "slime": layouts.slime_sample,
    "miles": layouts.slime_sample,
}
JSONL, BOTH = ("jsonl",), ("jsonl", "parquet")
WAYS = dict.fromkeys(RECORDS, JSONL) | dict.fromkeys(("verl", "trl", "plain"), BOTH)
WAYS |= {"slime": ("pt",), "miles": ("pt", "parquet")}
MILES_COLUMNS = {"tokens", "response_length", "loss_mask", "rollout_log_probs"}


def lacking(records: list[Row], name: str) -> Iterator[tuple[set[int], list[Row]]]:
    """The rows that lack a column, which is absent or null there, and the records."""
    absent = [{key: row[key] for key in row.keys() - {name}} for row in records]
    null = [row | {name: None} for row in records]
    for rows in ({0, 1, 2}, {0}, {1}):
        for changed in (absent, null):
            yield rows, [changed[i] if i in rows else row for i, row in enumerate(records)]


def read(path: Path, format: str) -> tuple[pa.Table, Tally]:
    """The rows of a trace, without writing it, and what was left out."""
    tally = Tally()
    completer = Completer(tally, newer_trainer=False)
    importer = registry.load(IMPORTERS, format, "format")
    blocks = importer.blocks(find([path]), tally, lambda _: None)
    tables = [completer.complete(table, where) for table, where in blocks]
    return pa.concat_tables(tables, promote_options="default"), tally


@pytest.mark.parametrize(("format", "way"), [(f, way) for f in RECORDS for way in WAYS[f]])
def test_a_column_that_need_not_be_there(format, way, tmp_path):
    path = tmp_path / f"rollout_2.{way}"
    records = [RECORDS[format](row, i) for i, row in enumerate(ROWS)]
    if (format, way) == ("miles", "parquet"):
        records = [{name: row[name] for name in MILES_COLUMNS} for row in records]
    whole, tally = read(write_records(path, records), format)
    assert whole.num_rows == 3 and not [n for n in tally.left_out if "unknown" not in n]
    expected = whole.to_pylist()
    for name in records[0].keys() - NEEDED[format]:
        for rows, some in lacking(records, name):
            table, tally = read(write_records(path, some), format)
            said = (name, rows, tally.left_out)
            assert table.num_rows == 3, said
            for ours in ("prompt_ids", "response_ids", "logp_rollout"):
                assert table.column(ours).equals(whole.column(ours)), said
            for at in {0, 1, 2} - rows:
                row = {key: table.column(key)[at].as_py() for key in table.column_names}
                values = {key: row.get(key) for key in expected[at]}
                assert str(values) == str(expected[at]), said


def test_verl_without_attention_mask(tmp_path):
    """The response ends with the last 1 of its mask, in each row that has no attention mask."""
    full = verl_records()
    padded = []
    for row in full:
        longer = dict(row)
        del longer["attention_mask"]
        for name in ("responses", "response_mask", "loss_mask"):
            longer[name] = [*row[name], 0, 0]
        for name in ("rollout_log_probs", "old_log_probs"):
            longer[name] = [*row[name], 0.0, 0.0]
        padded.append(longer)
    for records in (padded, [full[0], padded[1], full[2]], [padded[0], *full[1:]]):
        for way in ("jsonl", "parquet"):
            names = ["advantages", "entropys", "entropy", "token_level_scores", "rm_scores"]
            some = [{key: row[key] for key in row if key not in names} for row in records]
            path = write_records(tmp_path / f"d.{way}", some)
            table, about = imported(path, into=tmp_path / f"{way}{id(records)}")
            assert not about["left_out"]
            for name in ("prompt_ids", "response_ids", "logp_rollout", "loss_mask"):
                assert same_bits(table, name, [row[name] for row in ROWS]), name


def test_prompts_that_may_be_padded_are_counted_in_each_row_without_a_mask(tmp_path):
    full = [verl_record(row | {"prompt_ids": [7, 7, 8]}, i) for i, row in enumerate(ROWS)]
    for row in full[:2]:
        row["attention_mask"] = None
    path = write_records(tmp_path / "d.jsonl", full)
    assert imported(path, into=tmp_path / "out")[1]["noted"] == {PADDED: 2}


def test_a_row_is_read_under_the_name_that_it_has(tmp_path):
    """The first of verl's names under which a row has a value counts."""
    records = verl_records()
    expected, _ = imported(write_records(tmp_path / "a.jsonl", records), into=tmp_path / "a")
    for first, second in (
        ("entropys", "entropy"),
        ("token_level_scores", "rm_scores"),
        ("response_mask", "loss_mask"),
    ):
        records[0][first], records[1][second] = None, None
    table, _ = imported(write_records(tmp_path / "b.jsonl", records), into=tmp_path / "b")
    assert table.equals(expected)


def test_bypass_mode_in_some_rows_only(tmp_path):
    """A copy of log μ is not log π, also beside rows that have none."""
    records = verl_records()
    records[0]["old_log_probs"] = records[0]["rollout_log_probs"]
    records[1]["old_log_probs"] = None
    path = write_records(tmp_path / "a.jsonl", records[:2])
    table, about = imported(path, into=tmp_path / "a")
    assert "logp_trainer" not in table.column_names and "bypass" in json.dumps(about["noted"])


def test_a_sample_without_a_version_beside_others(tmp_path):
    records = slime_samples(ROWS)
    del records[1]["weight_versions"]
    path = write_records(tmp_path / "3.pt", records)
    table, about = imported(path, into=tmp_path / "out")
    assert table.column("version_rollout").to_pylist() == [3, 0, 3]
    assert about["noted"] == {NO_VERSION: 1}


@pytest.mark.parametrize("without", ["3.pt", "4.pt"])
def test_a_file_without_versions_beside_another(tmp_path, without):
    (tmp_path / "dump").mkdir()
    for number, name in enumerate(("3.pt", "4.pt")):
        records = [layouts.slime_sample(row, i + 3 * number) for i, row in enumerate(ROWS)]
        if name == without:
            for record in records:
                del record["weight_versions"]
        write_records(tmp_path / "dump" / name, records)
    table, about = imported(tmp_path / "dump", into=tmp_path / "out")
    assert sorted(table.column("version_rollout").to_pylist()) == [0, 0, 0, 3, 3, 3]
    assert about["noted"] == {NO_VERSION: 3}


def test_without_a_usable_sample_that_has_a_version_its_lack_is_not_noted(tmp_path):
    records = slime_samples(ROWS)
    del records[0]["weight_versions"], records[1]["weight_versions"]
    records[2] |= {"rollout_log_probs": None}
    table, about = imported(write_records(tmp_path / "3.pt", records), into=tmp_path / "out")
    assert table.column("version_rollout").to_pylist() == [0, 0]
    assert about["noted"] == {}
