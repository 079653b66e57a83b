"""The files of one rank in a trace folder: complete shards, and a note of what was written and
refused.
"""

from __future__ import annotations

import fcntl
import json
import logging
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
from mismatch_cli.frameworks.recording._folder_choice import RANK_LOCK
from mismatch_cli.frameworks.recording._responses import Batch, Row, count_responses
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
from mismatch_cli.trace.recorder_notes import (
    NOTE,
    RECORD,
    SECTIONS,
    manifest_sections,
    misspelt_keys,
    read_note,
)
from mismatch_cli.trace.vocabulary import write_vocabulary
from mismatch_cli.trace.writer import write_shard

_LOG = logging.getLogger("mismatch_cli.frameworks.recording")
_REASONS = 3  # in a warning
_SAMPLES = 2**16  # most samples of one prompt that a rank numbers

Facts = Mapping[str, Any] | Callable[[], Mapping[str, Any]]  # a manifest's sections, or a function


class RankFolder:
    """What a rank has written, restarts included, and where its next shard goes.

    Raises `MismatchError` if another process of the same rank holds the folder, or it contains
    another run.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        facts: Facts,
        tokenizer: Any,
        vocabulary: int | None,
        warn: Callable[[str, int], None],
    ) -> None:
        self.folder = folder
        self._rank = rank
        self._warn = warn
        self.written = 0  # responses, by this process
        self.refused = Counter[str]()  # those refused, by reason
        self.last_step = -1  # of earlier processes
        self.steps: set[int] = set()  # written by this process
        self._manifest: dict[str, Any] = {}  # of a new trace, written by rank 0
        if rank < 0:
            raise ValueError(f"rank is {rank}: ranks count from 0")
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _take_lock(folder / RANK_LOCK.format(rank))
        try:
            self._claim(facts, tokenizer)
            self._remove_drafts()
            self._tally = Tally()
            self._completer = Completer(self._tally, newer_trainer=False, vocabulary=vocabulary)
            self._samples: Counter[tuple[Any, Any]] = Counter()  # so far, per prompt and step
            self._shards = self._read_earlier_shards()
            self._write_note()
        except BaseException:
            _release(self._lock)
            raise

    def write(self, batches: list[Batch]) -> None:
        """Write a shard of these responses; if that fails, they are lost, but later ones are
        tried again.
        """
        before = Counter(self._tally.left_out)
        try:
            table, counts = self._complete(batches)
            if table.num_rows:
                self._write_shard(table, counts)
            refused = self._tally.left_out - before
        except Exception as error:  # the disk is full, the folder is gone: the run continues
            refused = self._tally.left_out - before
            lost = sum(map(count_responses, batches)) - refused.total()
            self._tally.leave_out("responses that could not be written", lost)
            self._warn(f"{first_line(error)}: {lost} responses are lost", lost)
        if refused:
            # A new counter, since the run's thread reads this one.
            self.refused = self.refused + refused
            reasons = "; ".join(self._tally.left_out_lines()[:_REASONS])
            self._warn(f"{reasons}: not recorded", 0)

    def close(self) -> None:
        """Note that the recording is complete, and release the folder."""
        try:
            self._write_note(closed=True)
        except MismatchError as error:
            self._warn(f"{first_line(error)}: the end of the recording is not noted", 0)
        _release(self._lock)

    def _remove_drafts(self) -> None:
        """Remove what a killed process of this rank has left; other ranks may be writing theirs."""
        own_files = [f"shard-{self._rank:05d}-", NOTE.format(self._rank)]
        if self._rank == 0:
            own_files += [FILE_NAME, VOCABULARY]
        for beginning in own_files:
            remove_unfinished(self.folder, beginning)

    def _claim(self, facts: Facts, tokenizer: Any) -> None:
        """Prepare the manifest of a new trace, or continue a recording of the same run; a
        `MismatchError` for any other trace, which stays untouched.
        """
        try:
            sections = manifest_sections(facts() if callable(facts) else facts)
        except Exception as error:  # the run's own objects may lack what an adapter reads
            self._warn(f"{first_line(error)}: the manifest does not describe the run", 0)
            sections = {}
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
            differing = _differing_sections(manifest, sections, self._rank)
            if differing:
                raise MismatchError(
                    f"{self.folder} holds a run with a different {differing[0]}: name a new folder"
                )
        elif self._rank == 0:
            has_notes = any(self.folder.glob(NOTE.replace("{:05d}", "*")))
            if shards_in(self.folder) and not has_notes:
                raise MismatchError(
                    f"{self.folder} holds foreign shards: give the recorder a new folder"
                )
            misspelt = misspelt_keys(sections)
            if misspelt:
                _LOG.warning(
                    "Unknown keys of the manifest: %s. They are kept.", ", ".join(misspelt)
                )
            self._write_vocabulary(tokenizer)
            self._manifest = {"command": RECORD, "libraries": library_versions(), **sections}

    def _write_vocabulary(self, tokenizer: Any) -> None:
        if tokenizer is None:
            return
        # The run's own tokenizer may lack anything; ids are recorded regardless.
        try:
            write_vocabulary(self.folder, tokenizer)
        except Exception as error:
            self._warn(f"{first_line(error)}: tokens are shown as ids", 0)

    def _read_earlier_shards(self) -> dict[str, dict[str, int]]:
        """The noted counts of the shards that this rank wrote before a restart, by file name.

        Takes over what was refused, the last step, and the keys of the rows, which are not recorded
        again. Raises a `MismatchError` for a shard that is not noted.
        """
        path = self.folder / NOTE.format(self._rank)
        note = read_note(path) if path.exists() else {"shards": {}}
        self._tally.left_out.update(note.get("left_out", {}))
        self._tally.noted.update(note.get("noted", {}))
        self._tally.first.update(note.get("left_out_first", {}))
        shards = sorted(self.folder.glob(f"shard-{self._rank:05d}-*.parquet"))
        for shard in shards:
            with pq.ParquetFile(shard) as file:  # `read_table` would import pandas if installed
                keys = file.read(list(ROW_KEY))
            self._completer.remember(keys)
            self.last_step = max(self.last_step, *keys["step"].to_pylist())
        noted: dict[str, dict[str, int]] = note["shards"]
        foreign = {shard.name for shard in shards} - noted.keys()
        if foreign:
            raise MismatchError(f"{self.folder / min(foreign)} does not belong to this recording")
        # A shard is noted before it is written, so a kill may have left the newest one unwritten.
        # It is forgotten; an older one that is missing was lost later, and readers say so.
        newest = max(noted, default="")
        if newest and not (self.folder / newest).exists():
            del noted[newest]
        return noted

    def _write_shard(self, table: pa.Table, counts: dict[str, int]) -> None:
        """Write a shard and note it first: a noted shard may be missing after a kill, an unknown
        one is foreign.
        """
        numbers = [int(name[len("shard-00000-") : -len(".parquet")]) for name in self._shards]
        name = f"shard-{self._rank:05d}-{1 + max(numbers, default=-1):06d}.parquet"
        self._shards[name] = counts
        try:
            self._write_note()
            write_shard(self.folder / name, table)
        except BaseException:
            del self._shards[name]
            raise
        self.written += table.num_rows
        self.steps.update(table["step"].to_pylist())

    def _complete(self, batches: list[Batch]) -> tuple[pa.Table, dict[str, int]]:
        """The responses in a trace's form, and counts for readers that do not open the shard."""
        before = self._completer.facts()
        table = as_table(batches, self._with_sample_index, self._tally)
        table = self._completer.complete(table, f"rank {self._rank}")
        after = self._completer.facts()
        return table, {name: count - before[name] for name, count in after.items()}

    def _with_sample_index(self, row: Row) -> Row:
        """A response with its sample index; without one, it is numbered so that ranks never
        collide.
        """
        if "sample_index" in row:
            return row
        prompt = row.get("prompt_id")
        if prompt is None:
            prompt = hash(np.asarray(row.get("prompt_ids", ())).tobytes())
        key = (row["step"], prompt)
        self._samples[key] += 1
        return row | {"sample_index": self._rank * _SAMPLES + self._samples[key] - 1}

    def _write_note(self, *, closed: bool = False) -> None:
        """Write the note about what this rank wrote and refused, which tells readers what
        belongs to the trace.
        """
        note = {
            "rank": self._rank,
            "closed": closed,
            "shards": self._shards,
            "left_out": dict(self._tally.left_out),
            "left_out_first": self._tally.first,
            "noted": dict(self._tally.noted),
        }
        # The trace is new, or its folder was removed while the run continued.
        if self._manifest and not (self.folder / FILE_NAME).exists():
            write_manifest(self.folder, self._manifest)
        write_atomically(self.folder / NOTE.format(self._rank), json.dumps(note, indent=2) + "\n")


def _take_lock(path: Path) -> int:
    """Take a rank's lock, or raise a `MismatchError`: two recorders of one rank would use the same
    shard names.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise MismatchError(f"another recorder of this rank is writing to {path.parent}") from error
    _OWN_LOCKS.add(lock)
    return lock


def _release(lock: int) -> None:
    # A forked child shares the lock and may outlive this process, where closing releases nothing:
    # so the file is unlocked, in every process, before it is closed.
    _OWN_LOCKS.discard(lock)
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _close_in_child() -> None:
    for lock in _OWN_LOCKS:
        os.close(lock)
    _OWN_LOCKS.clear()


_OWN_LOCKS: set[int] = set()  # of this process, which a forked child does not keep
os.register_at_fork(after_in_child=_close_in_child)


def _differing_sections(
    manifest: Mapping[str, Any], sections: Mapping[str, Any], rank: int
) -> list[str]:
    """Sections that describe another run; for ranks other than 0 only the models count."""
    if rank == 0:
        return [name for name in SECTIONS if manifest.get(name) != sections.get(name)]
    differing = []
    for name, section in sections.items():
        model = section.get("model")
        # A model that only one of the two states does not show another run.
        if model and manifest.get(name, {}).get("model") not in (None, model):
            differing.append(name)
    return differing
