"""The import itself: find the files, detect their format, stream them into shards, and report
what was skipped.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.base import registry
from mismatch_cli.base.errors import MismatchError, UsageError, suggest
from mismatch_cli.base.memory import allowance, bounded, too_large
from mismatch_cli.base.numbers import counted
from mismatch_cli.base.text import visible
from mismatch_cli.frameworks import IMPORTERS
from mismatch_cli.frameworks.importing import no_dump
from mismatch_cli.frameworks.importing.guess import (
    columns_in,
    guess_columns,
    log_probabilities,
    side_by_side,
)
from mismatch_cli.frameworks.importing.naming import OPEN, Row, as_option, check_columns
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.other_files import OtherFile, other_file
from mismatch_cli.frameworks.importing.rows import Completer
from mismatch_cli.frameworks.importing.sources import (
    CUT_OFF,
    DumpFile,
    FileHead,
    find,
    first_fault,
    first_rows,
    peek,
)
from mismatch_cli.trace.columns import length_column
from mismatch_cli.trace.manifest import library_versions, shard_entries, write_manifest
from mismatch_cli.trace.recorder_notes import manifest_sections
from mismatch_cli.trace.writer import shard_path, write_shard

_FACTS = ("title", "pi", "holds", "shift", "padding", "averaging")  # in a manifest
_WRITERS = 2  # threads that compress shards
_LARGE = 2**26  # bytes of a dump from which on they are used
_MEGABYTE = 2**20
_SHARD_TOKENS, _SHARD_BYTES = 2**21, 2**27
_REASONS_IN_ERROR, _KEYS_IN_ERROR = 3, 8
_FILES_IN_MANIFEST = 1000


class ImportProgress(Protocol):
    """Where an import reports its progress."""

    def say(self, message: str) -> None: ...

    def counting(
        self, phase: str, total: int, *, unit: str
    ) -> AbstractContextManager[Callable[[int], None]]: ...


@dataclass(frozen=True)
class Import:
    """What to import: files or folders, and what the user knows about them that the dump does
    not say.
    """

    paths: Sequence[Path]
    format: str | None = None
    # Whether π has newer weights than μ; None: the format's default
    newer_trainer: bool | None = None
    sampling: dict[str, float] = field(default_factory=dict)
    # What a manifest says of `rollout` and `trainer`, as far as it is stated
    sides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    vocabulary: int | None = None  # number of token ids, where known
    # Columns of the plain schema: their names in the files
    columns: Mapping[str, str] = field(default_factory=dict)
    # If given, only these files and byte ranges are read
    spans: Mapping[Path, tuple[int, int]] | None = None


@dataclass(frozen=True)
class FormatFacts:
    """How a format describes itself, in words."""

    title: str
    files: str
    enable: str  # how its framework is made to write it
    pi: str | None  # which column its π is: "recomputed" or "trainer"; None without one
    holds: str
    shift: str
    padding: str
    averaging: str


def facts(name: str) -> FormatFacts:
    """What the module of a format says of it; a `UsageError` for an unknown format."""
    module = registry.load(IMPORTERS, name, "format")
    return FormatFacts(
        **{fact.name: getattr(module, fact.name.upper()) for fact in fields(FormatFacts)}
    )


def import_dump(request: Import, folder: Path, progress: ImportProgress) -> dict[str, Any]:
    """Write the trace into an empty `folder` and return the manifest's `imported` section.

    Raises `MismatchError`, with the reason, where nothing can be imported. After an exception there
    is no manifest, and so no trace.
    """
    files = _files_to_read(request)
    # Arrow reserves a gigabyte at its first allocation, which does not count as taken by a file.
    pa.allocate_buffer(1)
    with bounded(request.paths[0], _bytes(files)):
        tally = Tally()
        name, sources = _recognise(request, files, tally)
        module = registry.load(IMPORTERS, name, "format")
        completer = _completer(module, request, tally)
        noun = "file" if len(sources) == 1 else "files"
        progress.say(f"Importing {len(sources)} {noun}: {module.TITLE}")
        size = _bytes(sources)
        with progress.counting("Importing", max(1, size // _MEGABYTE), unit="MB") as advance:
            in_megabytes = _in_megabytes(advance, size)
            tables = _completed(module, sources, tally, in_megabytes, completer)
            rows_by_shard = _write(joined_shards(tables), folder, in_threads=size >= _LARGE)
        if not completer.rows:
            raise _no_rows(request, name, tally)
        imported = _description(name, module, sources, tally, completer)
        manifest = {"command": "import", "imported": imported, **shard_entries(rows_by_shard)}
        manifest |= _cut_short(module, sources, tally)
        manifest |= _stated_sections(request, has_trainer=completer.scored > 0)
        write_manifest(folder, manifest)
        return imported


def _files_to_read(request: Import) -> list[DumpFile]:
    """The files below the paths; where byte ranges are stated, only the files that have one."""
    files = find(request.paths)
    spans = request.spans
    if spans is None:
        return files
    return [replace(file, span=spans[file.path]) for file in files if file.path in spans]


def _completer(module: ModuleType, request: Import, tally: Tally) -> Completer:
    newer_trainer = request.newer_trainer
    if newer_trainer is None:
        newer_trainer = module.PI == "trainer"
    return Completer(
        tally,
        newer_trainer=newer_trainer,
        vocabulary=request.vocabulary,
        needs_ids=getattr(module, "NEEDS_IDS", True),
    )


def _no_rows(request: Import, name: str, tally: Tally) -> MismatchError:
    """The error for a dump of which nothing is left, with the most frequent reasons."""
    reasons = "; ".join(tally.left_out_lines()[:_REASONS_IN_ERROR]) or "it holds no response"
    page = "schema" if name == "plain" else "formats"
    return MismatchError(
        f"No rows imported from {request.paths[0]}: {reasons}. See mismatch-cli import --{page}"
    )


def _cut_short(module: ModuleType, sources: list[DumpFile], tally: Tally) -> dict[str, str]:
    """The manifest's note on a dump that was still being written."""
    signs: list[str] = []
    lines = tally.left_out.get(CUT_OFF, 0)
    if lines:
        signs.append(counted(lines, CUT_OFF))
    unfinished = module.unfinished(sources) if hasattr(module, "unfinished") else ""
    if unfinished:
        signs.append(unfinished)
    if not signs:
        return {}
    note = f"the dump was still being written, or its run ended: {', '.join(signs)}"
    return {"cut_short": note}


def _stated_sections(request: Import, *, has_trainer: bool) -> dict[str, Any]:
    """The manifest's sections on what the user states; a trainer that scored nothing has none."""
    sections = {**request.sides, "sampling": request.sampling}
    if not has_trainer:
        sections.pop("trainer", None)
    return manifest_sections(sections)


def _bytes(sources: Sequence[DumpFile]) -> int:
    return sum(source.size for source in sources)


def _write(shards: Iterator[pa.Table], folder: Path, *, in_threads: bool) -> dict[str, int | None]:
    """Write the shards one by one and return their row counts.

    With `in_threads`, two shards are written while the next one is read: compression does not hold
    the GIL. But where memory runs out, C++ in another thread ends the process, and in this one it
    raises an error.
    """
    rows_by_shard: dict[str, int | None] = {}
    writing: deque[Future[None]] = deque()
    with ThreadPoolExecutor(_WRITERS) as writer:
        for index, shard in enumerate(shards):
            path = shard_path(folder, index)
            rows_by_shard[path.name] = shard.num_rows
            if not in_threads:
                write_shard(path, shard)
                continue
            # Waiting for the oldest bounds the shards in memory, and raises its error.
            if len(writing) == _WRITERS:
                writing.popleft().result()
            writing.append(writer.submit(write_shard, path, shard))
        for future in writing:
            future.result()
    return rows_by_shard


def _completed(
    module: ModuleType,
    sources: list[DumpFile],
    tally: Tally,
    advance: Callable[[int], None],
    completer: Completer,
) -> Iterator[pa.Table]:
    """The usable rows of the dump; a `MismatchError` once its tables exceed their allowance."""
    file_bytes = _bytes(sources)
    table_bytes = 0
    for table, where in module.blocks(sources, tally, advance):
        table_bytes += table.nbytes
        if table_bytes > allowance(file_bytes):
            raise too_large(where, file_bytes)
        if not table.num_rows:
            continue
        usable = completer.complete(table, where)
        if usable.num_rows:
            yield usable


def joined_shards(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Join tables until they are worth a file, but never more than fits."""
    shard: list[pa.Table] = []
    tokens = size = 0
    for table in tables:
        shard.append(table)
        lists = table.column(length_column(table.column_names))
        tokens += pc.sum(pc.list_value_length(lists)).as_py()
        size += table.nbytes
        if tokens >= _SHARD_TOKENS or size >= _SHARD_BYTES:
            yield pa.concat_tables(shard, promote_options="default")
            shard = []
            tokens = size = 0
    if shard:
        yield pa.concat_tables(shard, promote_options="default")


def _importers(hook: str) -> Iterator[ModuleType]:
    """The importers that define an optional function."""
    for name in registry.names(IMPORTERS):
        module = registry.load(IMPORTERS, name, "format")
        if hasattr(module, hook):
            yield module


def carriers(sources: Sequence[DumpFile]) -> list[DumpFile]:
    """The files of a growing run whose new lines are new responses, as its framework's importer
    knows: other files are only looked up.
    """
    files = list(sources)
    for module in _importers("carriers"):
        files = module.carriers(files)
    return files


def being_written(sources: Sequence[DumpFile]) -> set[Path]:
    """The files that their framework has not marked as complete, where it marks files at all."""
    paths = [source.path for source in sources]
    unmarked: set[Path] = set()
    for module in _importers("being_written"):
        unmarked |= module.being_written(paths)
    return unmarked


def _recognise(request: Import, files: list[DumpFile], tally: Tally) -> tuple[str, list[DumpFile]]:
    """The format, and the files that have it; other files of a folder are counted."""
    formats = _formats_to_try(request)
    if request.spans is None:
        files = _dumps_among(files, tally)
    files = [replace(source, columns=request.columns) for source in files]
    by_format, unknown = _by_format(files, formats)
    if request.columns:
        _check_columns(request, [*by_format.get("plain", ()), *unknown])
    if not by_format:
        _refuse(unknown, request)
        # The user chose a format that no file shows: its importer counts what is missing.
        by_format = {formats[0]: unknown}
        unknown = []
    if len(by_format) > 1:
        several = sorted(by_format)
        raise UsageError(f"The files are dumps of {' and '.join(several)}. {_choose(several)}")
    [(name, sources)] = by_format.items()
    if unknown:
        tally.leave_out("files of another layout", len(unknown), unknown[0].name)
    module = registry.load(IMPORTERS, name, "format")
    # A file that the user names is read; in a folder, the importer knows which repeat others.
    if hasattr(module, "choose") and any(map(Path.is_dir, request.paths)):
        sources = module.choose(sources, tally)
    chosen = set(sources)
    return name, [source for source in files if source in chosen]


def _formats_to_try(request: Import) -> list[str]:
    """The one that the user chose, which is the plain schema for `--columns`, or else all."""
    names = registry.names(IMPORTERS)
    if request.format is not None and request.format not in names:
        raise UsageError(registry.unknown_name("format", request.format, names))
    if request.columns:
        return ["plain"]
    return names if request.format is None else [request.format]


def _by_format(
    files: list[DumpFile], formats: Sequence[str]
) -> tuple[dict[str, list[DumpFile]], list[DumpFile]]:
    """The files by the one of these formats that their group has, and the files of no format."""
    groups: dict[tuple[str, str], list[DumpFile]] = {}
    for source in files:
        groups.setdefault(source.group, []).append(source)
    by_format: dict[str, list[DumpFile]] = {}
    unknown: list[DumpFile] = []
    for group in groups.values():
        name = _format_of(group, formats)
        if name is None:
            unknown += group
        else:
            by_format.setdefault(name, []).extend(group)
    return by_format, unknown


def _check_columns(request: Import, sources: Sequence[DumpFile]) -> None:
    """Check `--columns` with the first of the files that it is about."""
    rows = first_rows(sources[0]) if sources else []
    if rows:
        check_columns(request.columns, rows, str(sources[0].path))


def _dumps_among(files: list[DumpFile], tally: Tally) -> list[DumpFile]:
    """The files without those that hold no dump, which are counted; a `MismatchError` that says
    what the first is if none is left.
    """
    dumps: list[DumpFile] = []
    others: list[tuple[DumpFile, OtherFile]] = []
    for file in dict.fromkeys(files):  # one that was named twice counts once
        other = other_file(file.path, of_lines=file.kind == "jsonl")
        if other is None:
            dumps.append(file)
        else:
            others.append((file, other))
    if others and not dumps:
        file, other = others[0]
        raise MismatchError(f"{file.path} {other.why}")
    for file, other in others:
        tally.leave_out(other.kind, 1, file.name)
    return dumps


def _format_of(group: list[DumpFile], names: Sequence[str]) -> str | None:
    """The format of the first nonempty file of a group; a `UsageError` where two formats accept
    it.
    """
    for source in group:
        head = peek(source)
        if not head.keys:
            continue
        formats: list[str] = []
        for name in names:
            if registry.load(IMPORTERS, name, "format").recognises(head):
                formats.append(name)
        if len(formats) > 1:
            raise UsageError(
                f"{source.path} has the layout of {' and of '.join(formats)}. {_choose(formats)}"
            )
        return formats[0] if formats else None
    return None


def _choose(names: Sequence[str]) -> str:
    """What to type where files have several formats."""
    return f"Choose one with --format {' or --format '.join(names)}."


class UnknownLayout(MismatchError):
    """Files of no known format; `lines` show what is wanted beside what they hold."""

    def __init__(self, message: str, lines: str) -> None:
        super().__init__(message)
        self.lines = lines


def _refuse(unknown: Sequence[DumpFile], request: Import) -> None:
    """Raise a `MismatchError` for an unknown layout that says what the files are or lack, or how to
    map their columns; a format that the user chose is refused only for files that are no dump.
    """
    for source in {source.group: source for source in reversed(unknown)}.values():
        _refuse_what_is_no_dump(source)
    if request.format is not None and not request.columns:
        return
    source = unknown[0]
    rows = first_rows(source)
    begin = f"{source.path}: unrecognized format ({_what_it_holds(source, rows)})."
    if not rows:
        raise MismatchError(
            f"{begin} Formats: mismatch-cli import --formats; "
            "to write a dump from any program: mismatch-cli import --schema"
        )
    _propose(source, rows, request, begin)


def _refuse_what_is_no_dump(source: DumpFile) -> None:
    """Raise a `MismatchError` for metrics of a run and for logs of texts."""
    rows = first_rows(source)
    why = no_dump.text_only(rows) or no_dump.metrics(rows)
    if not rows and source.kind == "jsonl":
        why = no_dump.printed_metrics(source.path)
    if why:
        raise MismatchError(f"{source.path} {why}")


def _what_it_holds(source: DumpFile, rows: Sequence[Row]) -> str:
    """The first columns of a file, or what is wrong with its lines."""
    names = set(chain.from_iterable(rows)) or peek(source).keys
    keys = sorted(visible(name) for name in names if "." not in name)
    if not keys:
        return f"no line is a JSON object{first_fault(source)}"
    more = ", …" if len(keys) > _KEYS_IN_ERROR else ""
    return f"columns: {', '.join(keys[:_KEYS_IN_ERROR])}{more}"


def _propose(source: DumpFile, rows: Sequence[Row], request: Import, begin: str) -> None:
    """Raise an error that says what the file lacks, or with the line that maps its columns."""
    plain = registry.load(IMPORTERS, "plain", "format")
    columns = columns_in(rows)
    guess = guess_columns(columns, request.columns)
    lines = side_by_side(columns, guess, str(source.path))
    if not guess and plain.recognises(FileHead(source, frozenset(columns))):
        line = suggest("import", *request.paths, "--format", "plain")
        raise UnknownLayout(f"{begin} Later lines have the plain schema: {line}", lines)
    if not guess:
        lacks = no_dump.lacking(columns, log_probabilities(columns))
        write = "What to write: mismatch-cli import --schema"
        raise UnknownLayout(f"{begin} It {lacks}. {write}", lines)
    line = suggest("import", *request.paths, "--columns", as_option(guess))
    advice = "By its names, kinds and lengths, try"
    if OPEN in guess.values():
        advice = "Replace each ? with a column or path of the list above, or leave it out, and run"
    raise UnknownLayout(f"{begin} {advice}: {line}", lines)


def _description(
    name: str, module: ModuleType, sources: list[DumpFile], tally: Tally, completer: Completer
) -> dict[str, Any]:
    """The manifest's `imported` section."""
    about = {fact: getattr(module, fact.upper()) for fact in _FACTS}
    return {
        "format": name,
        **about,
        "files": [source.name for source in sources[:_FILES_IN_MANIFEST]],
        "file_count": len(sources),
        **completer.facts(),
        "steps": len(completer.steps),
        "left_out": dict(tally.left_out),
        "left_out_first": dict(tally.first),
        "noted": dict(tally.noted),
        "libraries": library_versions(),  # of this machine: those of the run are unknown
    }


def _in_megabytes(advance: Callable[[int], None], total: int) -> Callable[[int], None]:
    """Convert bytes to whole megabytes, so that the progress bar ends at its total."""
    done = shown = 0

    def advance_bytes(count: int) -> None:
        nonlocal done, shown
        done += count
        megabytes = min(done, total) // _MEGABYTE
        if megabytes > shown:
            advance(megabytes - shown)
            shown = megabytes

    return advance_bytes
