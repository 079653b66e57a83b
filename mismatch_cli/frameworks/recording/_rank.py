"""The files of one rank in a trace folder: complete shards, and a note of what was written and
refused.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_cli.base.errors import MismatchError, first_line
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.rows import Completer
from mismatch_cli.frameworks.recording._as_table import as_table
from mismatch_cli.frameworks.recording._place import RANK_LOCK
from mismatch_cli.frameworks.recording._responses import Padded, Row, responses_in
from mismatch_cli.trace.columns import ROW_KEY
from mismatch_cli.trace.drafts import remove_unfinished
from mismatch_cli.trace.files import write_atomically
from mismatch_cli.trace.manifest import (
    FILE_NAME,
    VOCABULARY,
    library_versions,
    read_manifest,
    shards_in,
    write_manifest,
)
from mismatch_cli.trace.recorder_notes import NOTE, RECORD, SECTIONS, manifest_sections, read_note
from mismatch_cli.trace.vocabulary import write_vocabulary
from mismatch_cli.trace.writer import write_shard

_REASONS = 3  # in a warning
_SAMPLES = 2**16  # most samples of one prompt that a rank numbers

Told = Mapping[str, Any] | Callable[[], Mapping[str, Any]]  # a manifest's sections, or a function


class RankFolder:
    """What a rank has written, restarts included, and where its next shard goes.

    Raises `MismatchError` if another process of the same rank holds the folder, or it contains
    another run.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        manifest: Told,
        tokenizer: Any,
        vocabulary: int | None,
        warn: Callable[[str, int], None],
    ) -> None:
        self.folder, self._rank, self._warn = folder, rank, warn
        self.written = self.refused = 0  # responses, by this process
        self.last_step = -1  # of earlier processes
        self.steps: set[int] = set()  # written by this process
        self._manifest: dict[str, Any] = {}  # of a new trace, written by rank 0
        if rank < 0:
            raise ValueError(f"rank is {rank}: ranks count from 0")
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _held(folder / RANK_LOCK.format(rank))
        try:
            self._begin(manifest, tokenizer)
            for beginning in (
                f"shard-{rank:05d}-",
                NOTE.format(rank),
                *((FILE_NAME, VOCABULARY) if rank == 0 else ()),
            ):
                remove_unfinished(folder, beginning)
            self._tally = Tally()
            self._completer = Completer(self._tally, newer_trainer=False, vocabulary=vocabulary)
            self._samples: Counter[tuple[Any, Any]] = Counter()  # so far, per prompt and step
            self._shards = self._earlier_shards()
            self._note()
        except BaseException:
            _let_go(self._lock)
            raise

    def write(self, given: list[Row | Padded]) -> None:
        """Write a shard of these responses; if that fails, they are lost, but later ones are
        tried again.
        """
        before = Counter(self._tally.left_out)
        try:
            table, facts = self._complete(given)
            if table.num_rows:
                self._write_shard(table, facts)
            refused = self._tally.left_out - before
        except Exception as error:  # the disk is full, the folder is gone: the run continues
            refused = self._tally.left_out - before
            lost = sum(map(responses_in, given)) - refused.total()
            self._tally.leave_out("responses that could not be written", lost)
            self._warn(f"{first_line(error)}: {lost} responses are lost", lost)
        if refused:
            self.refused += refused.total()
            self._warn(f"{'; '.join(self._tally.left_out_lines()[:_REASONS])}: not recorded", 0)

    def close(self) -> None:
        """Note that the recording is complete, and release the folder."""
        try:
            self._note(closed=True)
        except MismatchError as error:
            self._warn(f"{first_line(error)}: the end of the recording is not noted", 0)
        _let_go(self._lock)

    def _begin(self, facts: Told, tokenizer: Any) -> None:
        """Prepare the manifest of a new trace, or continue a recording of the same run; other
        traces stay untouched.
        """
        try:
            known = manifest_sections(facts() if callable(facts) else facts)
        except Exception as error:  # the run's own objects may lack what an adapter reads
            self._warn(f"{first_line(error)}: the manifest does not describe the run", 0)
            known = {}
        if (self.folder / "trace" / FILE_NAME).exists():
            raise MismatchError(
                f"{self.folder} holds a run in its trace/: give the recorder a separate folder"
            )
        if (self.folder / FILE_NAME).exists():
            manifest = read_manifest(self.folder)
            if manifest.get("command") != RECORD:
                raise MismatchError(
                    f"{self.folder} holds another trace: give the recorder a separate folder"
                )
            if differing := _differing(manifest, known, self._rank):
                raise MismatchError(
                    f"{self.folder} holds a run with a different {differing[0]}: name a new folder"
                )
        elif self._rank == 0:
            if shards_in(self.folder) and not any(self.folder.glob(NOTE.replace("{:05d}", "*"))):
                raise MismatchError(
                    f"{self.folder} holds foreign shards: give the recorder a new folder"
                )
            self._write_vocabulary(tokenizer)
            self._manifest = {"command": RECORD, "libraries": library_versions(), **known}

    def _write_vocabulary(self, tokenizer: Any) -> None:
        if tokenizer is None:
            return
        try:
            write_vocabulary(self.folder, tokenizer)
        except (
            Exception
        ) as error:  # the run's own tokenizer may lack anything: ids are recorded regardless
            self._warn(f"{first_line(error)}: tokens are shown as ids", 0)

    def _earlier_shards(self) -> dict[str, dict[str, int]]:
        """The shards that this rank wrote before a restart; their rows are not recorded again."""
        path = self.folder / NOTE.format(self._rank)
        note = read_note(path) if path.exists() else {"shards": {}}
        self._tally.left_out.update(note.get("left_out", {}))
        self._tally.noted.update(note.get("noted", {}))
        self._tally.first.update(note.get("left_out_first", {}))
        shards = sorted(self.folder.glob(f"shard-{self._rank:05d}-*.parquet"))
        for shard in shards:
            with pq.ParquetFile(shard) as file:  # `read_table` would import pandas if installed
                rows = file.read(list(ROW_KEY))
            self._completer.remember(rows)
            self.last_step = max(self.last_step, *rows["step"].to_pylist())
        if unknown := {shard.name for shard in shards} - note["shards"].keys():
            raise MismatchError(f"{self.folder / min(unknown)} does not belong to this recording")
        newest = max(note["shards"], default="")  # may be noted but not written, after a kill
        return {
            name: facts
            for name, facts in note["shards"].items()
            if name != newest or (self.folder / name).exists()
        }

    def _write_shard(self, table: pa.Table, facts: dict[str, int]) -> None:
        """Write a shard and note it first: a noted shard may be missing after a kill, an unknown
        one is foreign.
        """
        number = 1 + max(
            (int(name[len("shard-00000-") : -len(".parquet")]) for name in self._shards), default=-1
        )
        name = f"shard-{self._rank:05d}-{number:06d}.parquet"
        self._shards[name] = facts
        try:
            self._note()
            write_shard(self.folder / name, table)
        except BaseException:
            del self._shards[name]
            raise
        self.written += table.num_rows
        self.steps.update(table["step"].to_pylist())

    def _complete(self, given: list[Row | Padded]) -> tuple[pa.Table, dict[str, int]]:
        """The responses in a trace's form, and counts for readers that do not open the shard."""
        before = self._completer.facts()
        table = self._completer.complete(
            as_table(given, self._numbered, self._tally), f"rank {self._rank}"
        )
        return table, {
            name: count - before[name] for name, count in self._completer.facts().items()
        }

    def _numbered(self, row: Row) -> Row:
        """A response with its sample index; without one, it is numbered so that ranks never
        collide.
        """
        if "sample_index" in row:
            return row
        prompt = row.get("prompt_id")
        key = (
            row["step"],
            hash(np.asarray(row.get("prompt_ids", ())).tobytes()) if prompt is None else prompt,
        )
        self._samples[key] += 1
        return row | {"sample_index": self._rank * _SAMPLES + self._samples[key] - 1}

    def _note(self, *, closed: bool = False) -> None:
        """Write the note about what this rank wrote and refused, which tells readers what
        belongs to the trace.
        """
        found = {
            "rank": self._rank,
            "closed": closed,
            "shards": self._shards,
            "left_out": dict(self._tally.left_out),
            "left_out_first": self._tally.first,
            "noted": dict(self._tally.noted),
        }
        # A new trace, or the folder was removed
        if self._manifest and not (self.folder / FILE_NAME).exists():
            write_manifest(self.folder, self._manifest)
        write_atomically(self.folder / NOTE.format(self._rank), json.dumps(found, indent=2) + "\n")


def _held(lock: Path) -> int:
    """Take a rank's lock: two recorders of one rank would use the same shard names."""
    file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise MismatchError(f"another recorder of this rank is writing to {lock.parent}") from error
    _HELD.add(file)
    return file


def _let_go(lock: int) -> None:
    """Release the lock in every process: a forked child shares it, and may outlive this process."""
    _HELD.discard(lock)
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _close_in_child() -> None:
    for lock in _HELD:
        os.close(lock)
    _HELD.clear()


_HELD: set[int] = set()  # locks of this process, which a forked child does not keep
os.register_at_fork(after_in_child=_close_in_child)


def _differing(manifest: Mapping[str, Any], known: Mapping[str, Any], rank: int) -> list[str]:
    """Sections that describe another run; for ranks other than 0 only the models count."""
    if rank == 0:
        return [name for name in SECTIONS if manifest.get(name) != known.get(name)]
    models = {name: section.get("model") for name, section in known.items() if section.get("model")}
    return [
        name
        for name, model in models.items()
        if manifest.get(name, {}).get("model") not in (None, model)
    ]
