"""The ranks of one run: processes that run the same program, each on its device, with a share of the work.

A run of one process has a world of one, in which all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from mismatch_cli.errors import MismatchError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Who this rank is, and what ranks tell each other: every rank calls the same methods in the same order.

    What is told is pickled and goes through the CPU (gloo); tensors of a model have their own ways.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the ranks of this machine: the number of its device

    @property
    def first(self) -> bool:
        """Whether this rank writes the files and speaks to the user."""
        return self.rank == 0

    @property
    def suffix(self) -> str:
        """Of the names of files that every rank has."""
        return "" if self.first else f"-{self.rank}"

    def share(self, count: int) -> range:
        """Which of `count` things are this rank's: neighbours, in the order of the ranks, as many as others' ± 1."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def gather(self, item: T) -> list[T]:
        """What every rank has, in their order, on all of them."""
        if self.size == 1:
            return [item]
        import torch.distributed as dist

        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, item)
        return found  # type: ignore[return-value]

    def gather_first(self, item: T) -> list[T]:
        """What every rank has, on the first one; the others get an empty list."""
        if self.size == 1:
            return [item]
        import torch.distributed as dist

        found: list[T | None] | None = [None] * self.size if self.first else None
        dist.gather_object(item, found)
        return found or []  # type: ignore[return-value]

    def told(self, item: T) -> T:
        """What the first rank has, on all of them."""
        if self.size == 1:
            return item
        import torch.distributed as dist

        holder = [item]
        dist.broadcast_object_list(holder)
        return holder[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather(None)

    def check_same(self, what: Sequence[tuple[str, object]]) -> None:
        """A `MismatchError` that names the first of these things that is not the same on every rank."""
        for rank, theirs in enumerate(self.gather(tuple(what))):
            for (name, mine), (_, other) in zip(what, theirs, strict=False):
                if mine != other:
                    raise MismatchError(
                        f"Rank {rank} has {name} = {other}, and rank {self.rank} has {mine}. Start every rank with the "
                        "same command and the same files."
                    )


ALONE = World()
