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
    question: TracePass[Any],
    portion: Portion,
    cache: Cache | None,
    *,
    skip_broken: bool,
    on_responses: Progress = lambda _: None,
) -> Leaf[Any]:
    """Read a portion, or only what was added to it since the cached result for this question.

    With `skip_broken`, a broken shard is left out completely; otherwise it raises its reader's
    `MismatchError`.
    """
    entry = cache.entry(question, portion) if cache else None
    before: Leaf[Any] | None = None
    count = 0
    if entry:
        before, count = entry.read()
    # A result without its broken shards answers only those who leave them out.
    if before and before.broken and not skip_broken:
        before, count = None, 0
    if before:
        on_responses(before.responses)
        if count == len(portion.shards):
            return before
    leaf = _read(question, portion, before, portion.shards[count:], skip_broken, on_responses)
    if entry:
        entry.write(leaf)
    return leaf


def _read(
    question: TracePass[Any],
    portion: Portion,
    before: Leaf[Any] | None,
    shards: Sequence[Path],
    skip_broken: bool,
    on_responses: Progress,
) -> Leaf[Any]:
    """Read shards, to continue from an earlier result or to begin one."""
    broken: dict[str, str] = {}
    while True:
        leaf = before or Leaf(question.begin(portion))
        whole = [path for path in shards if path.name not in broken]
        try:
            trace = Trace(portion.folder, step=portion.step)
            groups = trace.row_groups(question.columns, whole)
            question.read(leaf.part, portion, _counted(groups, leaf, on_responses))
        except DamagedShard as error:
            if not skip_broken:
                raise
            # The part may contain some rows of this shard: everything is read again without it.
            on_responses(-leaf.responses)
            broken[error.path.name] = str(error)
            before = None
            shards = portion.shards
        else:
            leaf.broken |= broken
            return leaf


def _counted(
    groups: Iterator[RowGroup], leaf: Leaf[Any], on_responses: Progress
) -> Iterator[RowGroup]:
    """The same row groups; counts the responses of each once the next one is requested."""
    for group in groups:
        yield group
        leaf.responses += group.batch.num_responses
        on_responses(group.batch.num_responses)
