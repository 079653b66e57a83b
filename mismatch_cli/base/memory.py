"""Limits memory: for reading a foreign file, whose few bytes can expand without bound, and in
programs that run long.

C libraries do not survive a small `ulimit -v`: OpenBLAS retries forever, and Arrow's threads end
the process.
"""

import ctypes
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import MismatchError

_ALLOWED = 2**30  # bytes for reading any file
_TIMES = 20  # and so many bytes more for each of its own
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}
# Libraries map this much for a small trace, mostly for stacks and heaps of threads that stay empty
_ROOM = 2**30
# OpenBLAS maps 32 MB for a product of two matrices of this size
_SQUARE = 256
_BUFFER = 2**26
_OFTEN = (700, 10, 10)  # thresholds of the garbage collector: Python's own
_SIGNS = (
    "can't start new thread", "failed to launch worker thread", "failed to map segment",
    "cannot allocate memory",
)  # fmt: skip
_TEXT = 16  # bytes of overhead per text
_ROW = 200  # and per row


def allowance(file_bytes: int) -> int:
    """The bytes of memory that reading files of this size may take: 1 GiB + 20 × the size."""
    return _ALLOWED + _TIMES * file_bytes


def too_large(what: object, file_bytes: int) -> MismatchError:
    """The error for a file that takes more memory than its allowance."""
    allowed_gib = allowance(file_bytes) / 2**30
    return MismatchError(
        f"{what} expands far beyond its size: reading it takes over {allowed_gib:.3g} GiB (1 GiB + "
        "20 × its size). Name another file, or split it into smaller ones if it is valid."
    )


@contextmanager
def bounded(what: object, file_bytes: int) -> Iterator[None]:
    """Limit this process to the allowance beyond its present memory; exceeding it is a
    `MismatchError` about `what`.

    On systems without such a limit (only Linux has it), only what readers check themselves is
    refused.
    """
    allowed = allowance(file_bytes)
    # Under a stricter limit of the user's, an error is not the fault of the file.
    is_files_fault = room() > allowed
    # A few bytes of a compressed file can represent any amount of data.
    # Without a limit on the process, a stranger's file could take all memory of the machine.
    with limited(allowed):
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if is_files_fault and is_out_of_memory(error):
                raise too_large(what, file_bytes) from error
            raise


@contextmanager
def limited(allowed: int) -> Iterator[None]:
    """Limit this process to so many more bytes; exceeding it is a MemoryError."""
    present = _status("/proc/self/status", "VmData:")
    if present is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = present + allowed
    if soft != resource.RLIM_INFINITY:
        most = min(most, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def room() -> float:
    """Bytes that this process may still map under its limits; infinite without a limit, or if
    unknown.
    """
    mapped = _status("/proc/self/status", "VmSize:")
    data = _status("/proc/self/status", "VmData:")
    if mapped is None or data is None:
        return inf
    import resource

    left = inf
    for limit, used in ((resource.RLIMIT_AS, mapped), (resource.RLIMIT_DATA, data)):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            left = min(left, soft - used)
    return left


def check_room(needed: int = _ROOM) -> None:
    """A `MismatchError` if the limits leave less memory than `needed`, in bytes."""
    left = room()
    if left < needed:
        raise MismatchError(
            f"This process needs {needed >> 20} MB of memory, but a limit leaves it "
            f"{max(0, int(left)) >> 20} MB. Raise it with: ulimit -v unlimited; ulimit -d "
            "unlimited"
        )


def map_buffer_of_products() -> None:
    """Let OpenBLAS map the buffer of its matrix products: where it cannot, it retries forever,
    deaf to Ctrl-C.
    """
    check_room(_BUFFER)
    import numpy as np

    square = np.ones((_SQUARE, _SQUARE))
    square @ square.T


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory, or no room for a thread's stack or a
    library.
    """
    if isinstance(error, MemoryError):
        return True
    message = str(error).lower()
    return any(sign in message for sign in _SIGNS)


def collect_often() -> None:
    """Collect garbage as often as Python does by default, but for what exists now.

    For programs that run for hours: the program's own thresholds, made for imports, let cycles pile
    up.
    """
    gc.freeze()
    gc.set_threshold(*_OFTEN)


def release() -> None:
    """Free the cycles made since the last call, and return memory that is free to the system.

    For loops whose steps allocate the same again: without it, glibc keeps what its arenas cannot
    join.
    """
    gc.collect(1)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)


def free() -> int | None:
    """Bytes that the machine has available; None if unknown."""
    return _status("/proc/meminfo", "MemAvailable:")


def _status(file: str, name: str) -> int | None:
    """A number of bytes from a file below /proc, whose lines are `NAME: N kB`; None without it."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None


def decoded_bytes(
    metadata: Any, columns: Sequence[str] | None = None, groups: Sequence[int] | None = None
) -> int:
    """The memory that columns of a Parquet file take, by its footer, which counts a repeated text
    only once.

    `metadata` is pyarrow's; without `columns` and `groups`, all columns and all row groups count.
    """
    if groups is None:
        groups = range(metadata.num_row_groups)
    total = 0
    for group in groups:
        row_group = metadata.row_group(group)
        total += _ROW * row_group.num_rows
        for index in range(row_group.num_columns):
            column = row_group.column(index)
            if columns is None or column.path_in_schema.split(".")[0] in columns:
                width = _WIDTHS.get(column.physical_type, _TEXT)
                total += width * column.num_values
                # The bytes of the texts themselves, which have no fixed width.
                if width == _TEXT:
                    total += column.total_uncompressed_size
    return total
