"""A portion read, by whatever process: what is found in it, or was found before, and which of its shards are broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

from mismatch_cli.trace.reader import RowGroup, Trace
from mismatch_cli.trace.shards import DamagedShard
from mismatch_cli.workers.cache import Cache
from mismatch_cli.workers.portions import Part, Pass, Portion

Progress = Callable[[int], None]


@dataclass
class Leaf(Generic[Part]):
    """What is found in a portion."""

    part: Part
    responses: int = 0
    broken: dict[str, str] = field(default_factory=dict)  # names of shards that were left out, and why


def read_portion(
    asked: Pass[Any], portion: Portion, cache: Cache | None, *, skip_broken: bool, tell: Progress = lambda _: None
) -> Leaf[Any]:
    """Read a portion, or what has come to it since it was read for the same question.

    A broken shard is left out as a whole if `skip_broken`; else it is the `MismatchError` of its reader.
    """
    entry = cache.entry(asked, portion) if cache else None
    known = entry.known() if entry else None
    if known and known[0].broken and not skip_broken:
        known = None
    before, count = known or (None, 0)
    if before is not None:
        tell(before.responses)
        if count == len(portion.shards):
            return before
    leaf = _read(asked, portion, before, portion.shards[count:], skip_broken, tell)
    if entry:
        entry.keep(leaf)
    return leaf


def _read(
    asked: Pass[Any], portion: Portion, before: Leaf[Any] | None, shards: Sequence[Path], skip: bool, tell: Progress
) -> Leaf[Any]:
    """Go on from what was found before, or begin."""
    broken: dict[str, str] = {}
    while True:
        leaf = before or Leaf(asked.begin(portion))
        try:
            groups = Trace(portion.folder, step=portion.step).row_groups(
                asked.columns, [path for path in shards if path.name not in broken]
            )
            asked.read(leaf.part, portion, _counted(groups, leaf, tell))
            leaf.broken |= broken
            return leaf
        except DamagedShard as error:  # some of its rows may be in the part: all is read again without it
            if not skip:
                raise
            tell(-leaf.responses)
            broken[error.path.name] = str(error)
            before, shards = None, portion.shards


def _counted(groups: Iterator[RowGroup], leaf: Leaf[Any], tell: Progress) -> Iterator[RowGroup]:
    """The same row groups; of each it is told how many responses were read once the next one is asked for."""
    for group in groups:
        yield group
        leaf.responses += group.batch.num_responses
        tell(group.batch.num_responses)
