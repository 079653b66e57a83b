"""What is read at a time: a few shards of a trace that lie behind each other; and what a pass looks for in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol, Self, TypeVar

from mismatch_cli.trace.reader import RowGroup, Trace
from mismatch_cli.trace.recorder_notes import rank_of

PORTION_BYTES = 2**25  # of files; sending and merging what is counted of it take less than a tenth of the counting


@dataclass(frozen=True)
class Portion:
    """Shards of one trace that are read together."""

    trace: int  # its number among the traces of the pass
    folder: Path
    shards: tuple[Path, ...]
    step: int | None = None  # the rows of one step alone

    def absolute(self) -> Portion:
        """The same for processes that work elsewhere."""
        return Portion(self.trace, self.folder.absolute(), tuple(path.absolute() for path in self.shards), self.step)


def portions(traces: Sequence[Trace]) -> list[Portion]:
    """All shards in order; each portion ends with the shard that makes it large enough.

    Each rank of a run that is recorded begins a new one: what others add to a growing trace moves no boundary.
    """
    return [
        Portion(number, trace.folder, shards, trace.step)
        for number, trace in enumerate(traces)
        for _, own in groupby(trace.shards, key=rank_of)
        for shards in _large_enough(own)
    ]


def _large_enough(paths: Iterator[Path]) -> Iterator[tuple[Path, ...]]:
    shards: list[Path] = []
    size = 0
    for path in paths:
        shards.append(path)
        size += path.stat().st_size
        if size >= PORTION_BYTES:
            yield tuple(shards)
            shards, size = [], 0
    if shards:
        yield tuple(shards)


class Mergeable(Protocol):
    """What a pass finds: an accumulator for one."""

    def merge(self, other: Self) -> None:
        """Add what another one has seen, which lies behind it in the trace."""


Part = TypeVar("Part", bound=Mergeable)


class Pass(Protocol[Part]):
    """What is asked of each portion, in whatever process: it can be pickled, and so can what it finds."""

    @property
    def columns(self) -> Sequence[str] | None:
        """Those that are read beside the row keys, lengths and log μ; None: all."""

    def begin(self, portion: Portion) -> Part:
        """What is found in no row at all."""

    def read(self, found: Part, portion: Portion, groups: Iterator[RowGroup]) -> None:
        """Add what is found in the row groups of a portion, or in those that came to it since."""
