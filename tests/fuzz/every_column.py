"""Every column of a shard with extremes of its type, without values, in another type, renamed:
not at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_cli.base.places import bundled_names
from tests.fuzz.every_key import READERS, Case, folders
from tests.fuzz.strategies import PAYLOAD

SHARD = "shard-00000.parquet"


class ColumnCase(Case):
    """A run in which a column of the shard has one of `CHANGES`."""

    def lay(self, run: Path) -> None:
        """Change the run."""
        table = pq.read_table(run / SHARD)
        pq.write_table(
            CHANGES[self.value](table, table.schema.get_field_index(str(self.path[0]))), run / SHARD
        )


def _with_values(
    change: Callable[[Any, pa.DataType], Any], rows: slice
) -> Callable[[pa.Table, int], pa.Table]:
    """A table in which some rows of a column have other values; unchanged if the type does not
    hold them.
    """

    def apply(table: pa.Table, at: int) -> pa.Table:
        field, column = table.schema.field(at), table.column(at).to_pylist()
        try:
            column[rows] = [change(value, field.type) for value in column[rows]]
            return table.set_column(at, field, pa.array(column, field.type))
        except (pa.ArrowException, OverflowError, TypeError, ValueError, IndexError):
            return table

    return apply


def _inside(value: Any, kind: pa.DataType, change: Callable[[Any, pa.DataType], Any]) -> Any:
    """A row with a changed value, or a list whose first item is changed."""
    if not pa.types.is_list(kind):
        return change(value, kind)
    return None if value is None else [change(value[0], kind.value_type), *value[1:]]


def _extreme(last: bool) -> Callable[[Any, pa.DataType], Any]:
    def change(_: Any, kind: pa.DataType) -> Any:
        if pa.types.is_floating(kind):
            return 3e38 if last else -3e38
        if pa.types.is_string(kind):
            return "\U0010ffff" if last else ""
        bits = 1 if pa.types.is_boolean(kind) else kind.bit_width
        signed = pa.types.is_signed_integer(kind)
        return (2 ** (bits - signed) - 1) if last else -(2 ** (bits - 1)) * signed

    return change


def _constant(value: Any) -> Callable[[Any, pa.DataType], Any]:
    return lambda _value, _kind: value


def _retyped(table: pa.Table, at: int, kind: pa.DataType) -> pa.Table:
    return table.set_column(at, table.column_names[at], pa.nulls(len(table), kind))


_SCALARS = {
    "largest": _extreme(last=True), "smallest": _extreme(last=False), "-1": _constant(-1),
    "0": _constant(0),
    "NaN": _constant(float("nan")), "-inf": _constant(float("-inf")),
    "inf": _constant(float("inf")),
    "null": _constant(None), "text": _constant("\x1b[31m\u202e<script>"),
}  # fmt: skip
_ROWS = {"one row": slice(0, 1), "all rows": slice(None)}
CHANGES: dict[str, Callable[[pa.Table, int], pa.Table]] = {
    **{
        f"{name} in {where}": _with_values(partial(_inside, change=change), rows)
        for name, change in _SCALARS.items()
        for where, rows in _ROWS.items()
    },
    **{
        f"{name} {where}": _with_values(change, rows)
        for name, change in {
            "null for": _constant(None), "empty": _constant([]), "shorter": lambda v, _: v[:-1],
            "longer": lambda v, _: v + v[:1], "doubled": lambda v, _: v + v,
        }.items()
        for where, rows in _ROWS.items()
    },
    "without the column": lambda table, at: table.remove_column(at),
    "the column twice": lambda table, at: table.append_column(table.field(at), table.column(at)),
    "no rows": lambda table, _: table.slice(0, 0),
    "the rows twice": lambda table, _: pa.concat_tables([table, table]),
    **{
        f"as {kind}": partial(_retyped, kind=kind)
        for kind in (pa.string(), pa.int64(), pa.list_(pa.float64()), pa.null(),
                     pa.struct([("a", pa.int8())]))
    },
    "another name": lambda table, at: table.rename_columns(
        [*table.column_names[:at], "\u202e" + PAYLOAD, *table.column_names[at + 1 :]]
    ),
}  # fmt: skip


def cases(commands: int = 1) -> Iterator[Case]:
    """Each column once, of the first kind that has it, with every change, read by so many of the
    commands in turn.
    """
    turn, seen = cycle(map(tuple, READERS)), set[str]()
    for kind in (*bundled_names(), "imported"):
        for name in pq.read_schema(folders()[kind] / SHARD).names:
            if name not in seen:
                seen.add(name)
                for change in CHANGES:
                    yield from (
                        ColumnCase(kind, SHARD, (name,), change, next(turn))
                        for _ in range(commands)
                    )
