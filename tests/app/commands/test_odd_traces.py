"""Reports on traces with little data: no claim goes beyond the data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.trace.manifest import read_manifest

FP8 = bundled("traces") / "fp8-kv"
Change = Callable[[pa.Table], pa.Table]


@pytest.fixture
def said(tmp_path, monkeypatch, typed) -> Callable[..., str]:
    """The output of a command on a modified first shard of the bundled trace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def answer(command: str, change: Change, *flags: str, keys: Sequence[str] = ()) -> str:
        shutil.rmtree("odd", ignore_errors=True)
        Path("odd").mkdir()
        manifest = read_manifest(FP8) | {"shards": 1}
        entries = {key: manifest[key] for key in keys or manifest}
        Path("odd/manifest.json").write_text(json.dumps(entries), encoding="utf-8")
        shutil.copy(FP8 / "vocab.parquet", "odd")
        table = pq.read_table(FP8 / "shard-00000.parquet")
        pq.write_table(change(table), "odd/shard-00000.parquet")
        _, out, err = typed(command, "odd", "-q", "--no-plots", "-o", "out", "--force", *flags)
        return " ".join((out + err).split())

    return answer


def whole(table: pa.Table) -> pa.Table:
    return table


def sampled_alone(table: pa.Table) -> pa.Table:
    names = [name for name in table.column_names if name.startswith(("topk", "logp_trainer_re"))]
    return table.drop_columns(names)


def with_column(table: pa.Table, name: str, values: list) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(
        place, table.schema.field(name), pa.array(values, table.schema.field(name).type)
    )


def without_signal(table: pa.Table) -> pa.Table:
    return with_column(
        table, "advantage", [[0.0] * len(ids) for ids in table["response_ids"].to_pylist()]
    )


def test_an_empty_trace_is_reported_as_one(said):
    for command in ("report", "clipstats", "diagnose"):
        assert "odd has no responses, so there is nothing to measure." in said(
            command, lambda table: table.slice(0, 0)
        )


def test_one_response_has_no_spread_and_decides_nothing(said):
    text = said("report", lambda table: table.slice(0, 1))
    assert "SD of Σd per response" not in text
    assert "Undecided values come from too few prompts" in text and "are undecided" in text
    assert "too few prompts (an interval needs 10): they may be" in text


def test_without_a_precision_the_logits_show_their_scale(said):
    keys = ("format", "format_version", "shards")
    text = said("diagnose", whole, keys=keys)
    assert (
        "what a precision not on record makes of this model" in text and "logits in steps" in text
    )
    text = said("diagnose", sampled_alone, keys=keys)
    assert "! NO FAULT FOUND" in text and "the models measured so far" in text
    assert said("report", whole, keys=keys).startswith("engine, trainer and precision not recorded")


def test_where_nothing_can_be_blocked_nothing_is_ranked_and_no_threshold_advised(said):
    text = said("clipstats", without_signal)
    assert "NOTHING TO BLOCK" in text and "alike)" not in text and "delta=" not in text
    assert "mismatch-cli curate MODEL" in text


def test_what_staleness_leaves_out_is_reported(said):
    def without_some(table: pa.Table) -> pa.Table:
        some = table["logp_trainer"].to_pylist()
        for row in some:
            for place in range(0, len(row), 3):
                row[place] = float("nan")
        return with_column(table, "logp_trainer", some)

    assert "! With staleness, 659 tokens have no valid log-probability on one side" in said(
        "report", without_some
    )


def test_flags_that_would_do_nothing_are_refused(said):
    text = " ".join(said("report", whole, "--as", "verl").split())
    assert (
        "--as verl only prints: leave out --output. To write a file: --as verl --json > FILE"
        in text
    )
