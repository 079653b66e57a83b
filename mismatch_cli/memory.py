"""Limits the memory for reading a foreign file: in many formats a few bytes can expand without bound."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mismatch_cli.errors import MismatchError

_ALLOWED, _TIMES = 2**30, 20
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}
_NO_THREAD = "can't start new thread"
_TEXT, _ROW = 16, 200  # bytes of overhead per text, and per row


def allowance(file_bytes: int) -> int:
    """The bytes of memory that reading files of this size may take: 1 GiB + 20 × the size."""
    return _ALLOWED + _TIMES * file_bytes


def too_large(what: object, file_bytes: int) -> MismatchError:
    """The error if that is not enough."""
    allowed = allowance(file_bytes) / 2**30
    return MismatchError(
        f"{what} expands far beyond its size: reading it takes over {allowed:.3g} GiB (1 GiB + 20 × its size). "
        "If it is valid, split it into smaller files; else name another one."
    )


@contextmanager
def bounded(what: object, file_bytes: int) -> Iterator[None]:
    """Limit this process to the allowance beyond its present memory; exceeding it is a `MismatchError` about `what`.

    On systems without such a limit (only Linux has it), only what readers check themselves is refused.
    """
    with limited(allowance(file_bytes)):
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or _NO_THREAD in str(error):  # no memory for its stack
                raise too_large(what, file_bytes) from error
            raise


@contextmanager
def limited(allowed: int) -> Iterator[None]:
    """Limit this process to so many more bytes; exceeding it is a MemoryError."""
    has = _status("/proc/self/status", "VmData:")
    if has is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = has + allowed if soft == resource.RLIM_INFINITY else min(soft, has + allowed)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def free() -> int | None:
    """Bytes that the machine has available; None if unknown."""
    return _status("/proc/meminfo", "MemAvailable:")


def _status(file: str, name: str) -> int | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def decoded_bytes(metadata: Any, columns: Sequence[str] | None = None, groups: Sequence[int] | None = None) -> int:
    """The memory that columns of a Parquet file take, by its footer, which counts a repeated text only once.

    `metadata` is pyarrow's; without `columns` and `groups`, all columns and all row groups count.
    """
    total = 0
    for group in range(metadata.num_row_groups) if groups is None else groups:
        row_group = metadata.row_group(group)
        total += _ROW * row_group.num_rows
        for index in range(row_group.num_columns):
            column = row_group.column(index)
            if columns is None or column.path_in_schema.split(".")[0] in columns:
                width = _WIDTHS.get(column.physical_type, _TEXT)
                total += width * column.num_values + (column.total_uncompressed_size if width == _TEXT else 0)
    return total
