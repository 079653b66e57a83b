"""The ranks of one run: processes that run the same program, each on its own device, with a share
of the work.

A run of one process has a world of size one, in which all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from mismatch_cli.base.errors import MismatchError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Which rank this is, and how ranks exchange objects: every rank calls the same methods in the
    same order.

    Objects are pickled and go through the CPU (gloo); a model's tensors travel separately.
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
        """What to append to the names of files that every rank writes."""
        return "" if self.first else f"-{self.rank}"

    def share(self, count: int) -> range:
        """The range of `count` items that are this rank's: consecutive, in rank order, of equal
        size ± 1.
        """
        first = self.rank * count // self.size
        end = (self.rank + 1) * count // self.size
        return range(first, end)

    def gather(self, item: T) -> list[T]:
        """The items of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [item]
        import torch.distributed as dist

        items: list[T | None] = [None] * self.size
        dist.all_gather_object(items, item)
        return items  # type: ignore[return-value]

    def gather_first(self, item: T) -> list[T]:
        """The items of all ranks, on the first one; the others get an empty list."""
        if self.size == 1:
            return [item]
        import torch.distributed as dist

        if not self.first:
            dist.gather_object(item, None)
            return []
        items: list[T | None] = [None] * self.size
        dist.gather_object(item, items)
        return items  # type: ignore[return-value]

    def broadcast(self, item: T) -> T:
        """The first rank's item, on every rank."""
        if self.size == 1:
            return item
        import torch.distributed as dist

        # torch replaces the objects of a list in place.
        items = [item]
        dist.broadcast_object_list(items)
        return items[0]

    def barrier(self) -> None:
        """Wait until every rank gets here."""
        self.gather(None)

    def check_same(self, values: Sequence[tuple[str, object]]) -> None:
        """Raise a `MismatchError` that names the first of these values, each with its name, that
        differs between ranks.
        """
        for rank, theirs in enumerate(self.gather(tuple(values))):
            for (name, value), (_, other) in zip(values, theirs, strict=False):
                if value != other:
                    raise MismatchError(
                        f"Rank {rank} has {name} = {other}, and rank {self.rank} has {value}. "
                        "Start every rank with the same command and the same files."
                    )


ALONE = World()
