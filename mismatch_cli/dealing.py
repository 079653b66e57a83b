"""How ranks share the shards of a trace that is recorded or scored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mismatch_cli.ranks import ALONE, World

if TYPE_CHECKING:
    from mismatch_cli.sharding import Sharding

Shard = TypeVar("Shard")


@dataclass(frozen=True)
class Ranks:
    """A shard for each rank, which has a model of its own; or every shard for all, with one model spread over them."""

    world: World = ALONE
    sharded: bool = False

    @property
    def spreads(self) -> bool:
        """Whether all ranks have one model together."""
        return self.sharded and self.world.size > 1

    @property
    def sharding(self) -> Sharding | None:
        """Of the trainer."""
        from mismatch_cli.sharding import Sharding

        return Sharding(self.world, dealt=True) if self.spreads else None

    @property
    def writes(self) -> bool:
        """Whether this rank writes the shard that it has scored: of those that scored it together, the first."""
        return self.world.first or not self.spreads

    def own(self, todo: Sequence[Shard]) -> Sequence[Shard]:
        """Of the shards that a model of its own is needed for, this rank's."""
        return todo[self.world.rank :: self.world.size]

    @contextmanager
    def first_before_others(self) -> Iterator[bool]:
        """What the first rank does in the block is done before another one leaves it; whether this is the first."""
        yield self.world.first
        self.world.barrier()


ALL_HERE = Ranks()
