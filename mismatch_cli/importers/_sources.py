"""From what the user named to files: found, sorted by their numbers, and looked into to know their format."""

from __future__ import annotations

import glob
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_cli.errors import MismatchError, first_line
from mismatch_cli.importers import _torch_file
from mismatch_cli.importers._torch_file import NeedsItsFramework
from mismatch_cli.text import is_whole, visible

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pt": "pt", ".pth": "pt"}
_PICKLES = (".pkl", ".pickle", ".dp")
_LONGEST_LINE = 3 * 2**24  # bytes; as Python objects they can take 35 times as much
_FIRST_LINES = 64
_READ_BYTES = 2**20


@dataclass(frozen=True)
class Source:
    """One file of a dump; `name` is its path below what the user named."""

    path: Path
    name: str

    @property
    def kind(self) -> str:
        return KINDS.get(self.path.suffix.lower(), "jsonl")

    @property
    def group(self) -> tuple[str, str]:
        """Files that differ in numbers only have the same layout."""
        return str(self.path.parent), re.sub(r"\d+", "#", self.path.name)

    @property
    def size(self) -> int:
        return self.path.stat().st_size


@dataclass(frozen=True)
class Peek:
    """What can be seen of a file at first sight: its keys or columns, and of JSONL the first record."""

    source: Source
    keys: frozenset[str] = frozenset()
    record: dict[str, Any] = field(default_factory=dict)

    def has(self, *keys: str) -> bool:
        return self.keys.issuperset(keys)


def find(paths: Sequence[Path]) -> list[Source]:
    """The files to read, in the order of their numbers; a `MismatchError` says what is not there or cannot be read."""
    found = [source for path in paths for source in _below(path)]
    if not found:
        raise MismatchError(
            f"{paths[0]} holds no file to import ({', '.join(KINDS)}). Formats: mismatch-cli import --formats"
        )
    if odd := next((source.path for source in found if not is_whole(source.name)), None):
        raise MismatchError(f"{odd} has a name that is not UTF-8. Rename it.")
    return found


def _below(path: Path) -> list[Source]:
    if path.is_file():
        _refuse_pickle(path)
        return [Source(path, path.name)]
    if path.is_dir():
        files, root = [p for p in path.rglob("*") if p.is_file()], path
    else:
        files, root = [p for p in path.parent.glob(f"{glob.escape(path.name)}*") if p.is_file()], path.parent
        if not files:
            raise MismatchError(f"{path} does not exist. Name a dump: a file, several, or the folder of a run.")
    sources = [Source(p, str(p.relative_to(root))) for p in files if p.suffix.lower() in KINDS]
    if not sources:
        for file in sorted(files):
            _refuse_pickle(file)
    return sorted(sources, key=lambda source: _natural(source.name))


def _natural(name: str) -> list[tuple[int, int, str]]:
    """`step_10` after `step_9`."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _refuse_pickle(path: Path) -> None:
    if path.suffix.lower() in _PICKLES:
        raise NeedsItsFramework(path, "is a pickle, which could run any code when it is opened")


def peek(source: Source) -> Peek:
    """Look into one file; a `MismatchError` for one that is broken or would have to be unpickled."""
    if source.kind == "parquet":
        return Peek(source, frozenset(open_parquet(source).schema_arrow.names))
    if source.kind == "pt":
        return Peek(source, _torch_file.keys_of(_torch_file.load(source.path)))
    record = _first_record(source.path)
    return Peek(source, frozenset(record), record)


def open_parquet(source: Source) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(source.path, buffer_size=_READ_BYTES)  # a map of a large file would count as memory
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise MismatchError(
            f"{source.path} is broken or cut off ({first_line(error)}). Copy it again, or name the other files only."
        ) from error


def _first_record(path: Path) -> dict[str, Any]:
    """The first line that is a JSON object; empty where there is none among the first few."""
    for line in islice(lines_of(path), _FIRST_LINES):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            return record
    return {}


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file as bytes; a `MismatchError` for one that does not end where lines do."""
    with path.open("rb", buffering=_READ_BYTES) as file:
        for number, line in enumerate(iter(partial(file.readline, _LONGEST_LINE), b""), 1):
            if len(line) == _LONGEST_LINE:
                raise MismatchError(
                    f"{path}: line {number} is longer than {_LONGEST_LINE / 2**20:g} MiB, which is no response. "
                    "Write one response a line, or name other files only."
                )
            yield line


@dataclass
class Tally:
    """Reasons read after a count: "12 responses without log-probabilities of the rollout engine"."""

    left_out: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # where a reason was met first

    def leave_out(self, reason: str, count: int = 1, where: str = "") -> None:
        if count:
            reason = visible(reason)  # it may quote the file
            self.left_out[reason] += int(count)
            if where:
                self.first.setdefault(reason, visible(where))

    def note(self, what: str, count: int) -> None:
        if count:
            self.noted[what] += int(count)

    def sift(self, bad_S: dict[str, np.ndarray], where: str = "") -> np.ndarray:
        """Which rows stay; every other one counts once, under the first reason that holds for it."""
        keep_S = np.ones(len(next(iter(bad_S.values()))), dtype=bool)
        for reason, failed_S in bad_S.items():
            self.leave_out(reason, int((keep_S & failed_S).sum()), where)
            keep_S &= ~failed_S
        return keep_S

    def left_out_lines(self) -> list[str]:
        return [self._line(reason, count) for reason, count in self.left_out.most_common()]

    def _line(self, reason: str, count: int) -> str:
        where = self.first.get(reason)
        return f"{count:,} {reason}" + (f" (first: {where})" if where else "")
