"""Reads a portion in any process: its result, new or from the cache, and its broken shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mismatch_cli.processes.workers.cache import Cache
from mismatch_cli.processes.workers.portions import Leaf, Portion, TracePass
from mismatch_cli.trace.reader import RowGroup, Trace
from mismatch_cli.trace.shards import DamagedShard

Progress = Callable[[int], None]


def read_portion(
    asked: TracePass[Any],
    portion: Portion,
    cache: Cache | None,
    *,
    skip_broken: bool,
    tell: Progress = lambda _: None,
) -> Leaf[Any]:
    """Read a portion, or only what was added to it since the cached result for this question.

    With `skip_broken`, a broken shard is left out completely; otherwise it raises its reader's
    `MismatchError`.
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
    asked: TracePass[Any],
    portion: Portion,
    before: Leaf[Any] | None,
    shards: Sequence[Path],
    skip: bool,
    tell: Progress,
) -> Leaf[Any]:
    """Continue from an earlier result, or begin."""
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
        except (
            DamagedShard
        ) as error:  # the part may contain some of its rows: read everything again without it
            if not skip:
                raise
            tell(-leaf.responses)
            broken[error.path.name] = str(error)
            before, shards = None, portion.shards


def _counted(groups: Iterator[RowGroup], leaf: Leaf[Any], tell: Progress) -> Iterator[RowGroup]:
    """The same row groups; reports the responses of each once the next one is requested."""
    for group in groups:
        yield group
        leaf.responses += group.batch.num_responses
        tell(group.batch.num_responses)
