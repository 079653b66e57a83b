"""A growing dump of another framework: imported as its files arrive, in parts that are never read
again.

A part is a trace in our own folder, made of complete lines that were not read before. A file is
read once nobody writes to it: a later file exists, or it has not changed since the last look. An
incomplete line waits.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from mismatch_cli.base.errors import AccessDenied, MismatchError
from mismatch_cli.frameworks.importing import SEALED
from mismatch_cli.frameworks.importing.driver import (
    Import,
    being_written,
    carriers,
    import_dump,
)
from mismatch_cli.frameworks.importing.sources import DumpFile, find
from mismatch_cli.trace.drafts import files_in
from mismatch_cli.trace.files import replacing_entries
from mismatch_cli.watch.growing_trace import StepsOfShards
from mismatch_cli.watch.training_run import CompleteStep

_MOST_BYTES = 2**30  # of files imported together
_BLOCK = 2**16
Span = tuple[int, int]  # of bytes


class FileState(NamedTuple):
    """The present state of a file."""

    source: DumpFile
    size: int
    changed: float


class ImportedParts:
    """The imported parts of a dump, as the state records them: a row per part, with its bytes of
    each file.
    """

    def __init__(self, rows: list[dict[str, Any]], folder: Path, keep: Callable[[], None]) -> None:
        self.rows, self._folder, self._keep = rows, folder, keep

    @property
    def folders(self) -> list[Path]:
        return [self._folder / row["name"] for row in self.rows]

    def end_of(self, name: str) -> int:
        """How far a file has been read."""
        return max((row["files"][name][1] for row in self.rows if name in row["files"]), default=0)

    def add(self, spans: Mapping[str, Span], write: Callable[[Path], None]) -> Path:
        """Write a part, and record it once it is complete; an unrecorded part is written again."""
        numbers = [int(row["name"].rpartition("-")[2]) for row in self.rows]
        name = f"part-{max(numbers, default=-1) + 1:05d}"
        folder = self._folder / name
        with replacing_entries(folder, lambda: [folder / file for file in files_in(folder)]) as new:
            write(new / name)
        self.rows.append(
            {"name": name, "files": {file: list(span) for file, span in spans.items()}}
        )
        self._keep()
        return folder

    def drop(self, name: str) -> None:
        """Forget the parts that contain data of a rewritten file, with everything else in them."""
        gone = [row for row in self.rows if name in row["files"]]
        self.rows[:] = [row for row in self.rows if row not in gone]
        self._keep()
        for row in gone:
            shutil.rmtree(self._folder / row["name"], ignore_errors=True)


class Dump:
    """A folder of files, each of one step or of several."""

    kind, algorithm, is_over = "dump", "", False

    def __init__(
        self,
        path: Path,
        format: str | None,
        parts: ImportedParts,
        told: Callable[[int], str],
        say: Callable[[str], None],
    ) -> None:
        self._path, self._format, self._parts, self._told, self._say = (
            path,
            format,
            parts,
            told,
            say,
        )
        self._before: dict[str, FileState] = {}
        self._refused: dict[str, int] = {}  # files of another format, with their size when refused
        self._paths: dict[str, Path] = {}
        self.waiting, self.changed = "", 0.0
        self._begin()

    def _begin(self) -> None:
        self._steps = StepsOfShards()
        self._open = {step for folder in self._parts.folders for step in self._steps.add(folder)}

    @property
    def newest(self) -> int | None:
        return self._steps.newest

    def look(self, *, final: bool) -> Iterator[CompleteStep]:
        """Import what is complete; yield the steps that are apparently complete, or all steps if
        `final`.
        """
        seen = self._seen()
        for name, file in seen.items():
            if self._parts.end_of(name) > file.size or self._was_rewritten(name, file):
                self._parts.drop(name)
                self._begin()
        spans = dict(self._readable(seen, final=final))
        for together in _gathered(spans, seen):
            self._import(together)
        self._before = seen
        whole = {
            step for step in self._open if final or step < (self.newest or 0) or not self.waiting
        }
        self._open -= whole
        return self._steps.ready(whole, self._told)

    def _seen(self) -> dict[str, FileState]:
        try:
            sources = carriers(find([self._path]))
        except AccessDenied:
            raise
        except MismatchError:  # no file exists yet
            return {}
        found = {}
        for source in sources:
            try:
                status = source.path.stat()
            except FileNotFoundError:
                continue
            found[source.name] = FileState(source, source.size, status.st_mtime)
        self._paths = {name: file.source.path for name, file in found.items()}
        self.changed = max((file.changed for file in found.values()), default=0.0)
        return found

    def _was_rewritten(self, name: str, file: FileState) -> bool:
        """Whether a file without lines has changed its size since it was read."""
        return file.source.kind != "jsonl" and self._parts.end_of(name) not in (0, file.size)

    def _readable(
        self, seen: Mapping[str, FileState], *, final: bool
    ) -> Iterator[tuple[str, Span]]:
        """The unread bytes of each file that nobody writes to."""
        self.waiting = ""
        last_of: dict[tuple[str, str], str] = {
            file.source.group: name for name, file in seen.items()
        }
        unmarked = being_written([file.source for file in seen.values()])
        for name, file in seen.items():
            begin = self._parts.end_of(name)
            if file.size == begin or self._refused.get(name) == file.size:
                continue
            end = _end_of_lines(file, begin) if file.source.kind == "jsonl" else file.size
            rests = self._before.get(name) == file or last_of[file.source.group] != name
            if not final and (not rests or end < file.size or file.source.path in unmarked):
                self.waiting = f"{file.source.path} is being written"
            elif end > begin:
                yield name, (begin, end)

    def _import(self, spans: Mapping[str, Span]) -> None:
        """Import the spans together, or one by one if one of them cannot be read."""
        try:
            self._open |= self._steps.add(
                self._parts.add(spans, lambda part: self._write(spans, part))
            )
        except MismatchError as error:
            if len(spans) > 1:
                for name, span in spans.items():
                    self._import({name: span})
                return
            (name, (_, end)) = next(iter(spans.items()))
            if name not in self._refused:
                self._say(f"Left out: {error}")
            self._refused[name] = end

    def _write(self, spans: Mapping[str, Span], part: Path) -> None:
        part.mkdir(exist_ok=True)
        what = Import(
            [self._path],
            self._format,
            spans={self._paths[name]: span for name, span in spans.items()},
        )
        self._format = import_dump(what, part, _Silent())["format"]


class _Silent:
    """The progress of an import that is one of many: none."""

    def say(self, _message: str) -> None:
        pass

    def counting(
        self,
        _phase: str,
        _total: int,
        *,
        unit: str,  # noqa: ARG002
    ) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(lambda _: None)


def _gathered(
    spans: Mapping[str, Span], seen: Mapping[str, FileState]
) -> Iterator[dict[str, Span]]:
    """Spans grouped for reading: lines by the gigabyte, other files one at a time, since they
    may be rewritten.
    """
    together: dict[str, Span] = {}
    for name, span in spans.items():
        if seen[name].source.kind != "jsonl":
            yield {name: span}
            continue
        together[name] = span
        if sum(end - begin for begin, end in together.values()) >= _MOST_BYTES:
            yield together
            together = {}
    if together:
        yield together


def _end_of_lines(file: FileState, begin: int) -> int:
    """Where the last complete line ends; a line without a line break is complete if it is a JSON
    object.
    """
    if file.source.path.suffix == SEALED:
        return file.size  # whole, and nobody writes to it
    with file.source.path.open("rb") as content:
        end, tail = file.size, b""
        while end > begin and b"\n" not in tail:
            end = max(begin, end - _BLOCK)
            content.seek(end)
            tail = content.read(file.size - end)
    last = tail[tail.rfind(b"\n") + 1 :]
    return file.size if not last or _is_object(last) else file.size - len(last)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False
