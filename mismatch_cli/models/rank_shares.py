"""How ranks share the shards of a trace while it is recorded or scored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mismatch_cli.processes.ranks import ALONE, World

if TYPE_CHECKING:
    from mismatch_cli.models.sharding import Sharding

Shard = TypeVar("Shard")


@dataclass(frozen=True)
class Ranks:
    """Each rank takes its own shards with its own model, or all take every shard with one model
    spread over them.
    """

    world: World = ALONE
    sharded: bool = False

    @property
    def spreads(self) -> bool:
        """Whether all ranks share one model."""
        return self.sharded and self.world.size > 1

    @property
    def sharding(self) -> Sharding | None:
        """The sharding of the trainer's model."""
        from mismatch_cli.models.sharding import Sharding

        return Sharding(self.world, dealt=True) if self.spreads else None

    @property
    def writes(self) -> bool:
        """Whether this rank writes the shard it has scored; of ranks that score together, only
        the first.
        """
        return self.world.first or not self.spreads

    def own(self, todo: Sequence[Shard]) -> Sequence[Shard]:
        """This rank's part of the shards."""
        return todo[self.world.rank :: self.world.size]

    @contextmanager
    def first_before_others(self) -> Iterator[bool]:
        """A block that other ranks leave only after the first one has; yields whether this is
        the first.
        """
        yield self.world.first
        self.world.barrier()


ALL_HERE = Ranks()
