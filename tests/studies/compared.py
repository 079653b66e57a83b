"""Traces that differ from a bundled one in known ways."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.studies.comparison import (
    ComparisonAnalysis,
    ComparisonPlotData,
    analyse_comparison,
)
from mismatch_cli.studies.comparison_result import ComparedTrace, ComparisonResult
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.writer import shard_path, write_shard

Row = dict[str, Any]
FLOAT32 = bundled("traces") / "float32"


def rows_of(folder: Path) -> list[Row]:
    """The responses of a trace as dicts, in file order."""
    rows: list[Row] = []
    for table in Trace.open(folder).tables():
        rows += table.to_pylist()
    return rows


def write_rows(
    folder: Path,
    rows: Sequence[Row],
    like: Path,
    *,
    shards: int = 1,
    manifest: Callable[[Row], Any] = lambda _: None,
) -> Path:
    """A trace of these rows with the schema, vocabulary and, except for a change, the manifest
    of another.
    """
    folder.mkdir(parents=True)
    names = set().union(*rows)
    schema = next(Trace.open(like).tables()).schema
    # A column that no row has is left out, as in an import
    schema = pa.schema([field for field in schema if field.name in names])
    for number, part in enumerate(np.array_split(np.arange(len(rows)), shards)):
        table = pa.Table.from_pylist([rows[i] for i in part], schema=schema)
        write_shard(shard_path(folder, number), table)
    content = json.loads((like / "manifest.json").read_text()) | {"shards": shards}
    manifest(content)
    (folder / "manifest.json").write_text(json.dumps(content))
    (folder / "vocab.parquet").write_bytes((like / "vocab.parquet").read_bytes())
    return folder


def changed_trace(folder: Path, source: Path, change: Callable[[Row], Row]) -> Path:
    """A copy of a trace in which each row is changed."""
    return write_rows(folder, list(map(change, rows_of(source))), source)


def without_columns(row: Row, *beginnings: str) -> Row:
    return {name: value for name, value in row.items() if not name.startswith(beginnings)}


def shifted(row: Row, nats: float) -> Row:
    """The same response with log π lowered by a constant."""
    return row | {"logp_trainer": [logp - nats for logp in row["logp_trainer"]]}


def lacking(row: Row, first: int, every: int) -> Row:
    """The same response without log π of every so many tokens, from one on."""
    logp = np.array(row["logp_trainer"])
    logp[first::every] = np.nan
    return row | {"logp_trainer": logp.tolist()}


@pytest.fixture(scope="session")
def float32_rows() -> list[Row]:
    return rows_of(FLOAT32)


@pytest.fixture(scope="session")
def perturbed(tmp_path_factory: pytest.TempPathFactory, float32_rows: list[Row]) -> Path:
    """float32 with log π lowered by 0.02 everywhere and noise of 0.01, in a different order and
    in three shards.
    """
    rng = np.random.default_rng(0)
    rows = []
    for row in float32_rows:
        own = np.array(row["logp_trainer"], dtype=np.float32)
        logp = own - 0.02 + 0.01 * rng.normal(size=len(own))
        rows.append(row | {"logp_trainer": np.minimum(logp, 0).astype(np.float32).tolist()})
    # Pairs must be made by key, in whatever order the rows are
    order = rng.permutation(len(rows))
    folder = tmp_path_factory.mktemp("perturbed") / "trace"
    return write_rows(folder, [rows[i] for i in order], FLOAT32, shards=3, manifest=_newer_torch)


def _newer_torch(manifest: Row) -> None:
    manifest["libraries"]["torch"] = manifest["trainer"]["torch"] = "2.14.0+cpu"


@pytest.fixture(scope="session")
def traces(perturbed: Path) -> list[Trace]:
    return list(map(Trace.open, (FLOAT32, perturbed, bundled("traces/fp8-kv"))))


@pytest.fixture(scope="session")
def analysis(traces: list[Trace]) -> ComparisonAnalysis:
    """float32 compared with its perturbed copy, in a different order, and with the fp8 trace."""
    return analyse_comparison(traces, arguments=["--pair", "mismatch"])


@pytest.fixture(scope="session")
def result(analysis: ComparisonAnalysis) -> Row:
    return json.loads(json.dumps(analysis.to_json(), allow_nan=False))


@pytest.fixture(scope="session")
def plot_data(analysis: ComparisonAnalysis) -> ComparisonPlotData:
    return analysis.plot_data


def first_two(result: Row) -> Row:
    """The same comparison without the third trace."""
    return result | {"traces": result["traces"][:2], "comparisons": result["comparisons"][:1]}


def with_summary(trace: ComparedTrace, **change: Any) -> ComparedTrace:
    """The same trace with another part of its summary."""
    return replace(trace, summary=replace(trace.summary, **change))


def with_turns(result: ComparisonResult) -> ComparisonResult:
    """The same with ranges of positions as turns, which the bundled traces lack."""
    traces = []
    for trace in result.traces:
        turns = [
            replace(row, first=turn, last=turn, turns=row.tokens, length_mean=row.abs_d_mean)
            for turn, row in enumerate(trace.summary.positions, start=1)
        ]
        traces.append(with_summary(trace, turns=turns))
    return replace(result, traces=traces)


def two_of(result: ComparisonResult) -> ComparisonResult:
    """The same comparison without the third trace."""
    return replace(result, traces=result.traces[:2], comparisons=result.comparisons[:1])
