"""Turns a run's responses into columns with a trace's types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.base.errors import first_line
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.rows import text_key
from mismatch_cli.frameworks.recording._responses import Batch, Row, extractors
from mismatch_cli.trace import foreign_values
from mismatch_cli.trace.columns import COLUMNS
from mismatch_cli.trace.writer import rows_to_table

REFUSED = "responses whose {} has an invalid value"
STRANGE = "responses with an unknown column ({})"
NO_STEP = "responses without a step"
_LONGEST = 40  # characters of a name in a reason, which is stored


class _Refusal(Exception):
    """Why a response is left out, and the details."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


def as_table(
    batches: Iterable[Batch], with_sample_index: Callable[[Row], Row], tally: Tally
) -> pa.Table:
    """The responses as columns of a trace, each with its sample index; those with invalid values
    are left out and counted.
    """
    rows = []
    for extract in extractors(batches):
        try:
            rows.append(with_sample_index(_in_types(extract())))
        except _Refusal as refusal:
            tally.leave_out(refusal.reason, 1, refusal.detail)
        except Exception as error:  # the run's own arrays may raise anything
            tally.leave_out(
                "responses that could not be extracted from their batch", 1, first_line(error)
            )
    present = set[str]().union(*rows)
    columns: dict[str, Sequence[Any]] = {}
    for name in COLUMNS:
        if name in present:
            columns[name] = [row.get(name) for row in rows]
    return rows_to_table(columns)


def _in_types(row: Row) -> Row:
    """The response with values of a trace's types, without those that are None; a `_Refusal`
    names the first that is invalid.
    """
    strange = row.keys() - COLUMNS.keys()
    if strange:
        raise _Refusal(STRANGE.format(min(strange)[:_LONGEST]), "")
    if row.get("step") is None:
        raise _Refusal(NO_STEP, "")
    typed: Row = {}
    for name, value in row.items():
        if value is None:
            continue
        try:
            typed[name] = _in_type(name, value)
        except Exception as error:
            raise _Refusal(REFUSED.format(name), first_line(error)) from error
    return typed


def _in_type(name: str, value: Any) -> Any:
    kind = COLUMNS[name].type
    if pa.types.is_list(kind):
        if np.ndim(value) == 0:  # a single number, as an advantage may be
            value = np.atleast_1d(value)
        return foreign_values.flat_array(value, kind.value_type)
    if name == "prompt_id" and isinstance(value, str):
        return text_key(value)
    if name == "finish_reason":
        return str(value)
    # A reward that is not finite is not refused: it is emptied with a note, as in an import.
    if name == "reward":
        return float(np.asarray(value).item())
    number = foreign_values.whole_number(value)
    # Arrow refuses a number beyond the column's type.
    # Refused here it costs this response; in the finished table it would cost all of them.
    return pa.scalar(number, kind).as_py()
