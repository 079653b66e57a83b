"""`--nproc`: a command on several devices of one machine, or as one of the ranks that torchrun
started.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import typer

from mismatch_cli.app.typed import words
from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.options import setting
from mismatch_cli.processes.ranks import World
from mismatch_cli.processes.ranks.joined import launched

T = TypeVar("T")
KEPT = (
    "What was recorded is kept: the same command with --resume, and without --force, continues it."
)

NPROC = setting(
    1, "Processes that share the work, one per local GPU.", min=1, panel="Ranks", metavar="N"
)
SHARDED = setting(
    False,
    "Shard the trainer's weights over these processes (FSDP), if one GPU cannot hold them; else "
    "each loads a copy.",
    panel="Ranks",
)


def launch_ranks(context: typer.Context, nproc: int, kept: str, max_restarts: int = 0) -> None:
    """Run this command as ranks and exit with their exit code, unless this process already is
    one of them.
    """
    if launched() or (nproc == 1 and not max_restarts):
        return
    from mismatch_cli.processes.ranks.launch import launch

    typed = words(context, without=("nproc", "max_restarts"))
    raise typer.Exit(
        launch(nproc, [str(context.info_name), *typed], max_restarts=max_restarts, kept=kept)
    )


def check_sharded(sharded: bool, nproc: int) -> None:
    """A `UsageError` if there is only one process to shard a model over."""
    if sharded and nproc == 1 and not launched():
        raise UsageError(
            "--sharded spreads a model over several processes. Set how many with --nproc."
        )


@contextmanager
def told_to_all(world: World, prepared: AbstractContextManager[T]) -> Iterator[T]:
    """Give all ranks what the first one prepares; only the first holds it, until all have left
    the block.
    """
    if not world.first:
        yield world.told(None)  # type: ignore[misc]
        world.barrier()
        return
    with prepared as found:
        yield world.told(found)
        world.barrier()
