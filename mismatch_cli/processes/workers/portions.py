"""Portions, a few consecutive shards that are read together, and the interface of a pass over
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from mismatch_cli.trace.reader import RowGroup, Trace
from mismatch_cli.trace.recorder_notes import rank_of

# Portions follow from the files alone: cut by the number of workers, sums would have other bits.
# At 32 MB, sending and merging a result take less than a tenth of the time to compute it.
PORTION_BYTES = 2**25


@dataclass(frozen=True)
class Portion:
    """Shards of one trace that are read together."""

    trace: int  # index among the traces of the pass
    folder: Path
    shards: tuple[Path, ...]
    step: int | None = None  # only the rows of this step

    def absolute(self) -> Portion:
        """The portion with absolute paths, for processes in other folders."""
        shards = tuple(path.absolute() for path in self.shards)
        return replace(self, folder=self.folder.absolute(), shards=shards)


def portions(traces: Sequence[Trace]) -> list[Portion]:
    """All shards in order; each portion ends with the shard that makes it large enough.

    Each rank of a recorded run begins a new portion, so that other ranks' new shards do not move
    its boundaries.
    """
    every: list[Portion] = []
    for number, trace in enumerate(traces):
        for _, shards_of_rank in groupby(trace.shards, key=rank_of):
            for shards in _large_enough(shards_of_rank):
                every.append(Portion(number, trace.folder, shards, trace.step))
    return every


def _large_enough(paths: Iterator[Path]) -> Iterator[tuple[Path, ...]]:
    """The shards of each portion; only the last one may be smaller than `PORTION_BYTES`."""
    shards: list[Path] = []
    size = 0
    for path in paths:
        shards.append(path)
        size += path.stat().st_size
        if size >= PORTION_BYTES:
            yield tuple(shards)
            shards = []
            size = 0
    if shards:
        yield tuple(shards)


class Mergeable(Protocol):
    """The result of a pass, such as an accumulator."""

    def merge(self, other: Self) -> None:
        """Add the result of the next part of the trace."""


Part = TypeVar("Part", bound=Mergeable)


class TracePass(Protocol[Part]):
    """A question to each portion, in any process: the pass and its results can be pickled."""

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns to read besides row keys, lengths and log μ; None: all."""

    def begin(self, portion: Portion) -> Part:
        """An empty result."""

    def read(self, part: Part, portion: Portion, groups: Iterator[RowGroup]) -> None:
        """Add the row groups of a portion, or those that were added to it."""


@dataclass
class Leaf(Generic[Part]):
    """The result of a portion, and how much of the portion is in it."""

    part: Part
    responses: int = 0  # read so far
    broken: dict[str, str] = field(default_factory=dict)  # names of left-out shards, and why
