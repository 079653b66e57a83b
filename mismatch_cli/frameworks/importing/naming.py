"""Reads `import --columns ours=theirs,…`, which maps columns of the plain schema to a file's,
and checks it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
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
_KINDS = {
    bool: "true or false",
    str: "text",
    int: "a number",
    float: "a number",
    dict: "an object",
}


def parse_columns(text: str) -> dict[str, str]:
    """Parse `ours=theirs,…`; a `UsageError` for an unknown column, or one that is named twice."""
    columns: dict[str, str] = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        ours, equals, theirs = map(str.strip, pair.partition("="))
        if not (equals and ours and theirs):
            raise UsageError(f"--columns: '{pair}' is not ours=theirs. Write it like {_EXAMPLE}.")
        _check_pair(ours, theirs, columns)
        columns[ours] = theirs
    if not columns:
        raise UsageError(f"--columns is empty. Write it like {_EXAMPLE}.")
    return columns


def _check_pair(ours: str, theirs: str, columns: Mapping[str, str]) -> None:
    """Raise a `UsageError` if our name is unknown, or if a former pair has one of the names."""
    available = schema_columns()
    if ours not in available:
        swapped = f" Our name comes first: {theirs}={ours}." if theirs in available else ""
        raise UsageError(f"--columns: {unknown_name('column', ours, available)}{swapped}")
    if ours in columns:
        raise UsageError(
            f"--columns names {ours} twice, {columns[ours]} and {theirs}. Name it once."
        )
    for former, its in columns.items():
        if its == theirs != OPEN:
            raise UsageError(
                f"--columns maps {theirs} to both {former} and {ours}. Keep one of them."
            )


def as_option(columns: Mapping[str, str]) -> str:
    """The argument of `--columns` that `parse_columns` reads as these columns."""
    return ",".join(map("=".join, columns.items()))


def schema_columns() -> list[str]:
    """The columns of the plain schema."""
    return [*COLUMNS, *MASKS, *SEQUENCES, *ALIASES]


def check_columns(columns: Mapping[str, str], rows: Sequence[Row], where: str) -> None:
    """Raise for a name that is still open or missing from the file, and for values of the wrong
    kind.
    """
    paths = _visible_names(map(paths_in, rows))
    rows = [with_paths(row, columns.values()) for row in rows]
    present = _visible_names(rows)
    for ours, its in columns.items():
        if its == OPEN:
            alternative = "" if ours in REQUIRED else f", or leave {ours} out"
            raise UsageError(
                f"--columns does not say which column of {where} is {ours}: replace ? with a "
                f"column{alternative}. Available: {', '.join(present)}."
            )
        if visible(its) not in present:
            raise UsageError(
                f"--columns: {lacks_name(where, 'column', its, [*present, *paths], present)}"
            )
    measure = measure_of({*columns, *present})
    for row in responses(rows, columns.get(measure, measure)):
        for ours, its in columns.items():
            if not fits(ours, row.get(its)):
                raise _misfit(ours, its, row[its], where)


def _visible_names(rows: Iterable[Row]) -> list[str]:
    return sorted(set(map(visible, chain.from_iterable(rows))))


def _misfit(ours: str, its: str, value: Any, where: str) -> MismatchError:
    """The error for a column whose value is not of our kind."""
    kind, _ = _kind(ours)
    advice = ""
    if isinstance(value, str) and ours in REQUIRED:
        advice = f" {RETOKENISED}: see mismatch-cli guide record."
    return MismatchError(
        f"--columns: {its} of {where} is {_kind_of_value(value)}, but {ours} must be {kind}.{advice}"
    )


def responses(rows: Sequence[Row], ids: str) -> list[Row]:
    """One row per response: a row whose token ids (the column `ids`) are a matrix is split into
    its rows.
    """
    single: list[Row] = []
    for row in rows:
        if _lists.depth_of(row.get(ids)) < _BATCH:
            single.append(row)
            continue
        size = len(row[ids])
        # A list with a value for each response is divided; anything else is of them all.
        divided = {name: value for name, value in row.items() if _has_length(value, size)}
        for i in range(size):
            own = {name: values[i] for name, values in divided.items()}
            single.append({**row, **own})
    return single


def _has_length(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


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
    _, is_right = _kind(ours)
    if not is_right(value):
        return False
    if ours in TOKEN_COLUMNS and isinstance(tokens, list) and isinstance(value, list):
        is_shared = ours == "advantage" and len(value) == 1
        return is_shared or len(value) == len(tokens)
    return True


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
        return "a list of whole numbers", lambda value: _all_are(value, _is_id)
    if pa.types.is_boolean(leaf):
        return "a list of 0 and 1", lambda value: _all_are(value, _is_flag) or _are_labels(value)
    return "a list of numbers", lambda value: _all_are(value, is_number)


def _all_are(value: Any, is_right: Callable[[Any], bool]) -> bool:
    """Whether a value is a list of such entries, or nulls."""
    return isinstance(value, list) and all(entry is None or is_right(entry) for entry in value)


def _is_flag(value: Any) -> bool:
    return value in (0, 1)


def _is_id(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_label(value: Any) -> bool:
    return _is_whole(value) and (value >= 0 or value == IGNORED)


def _are_labels(value: Any) -> bool:
    """Whether these are token ids, with −100 for those outside the loss."""
    return _all_are(value, _is_label) and IGNORED in value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    # NaN differs from itself, and an infinity exceeds the bound: neither reaches `int`.
    return is_number(value) and value == value and abs(value) < 2**63 and int(value) == value


def kind_and_length(value: Any) -> str:
    """A value's kind and length: `20 whole numbers`, `4 lists of 12 to 20 numbers`."""
    depth = _lists.depth_of(value)
    if not depth:
        return _kind_of_value(value)
    if depth > _BATCH:
        return f"{things(len(value), 'list')} of lists of lists"
    if depth == _BATCH:
        rows = [row for row in value if isinstance(row, list)]
        sizes = [len(row) for row in rows]
        # In the plural, unless every row has one
        _, _, inside = kind_and_length(max(rows, key=len)).partition(" ")
        most = f" to {max(sizes)}" if max(sizes) > min(sizes) else ""
        return f"{things(len(value), 'list')} of {min(sizes)}{most} {inside}"
    entries = [entry for entry in value if entry is not None]
    if entries and all(map(_is_whole, entries)):
        return things(len(value), "whole number")
    kinds = {"a number": "number", "text": "text", "an object": "object"}
    return things(len(value), kinds.get(_kind_of_value(_lists.first_value(value)), "value"))


def _kind_of_value(value: Any) -> str:
    """A value's kind, in words."""
    if not isinstance(value, list):
        return _KINDS.get(type(value), "nothing")
    if _lists.depth_of(value) > 1:
        return "a list of lists"
    entry = _lists.first_value(value)
    if entry is None:
        return "a list"
    return f"a list with {_kind_of_value(entry)}"
