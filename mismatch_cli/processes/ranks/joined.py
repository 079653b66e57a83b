"""Joining the other ranks, which torchrun's environment variables name."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from mismatch_cli.base.errors import MismatchError, first_line
from mismatch_cli.processes.ranks import ALONE, World

# For the slowest rank at a barrier; a dead rank is noticed at once
PATIENCE = timedelta(minutes=30)
STOPPED = "MISMATCH_CLI_STOPPED"  # in the environment of ranks that start after Ctrl-C
_LAUNCHER_ACTS = 5  # seconds for the launcher to end this rank: it knows which rank died, and why
_PR_SET_PDEATHSIG = 1


def launched() -> bool:
    """Whether torchrun, or `--nproc`, started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def number_of_ranks(nproc: int) -> int:
    """How many processes there are or will be: as many as torchrun started, else `nproc`."""
    return int(os.environ["WORLD_SIZE"]) if launched() else nproc


def restarted() -> bool:
    """Whether this process replaces one that died, and resumes its work."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


@contextmanager
def joined(consequence: str) -> Iterator[World]:
    """This rank among the others, until the end of the block; `ALONE` if nobody launched several.

    Raises a `MismatchError` if the others are not found, and one that ends with the `consequence`
    if a rank is lost during the block.
    """
    if not launched():
        yield ALONE
        return
    if STOPPED in os.environ:
        raise KeyboardInterrupt
    import torch
    import torch.distributed as dist

    _end_with_launcher()
    world = World(
        int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", 0))
    )
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        _take_device(world.local_rank)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError, OSError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT')}"
        raise MismatchError(
            f"Rank {world.rank} did not find the other ranks at {address} ({first_line(error)}). "
            "Start all ranks with torchrun, or on one machine with --nproc, which chooses a free "
            "port."
        ) from error
    try:
        yield world
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise lost_rank(world, consequence) from error
    finally:
        if dist.is_initialized():  # closing an engine may have destroyed it
            dist.destroy_process_group()


def is_lost_rank(error: BaseException) -> bool:
    """Whether the network between ranks failed, not the computation."""
    if not isinstance(error, RuntimeError):
        return False
    # By name: torch may not be installed
    kinds = {kind.__name__ for kind in type(error).__mro__}
    message = str(error)
    return "DistError" in kinds or "gloo" in message or "Connection closed by peer" in message


def lost_rank(world: World, consequence: str) -> MismatchError:
    """The error for a rank that has lost another one; first waits for the launcher to end it."""
    time.sleep(_LAUNCHER_ACTS)
    return MismatchError(
        f"Another rank has ended, and rank {world.rank} cannot continue without it. {consequence}"
    )


def _take_device(number: int) -> None:
    import torch

    if number >= torch.cuda.device_count():
        raise MismatchError(
            f"There is no GPU for rank {number} on this machine: torch sees "
            f"{torch.cuda.device_count()}. Launch at most one rank per GPU."
        )
    torch.cuda.set_device(number)


def _end_with_launcher() -> None:
    """Die with the launcher: one that is killed cannot stop its ranks itself."""
    launcher = os.getppid()
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):  # not Linux
        return
    # A launcher that ended before the call above sends no signal.
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)
