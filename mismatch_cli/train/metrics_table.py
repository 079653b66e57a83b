"""metrics.jsonl flattened: `train/reward`, `mismatch/k3`, `seconds/update`; also as a table,
metrics.parquet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from mismatch_cli.trace.files import replacing
from mismatch_cli.trace.training_folder import AS

METRICS_TABLE = "metrics.parquet"
_OWN = "train"  # the group of metrics without one
_STEP = "step"


def flat(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line: `group/name`, `train/name` for those without a group, and a
    framework's own names.
    """
    return {name: float(value) for name, value in _named(record) if _is_number(value)}


def _named(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every metric of a line under its flat name; the step is not a metric."""
    for key, value in record.items():
        if key == AS:
            for metrics in value.values():
                yield from metrics.items()
        elif isinstance(value, Mapping):
            for name, metric in value.items():
                yield f"{key}/{name}", metric
        elif key != _STEP:
            yield f"{_OWN}/{key}", value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def records_from(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The complete lines of a growing metrics.jsonl after `offset`, and where the next one
    starts.
    """
    with path.open("rb") as file:
        file.seek(offset)
        lines, newline, _ = file.read().rpartition(b"\n")
    # The line after the last newline is still being written: the next call reads it from its start.
    return list(map(json.loads, lines.splitlines())), offset + len(lines) + len(newline)


def renew_table(metrics: Path, say: Callable[[str], None]) -> None:
    """Write metrics.parquet again; a failure does not stop the run, since the table only copies
    metrics.jsonl.
    """
    try:
        write_table(metrics)
    except Exception as error:
        say(
            f"{METRICS_TABLE} could not be written; metrics.jsonl has every step, and the run "
            f"continues. {error}"
        )


def write_table(metrics: Path) -> Path:
    """Write metrics.parquet beside a metrics.jsonl: a row per line, a column per metric; null is
    "not measured".
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    records, _ = records_from(metrics, 0)
    rows = [{**_texts(record), **flat(record)} for record in records]
    columns: dict[str, list[Any]] = {_STEP: [record[_STEP] for record in records]}
    for name in sorted(set[str]().union(*rows)):
        columns[name] = [row.get(name) for row in rows]
    table = pa.table(columns).replace_schema_metadata({"format": "mismatch-cli metrics"})
    path = metrics.with_name(METRICS_TABLE)
    with replacing(path) as temporary:
        pq.write_table(table, temporary)
    return path


def _texts(record: Mapping[str, Any]) -> dict[str, str]:
    """The texts of a record, such as `train/sync`, which only the table holds."""
    return {name: value for name, value in _named(record) if isinstance(value, str)}
