"""Every key of the files that a reader believes, with every hostile value: in order, not at random."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_cli.places import bundled, bundled_names
from mismatch_cli.trace.manifest import recorded
from tests.fuzz import world
from tests.fuzz.properties import judge
from tests.fuzz.strategies import PAYLOAD
from tests.importers import layouts

SECONDS = 10  # per command, on a trace of a few responses
ROWS = 4
Path_ = tuple[str | int, ...]
_HERE = "the value of this case"


ABSENT = ""  # the key is not there
VALUES = {  # as JSON
    "absent": ABSENT,
    **{
        text: text
        for text in ("null", "true", "0", "1", "-3", "0.5", "NaN", "Infinity", "[]", "{}", '""', '"x"', '"7"')
    },
    "64 bits": str(2**64),
    "400 digits": "9" * 400,
    "5,000 digits": "9" * 5000,
    "1 MB of text": json.dumps("z" * 10**6),
    "control": json.dumps("\x1b[31m\u202egnp.exe\x00\r\n"),
    "markup": json.dumps(PAYLOAD + "[/][link=file:///x]$\\frac{"),
    "half a character": '"\\ud800"',
    "list": '[[1], {"a": null}, "x"]',
    "object": '{"model": {"dtype": [1]}, "": null, "\\u202e": "x"}',
    **{f"{levels} brackets": "[" * levels + "]" * levels for levels in (60, 900, 5000)},
}
READERS = (
    ["report", "run", "--output", "new"],
    ["clipstats", "run", "--output", "new"],
    ["diagnose", "run", "--output", "new"],
    ["compare", "run", "other", "--output", "new"],
    ["gate", "run", "--limits", "limits.toml"],
    ["report", "run", "--as", "all", "--json"],
    ["compare", "other", "run", "--json"],
    ["report", "run", "--output", "new", "--export", "csv"],
    ["watch", "run", "--once", "--every", "0.1", "--no-plots", "--output", "new"],
    ["report", "run", "other"],
)


@dataclass(frozen=True)
class Case:
    """A value in the place of another, in the manifest or a shard of a kind of run, and the command that reads it."""

    kind: str
    path: Path_  # into the manifest; or a column
    value: str
    command: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {'.'.join(map(str, self.path))} = {self.value}: {' '.join(self.command)}"

    def lay(self, run: Path) -> None:
        """Change the run."""
        manifest = run / "manifest.json"
        content = json.loads(manifest.read_text(encoding="utf-8"))
        manifest.write_text(changed(content, self.path, VALUES[self.value]), encoding="utf-8")


class ColumnCase(Case):
    """The same with the column of a shard, and one of `COLUMN_CHANGES`."""

    def lay(self, run: Path) -> None:
        shard = run / "shard-00000.parquet"
        table, at = pq.read_table(shard), pq.read_schema(shard).get_field_index(str(self.path[0]))
        pq.write_table(COLUMN_CHANGES[self.value](table, at), shard)


def _with_values(change: Callable[[Any, pa.DataType], Any], rows: slice) -> Callable[[pa.Table, int], pa.Table]:
    """A table in which some rows of a column have other values; unchanged if the type does not hold them."""

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
    "largest": _extreme(last=True), "smallest": _extreme(last=False), "-1": _constant(-1), "0": _constant(0),
    "NaN": _constant(float("nan")), "-inf": _constant(float("-inf")), "inf": _constant(float("inf")),
    "null": _constant(None), "text": _constant("\x1b[31m\u202e<script>"),
}  # fmt: skip
_ROWS = {"one row": slice(0, 1), "all rows": slice(None)}
COLUMN_CHANGES: dict[str, Callable[[pa.Table, int], pa.Table]] = {
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
        for kind in (pa.string(), pa.int64(), pa.list_(pa.float64()), pa.null(), pa.struct([("a", pa.int8())]))
    },
    "another name": lambda table, at: table.rename_columns(
        [*table.column_names[:at], "\u202e" + PAYLOAD, *table.column_names[at + 1 :]]
    ),
}  # fmt: skip


@cache
def folders() -> dict[str, Path]:
    """A run of each kind, with a few responses: the bundled traces, and an import."""
    root = Path(world._made.name) / "kinds"
    made = {}
    for name in bundled_names():
        made[name] = _shortened(bundled("traces") / name, root / name)
    layouts.write_lines(root / "dump.jsonl", map(layouts.plain_record, layouts.real_rows(ROWS)))
    layouts.imported(root / "dump.jsonl", into=root / "imported")
    return made | {"imported": root / "imported"}


def _shortened(source: Path, folder: Path) -> Path:
    folder.mkdir(parents=True)
    table = pq.read_table(source / "shard-00000.parquet").slice(0, ROWS)
    pq.write_table(table, folder / "shard-00000.parquet")
    pq.write_table(pq.read_table(source / "vocab.parquet").slice(0, 300), folder / "vocab.parquet")
    manifest = json.loads((source / "manifest.json").read_text(encoding="utf-8"))
    (folder / "manifest.json").write_text(json.dumps(manifest | recorded({"shard-00000.parquet": ROWS})))
    return folder


def paths(content: Any, above: Path_ = ()) -> Iterator[Path_]:
    """Every place in a JSON value, of a list only the first one."""
    first = dict(enumerate(content[:1])) if isinstance(content, list) else {}
    for key, value in (content if isinstance(content, dict) else first).items():
        yield (*above, key)
        yield from paths(value, (*above, key))


def changed(content: Any, path: Path_, value: str) -> str:
    """The content as JSON, with another value at this place."""
    content = deepcopy(content)
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = _HERE
    if value == ABSENT:
        del place[path[-1]]
    return json.dumps(content).replace(json.dumps(_HERE), value)


def cases(commands: int = len(READERS)) -> Iterator[Case]:
    """Each place once, in the first kind that has it, with every value, read by so many of the commands in turn."""
    turn = cycle(map(tuple, READERS))
    for make, places, values in ((Case, _keys, VALUES), (ColumnCase, _columns, COLUMN_CHANGES)):
        seen: set[Path_] = set()
        for kind, folder in folders().items():
            for path in places(folder):
                if path in seen:
                    continue
                seen.add(path)
                for value in values:
                    yield from (make(kind, path, value, next(turn)) for _ in range(commands))


def _keys(folder: Path) -> Iterator[Path_]:
    return paths(json.loads((folder / "manifest.json").read_text(encoding="utf-8")))


def _columns(folder: Path) -> Iterator[Path_]:
    return ((name,) for name in pq.read_schema(folder / "shard-00000.parquet").names)


@contextlib.contextmanager
def laid_out(kind: str) -> Iterator[Path]:
    """A working folder with `run` and `other`, both of this kind, and limits."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        folder = Path(temporary) / "a" / "b" / "c"
        for name in ("run", "other"):
            (folder / name).mkdir(parents=True)
            for path in folders()[kind].iterdir():
                (folder / name / path.name).write_bytes(path.read_bytes())
        (folder / "existing").mkdir()
        (folder / "existing" / "precious.txt").write_text("keep me")
        (folder / "limits.toml").write_text(world.LIMITS)
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)


def try_case(case: Case) -> str:
    """The properties of every command line, within ten seconds."""
    with laid_out(case.kind) as folder, mock.patch.object(world, "SECONDS", SECONDS):
        case.lay(folder / "run")
        return judge(world.call(folder, *case.command), folder)
