"""Responses as a run has them, turned into columns in a trace's types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.errors import first_line
from mismatch_cli.importers._lists import from_rows
from mismatch_cli.importers._rows import text_key
from mismatch_cli.importers._tally import Tally
from mismatch_cli.record._responses import Padded, Row, rows_in
from mismatch_cli.trace import foreign
from mismatch_cli.trace.schema import arrow_type, column_order

REFUSED = "responses with values that the columns of a trace cannot hold ({})"


def in_types(given: Iterable[Row | Padded], tally: Tally) -> list[Row]:
    """The responses with values of a trace's types; one with a value that does not fit is left out and counted."""
    kept = []
    for row in rows_in(given):
        try:
            kept.append(_in_types(row()))
        except Exception as error:  # whatever a run hands over: its own arrays may raise anything
            tally.leave_out(REFUSED.format(first_line(error)))
    return kept


def as_table(rows: Sequence[Row]) -> pa.Table:
    """The same as columns."""
    names = [name for name in column_order() if any(name in row for row in rows)]
    return pa.table({name: _column(name, [row.get(name) for row in rows]) for name in names})


def _in_types(row: Row) -> Row:
    if strange := sorted(row.keys() - {*column_order()}):
        raise ValueError(f"a trace has no column {strange[0]}")
    return {name: _value(name, value) for name, value in row.items() if value is not None}


def _value(name: str, value: Any) -> Any:
    kind = arrow_type(name)
    if pa.types.is_list(kind):
        return foreign.flat_array(np.atleast_1d(value) if np.ndim(value) == 0 else value, kind.value_type)
    if name == "prompt_id" and isinstance(value, str):
        return text_key(value)
    if name == "finish_reason":
        return str(value)
    if name == "reward":  # what is no finite number is emptied with a note, as in an import
        return float(np.asarray(value).item())
    number = foreign.whole_number(value)
    return pa.scalar(number, kind).as_py()  # beyond the type: refused here, where it is this row's fault


def _column(name: str, values: list[Any]) -> pa.Array:
    kind = arrow_type(name)
    return from_rows(values, kind.value_type) if pa.types.is_list(kind) else pa.array(values, kind)
