"""Reads `import --columns ours=theirs,…`, which maps columns of the plain schema to a file's,
and checks it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.numbers import things
from mismatch_cli.base.registry import lacks_name, unknown_name
from mismatch_cli.base.text import visible
from mismatch_cli.frameworks.importing import lists as _lists
from mismatch_cli.frameworks.importing.padded import MASKS, SEQUENCES, kind_of, measure_of
from mismatch_cli.frameworks.importing.paths import paths_in, with_paths
from mismatch_cli.trace.columns import ALIASES, COLUMNS, TOKEN_COLUMNS

Row = Mapping[str, Any]
IGNORED = -100  # the label of a token outside the loss, where a mask holds labels
_BATCH = 2  # lists within lists
OPEN = "?"  # placeholder for a name that the user has to fill in
REQUIRED = ("prompt_ids", "response_ids", "logp_rollout")
RETOKENISED = "Retokenized text is not what was sampled"
_EXAMPLE = "--columns response_ids=output_tokens,logp_rollout=logprobs"


def named(text: str) -> dict[str, str]:
    """Parse `ours=theirs,…`; a `UsageError` for an unknown column, or one that is named twice."""
    columns: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        ours, equals, theirs = (piece.strip() for piece in part.partition("="))
        if not (equals and ours and theirs):
            raise UsageError(f"--columns: '{part}' is not ours=theirs. Write it like {_EXAMPLE}.")
        if ours not in known():
            swapped = f" Our name comes first: {theirs}={ours}." if theirs in known() else ""
            raise UsageError(f"--columns: {unknown_name('column', ours, known())}{swapped}")
        if ours in columns:
            raise UsageError(
                f"--columns names {ours} twice, {columns[ours]} and {theirs}. Name it once."
            )
        if theirs != OPEN and theirs in columns.values():
            other = next(name for name, its in columns.items() if its == theirs)
            raise UsageError(
                f"--columns maps {theirs} to both {other} and {ours}. Keep one of them."
            )
        columns[ours] = theirs
    if not columns:
        raise UsageError(f"--columns is empty. Write it like {_EXAMPLE}.")
    return columns


def known() -> list[str]:
    """The columns of the plain schema."""
    return [*COLUMNS, *MASKS, *SEQUENCES, *ALIASES]


def check(columns: Mapping[str, str], rows: Sequence[Row], where: str) -> None:
    """Raise for a name that is still open or missing from the file, and for values of the wrong
    kind.
    """
    inside = sorted({visible(path) for row in rows for path in paths_in(row)})
    rows = [with_paths(row, columns.values()) for row in rows]
    present = sorted({visible(name) for row in rows for name in row})
    for ours, its in columns.items():
        if its == OPEN:
            raise UsageError(
                f"--columns does not say which column of {where} is {ours}: replace ? with a "
                f"column{'' if ours in REQUIRED else f', or leave {ours} out'}. Available: "
                f"{', '.join(present)}."
            )
        if visible(its) not in present:
            raise UsageError(
                f"--columns: {lacks_name(where, 'column', its, [*present, *inside], present)}"
            )
    measure = measure_of({*columns, *present})
    for row in responses(rows, columns.get(measure, measure)):
        for ours, its in columns.items():
            if not fits(ours, row.get(its)):
                retokenised = (
                    f" {RETOKENISED}: see mismatch-cli guide record."
                    if isinstance(row[its], str)
                    else ""
                )
                raise MismatchError(
                    f"--columns: {its} of {where} is {_said(row[its])}, but {ours} must be "
                    f"{_kind(ours)[0]}.{retokenised if ours in REQUIRED else ''}"
                )


def responses(rows: Sequence[Row], ids: str) -> list[Row]:
    """One row per response: a row whose token ids (the column `ids`) are a matrix is split into
    its rows.
    """
    found: list[Row] = []
    for row in rows:
        if _lists.depth_of(row.get(ids)) < 2:
            found.append(row)
            continue
        size = len(row[ids])
        for i in range(size):
            of_each = {
                name: isinstance(value, list) and len(value) == size for name, value in row.items()
            }
            found.append(
                {name: value[i] if of_each[name] else value for name, value in row.items()}
            )
    return found


def fits(ours: str, value: Any, tokens: Any = None) -> bool:
    """Whether a value fits this column, and, where the response's `tokens` are given, has one
    entry per token.
    """
    if value is None:
        return True
    if ALIASES.get(ours, ours) == "prompt_id" and isinstance(value, str):
        return True
    if ours == "advantage" and not isinstance(value, list):
        return is_number(value)
    if ours in TOKEN_COLUMNS and isinstance(tokens, list) and isinstance(value, list):
        return _kind(ours)[1](value) and (
            len(value) == len(tokens) or (ours == "advantage" and len(value) == 1)
        )
    return _kind(ours)[1](value)


def _kind(ours: str) -> tuple[str, Callable[[Any], bool]]:
    """What a column holds, in words, and a test for a value from JSON or Parquet."""
    kind = kind_of(ours)
    if not pa.types.is_list(kind):
        if pa.types.is_integer(kind):
            return "a whole number", _is_whole
        if pa.types.is_floating(kind):
            return "a number", lambda value: isinstance(value, bool) or is_number(value)
        return "text", lambda value: isinstance(value, str)
    leaf = kind.value_type
    if pa.types.is_integer(leaf):
        return "a list of whole numbers", lambda value: _all_are(
            value, lambda v: _is_whole(v) and v >= 0
        )
    if pa.types.is_boolean(leaf):
        return "a list of 0 and 1", lambda value: _all_are(value, _is_flag) or _are_labels(value)
    return "a list of numbers", lambda value: _all_are(value, is_number)


def _all_are(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(v is None or is_right(v) for v in value)


def _is_flag(value: Any) -> bool:
    return value in (0, 1)


def _are_labels(value: Any) -> bool:
    """Whether these are token ids, with −100 for those outside the loss."""
    return _all_are(value, lambda v: _is_whole(v) and (v >= 0 or v == IGNORED)) and IGNORED in value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return is_number(value) and value == value and abs(value) < 2**63 and int(value) == value


def said(value: Any) -> str:
    """A value's kind and length, in words: `20 whole numbers`, `4 lists of 12 to 20 numbers`."""
    depth = _lists.depth_of(value)
    if not depth:
        return _said(value)
    if depth > _BATCH:
        return f"{things(len(value), 'list')} of lists of lists"
    if depth > 1:
        sizes = [len(row) for row in value if isinstance(row, list)]
        inside = next(said(row) for row in value if row is not None).partition(" ")[2]
        most = f" to {max(sizes)}" if max(sizes) > min(sizes) else ""
        return f"{things(len(value), 'list')} of {min(sizes)}{most} {inside}"
    first = [entry for entry in value if entry is not None]
    if first and all(map(_is_whole, first)):
        return things(len(value), "whole number")
    kinds = {"a number": "number", "text": "text", "an object": "object"}
    return things(len(value), kinds.get(_said(first[0]) if first else "", "value"))


def _said(value: Any) -> str:
    """A value's kind, in words."""
    if isinstance(value, list):
        depth, found = _lists.depth_of(value), next((v for v in value if v is not None), None)
        return (
            "a list of lists"
            if depth > 1
            else f"a list with {_said(found)}"
            if found is not None
            else "a list"
        )
    names = {
        bool: "true or false",
        str: "text",
        int: "a number",
        float: "a number",
        dict: "an object",
    }
    return names.get(type(value), "nothing")
