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

    def __init__(self, rows: list[dict[str, Any]], folder: Path, save: Callable[[], None]) -> None:
        self.rows = rows
        self._folder = folder
        self._save = save

    @property
    def folders(self) -> list[Path]:
        return [self._folder / row["name"] for row in self.rows if row["files"]]

    def end_of(self, name: str) -> int:
        """How far a file has been read."""
        spans = [row["files"].get(name, (0, 0)) for row in self.rows]
        return max((end for _, end in spans), default=0)

    def add(self, spans: Mapping[str, Span], write: Callable[[Path], None]) -> Path:
        """Write a part, and record it once it is complete; an unrecorded part is written again."""
        numbers = [int(row["name"].rpartition("-")[2]) for row in self.rows]
        name = f"part-{max(numbers, default=-1) + 1:05d}"
        folder = self._folder / name
        with replacing_entries(folder, lambda: [folder / file for file in files_in(folder)]) as new:
            write(new / name)
        files = {file: list(span) for file, span in spans.items()}
        self.rows.append({"name": name, "files": files})
        self._save()
        return folder

    def drop(self, name: str) -> None:
        """Forget the parts that contain data of a rewritten file, with everything else in them."""
        dropped = [row for row in self.rows if name in row["files"]]
        for row in dropped:
            # Its name remains, never to be used again: by the names of their shards, steps that
            # have changed are told from those already reported.
            row["files"] = {}
        # Forgotten before it is removed: a kill between the two leaves a folder that nobody reads.
        self._save()
        for row in dropped:
            shutil.rmtree(self._folder / row["name"], ignore_errors=True)


class Dump:
    """A folder of files, each of one step or of several."""

    kind, algorithm, is_over = "dump", "", False

    def __init__(
        self,
        path: Path,
        format: str | None,
        parts: ImportedParts,
        reported: Callable[[int], str],
        say: Callable[[str], None],
    ) -> None:
        """`reported`: the shards of a step when it was reported; empty if it was not."""
        self._path = path
        self._format = format
        self._parts = parts
        self._reported = reported
        self._say = say
        self._files_before: dict[str, FileState] = {}  # at the last look
        self._refused: dict[str, int] = {}  # files of another format, with their size when refused
        self.waiting = ""
        self.changed = 0.0
        self._read_parts()

    def _read_parts(self) -> None:
        self._steps = StepsOfShards()
        self._open: set[int] = set()  # steps not reported yet, or grown since
        for folder in self._parts.folders:
            self._open |= self._steps.add(folder)

    @property
    def newest(self) -> int | None:
        return self._steps.newest

    def look(self, *, final: bool) -> Iterator[CompleteStep]:
        """Import what is complete; yield the steps that are apparently complete, or all steps if
        `final`.
        """
        files = self._files()
        for name, file in files.items():
            if self._parts.end_of(name) > file.size or self._was_rewritten(name, file):
                self._parts.drop(name)
                self._read_parts()
        spans = dict(self._readable(files, final=final))
        for together in _gathered(spans, files):
            self._import(together, files)
        self._files_before = files
        if final or not self.waiting:
            complete = set(self._open)
        else:
            # The files that are still written may contain more of the newest step.
            complete = {step for step in self._open if step < (self.newest or 0)}
        self._open -= complete
        return self._steps.ready(complete, self._reported)

    def _files(self) -> dict[str, FileState]:
        """The present files of the dump, by name."""
        try:
            sources = carriers(find([self._path]))
        except AccessDenied:
            raise
        except MismatchError:  # no file exists yet
            return {}
        files: dict[str, FileState] = {}
        for source in sources:
            try:
                status = source.path.stat()
            except FileNotFoundError:
                # The framework removes files as well as it writes them.
                continue
            files[source.name] = FileState(source, source.size, status.st_mtime)
        self.changed = max((file.changed for file in files.values()), default=0.0)
        return files

    def _was_rewritten(self, name: str, file: FileState) -> bool:
        """Whether a file without lines has changed its size since it was read."""
        return file.source.kind != "jsonl" and self._parts.end_of(name) not in (0, file.size)

    def _readable(
        self, files: Mapping[str, FileState], *, final: bool
    ) -> Iterator[tuple[str, Span]]:
        """The unread bytes of each file that nobody writes to."""
        self.waiting = ""
        last_of_group = {file.source.group: name for name, file in files.items()}
        unmarked = being_written([file.source for file in files.values()])
        for name, file in files.items():
            begin = self._parts.end_of(name)
            if file.size == begin or self._refused.get(name) == file.size:
                continue
            end = _end_of_lines(file, begin)
            has_later_file = last_of_group[file.source.group] != name
            rests = has_later_file or self._files_before.get(name) == file
            is_whole = rests and end == file.size and file.source.path not in unmarked
            if not is_whole and not final:
                self.waiting = f"{file.source.path} is being written"
            elif end > begin:
                yield name, (begin, end)

    def _import(self, spans: Mapping[str, Span], files: Mapping[str, FileState]) -> None:
        """Import the spans together, or one by one if one of them cannot be read."""
        paths = {files[name].source.path: span for name, span in spans.items()}
        try:
            folder = self._parts.add(spans, lambda part: self._write(paths, part))
            self._open |= self._steps.add(folder)
        except MismatchError as error:
            if len(spans) > 1:
                for name, span in spans.items():
                    self._import({name: span}, files)
                return
            ((name, (_, end)),) = spans.items()
            if name not in self._refused:
                self._say(f"Left out: {error}")
            self._refused[name] = end

    def _write(self, spans: Mapping[Path, Span], part: Path) -> None:
        part.mkdir(exist_ok=True)
        manifest = import_dump(Import([self._path], self._format, spans=spans), part, _Silent())
        # The first part decides the format, so that no later one is guessed differently.
        self._format = manifest["format"]


class _Silent:
    """The progress of an import that nobody watches: one of many."""

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
    spans: Mapping[str, Span], files: Mapping[str, FileState]
) -> Iterator[dict[str, Span]]:
    """Spans grouped for reading: lines by the gigabyte, other files one at a time, since they
    may be rewritten.
    """
    together: dict[str, Span] = {}
    for name, span in spans.items():
        if files[name].source.kind != "jsonl":
            yield {name: span}
            continue
        together[name] = span
        if sum(end - begin for begin, end in together.values()) >= _MOST_BYTES:
            yield together
            together = {}
    if together:
        yield together


def _end_of_lines(file: FileState, begin: int) -> int:
    """Where the last complete line ends, of files without lines their end; a line without a line
    break is complete if it is a JSON object.
    """
    if file.source.kind != "jsonl" or file.source.path.suffix == SEALED:
        return file.size
    # Only the tail is read, from `start` on, until it contains a line break.
    start, tail = file.size, b""
    with file.source.path.open("rb") as content:
        while start > begin and b"\n" not in tail:
            start = max(begin, start - _BLOCK)
            content.seek(start)
            tail = content.read(file.size - start)
    last = tail[tail.rfind(b"\n") + 1 :]
    if not last or _is_object(last):
        return file.size
    return file.size - len(last)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False
