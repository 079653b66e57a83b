"""metrics.jsonl, flat: `train/reward`, `mismatch/k3`, `seconds/update`; and as a table, metrics.parquet, beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from mismatch_cli.trace.files import replacing

METRICS_TABLE = "metrics.parquet"
AS = "as"  # where a record holds what frameworks call it: these names stand as they are
_OWN = "train"  # what has no group of its own
_STEP = "step"


def flat(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line: `group/name`, `train/name` for what stands alone, and a framework's names as they are."""
    return {name: float(value) for name, value in _named(record) if _is_number(value)}


def _named(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if key == AS:
            yield from (line for lines in value.values() for line in lines.items())
        elif isinstance(value, Mapping):
            yield from ((f"{key}/{name}", found) for name, found in value.items())
        elif key != _STEP:
            yield f"{_OWN}/{key}", value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def records_from(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a growing metrics.jsonl behind `offset`, and where the next one will begin."""
    with path.open("rb") as file:
        file.seek(offset)
        whole = file.read().rpartition(b"\n")[0]
    return [json.loads(line) for line in whole.splitlines()], offset + len(whole) + bool(whole)


def renew_table(metrics: Path, say: Callable[[str], None]) -> None:
    """Write metrics.parquet again; it only copies what metrics.jsonl has, so that nothing ends where it cannot."""
    try:
        write_table(metrics)
    except Exception as error:
        say(f"{METRICS_TABLE} could not be written; metrics.jsonl has every step, and the run continues. {error}")


def write_table(metrics: Path) -> Path:
    """Write metrics.parquet beside a metrics.jsonl: a row a line, a column a name; null is "not measured"."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records, _ = records_from(metrics, 0)
    rows = [{_STEP: record[_STEP], **_texts(record), **flat(record)} for record in records]
    names = [_STEP, *sorted({name for row in rows for name in row} - {_STEP})]
    columns = {name: [row.get(name) for row in rows] for name in names}
    table = pa.table(columns).replace_schema_metadata({"format": "mismatch-cli metrics"})
    with replacing(metrics.with_name(METRICS_TABLE)) as temporary:
        pq.write_table(table, temporary)
    return metrics.with_name(METRICS_TABLE)


def _texts(record: Mapping[str, Any]) -> dict[str, str]:
    """What is no number, `train/sync`, has a place in a table."""
    return {name: value for name, value in _named(record) if isinstance(value, str)}
