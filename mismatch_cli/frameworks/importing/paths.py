"""Values inside the objects of a dump, by their path: `meta_info.output_ids`,
`choices.0.token_ids`, `choices.token_ids`, `token_logprobs.*.0`.

A part is a name in an object, the number of an entry of a list, or `*` for each entry. A name is
also looked up in each object of a list, so `choices.token_ids` has a list for each choice.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.frameworks.importing.lists import depth_of, first_value

EACH = "*"
_BATCH = 2  # lists within lists, of a batch of responses
_DEEPEST = 8  # parts of a path that is proposed
_TUPLE = 3  # the longest entry of a list that is proposed by number: log-prob, id, text


def value_at(value: Any, path: str) -> Any:
    """The value at a path; None where there is none. Lists within lists are joined until they are
    as deep as a batch: the lists of some responses.
    """
    inner = _at(value, path)
    while depth_of(inner) > _BATCH:
        inner = list(chain.from_iterable(entries for entries in inner if entries is not None))
    return inner


def _at(value: Any, path: str) -> Any:
    part, _, rest = path.partition(".")
    if isinstance(value, list):
        if not part.isdecimal():
            return _at_each(value, rest if part == EACH else path)
        number = int(part)
        inner = value[number] if number < len(value) else None
    elif isinstance(value, Mapping):
        inner = value.get(part)
    else:
        return None
    return _at(inner, rest) if rest else inner


def _at_each(values: list[Any], path: str) -> list[Any] | None:
    """What is at a path in each value; None where that is nowhere."""
    inner = [_at(value, path) for value in values] if path else values
    if inner and first_value(inner) is None:
        return None
    return inner


def with_paths(record: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The record with a key for each of the names that is a path into it; what such a path enters
    is not a key of its own any more.
    """
    values = dict(record)
    for name in names:
        root = name.partition(".")[0]
        if name in record or root == name:
            continue
        if root not in names:
            values.pop(root, None)
        value = value_at(record, name)
        if value is not None:
            values[name] = value
    return values


def paths_in(record: Mapping[str, Any]) -> dict[str, Any]:
    """The lists, numbers and texts inside the objects of a record, by their paths."""
    values: dict[str, Any] = {}
    for name, value in record.items():
        for path in _below(name, value):
            if path != name:
                values[path] = value_at(record, path)
    return values


def _below(path: str, value: Any) -> Iterator[str]:
    """The paths to what a value holds, through its objects and its lists of objects."""
    if path.count(".") >= _DEEPEST:
        return
    first: Any = value[0] if isinstance(value, list) and value else None
    inside: dict[str, Any] = {}
    if isinstance(value, Mapping):
        inside = {name: inner for name, inner in value.items() if _is_part(name)}
    elif isinstance(first, Mapping):
        inside = {"0" if len(value) == 1 else EACH: first}
    elif _is_tuple(first):
        for number, entry in enumerate(first):
            inside[f"{EACH}.{number}"] = entry
    else:
        # A list of numbers or texts is a value; so is an empty one, which shows no more.
        yield path
    for part, inner in inside.items():
        yield from _below(f"{path}.{part}", inner)


def _is_part(name: str) -> bool:
    """Whether a name in an object can be a part of a path, and of a `--columns` option."""
    return bool(name) and name != EACH and set(name).isdisjoint(".,=")


def _is_tuple(value: Any) -> bool:
    """Whether a list is `[log-prob, id, text]` rather than a list of values of one kind."""
    if not isinstance(value, list) or len(value) > _TUPLE:
        return False
    are_numbers = [isinstance(entry, int | float) for entry in value]
    return any(are_numbers) and not all(are_numbers)


def roots(schema: pa.Schema, names: Collection[str]) -> dict[str, str]:
    """The columns of a Parquet file and the stated paths into its structs, each with the column
    that holds it.
    """
    held_in = {name: name for name in schema.names}
    for name in names:
        root = name.partition(".")[0]
        if name not in held_in and _is_in(schema, name):
            held_in[name] = root
            if root not in names:
                held_in.pop(root, None)
    return held_in


def _is_in(schema: pa.Schema, path: str) -> bool:
    """Whether a path leads through structs to a field."""
    root, *names = path.split(".")
    if root not in schema.names:
        return False
    kind = schema.field(root).type
    for name in names:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return False
        kind = kind.field(name).type
    return True


def column_at(batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column of a batch, or what a path into its structs holds."""
    if name in batch.schema.names:
        return batch.column(name)
    root, *fields = name.split(".")
    return pc.struct_field(batch.column(root), fields)
