"""Turns a run's responses into columns with a trace's types."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.base.errors import first_line
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.rows import text_key
from mismatch_cli.frameworks.recording._responses import Padded, Row, rows_in
from mismatch_cli.trace import foreign_values
from mismatch_cli.trace.columns import COLUMNS
from mismatch_cli.trace.writer import rows_to_table

REFUSED = "responses whose {} has an invalid value"
STRANGE = "responses with an unknown column ({})"
_LONGEST = 40  # characters of a name in a reason, which is stored


class _Refusal(Exception):
    """Why a response is left out, and the details."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def as_table(given: Iterable[Row | Padded], number: Callable[[Row], Row], tally: Tally) -> pa.Table:
    """The responses as columns, each with its number; those with invalid values are left out and
    counted.
    """
    kept = []
    for row in rows_in(given):
        try:
            kept.append(number(_in_types(row())))
        except _Refusal as refusal:
            tally.leave_out(refusal.reason, 1, refusal.detail)
        except Exception as error:  # the run's own arrays may raise anything
            tally.leave_out(
                "responses that could not be extracted from their batch", 1, first_line(error)
            )
    names = [name for name in COLUMNS if any(name in row for row in kept)]
    return rows_to_table({name: [row.get(name) for row in kept] for name in names})


def _in_types(row: Row) -> Row:
    if strange := sorted(row.keys() - COLUMNS.keys()):
        raise _Refusal(STRANGE.format(strange[0][:_LONGEST]), "")
    found: Row = {}
    for name, value in row.items():
        try:
            found |= {} if value is None else {name: _value(name, value)}
        except Exception as error:
            raise _Refusal(REFUSED.format(name), first_line(error)) from error
    return found


def _value(name: str, value: Any) -> Any:
    kind = COLUMNS[name].type
    if pa.types.is_list(kind):
        return foreign_values.flat_array(
            np.atleast_1d(value) if np.ndim(value) == 0 else value, kind.value_type
        )
    if name == "prompt_id" and isinstance(value, str):
        return text_key(value)
    if name == "finish_reason":
        return str(value)
    if name == "reward":  # a value that is not finite is emptied with a note, as in an import
        return float(np.asarray(value).item())
    number = foreign_values.whole_number(value)
    # A value beyond the type is refused here, for this row only
    return pa.scalar(number, kind).as_py()
