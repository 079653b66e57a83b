"""The thread that writes: responses in, whole shards out, and beside them what this rank wrote, refused and lost."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_cli.errors import MismatchError, first_line
from mismatch_cli.importers._lists import from_rows
from mismatch_cli.importers._rows import Completer, text_key
from mismatch_cli.importers._tally import Tally
from mismatch_cli.trace import foreign
from mismatch_cli.trace.files import write_atomically
from mismatch_cli.trace.manifest import (
    FILE_NAME,
    RECORD,
    RECORDER_NOTE,
    library_versions,
    read_manifest,
    write_manifest,
)
from mismatch_cli.trace.schema import ROW_KEY, arrow_type, column_order
from mismatch_cli.trace.vocabulary import write_vocabulary
from mismatch_cli.trace.writer import write_shard

_SHARD_TOKENS, _SHARD_SECONDS = 2**18, 60.0  # whichever comes first ends a shard: a trace is read while it grows
_QUEUED = 4  # shards that may wait before the run waits for the disk
_GLANCE = 1.0  # seconds between two looks at rows that grow old
_SAMPLES = 2**16  # that a rank numbers of one prompt at most
_PATIENCE = 30.0  # seconds that the run waits at most

Row = dict[str, Any]
Item = list[Row] | threading.Event | None  # of one shard, a wish to be told once all before it is written, the end


class Writer:
    """Owns the folder's files of one rank. Its methods are called by the run, what begins with `_` by the thread."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        manifest: dict[str, Any],
        tokenizer: Any,
        vocabulary: int | None,
        warn: Callable[[str, int], None],
    ) -> None:
        self._folder, self._rank, self._warn = folder, rank, warn
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _held(folder / f".recorder-{rank:05d}.lock")
        if rank == 0:
            _begin(folder, manifest, tokenizer)
        self._tally = Tally()
        self._completer = Completer(self._tally, newer_trainer=False, vocabulary=vocabulary)
        self._shard_rows: dict[str, int] = {}
        for path in sorted(folder.glob(f"shard-{rank:05d}-*.parquet")):  # of this rank, before it was restarted
            with pq.ParquetFile(path) as shard:
                self._completer.remember(shard.read(list(ROW_KEY)))
                self._shard_rows[path.name] = shard.metadata.num_rows
        self._samples: Counter[tuple[Any, Any]] = Counter()  # so far, of each prompt of a step
        self._queue: Queue[Item] = Queue(_QUEUED)
        self._gathering = (
            threading.Lock()
        )  # over the rows of the next shard, with their tokens and the age of the first
        self._rows: list[Row] = []
        self._tokens, self._since = 0, 0.0
        self._thread = threading.Thread(target=self._run, name=f"mismatch-cli recorder {rank}", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        """Hand over a response; where the disk is slower than the run, wait for it, though not for ever."""
        with self._gathering:
            if not self._rows:
                self._since = time.monotonic()
            self._rows.append(row)
            self._tokens += np.size(row.get("response_ids", ()))
            if self._tokens >= _SHARD_TOKENS:
                self._queue.put(self._gathered(), timeout=_PATIENCE)

    def flush(self) -> None:
        """Return once everything that was put is in shards."""
        done = threading.Event()
        with self._gathering:
            for item in (self._gathered(), done):
                self._queue.put(item, timeout=_PATIENCE)
        while self._thread.is_alive() and not done.wait(0.1):
            pass

    def close(self) -> None:
        """Write what is left, say that it is all, and let the folder go."""
        self.flush()
        self._queue.put(None, timeout=_PATIENCE)
        self._thread.join(_PATIENCE)
        os.close(self._lock)

    def _gathered(self) -> list[Row]:
        """The rows of the next shard, taken; whoever asks holds their lock."""
        rows, self._rows, self._tokens = self._rows, [], 0
        return rows

    def _run(self) -> None:
        while True:
            try:
                item: Item = self._queue.get(timeout=_GLANCE)
            except Empty:
                item = self._old_rows()
            rows = item if isinstance(item, list) else []
            try:
                if rows:
                    self._write_shard(rows)
                if item is None:
                    self._note(closed=True)
            except Exception as error:  # the disk is full, the folder is gone: the run goes on
                self._warn(f"{len(rows)} responses could not be recorded ({error})", len(rows))
            if isinstance(item, threading.Event):
                item.set()
            if item is None:
                return

    def _old_rows(self) -> list[Row]:
        """Rows that have waited so long that a reader should see them."""
        with self._gathering:
            return self._gathered() if time.monotonic() - self._since > _SHARD_SECONDS else []

    def _write_shard(self, rows: list[Row]) -> None:
        table = self._completer.complete(_table(map(self._numbered, rows), self._tally), f"rank {self._rank}")
        if table.num_rows:
            path = self._folder / f"shard-{self._rank:05d}-{len(self._shard_rows):06d}.parquet"
            write_shard(path, table)
            self._shard_rows[path.name] = table.num_rows
        self._note()

    def _numbered(self, row: Row) -> Row:
        """A response with its number among those to its prompt; where nobody gave one, ranks must not give the same."""
        if "sample_index" in row:
            return row
        step, prompt = row.get("step"), row.get("prompt_id")
        key = (step, tuple(np.ravel(row.get("prompt_ids", ())).tolist()) if prompt is None else prompt)
        self._samples[key] += 1
        return row | {"sample_index": self._rank * _SAMPLES + self._samples[key] - 1}

    def _note(self, *, closed: bool = False) -> None:
        """Beside the shards: what this rank wrote and refused, so that a reader knows what belongs to the trace."""
        found = {
            "rank": self._rank,
            "closed": closed,
            "shard_rows": self._shard_rows,
            "left_out": dict(self._tally.left_out),
            "noted": dict(self._tally.noted),
        }
        write_atomically(self._folder / RECORDER_NOTE.format(self._rank), json.dumps(found, indent=2) + "\n")


def _held(lock: Path) -> int:
    """The lock of a rank: two recorders of one rank would give their shards the same names."""
    file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise MismatchError(f"{lock.parent} is being recorded by another process with this rank") from error
    return file


def _begin(folder: Path, manifest: dict[str, Any], tokenizer: Any) -> None:
    """The manifest of a new trace; a trace of this recorder goes on, and one of anybody else is left alone."""
    if (folder / FILE_NAME).exists():
        if read_manifest(folder).get("command") != RECORD:
            raise MismatchError(f"{folder} holds another run")
        return
    if tokenizer is not None:
        write_vocabulary(folder, tokenizer)
    write_manifest(folder, {"command": RECORD, "libraries": library_versions(), **manifest})


def _table(rows: Iterable[Row], tally: Tally) -> pa.Table:
    """Responses as columns in the trace's types; one with a value that has none is left out and counted."""
    kept = []
    for row in rows:
        try:
            kept.append(_in_types(row))
        except (foreign.WRONG_VALUE, foreign.WRONG_TYPE, ValueError, OverflowError) as error:
            tally.leave_out(f"responses with values that the columns of a trace cannot hold ({first_line(error)})")
    names = [name for name in column_order() if any(name in row for row in kept)]
    return pa.table({name: _column(name, [row.get(name) for row in kept]) for name in names})


def _in_types(row: Row) -> Row:
    if strange := sorted(row.keys() - {*column_order()}):
        raise ValueError(f"a trace has no column {strange[0]}")
    found = {name: _value(name, value) for name, value in row.items()}
    advantage = found.get("advantage")
    if advantage is not None and advantage.size == 1 and "response_ids" in found:
        found["advantage"] = np.repeat(advantage, found["response_ids"].size)
    return found


def _value(name: str, value: Any) -> Any:
    kind = arrow_type(name)
    if pa.types.is_list(kind):
        return foreign.flat_array(np.atleast_1d(value) if np.ndim(value) == 0 else value, kind.value_type)
    if name == "prompt_id" and isinstance(value, str):
        return text_key(value)
    if name == "finish_reason":
        return str(value)
    return foreign.finite_number(value) if name == "reward" else foreign.whole_number(value)


def _column(name: str, values: list[Any]) -> pa.Array:
    kind = arrow_type(name)
    return from_rows(values, kind.value_type) if pa.types.is_list(kind) else pa.array(values, kind)
