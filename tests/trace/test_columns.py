"""A column is a row: everything that does not compute with it follows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields

import pytest

from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.trace.columns import COLUMNS, REQUIRED, ROW_KEY, Maker, Shape, made_by, of_shape
from tests.test_programs import without

ROW = """
    TraceColumn("surprise", _TOKENS, _FLOAT, _TRAINER, "an example", "bits", aliases=("shock",)),
"""
ANSWERS = """
import json
from mismatch_cli.app.cli import run
from mismatch_cli.probe.rescore_plan import OF_TRAINER
from mismatch_cli.trace.reader import Trace
from pathlib import Path
assert run(["import", "--schema"]) == 0
assert run(["import", "dump.jsonl", "--output", "run"]) == 0
assert run(["report", "run", "--export", "jsonl"]) == 0
assert "surprise" in OF_TRAINER
print("columns:", *Trace.open(Path("run")).columns())
"""


def test_a_new_row_is_recorded_exported_and_documented(tmp_path):
    root = without((), tmp_path / "copy")
    table = root / "mismatch_cli/trace/columns.py"
    text, mark = table.read_text("utf-8"), "# The sampled token is not inserted"
    assert mark in text
    table.write_text(text.replace(f"    {mark}", f"{ROW.strip(chr(10))}\n    {mark}"), "utf-8")
    rows = [
        {
            "prompt_ids": [1],
            "response_ids": [5, 6],
            "logp_rollout": [-0.5, -1.5],
            "logp_trainer": [-0.5, -1.25],
            "shock": [0.25, 2.0],
            "sample_index": number,
        }
        for number in range(12)
    ]
    (tmp_path / "dump.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run(
        [sys.executable, "-c", ANSWERS],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(root), "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    assert "an example, bits; also read from shock" in done.stdout
    assert "surprise" in done.stdout.partition("columns:")[2]
    exported = (tmp_path / "run/responses.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["surprise"] for line in exported] == [[0.25, 2.0]] * 12


def test_the_rows():
    assert [name for name, column in COLUMNS.items() if column.name != name] == []
    assert {name for maker in Maker for name in made_by(maker)} == COLUMNS.keys()
    assert {*of_shape(*Shape)} == COLUMNS.keys() and {*ROW_KEY} <= {*REQUIRED}
    for column in COLUMNS.values():
        assert column.meaning and column.description.startswith(column.meaning)
        assert column.required or not column.is_required
        assert ("logp" in column.name) <= (column.unit == "nats"), column.name


def test_every_field_of_a_batch_is_a_column():
    names = {f"{name}_T" for name in of_shape(Shape.TOKENS)}
    names |= {f"{name}_TK" for name in of_shape(Shape.TOP_K)}
    held = {each.name for each in fields(TokenBatch) if each.name.endswith(("_T", "_TK"))}
    assert held == names


@pytest.mark.parametrize("shape", Shape)
def test_types_follow_from_shapes(shape):
    for name in of_shape(shape):
        kind = COLUMNS[name].type
        assert (kind == COLUMNS[name].value) == (shape is Shape.RESPONSE)
