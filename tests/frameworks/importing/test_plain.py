"""The plain schema: a trace survives a round trip to the bit, and other forms of the same values
are read.
"""

from __future__ import annotations

import json
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lab.makers.make_dump import export_record
from mismatch_cli.base import registry
from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.places import bundled
from mismatch_cli.frameworks.importing import driver as _driver
from mismatch_cli.frameworks.importing import sources as _sources
from mismatch_cli.frameworks.importing.padded import MASKS, SEQUENCES
from mismatch_cli.frameworks.importing.rows import (
    WRONG_ADVANTAGE,
    WRONG_LENGTH,
    WRONG_TOP_K,
    text_key,
)
from mismatch_cli.frameworks.plain import importer as plain
from mismatch_cli.frameworks.plain.importer import WRITER, meanings
from mismatch_cli.trace.columns import COLUMNS
from mismatch_cli.trace.export import export_responses
from mismatch_cli.trace.manifest import write_manifest
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.writer import rows_to_table, shard_path, write_shard
from tests.frameworks.importing.layouts import (
    assert_holds,
    column,
    imported,
    ones,
    plain_record,
    prime_rl,
    real_rows,
    same_bits,
    whole,
    write_lines,
    write_parquet,
    write_records,
)
from tests.trace.conftest import row_columns


def as_text(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Numbers in their shortest words, where NaN equals itself and −0.0 differs from 0.0."""
    return values.cast(pa.list_(pa.string()) if pa.types.is_list(values.type) else pa.string())


def assert_equal_to_the_bit(rows: pa.Table, expected: pa.Table) -> None:
    assert set(rows.column_names) == set(expected.column_names)
    for name in expected.column_names:
        ours, theirs = rows.column(name), expected.column(name)
        assert ours.type == theirs.type and as_text(ours).equals(as_text(theirs)), name


@pytest.fixture
def odd_trace(tmp_path):
    """Null rows, −inf, NaN, −0.0, subnormal and largest floats, and a large prompt id."""
    special = np.array([-np.inf, np.nan, -0.0, -1e-45, -3.4028235e38, -0.1], np.float32)
    columns = row_columns(
        logp_rollout=[special[:3], special[3:4], special[4:]],
        logp_trainer=[special[3:], None, special[:2]],
        prompt_id=[2**62 + 1, 2**62 + 1, 8],
        advantage=[np.full(3, 1 / 3, np.float32), None, np.zeros(2, np.float32)],
        version_trainer=[1, 0, 5],
    )
    folder = tmp_path / "odd"
    write_shard(shard_path(folder, 0), rows_to_table(columns))
    write_manifest(folder, {})
    return folder


@pytest.mark.parametrize("way", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", ["fp8-kv", "float32", "odd"])
def test_a_trace_goes_out_and_back_to_the_bit(tmp_path, odd_trace, name, way):
    folder = odd_trace if name == "odd" else bundled("traces") / name
    path = export_responses([Trace.open(folder)], tmp_path) if way == "jsonl" else folder
    rows, about = imported(path, into=tmp_path / "back")
    assert_equal_to_the_bit(rows, whole(folder))
    vocabulary = {"files of another layout": 1} if way == "parquet" and name != "odd" else {}
    assert about["left_out"] == vocabulary


def test_shards_and_blocks_do_not_change_a_bit(tmp_path, monkeypatch):
    folder = bundled("traces") / "fp8-kv"
    monkeypatch.setattr(_driver, "_SHARD_TOKENS", 700)
    monkeypatch.setattr(_sources, "TOKENS_PER_BLOCK", 300)
    rows, about = imported(folder, into=tmp_path / "back")
    assert_equal_to_the_bit(rows, whole(folder))
    assert len(Trace.open(tmp_path / "back").shards) > 5 and about["rows"] == rows.num_rows


def test_other_forms_of_the_same_values(tmp_path):
    rows = real_rows(4)
    records = [
        plain_record(row) | {"reward": i % 2 == 0, "group_id": f"g{i // 2}"}
        for i, row in enumerate(rows)
    ]
    for record, row in zip(records, rows, strict=True):
        record |= {"loss_mask": [1] * len(row["response_ids"]), "advantage": 0.5, "note": "ours"}
    records[1]["loss_mask"] = [True] * len(rows[1]["response_ids"])
    records[2]["advantage"] = [0.5] * len(rows[2]["response_ids"])
    records[3] |= {"advantage": None, "reward": 2}
    path = write_lines(tmp_path / "dump.jsonl", records)
    table, about = imported(path, into=tmp_path / "trace")
    assert_holds(table, rows, "logp_trainer")
    assert table.column("reward").to_pylist() == [1.0, 0.0, 1.0, 2.0]
    assert all(all(mask) for mask in table.column("loss_mask").to_pylist())
    assert [None if a is None else set(a) for a in table.column("advantage").to_pylist()] == [
        {0.5}
    ] * 3 + [None]
    ids = table.column("prompt_id").to_pylist()
    assert ids[0] == ids[1] != ids[2] == ids[3] and min(ids) >= 0
    assert about["left_out"] == {"unknown columns (note)": 1}
    assert table.column("version_trainer").to_pylist() == [0] * 4
    assert table.column("finish_reason").to_pylist() == ["unknown"] * 4


def test_wide_numbers_of_a_foreign_parquet(tmp_path):
    rows = real_rows(3)
    kinds = {
        "prompt_ids": pa.list_(pa.int64()),
        "response_ids": pa.large_list(pa.int64()),
        "logp_rollout": pa.list_(pa.float64()),
        "logp_trainer": pa.list_(pa.float64()),
    }
    columns = {name: pa.array(column(rows, name), kind) for name, kind in kinds.items()}
    columns |= {
        "loss_mask": pa.array(ones(column(rows, "response_ids")), pa.list_(pa.int8())),
        "advantage": pa.array([0.25, None, -1.0], pa.float64()),
        "prompt_id": pa.array(["a", "b", "a"]),
    }
    table, _ = imported(
        write_parquet(tmp_path / "d.parquet", pa.table(columns)), into=tmp_path / "trace"
    )
    assert_holds(table, rows, "prompt_ids", "response_ids", "logp_rollout", "logp_trainer")
    assert table.column("advantage").to_pylist()[1] is None


def test_wrong_lengths_nulls_and_repeated_rows(tmp_path):
    records = [
        plain_record(row) | {"prompt_id": 1, "sample_index": i}
        for i, row in enumerate(real_rows(6))
    ]
    records[1]["logp_trainer"].append(-1.0)
    records[2]["response_ids"][0] = None
    records[3] |= {"topk_ids": [1, 2, 3], "topk_logp_rollout": [-1.0]}
    records[4]["sample_index"] = 0
    records[5]["logp_rollout"][0] = None
    table, about = imported(write_lines(tmp_path / "d.jsonl", records), into=tmp_path / "trace")
    assert table.num_rows == 2
    assert about["left_out"] == {
        WRONG_LENGTH.format(name="logp_trainer"): 1,
        "responses without token ids": 1,
        WRONG_TOP_K: 1,
        "repeated responses (same step, prompt and sample index)": 1,
    }
    assert np.isnan(table.column("logp_rollout").to_pylist()[1][0])


def test_recomputed_log_probs_make_the_trainer_newer(tmp_path):
    records = [
        plain_record(row) | {"logp_recomputed": row["logp_recomputed"]} for row in real_rows(2)
    ]
    table, about = imported(write_lines(tmp_path / "d.jsonl", records), into=tmp_path / "trace")
    assert (
        table.column("version_trainer").to_pylist() == [1, 1]
        and about["rows_with_newer_trainer"] == 2
    )


def test_the_average_policy_is_a_second_side(tmp_path):
    pair = {"logp_rollout": [-1.0, -2.0], "logp_average": [-1.0, -2.5]}
    table, about = imported(write_lines(tmp_path / "d.jsonl", [pair]), into=tmp_path / "trace")
    assert (about["format"], about["left_out"]) == ("plain", {})
    assert same_bits(table, "logp_average", [[-1.0, -2.5]])
    assert "logp_trainer" not in table.column_names


@pytest.mark.parametrize(("count", "end"), [(10, "x09)"), (11, "x09, …)")])
def test_ten_unknown_columns_of_all_files_are_named_in_order(tmp_path, count, end):
    pair = {"logp_rollout": [-1.0], "logp_trainer": [-1.5]}
    names = [f"x{number:02}" for number in range(count)]
    write_lines(tmp_path / "0.jsonl", [pair | dict.fromkeys(reversed(names[3:]), "text")])
    write_lines(tmp_path / "1.jsonl", [pair | dict.fromkeys(names[:4], "text")])
    paths = (tmp_path / "0.jsonl", tmp_path / "1.jsonl")
    _, about = imported(*paths, into=tmp_path / "trace")
    listed = ", ".join(names[:9])
    assert about["left_out"] == {f"unknown columns ({listed}, {end}": count}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_texts_may_be_of_any_kind(tmp_path, kind):
    names = pa.array(["a", None, "b", "a"], kind)
    columns = {"logp_rollout": [[-1.0]] * 4, "logp_trainer": [[-1.5]] * 4, "prompt_id": names}
    columns["finish_reason"] = pa.array(["stop", "length", None, "stop"], kind)
    path = write_parquet(tmp_path / "d.parquet", pa.table(columns))
    table, _ = imported(path, into=tmp_path / "trace")
    ids = table.column("prompt_id").to_pylist()
    reasons = ["stop", "length", "unknown", "stop"]
    assert table.column("finish_reason").to_pylist() == reasons
    assert ids[::2] == [text_key("a"), text_key("b")] and ids[3] == ids[0] != ids[1]


def test_an_impossible_type_is_one_sentence(tmp_path):
    columns = {name: pa.array([["x"]]) for name in ("prompt_ids", "response_ids", "logp_rollout")}
    with pytest.raises(MismatchError, match=r"column prompt_ids is list.*--schema"):
        imported(write_parquet(tmp_path / "d.parquet", pa.table(columns)), into=tmp_path / "trace")


def test_a_cut_parquet_is_one_sentence(tmp_path):
    path = write_parquet(
        tmp_path / "d.parquet", pa.Table.from_pylist([plain_record(row) for row in real_rows(2)])
    )
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(MismatchError, match="broken or truncated"):
        imported(path, into=tmp_path / "trace")


def test_errors_name_the_reasons(tmp_path):
    record = plain_record(real_rows(1)[0]) | {"logp_rollout": [-1.0]}
    message = r"logp_rollout does not have one value per token \(first: d.jsonl: 1 value for \d+ tokens\).*--schema"
    with pytest.raises(MismatchError, match=message):
        imported(write_lines(tmp_path / "d.jsonl", [record]), into=tmp_path / "trace")
    lines = [*map(plain_record, real_rows(2)), record]
    _, about = imported(write_lines(tmp_path / "d.jsonl", lines), into=tmp_path / "trace")
    (first,) = about["left_out_first"].values()
    assert first.startswith("d.jsonl: 1 value for ")
    with pytest.raises(MismatchError, match=r"unrecognized format .columns: a, b"):
        imported(write_lines(tmp_path / "e.jsonl", [{"a": 1, "b": 2}]), into=tmp_path / "trace")
    (tmp_path / "f.jsonl").write_bytes(b"\x00\x01garbage\n" + b"[" * 100_000)
    with pytest.raises(MismatchError, match="no line is a JSON object"):
        imported(tmp_path / "f.jsonl", into=tmp_path / "trace")
    with pytest.raises(UsageError, match=r"Unknown format 'prime'.*prime-rl"):
        imported(tmp_path / "d.jsonl", into=tmp_path / "trace", format="prime")


def test_of_two_formats_in_one_folder_the_user_chooses_one(tmp_path):
    prime_rl(tmp_path, real_rows(2))
    write_lines(tmp_path / "dump.jsonl", [plain_record(row) for row in real_rows(3)])
    with pytest.raises(UsageError, match=r"plain and prime-rl.*--format"):
        imported(tmp_path, into=tmp_path / "trace")
    table, about = imported(tmp_path, into=tmp_path / "trace", format="plain")
    assert table.num_rows == 3 and about["left_out"] == {"files of another layout": 1}


def test_a_file_that_two_importers_accept_is_refused(tmp_path, monkeypatch):
    """One JSONL with the keys of two formats: by itself, among others in a folder, and with the
    user's own importer.
    """
    record = export_record(real_rows(1)[0], 0, 0) | plain_record(real_rows(1)[0])
    path = write_lines(tmp_path / "dump" / "both.jsonl", [record])
    write_lines(tmp_path / "dump" / "other.jsonl", [plain_record(real_rows(1)[0])])
    for what in (path, tmp_path / "dump"):
        with pytest.raises(
            UsageError, match=r"both.jsonl has the layout of plain and of prime-rl. Choose one with"
        ):
            imported(what, into=tmp_path / "trace")
    assert imported(path, into=tmp_path / "chosen", format="prime-rl")[1]["format"] == "prime-rl"
    ours = ModuleType("ours")
    ours.recognises = plain.recognises
    load, names = registry.load, registry.names
    monkeypatch.setattr(registry, "names", lambda package: [*names(package), "zzz-ours"])
    monkeypatch.setattr(
        registry,
        "load",
        lambda package, name, kind: ours if "ours" in name else load(package, name, kind),
    )
    with pytest.raises(
        UsageError,
        match=r"of plain and of zzz-ours. Choose one with --format plain or --format zzz-ours",
    ):
        imported(tmp_path / "dump" / "other.jsonl", into=tmp_path / "trace")


def test_the_schema_names_every_column_and_its_lines_run(tmp_path, monkeypatch):
    assert set(meanings()) == {*COLUMNS, *MASKS, *SEQUENCES}
    monkeypatch.chdir(tmp_path)
    rows = real_rows(2)
    exec(WRITER, {"batch": [tuple(plain_record(row).values()) for row in rows]})
    assert len(WRITER.strip().splitlines()) <= 6
    assert [json.loads(line) for line in (tmp_path / "dump.jsonl").read_text().splitlines()] == [
        plain_record(row) for row in rows
    ]
    table, _ = imported(tmp_path / "dump.jsonl", into=tmp_path / "trace")
    assert (
        table.num_rows == 2
        and pq.ParquetFile(tmp_path / "trace" / "shard-00000.parquet").metadata.num_rows == 2
    )


@pytest.mark.parametrize("way", ["jsonl", "parquet"])
def test_a_list_of_one_advantage_applies_to_the_response(tmp_path, way):
    records = [plain_record(row) for row in real_rows(5)]
    for name in ("response_ids", "logp_rollout", "logp_trainer"):
        records[1][name] = records[1][name][:1]  # also where the others are one per token
    lengths = [len(record["response_ids"]) for record in records]
    advantages = [[0.3], [0.5], None, [0.25] * lengths[3], [0.1, 0.2]]
    records = [
        record | {"advantage": advantage}
        for record, advantage in zip(records, advantages, strict=True)
    ]
    path = tmp_path / f"d.{way}"
    table, about = imported(write_records(path, records), into=tmp_path / "trace")
    assert about["left_out"] == {WRONG_ADVANTAGE: 1}
    expected = [[0.3] * lengths[0], [0.5], None, [0.25] * lengths[3]]
    assert same_bits(table, "advantage", expected)


def imported_beside(tmp_path, records):
    """The rows as imported together; each is the same as when imported by itself, except for its
    number.
    """
    table, about = imported(write_lines(tmp_path / "d.jsonl", records), into=tmp_path / "together")
    for i, record in enumerate(records):
        alone, _ = imported(
            write_lines(tmp_path / f"{i}.jsonl", [record]), into=tmp_path / f"alone-{i}"
        )
        for name in set(alone.column_names) - {"sample_index"}:
            assert alone.column(name).to_pylist() == table.slice(i, 1).column(name).to_pylist(), (
                i,
                name,
            )
    assert not about["left_out"]
    return table


def test_a_row_without_a_key_does_not_change_its_neighbors(tmp_path):
    records = [
        plain_record(row) | {"prompt_id": 7, "sample_index": i}
        for i, row in enumerate(real_rows(4))
    ]
    del records[1]["prompt_id"]
    records = [
        records[0],
        records[1],
        records[2] | {"sample_index": 3},
        records[3] | {"sample_index": None},
    ]
    table = imported_beside(tmp_path, records)
    first, hashed, *rest = table.column("prompt_id").to_pylist()
    assert [first, *rest] == [7, 7, 7] and hashed != 7
    assert table.column("sample_index").to_pylist() == [0, 1, 3, 2]  # its position, 3, is taken


def test_keys_that_no_row_has_are_0(tmp_path):
    keys = ("step", "epoch", "minibatch", "version_rollout", "version_trainer", "sample_index")
    needed = ("prompt_ids", "response_ids", "logp_rollout", "logp_trainer")
    row = {name: real_rows(1)[0][name] for name in needed}
    table, _ = imported(write_lines(tmp_path / "d.jsonl", [row]), into=tmp_path / "trace")
    assert {name: table.column(name).to_pylist() for name in keys} == {key: [0] for key in keys}
    assert table.column("finish_reason").to_pylist() == ["unknown"]


def test_the_version_of_a_row_does_not_depend_on_its_neighbors(tmp_path):
    rows = real_rows(5)
    more = [{}, {"logp_recomputed": rows[1]["logp_recomputed"]}, {"version_rollout": 5},
            {"version_trainer": 9},
            {"version_rollout": 5, "logp_recomputed": rows[4]["logp_recomputed"]}]  # fmt: skip
    table = imported_beside(
        tmp_path, [plain_record(row) | said for row, said in zip(rows, more, strict=True)]
    )
    assert table.column("version_rollout").to_pylist() == [0, 0, 5, 0, 5]
    assert table.column("version_trainer").to_pylist() == [0, 1, 5, 9, 6]


def test_only_rows_with_a_different_k_are_left_out(tmp_path):
    """Whether K is larger, equally frequent, or the only one of its file."""

    def records(*widths):
        for row, k in zip(real_rows(len(widths)), widths, strict=True):
            size = k * len(row["response_ids"])
            yield plain_record(row) | {"topk_ids": [1] * size, "topk_logp_rollout": [-1.0] * size}

    for i, widths in enumerate([(2, 3, 2), (2, 2, 3, 3)]):
        smaller = write_lines(tmp_path / f"{i}" / "a.jsonl", records(*widths))
        larger = write_lines(tmp_path / f"{i}" / "b.jsonl", records(3))
        table, about = imported(smaller, larger, into=tmp_path / f"trace-{i}")
        assert table.num_rows == 2 and about["left_out"] == {WRONG_TOP_K: len(widths) - 1}
        lists = zip(
            table.column("topk_ids").to_pylist(),
            table.column("response_ids").to_pylist(),
            strict=True,
        )
        assert all(len(ids) == 2 * len(tokens) for ids, tokens in lists)
