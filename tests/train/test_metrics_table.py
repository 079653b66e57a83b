"""metrics.jsonl flattened: names, the table beside it, and values that are not numbers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from mismatch_cli.frameworks import dialects
from mismatch_cli.trace.ownership import is_own_file
from mismatch_cli.train.metrics_table import (
    METRICS_TABLE,
    flat,
    records_from,
    renew_table,
    write_table,
)
from mismatch_cli.train.tracking import Trackers

RECORD = {
    "step": 3, "reward": 0.5, "grad_norm": None, "mismatch": {"k3": 1e-5, "k1": float("inf")},
    "sync": "proven",
    "eval": {"aime": 0.25}, "updates": 6,
    "as": {"trl": {"sampling/sampling_logp_difference/mean": 0.01}},
}  # fmt: skip
FLAT = {
    "train/reward": 0.5, "mismatch/k3": 1e-5, "eval/aime": 0.25, "train/updates": 6.0,
    "sampling/sampling_logp_difference/mean": 0.01,
}  # fmt: skip


def lines(folder: Path, *records: dict) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


def test_every_number_has_one_flat_name():
    assert flat(RECORD) == FLAT


def test_no_framework_uses_one_of_our_names():
    """Otherwise one would overwrite the other."""
    groups = ("mismatch", "current", "seconds", "eval", "routing", "sampled")
    for framework in dialects.names():
        for line in dialects.lines(framework):
            group, _, key = line.name.partition("/")
            assert group not in groups, line.name
            assert group != "train" or key not in (
                "reward",
                "length",
                "entropy",
                "grad_norm",
                "blocked",
            ), line.name


def test_the_table_holds_every_line(tmp_path):
    before = {"step": 0, "eval_accuracy": 0.125}
    path = write_table(lines(tmp_path, before, RECORD))
    table = pq.read_table(path)
    rows = table.to_pylist()
    assert [row["step"] for row in rows] == [0, 3] and table.column_names[0] == "step"
    assert rows[0] == dict.fromkeys(table.column_names) | {"step": 0, "train/eval_accuracy": 0.125}
    assert {k: v for k, v in rows[1].items() if v is not None} == FLAT | {
        "step": 3,
        "train/sync": "proven",
    }
    assert is_own_file(path, tmp_path)


def test_a_table_of_the_users_is_not_ours(tmp_path):
    import pyarrow as pa

    pq.write_table(pa.table({"step": [1]}), tmp_path / METRICS_TABLE)
    assert not is_own_file(tmp_path / METRICS_TABLE, tmp_path)


def test_a_table_that_cannot_be_written_is_reported_and_leaves_nothing(tmp_path):
    said: list[str] = []
    (tmp_path / METRICS_TABLE).mkdir()
    renew_table(lines(tmp_path, RECORD), said.append)
    assert len(said) == 1 and said[0].startswith(
        "metrics.parquet could not be written; metrics.jsonl has every step"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", METRICS_TABLE]


@pytest.mark.parametrize("cut", range(0, 30, 7))
def test_a_half_written_line_waits(cut, tmp_path):
    path = lines(tmp_path, {"step": 1}, {"step": 2})
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    first, offset = records_from(path, 0)
    path.write_bytes(whole)
    rest, end = records_from(path, offset)
    assert [record["step"] for record in first + rest] == [1, 2] and end == len(whole)


def test_trackers_get_each_step_once_as_soon_as_its_line_is_whole(tmp_path):
    """The second half of a line comes later."""
    steps = []
    trackers = SimpleNamespace(
        children={"a tracker": None}, _offset=0, log=lambda *step: steps.append(step)
    )
    metrics = tmp_path / "metrics.jsonl"
    for text in ('{"step": 1, "loss": 0.5}\n{"step": 2, ', '"loss": 0.25}\n'):
        with metrics.open("a", encoding="utf-8") as file:
            file.write(text)
        Trackers.follow(trackers, metrics)
    assert steps == [(1, {"train/loss": 0.5}), (2, {"train/loss": 0.25})]
