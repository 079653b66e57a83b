"""Opens files of lines: as they are, sealed with zstd (`*.jsonl.zst`), or a single JSON document.

Bytes of a sealed file are counted as if it were not: an offset in the plain file is the same place
in the sealed one. A seekable file ends with a table of its frames, each of which unpacks alone.
"""

from __future__ import annotations

import io
import json
import struct
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa

from mismatch_cli.base.errors import MismatchError, unreadable
from mismatch_cli.base.memory import allowance, too_large
from mismatch_cli.base.text import parse_json
from mismatch_cli.frameworks.importing import SEALED
from mismatch_cli.frameworks.importing.other_files import document, into_lines

LONGEST_LINE = 3 * 2**24  # bytes; as Python objects a line can take 35 times as much
_READ_BYTES = 2**20
_FOOTER = struct.Struct("<IBI")  # number of frames, flags, mark
_MAGIC = 0x8F92EAB1  # the mark of a seekable file
_CHECKSUMS = 0x80  # the flag of a third number per frame
_HEADER = 8  # bytes before the table: it is in a frame that decoders skip


class _Frame(NamedTuple):
    """A frame of a sealed file, by where it and its content begin and how long they are."""

    packed_start: int
    packed: int
    start: int
    size: int


def is_sealed(path: Path) -> bool:
    """Whether a file is packed with zstd, by its name."""
    return path.suffix == SEALED


def size_of(path: Path) -> int:
    """The bytes of a file, of a sealed one as if it were not."""
    if not is_sealed(path):
        return path.stat().st_size
    frames = _frames(path, path.stat().st_mtime)
    if frames:
        return frames[-1].start + frames[-1].size
    # Without a table of frames, only unpacking it all tells the size.
    with _unsealed(path) as file:
        return sum(map(len, iter(lambda: file.read(_READ_BYTES), b"")))


def lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """The lines of a file from an offset on; a JSON document as the lines that it could be.

    Raises `MismatchError` for a line that is far too long.
    """
    kind = document(path)
    if kind and not start:
        yield from _rows_of(path, kind)
        return
    with _opened(path, start) as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
            if len(line) == LONGEST_LINE:
                raise MismatchError(
                    f"{path}: line {number} is longer than {LONGEST_LINE / 2**20:g} MiB, too "
                    "long for a response. Write one response per line, or leave the file out."
                )
            yield line


def line_at(path: Path, start: int) -> bytes:
    """The line that begins at an offset; of a seekable file, frames near it are kept."""
    frames = _frames(path, path.stat().st_mtime) if is_sealed(path) else ()
    if not frames:
        with _opened(path, start) as file:
            return file.readline(LONGEST_LINE)
    number = bisect_right(frames, start, key=lambda frame: frame.start) - 1
    line = b""
    skipped = start - frames[number].start
    # A line may continue in the next frames.
    while b"\n" not in line and number < len(frames) and len(line) < LONGEST_LINE:
        line += _unpacked(path, frames[number])[skipped:]
        skipped = 0
        number += 1
    return line.partition(b"\n")[0] + b"\n"


@lru_cache(maxsize=8)
def _unpacked(path: Path, frame: _Frame) -> bytes:
    """The content of a frame, at most some megabytes."""
    if frame.size > LONGEST_LINE:
        raise too_large(path, path.stat().st_size)
    with path.open("rb") as file:
        file.seek(frame.packed_start)
        packed = file.read(frame.packed)
    return bytes(pa.Codec("zstd").decompress(packed, frame.size))


def _opened(path: Path, start: int) -> IO[bytes]:
    """The content of a file from an offset on."""
    if not is_sealed(path):
        plain = path.open("rb", buffering=_READ_BYTES)
        plain.seek(start)
        return plain
    # Unpacking begins with the last frame that begins early enough.
    beginning = _Frame(0, 0, 0, 0)
    for frame in _frames(path, path.stat().st_mtime):
        if frame.start <= start:
            beginning = frame
    file = _unsealed(path, beginning.packed_start)
    left = start - beginning.start
    while left > 0:
        skipped = len(file.read(min(left, _READ_BYTES)))
        if not skipped:
            break
        left -= skipped
    return file


def _unsealed(path: Path, packed_start: int = 0) -> IO[bytes]:
    """The content of a sealed file from the beginning of a frame on."""
    file = path.open("rb")
    file.seek(packed_start)
    stream: Any = pa.CompressedInputStream(pa.PythonFile(file), "zstd")
    return io.BufferedReader(stream, _READ_BYTES)


@lru_cache(maxsize=64)
def _frames(path: Path, _changed: float) -> tuple[_Frame, ...]:
    """The frames of a seekable file; none for a file without their table."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _FOOTER.size))
        footer = file.read()
        if len(footer) < _FOOTER.size:
            return ()
        count, flags, magic = _FOOTER.unpack(footer)
        entry = struct.Struct("<III" if flags & _CHECKSUMS else "<II")
        table = size - _FOOTER.size - count * entry.size
        if magic != _MAGIC or table < _HEADER:
            return ()
        file.seek(table)
        entries = entry.iter_unpack(file.read(count * entry.size))
    frames: list[_Frame] = []
    packed_start = start = 0
    for packed, unpacked, *_ in entries:
        frames.append(_Frame(packed_start, packed, start, unpacked))
        packed_start += packed
        start += unpacked
    # A table that contradicts the file, or promises more than memory holds, is a trap.
    if packed_start + _HEADER != table or start > allowance(size):
        raise too_large(path, size)
    return tuple(frames)


def _rows_of(path: Path, kind: str) -> Iterator[bytes]:
    """The rows of an array, or the single row that an object is, one per line."""
    if path.stat().st_size > LONGEST_LINE:
        raise MismatchError(
            f"{path} is one JSON {kind} of over {LONGEST_LINE / 2**20:g} MiB, which is not read at "
            f"once. {into_lines(path, kind)}"
        )
    try:
        content = parse_json(path.read_bytes())
    except ValueError as error:
        fault = f"is not a whole JSON {kind}: {{}}"
        raise unreadable(path, error, "Copy it again, or leave it out.", fault) from error
    rows = content if isinstance(content, list) else [content]
    for row in rows:
        yield json.dumps(row).encode() + b"\n"
