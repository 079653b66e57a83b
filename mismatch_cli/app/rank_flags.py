"""`--nproc`: a command on several devices of one machine, or as one of the ranks that torchrun
started.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import typer

from mismatch_cli.app.rank_command_line import typed_arguments
from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.options import of_running
from mismatch_cli.processes.ranks import World
from mismatch_cli.processes.ranks.joined import launched

T = TypeVar("T")
CAN_RESUME = (
    "What was recorded is kept: the same command with --resume, and without --force, continues it."
)


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The processes that share the work."""

    nproc: int = of_running(1, "Processes, one per local GPU.", least=1)
    sharded: bool = of_running(
        False,
        "Shard the trainer over these processes (FSDP); else each loads a copy.",
    )
    max_restarts: int = of_running(
        0,
        "Restarts from the last checkpoint after a process has died.",
        flag=False,
        least=0,
    )

    def check_sharded(self) -> None:
        """A `UsageError` if there is only one process to shard a model over."""
        if self.sharded and self.nproc == 1 and not launched():
            raise UsageError(
                "sharded spreads a model over several processes. Set how many with --nproc."
            )

    def launch(self, context: typer.Context, consequence: str) -> None:
        """Run this command as ranks and exit with their exit code; returns if this process is to
        do the work itself, alone or as one of them.

        `consequence` ends the message about a rank that is lost.
        """
        if launched() or (self.nproc == 1 and not self.max_restarts):
            return
        from mismatch_cli.processes.ranks.launch import launch

        # Ranks must not launch ranks, so they do not get the flags that ask for them.
        arguments = typed_arguments(context, without=("nproc", "max_restarts"))
        command_line = [str(context.info_name), *arguments]
        exit_code = launch(
            self.nproc, command_line, max_restarts=self.max_restarts, consequence=consequence
        )
        raise typer.Exit(exit_code)


@contextmanager
def shared_with_ranks(world: World, prepared: AbstractContextManager[T]) -> Iterator[T]:
    """Give all ranks what the first one prepares; only the first holds it, until all have left
    the block.
    """
    if not world.first:
        yield world.broadcast(None)  # type: ignore[misc]
        world.barrier()
        return
    with prepared as run:
        yield world.broadcast(run)
        # Leaving `prepared` unlocks the folder, into which another rank may still be writing.
        world.barrier()
