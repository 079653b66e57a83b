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
from mismatch_cli.frameworks.importing.padded import PADDED
from mismatch_cli.frameworks.importing.rows import NO_VERSION, Completer
from mismatch_cli.frameworks.importing.sources import find
from mismatch_cli.frameworks.importing.tally import Tally
from mismatch_cli.trace.columns import TOKEN_COLUMNS, TOPK_COLUMNS
from tests.frameworks.importing import layouts
from tests.frameworks.importing.layouts import (
    Row,
    imported,
    real_rows,
    same_bits,
    save,
    write_lines,
    write_parquet,
)
from tests.frameworks.importing.test_trl import single

TOKENS = 6


def short(row: Row) -> Row:
    """The beginning of a response, whose second token is outside the loss."""
    width = dict.fromkeys(TOKEN_COLUMNS, TOKENS)
    width |= dict.fromkeys(TOPK_COLUMNS, TOKENS * len(row["topk_ids"]) // len(row["response_ids"]))
    cut = {name: row[name][: width[name]] for name in width if row.get(name) is not None}
    return row | cut | {"loss_mask": [True, False, *[True] * (TOKENS - 2)]}


ROWS = [short(row) for row in real_rows(3)]
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
    numbers = {
        "rollout_log_probs": row["logp_rollout"],
        "old_log_probs": row["logp_trainer"],
        "advantages": row["advantage"],
        "entropys": row["entropy_trainer"],
        "token_level_scores": [*[0.0] * (len(response) - 1), row["reward"]],
    }
    mask = [int(value) for value in row["loss_mask"]]
    return numbers | {
        "prompts": prompt,
        "responses": response,
        "attention_mask": [1] * (len(prompt) + len(response)),
        "response_mask": mask,
        "loss_mask": mask,
        "entropy": row["entropy_trainer"],
        "rm_scores": numbers["token_level_scores"],
        "uid": str(index),
    }


def plain_record(row: Row, index: int) -> Row:
    names = "prompt_ids response_ids logp_rollout logp_trainer loss_mask advantage reward prompt_id"
    names += " version_rollout version_trainer finish_reason topk_ids topk_logp_rollout"
    kept = {name: row[name] for name in names.split()}
    return kept | {"sample_index": index, "response_mask": [1] * len(row["response_ids"])}


def nemo_record(row: Row, index: int) -> Row:
    return layouts.nemo_record(row, index, width=400)


RECORDS: dict[str, Callable[[Row, int], Row]] = {
    "verl": verl_record,
    "trl": lambda row, _: single(row),
    "plain": plain_record,
    "prime-rl": lambda row, index: layouts.export_record(row, 0, index),
    "nemo-rl": nemo_record,
    "open-instruct": layouts.open_instruct_record,
    "slime": layouts.slime_sample,
    "miles": layouts.slime_sample,
}
PARQUET = ("verl", "trl", "plain", "miles")


def written(path: Path, format: str, records: list[Row]) -> Path:
    if path.suffix == ".pt":
        metadata = {"metadata": {}} if format == "miles" else {}
        return save(path, {"rollout_id": 2, "samples": records} | metadata)
    if path.suffix == ".parquet":
        names = dict.fromkeys(name for record in records for name in record)
        columns = {name: pa.array([record.get(name) for record in records]) for name in names}
        return write_parquet(path, pa.table(columns))
    return write_lines(path, records)


def lacking(records: list[Row], name: str) -> Iterator[tuple[str, list[Row], set[int]]]:
    """How a column can be missing, the records, and the rows that lack it."""
    without = [{key: value for key, value in row.items() if key != name} for row in records]
    yield "absent", without, {0, 1, 2}
    yield "null everywhere", [row | {name: None} for row in records], {0, 1, 2}
    for at in (0, 1):
        yield "absent in a row", [*records[:at], without[at], *records[at + 1 :]], {at}
        null = records[at] | {name: None}
        yield "null in a row", [*records[:at], null, *records[at + 1 :]], {at}


def read(path: Path, format: str) -> tuple[pa.Table, Tally]:
    """The rows of a trace, without writing it, and what was left out."""
    tally = Tally()
    completer, module = (
        Completer(tally, newer_trainer=False),
        registry.load(IMPORTERS, format, "format"),
    )
    blocks = module.blocks(find([path]), tally, lambda _: None)
    tables = [completer.complete(table, where) for table, where in blocks]
    return pa.concat_tables(tables, promote_options="default"), tally


def ways(format: str) -> list[str]:
    if format in ("slime", "miles"):
        return ["pt", "parquet"][: 1 + (format == "miles")]
    return ["jsonl", "parquet"][: 1 + (format in PARQUET)]


def records_of(format: str, way: str) -> list[Row]:
    records = [RECORDS[format](row, i) for i, row in enumerate(ROWS)]
    if way == "parquet" and format == "miles":
        kept = ("tokens", "response_length", "loss_mask", "rollout_log_probs")
        return [{name: row[name] for name in kept} for row in records]
    return records


@pytest.mark.parametrize("format", RECORDS)
def test_a_column_that_need_not_be_there(format, tmp_path):
    for way in ways(format):
        records = records_of(format, way)
        path = tmp_path / f"rollout_2.{way}"
        whole, tally = read(written(path, format, records), format)
        assert whole.num_rows == 3 and not [n for n in tally.left_out if "unknown" not in n]
        expected = whole.to_pylist()
        for name in records[0].keys() - NEEDED[format]:
            for how, some, rows in lacking(records, name):
                table, tally = read(written(path, format, some), format)
                said = (way, name, how, rows, tally.left_out)
                assert table.num_rows == 3, said
                for ours in ("prompt_ids", "response_ids", "logp_rollout"):
                    assert table.column(ours).equals(whole.column(ours)), said
                for at in {0, 1, 2} - rows:
                    row = {key: table.column(key)[at].as_py() for key in table.column_names}
                    known = {key: row.get(key) for key in expected[at]}
                    assert str(known) == str(expected[at]), said


def test_verl_without_attention_mask(tmp_path):
    """The response ends with the last 1 of its mask, in each row that has no attention mask."""
    full = [verl_record(row, i) for i, row in enumerate(ROWS)]
    padded = [
        {name: values for name, values in row.items() if name != "attention_mask"}
        | {name: [*row[name], 0, 0] for name in ("responses", "response_mask", "loss_mask")}
        | {name: [*row[name], 0.0, 0.0] for name in ("rollout_log_probs", "old_log_probs")}
        for row in full
    ]
    for records in (padded, [full[0], padded[1], full[2]], [padded[0], *full[1:]]):
        for way in ("jsonl", "parquet"):
            names = ["advantages", "entropys", "entropy", "token_level_scores", "rm_scores"]
            some = [{key: row[key] for key in row if key not in names} for row in records]
            path = written(tmp_path / f"d.{way}", "verl", some)
            table, about = imported(path, into=tmp_path / f"{way}{id(records)}")
            assert not about["left_out"]
            for name in ("prompt_ids", "response_ids", "logp_rollout", "loss_mask"):
                assert same_bits(table, name, [row[name] for row in ROWS]), name


def test_prompts_that_may_be_padded_are_counted_in_each_row_without_a_mask(tmp_path):
    full = [verl_record(row | {"prompt_ids": [7, 7, 8]}, i) for i, row in enumerate(ROWS)]
    for row in full[:2]:
        row["attention_mask"] = None
    path = written(tmp_path / "d.jsonl", "verl", full)
    assert imported(path, into=tmp_path / "out")[1]["noted"] == {PADDED: 2}


def test_a_row_is_read_under_the_name_that_it_has(tmp_path):
    """The first of verl's names under which a row has a value counts."""
    records = [verl_record(row, i) for i, row in enumerate(ROWS)]
    expected, _ = imported(written(tmp_path / "a.jsonl", "verl", records), into=tmp_path / "a")
    for first, second in (
        ("entropys", "entropy"),
        ("token_level_scores", "rm_scores"),
        ("response_mask", "loss_mask"),
    ):
        records[0][first], records[1][second] = None, None
    table, _ = imported(written(tmp_path / "b.jsonl", "verl", records), into=tmp_path / "b")
    assert table.equals(expected)


def test_bypass_mode_in_some_rows_only(tmp_path):
    """A copy of log μ is not log π, also beside rows that have none."""
    records = [verl_record(row, i) for i, row in enumerate(ROWS)]
    records[0]["old_log_probs"] = records[0]["rollout_log_probs"]
    records[1]["old_log_probs"] = None
    path = written(tmp_path / "a.jsonl", "verl", records[:2])
    table, about = imported(path, into=tmp_path / "a")
    assert "logp_trainer" not in table.column_names and "bypass" in json.dumps(about["noted"])


def test_a_sample_without_a_version_beside_others(tmp_path):
    records = [layouts.slime_sample(row, i) for i, row in enumerate(ROWS)]
    del records[1]["weight_versions"]
    path = written(tmp_path / "3.pt", "slime", records)
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
        written(tmp_path / "dump" / name, "slime", records)
    table, about = imported(tmp_path / "dump", into=tmp_path / "out")
    assert sorted(table.column("version_rollout").to_pylist()) == [0, 0, 0, 3, 3, 3]
    assert about["noted"] == {NO_VERSION: 3}


def test_without_a_usable_sample_that_has_a_version_its_lack_is_not_noted(tmp_path):
    records = [layouts.slime_sample(row, i) for i, row in enumerate(ROWS)]
    del records[0]["weight_versions"], records[1]["weight_versions"]
    records[2] |= {"rollout_log_probs": None}
    table, about = imported(written(tmp_path / "3.pt", "slime", records), into=tmp_path / "out")
    assert table.column("version_rollout").to_pylist() == [0, 0]
    assert about["noted"] == {}
