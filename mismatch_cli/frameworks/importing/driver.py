"""The import itself: find the files, detect their format, stream them into shards, and report
what was skipped.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
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
    guessed,
    log_probabilities,
    side_by_side,
)
from mismatch_cli.frameworks.importing.naming import OPEN, Row, check
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.other_files import other_file
from mismatch_cli.frameworks.importing.rows import Completer
from mismatch_cli.frameworks.importing.sources import (
    CUT_OFF,
    DumpFile,
    find,
    first_fault,
    first_rows,
    peek,
)
from mismatch_cli.trace.columns import length_column
from mismatch_cli.trace.manifest import library_versions, shard_entries, write_manifest
from mismatch_cli.trace.recorder_notes import manifest_sections
from mismatch_cli.trace.writer import shard_path, write_shard

FACTS = ("title", "files", "enable", "pi", "holds", "shift", "padding", "averaging")
_WRITERS, _LARGE = 2, 2**26  # threads, for dumps of at least so many bytes
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
    """What the module of a format says of it."""
    module = registry.load(IMPORTERS, name, "format")
    return FormatFacts(**{fact: getattr(module, fact.upper()) for fact in FACTS})


def import_dump(request: Import, folder: Path, progress: ImportProgress) -> dict[str, Any]:
    """Write the trace into an empty `folder` and return the manifest's `imported` section.

    Raises `MismatchError`, with the reason, where nothing can be imported. After an exception there
    is no manifest, and so no trace.
    """
    files = find(request.paths)
    if request.spans is not None:
        files = [
            replace(file, span=request.spans[file.path])
            for file in files
            if file.path in request.spans
        ]
    with bounded(request.paths[0], _bytes(files)):
        tally = Tally()
        name, sources = _recognised(request, files, tally)
        module = registry.load(IMPORTERS, name, "format")
        newer = (
            request.newer_trainer if request.newer_trainer is not None else module.PI == "trainer"
        )
        completer = Completer(
            tally,
            newer_trainer=newer,
            vocabulary=request.vocabulary,
            needs_ids=getattr(module, "NEEDS_IDS", True),
        )
        progress.say(
            f"Importing {len(sources)} {'file' if len(sources) == 1 else 'files'}: {module.TITLE}"
        )
        size = _bytes(sources)
        with progress.counting("Importing", max(1, size // _MEGABYTE), unit="MB") as advance:
            shards = joined_shards(
                _completed(module, sources, tally, _in_megabytes(advance, size), completer)
            )
            rows = _write(shards, folder, in_threads=size >= _LARGE)
        if not completer.rows:
            reasons = (
                "; ".join(tally.left_out_lines()[:_REASONS_IN_ERROR]) or "it holds no response"
            )
            page = "schema" if name == "plain" else "formats"
            dump = request.paths[0]
            raise MismatchError(
                f"No rows imported from {dump}: {reasons}. See mismatch-cli import --{page}"
            )
        imported = _description(name, module, sources, tally, completer)
        # A trainer that scored nothing is none
        sides = {n: side for n, side in request.sides.items() if n == "rollout" or completer.scored}
        whole = shard_entries(rows) | _cut_short(module, sources, tally)
        facts = manifest_sections({**sides, "sampling": request.sampling})
        write_manifest(folder, {"command": "import", "imported": imported, **whole, **facts})
        return imported


def _cut_short(module: ModuleType, sources: list[DumpFile], tally: Tally) -> dict[str, str]:
    """The manifest's note on a dump that was still being written."""
    lines = tally.left_out.get(CUT_OFF, 0)
    found = [counted(lines, CUT_OFF)] * bool(lines)
    if hasattr(module, "unfinished") and (why := module.unfinished(sources)):
        found.append(why)
    return (
        {"cut_short": f"the dump was still being written, or its run ended: {', '.join(found)}"}
        if found
        else {}
    )


def _bytes(sources: Sequence[DumpFile]) -> int:
    return sum(source.size for source in sources)


def _write(shards: Iterator[pa.Table], folder: Path, *, in_threads: bool) -> dict[str, int | None]:
    """Write the shards one by one and return their row counts.

    With `in_threads`, two shards are written while the next one is read: compression does not hold
    the GIL. But where memory runs out, C++ in another thread ends the process, and in this one it
    raises an error.
    """
    rows: dict[str, int | None] = {}
    writing: deque[Future[None]] = deque()
    with ThreadPoolExecutor(_WRITERS) as writer:
        for index, shard in enumerate(shards):
            path = shard_path(folder, index)
            rows[path.name] = shard.num_rows
            if not in_threads:
                write_shard(path, shard)
                continue
            if len(writing) == _WRITERS:
                writing.popleft().result()
            writing.append(writer.submit(write_shard, path, shard))
        for written in writing:
            written.result()
    return rows


def _completed(
    module: ModuleType,
    sources: list[DumpFile],
    tally: Tally,
    advance: Callable[[int], None],
    completer: Completer,
) -> Iterator[pa.Table]:
    given = _bytes(sources)
    read = 0
    for table, where in module.blocks(sources, tally, advance):
        read += table.nbytes
        if read > allowance(given):
            raise too_large(where, given)
        if table.num_rows and (rows := completer.complete(table, where)).num_rows:
            yield rows


def joined_shards(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Join tables until they are worth a file, but never more than fits."""
    gathered: list[pa.Table] = []
    tokens = size = 0
    for table in tables:
        gathered.append(table)
        lists = table.column(length_column(table.column_names))
        tokens += pc.sum(pc.list_value_length(lists)).as_py()
        size += table.nbytes
        if tokens >= _SHARD_TOKENS or size >= _SHARD_BYTES:
            yield pa.concat_tables(gathered, promote_options="default")
            gathered, tokens, size = [], 0, 0
    if gathered:
        yield pa.concat_tables(gathered, promote_options="default")


def _importers() -> Iterator[ModuleType]:
    return (registry.load(IMPORTERS, name, "format") for name in registry.names(IMPORTERS))


def carriers(sources: Sequence[DumpFile]) -> list[DumpFile]:
    """The files of a growing run whose new lines are new responses, as its framework's importer
    knows: other files are only looked up.
    """
    kept = list(sources)
    for module in _importers():
        kept = module.carriers(kept) if hasattr(module, "carriers") else kept
    return kept


def being_written(sources: Sequence[DumpFile]) -> set[Path]:
    """The files that their framework has not marked as complete, where it marks files at all."""
    paths = [source.path for source in sources]
    open_paths: set[Path] = set()
    for module in _importers():
        open_paths |= module.being_written(paths) if hasattr(module, "being_written") else set()
    return open_paths


def _recognised(request: Import, files: list[DumpFile], tally: Tally) -> tuple[str, list[DumpFile]]:
    """The format, and the files that have it; other files of a folder are counted."""
    names = registry.names(IMPORTERS)
    if request.format is not None and request.format not in names:
        raise UsageError(registry.unknown_name("format", request.format, names))
    asked = "plain" if request.columns else request.format
    files = [
        replace(source, columns=request.columns)
        for source in (_of_dumps(files, tally) if request.spans is None else files)
    ]
    groups: dict[tuple[str, str], list[DumpFile]] = {}
    for source in files:
        groups.setdefault(source.group, []).append(source)
    by_format: dict[str, list[DumpFile]] = {}
    unknown: list[DumpFile] = []
    for group in groups.values():
        known = _format_of(group, [asked] if asked else names)
        (unknown if known is None else by_format.setdefault(known, [])).extend(group)
    first = next(chain(by_format.get("plain", ()), unknown), None)
    if request.columns and first and (rows := first_rows(first)):
        check(request.columns, rows, str(first.path))
    if not by_format:
        _refuse(unknown, request)
    if len(by_format) > 1:
        raise UsageError(
            f"The files are dumps of {' and '.join(sorted(by_format))}. "
            f"{_choose(sorted(by_format))}"
        )
    name, sources = next(iter(by_format.items()), (str(asked), unknown))
    if by_format:
        tally.leave_out("files of another layout", len(unknown), unknown[0].name if unknown else "")
    module = registry.load(IMPORTERS, name, "format")
    if hasattr(module, "choose") and any(path.is_dir() for path in request.paths):
        sources = module.choose(sources, tally)
    chosen = set(sources)
    return name, [source for source in files if source in chosen]


def _of_dumps(files: list[DumpFile], tally: Tally) -> list[DumpFile]:
    """The files without those that hold no dump, which are counted; a `MismatchError` that says
    what the first is if none is left.
    """
    others = {file: other_file(file.path, of_lines=file.kind == "jsonl") for file in files}
    kept = [file for file, other in others.items() if other is None]
    for file, other in others.items():
        if other is not None and not kept:
            raise MismatchError(f"{file.path} {other.why}")
        if other is not None:
            tally.leave_out(other.kind, 1, file.name)
    return kept


def _format_of(group: list[DumpFile], names: Sequence[str]) -> str | None:
    """The format of the first nonempty file of a group; a `UsageError` where two formats accept
    it.
    """
    for source in group:
        seen = peek(source)
        if seen.keys:
            known = [
                name for name in names if registry.load(IMPORTERS, name, "format").recognises(seen)
            ]
            if len(known) > 1:
                raise UsageError(
                    f"{source.path} has the layout of {' and of '.join(known)}. {_choose(known)}"
                )
            return known[0] if known else None
    return None


def _choose(names: Sequence[str]) -> str:
    return f"Choose one with {' or '.join(f'--format {name}' for name in names)}."


class UnknownLayout(MismatchError):
    """Files of no known format; `lines` show what is wanted beside what they hold."""

    def __init__(self, message: str, lines: str) -> None:
        super().__init__(message)
        self.lines = lines


def _refuse(unknown: Sequence[DumpFile], request: Import) -> None:
    """Raise a `MismatchError` for an unknown layout that says what the files are or lack, or how to
    map their columns.
    """
    for source in {source.group: source for source in reversed(unknown)}.values():
        rows = first_rows(source)
        of_text = "" if rows or source.kind != "jsonl" else no_dump.printed_metrics(source.path)
        if why := no_dump.text_only(rows) or no_dump.metrics(rows) or of_text:
            raise MismatchError(f"{source.path} {why}")
    if request.format is not None and not request.columns:
        return  # the user chose the format: the importer counts what is missing
    source, rows = unknown[0], first_rows(unknown[0])
    names = {name for row in rows for name in row} or peek(source).keys
    keys = sorted(visible(name) for name in names if "." not in name)
    shown = ", ".join(keys[:_KEYS_IN_ERROR]) + (", …" if len(keys) > _KEYS_IN_ERROR else "")
    holds = f"columns: {shown}" if keys else f"no line is a JSON object{first_fault(source)}"
    begin = f"{source.path}: unrecognized format ({holds})."
    if not rows:
        raise MismatchError(
            f"{begin} Formats: mismatch-cli import --formats; "
            "to write a dump from any program: mismatch-cli import --schema"
        )
    _propose(source, rows, request, begin)


def _propose(source: DumpFile, rows: Sequence[Row], request: Import, begin: str) -> None:
    """Raise an error that says what the file lacks, or with the line that maps its columns."""
    columns = columns_in(rows)
    guess = guessed(columns, request.columns)
    lines = side_by_side(columns, guess, str(source.path))
    if not guess:
        lacks = no_dump.lacking(columns, log_probabilities(columns))
        write = "What to write: mismatch-cli import --schema"
        raise UnknownLayout(f"{begin} It {lacks}. {write}", lines)
    typed = ",".join(f"{ours}={its}" for ours, its in guess.items())
    line = suggest("import", *request.paths, "--columns", typed)
    advice = (
        "By its names, kinds and lengths, try"
        if OPEN not in guess.values()
        else "Replace each ? with a column or path of the list above, or leave it out, and run"
    )
    raise UnknownLayout(f"{begin} {advice}: {line}", lines)


def _description(
    name: str, module: ModuleType, sources: list[DumpFile], tally: Tally, completer: Completer
) -> dict[str, Any]:
    return {
        "format": name,
        **{
            fact: getattr(module, fact.upper()) for fact in FACTS if fact not in ("files", "enable")
        },
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
        done, before = done + count, shown
        shown = min(done, total) // _MEGABYTE
        if shown > before:
            advance(shown - before)

    return advance_bytes
