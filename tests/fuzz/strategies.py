"""Faults in files: values, records, lines, bytes and tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from hypothesis import strategies as st

PAYLOAD = "<script>alert('PAYLOAD')</script>"
_MARKUP = "[/] [link=file:///x] &lt; ]]> $\\frac{ %s%n {0} 𝔘𝔫 ﷺ ../../up ~ - -- '\"` \\"
_NUMBERS = "NaN nan inf -inf 1e999 0x10 true null ١٢ 1_000 -1 0 1.5"
NASTY = (
    *("", " ", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x9b31m", "\r", "\x00", "a\x00b"),
    *("\u202egnp.exe", "\ud800", "[bold red]x[/]", PAYLOAD, "<img src=x onerror=alert(1)>"),
    *("{{ 7*7 }}", "e\u0301" * 20, "z" * 3000, "9" * 40),
    *_MARKUP.split(),
    *_NUMBERS.split(),
)
HUGE = (-1, 0, 1, 2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, -(2**63) - 1, 10**400)
ODD = (float("nan"), float("inf"), float("-inf"), -0.0, 5.0, 1e300, -1e300, 5e-324, 1e39)

texts = st.one_of(st.sampled_from(NASTY), st.text(max_size=20))
scalars = st.one_of(st.none(), st.booleans(), st.sampled_from(HUGE), st.sampled_from(ODD), texts)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def pick(draw: st.DrawFn, *choices: Any) -> Any:
    return draw(st.sampled_from(choices))


@st.composite
def changed_record(draw: st.DrawFn, record: dict[str, Any]) -> dict[str, Any]:
    """A record with a few fields dropped, replaced, cut, doubled, or with one odd value."""
    changed = dict(record)
    for _ in range(draw(st.integers(1, 3))):
        name = pick(draw, *(sorted(changed) or ["x"]))
        how = pick(draw, "drop", "replace", "inside", "cut", "double", "more", "wrap", "text")
        value = changed.get(name)
        if how == "drop":
            changed.pop(name, None)
        elif how == "more":
            changed[draw(texts)] = draw(values)
        elif how == "wrap":
            changed[name] = [value]
        elif how == "text":
            changed[name] = str(value)
        elif isinstance(value, list) and value and how in ("inside", "cut", "double"):
            changed[name] = _changed_list(draw, value, how)
        elif isinstance(value, dict) and value and how == "inside":
            changed[name] = draw(changed_record(value))
        else:
            changed[name] = draw(values)
    return changed


def _changed_list(draw: st.DrawFn, value: list[Any], how: str) -> list[Any]:
    if how == "cut":
        return value[: draw(st.integers(0, len(value) - 1))]
    if how == "double":
        return value + value
    index = draw(st.integers(0, len(value) - 1))
    inner = value[index]
    if isinstance(inner, list) and inner and draw(st.booleans()):
        return [
            *value[:index],
            _changed_list(draw, inner, pick(draw, "inside", "cut", "double")),
        ]
    return [*value[:index], draw(values), *value[index + 1 :]]


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes truncated, flipped, inserted or repeated."""
    how = pick(
        draw, "cut", "flip", "insert", "remove", "repeat", "empty", "bom", "utf-16", "crlf", "head"
    )
    at = draw(st.integers(0, max(0, len(content) - 1)))
    some = draw(st.binary(min_size=1, max_size=8))
    return {
        "cut": lambda: content[:at],
        "flip": lambda: content[:at] + some + content[at + len(some) :],
        "insert": lambda: content[:at] + some + content[at:],
        "remove": lambda: content[:at] + content[at + 16 :],
        "repeat": lambda: content + content,
        "empty": lambda: b"",
        "bom": lambda: b"\xef\xbb\xbf" + content,
        "utf-16": lambda: content.decode(errors="replace").encode("utf-16"),
        "crlf": lambda: content.replace(b"\n", b"\r\n"),
        "head": lambda: some * 50 + content,
    }[how]()


LINES = (
    *(
        b"",
        b"   ",
        b"null",
        b"[]",
        b"3",
        b'"text"',
        b"{",
        b"{}",
        b"[" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
    ),
    *(
        b'{"problem": "a", "problem": "b"}',
        b'\xff\xfe{"problem": 1}',
        b'{"x": NaN, "y": -Infinity}',
        b"\x00" * 20,
    ),
)


@st.composite
def changed_jsonl(draw: st.DrawFn, content: bytes) -> bytes:
    """JSON lines with broken records, foreign lines between them, or broken bytes."""
    lines = content.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1)) if lines else 0
        how = pick(draw, "record", "record", "record", "line", "bytes", "twice", "remove")
        if how == "record" and lines and lines[at].startswith(b"{") and len(lines[at]) < 10**5:
            lines[at] = _dumps(draw, draw(changed_record(_loads(lines[at]))))
        elif how == "line":
            lines.insert(at, pick(draw, *LINES))
        elif how == "twice" and lines:
            lines.append(lines[at])
        elif how == "remove" and lines:
            del lines[at]
        elif how == "bytes" and lines:
            return draw(changed_bytes(b"\n".join(lines) + b"\n"))
    return b"\n".join(lines) + b"\n" * draw(st.booleans())


def _loads(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _dumps(draw: st.DrawFn, record: dict[str, Any]) -> bytes:
    text = json.dumps(record, ensure_ascii=draw(st.booleans()))
    return text.encode(errors="surrogatepass").replace(b"\n", b" ")


_TYPES = (
    pa.string(),
    pa.int64(),
    pa.float64(),
    pa.bool_(),
    pa.list_(pa.float64()),
    pa.binary(),
    pa.null(),
)


@st.composite
def changed_table(draw: st.DrawFn, table: pa.Table) -> pa.Table:
    """A table with missing, retyped or renamed columns, odd values, ragged or null rows, or
    without rows.
    """
    for _ in range(draw(st.integers(1, 2))):
        how = pick(
            draw,
            "value",
            "value",
            "value",
            "ragged",
            "null",
            "drop",
            "type",
            "name",
            "empty",
            "twice",
        )
        if not table.num_columns:
            return table
        at = draw(st.integers(0, table.num_columns - 1))
        name = table.column_names[at]
        if how == "drop":
            table = table.remove_column(at)
        elif how == "empty":
            table = table.slice(0, 0)
        elif how == "twice":
            table = pa.concat_tables([table, table])
        elif how == "name":
            names = list(table.column_names)
            names[at] = pick(draw, *table.column_names, *(n for n in NASTY if n.isprintable()))
            table = table.rename_columns(names)
        elif how == "type":
            kind = pick(draw, *_TYPES)
            table = table.set_column(at, name, pa.nulls(len(table), kind))
        elif len(table):
            table = _changed_column(draw, table, at, how)
    return table


def _changed_column(draw: st.DrawFn, table: pa.Table, at: int, how: str) -> pa.Table:
    """A column with one odd row, in the column's type."""
    field, column = table.schema.field(at), table.column(at).to_pylist()
    row = draw(st.integers(0, len(column) - 1))
    if how == "null":
        column[row] = None
    elif how == "ragged" and isinstance(column[row], list):
        column[row] = column[row][:-1] if draw(st.booleans()) else [*column[row], *column[row][:1]]
    elif isinstance(column[row], list) and column[row]:
        inside = list(column[row])
        inside[draw(st.integers(0, len(inside) - 1))] = draw(_of_type(field.type.value_type))
        column[row] = inside
    else:
        column[row] = draw(_of_type(field.type))
    try:
        return table.set_column(at, field, pa.array(column, field.type))
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return table


def _of_type(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_floating(kind):
        return st.sampled_from((*ODD, None))
    if pa.types.is_integer(kind):
        return st.sampled_from((-1, 0, 2**31 - 1, -(2**31), 5000, None))
    if pa.types.is_boolean(kind):
        return st.sampled_from((True, False, None))
    return st.sampled_from((*(text for text in NASTY if "\ud800" not in text), None))


@st.composite
def changed_content(draw: st.DrawFn, content: Any) -> Any:
    """The content of a `.pt` file with changed tensor shapes and types, and arbitrary
    replacements.
    """
    if isinstance(content, dict) and content:
        name = pick(draw, *sorted(content))
        if isinstance(content[name], dict | list | torch.Tensor) and draw(st.integers(0, 3)):
            return content | {name: draw(changed_content(content[name]))}
        return draw(changed_record(content))
    if isinstance(content, list) and content:
        at = draw(st.integers(0, len(content) - 1))
        return [*content[:at], draw(changed_content(content[at])), *content[at + 1 :]]
    if isinstance(content, torch.Tensor) and draw(st.booleans()):
        return pick(draw, *_TENSORS)(content)
    return draw(values)


_TENSORS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda t: t[:-1],
    lambda t: t.reshape(-1, 1),
    lambda t: t[:0],
    lambda t: t.sum(),
    lambda t: t.to(torch.complex64),
    lambda t: t.bool(),
    lambda t: t.to(torch.bfloat16),
    lambda t: t.double() * float("nan"),
    lambda t: t.to_sparse(),
    lambda t: torch.empty(3, device="meta"),
    lambda t: np.asarray(t),
    lambda t: t.float() + 5,
)
