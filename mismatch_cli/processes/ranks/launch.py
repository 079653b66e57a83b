"""Launching a command as several ranks on one machine with torch's elastic agent: what `--nproc`
does.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mismatch_cli.base.child_python import python_command
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.processes.ranks.joined import STOPPED

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

_PATIENCE = 30  # seconds for the other ranks to end when one has died, before they are killed
_FAULT = "mismatch-cli: "  # how a rank's error message begins


def launch(nproc: int, arguments: Sequence[str], *, max_restarts: int, consequence: str) -> int:
    """Run `mismatch-cli ARGUMENTS` as `nproc` ranks, the first of them on this terminal.

    If one dies, the others are ended and all start again, at most `max_restarts` times;
    `restarted()` tells them to resume. Ctrl-C reaches the ranks; a second one ends them. Returns
    the exit code if the first rank has reported what is wrong. Raises a `MismatchError` with
    another rank's error, or with the signal that killed a rank and the `consequence`.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    with (
        tempfile.TemporaryDirectory(prefix="mismatch-cli-ranks-") as logs,
        _environment_of_ranks(nproc),
        _interrupts_passed_on() as interrupts,
    ):
        program, *words = python_command("mismatch_cli", *arguments)
        try:
            elastic_launch(_configuration(nproc, max_restarts, logs), program)(*words)
        except ChildFailedError as failed:
            if interrupts:
                raise KeyboardInterrupt from failed
            rank, failure = failed.get_first_failure()
            if failure.exitcode < 0:
                killer = signal.Signals(-failure.exitcode).name
                raise MismatchError(f"Rank {rank} was killed ({killer}). {consequence}") from failed
            if rank == 0:
                return failure.exitcode
            message = _last_message(Path(logs), rank)
            raise MismatchError(f"Rank {rank}: {message}") from failed
    if interrupts:
        raise KeyboardInterrupt
    return 0


def _configuration(nproc: int, max_restarts: int, logs: str) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        local_addr="localhost",
        max_restarts=max_restarts,
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
        shutdown_timeout=_PATIENCE,
        # Only the first rank prints on this terminal.
        logs_specs=DefaultLogsSpecs(logs, redirects=dict.fromkeys(range(1, nproc), Std.ALL)),
    )


@contextmanager
def _environment_of_ranks(nproc: int) -> Iterator[None]:
    """Set the environment of the ranks and silence the launcher; afterwards restore both."""
    before = dict(os.environ)
    disabled_level = logging.root.manager.disable
    logging.disable()  # it reports every fault in 20 lines
    # torch's launcher shares its store with the ranks, and keeps it when it starts them again.
    # There a restarted rank would find the addresses of dead ones, and wait for them.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    threads = max(1, (os.cpu_count() or 1) // nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    try:
        yield
    finally:
        logging.disable(disabled_level)
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _interrupts_passed_on() -> Iterator[list[int]]:
    """Pass Ctrl-C on to the ranks, which are not attached to this terminal; yields the list of
    signals received.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    interrupts: list[int] = []

    def on_signal(number: int, _: object) -> None:
        interrupts.append(number)
        # For ranks that start later: Ctrl-C may kill one while Python starts
        os.environ[STOPPED] = "1"
        if len(interrupts) > 1:
            raise SignalException("interrupted twice", signal.SIGINT)
        for rank in _children():
            os.kill(rank, signal.SIGINT)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield interrupts
    except SignalException as error:
        if not interrupts:
            raise SystemExit(128 + error.sigval) from error
        raise KeyboardInterrupt from error
    finally:
        signal.signal(signal.SIGINT, before)


def _children() -> list[int]:
    """The processes that this one has started."""
    numbers: list[str] = []
    for thread in Path("/proc/self/task").iterdir():
        numbers += (thread / "children").read_text().split()
    return list(map(int, numbers))


def _last_message(logs: Path, rank: int) -> str:
    """The last message of a rank, from its latest attempt."""
    files = sorted(
        logs.glob(f"*/attempt_*/{rank}/stderr.log"), key=lambda path: path.stat().st_mtime
    )
    lines = files[-1].read_text(errors="replace").splitlines() if files else []
    lines.reverse()
    # Libraries may print after our own sentence, which says more.
    for line in lines:
        if line.startswith(_FAULT):
            return line.removeprefix(_FAULT)
    for line in lines:
        if line.strip():
            return line
    return "it ended without a message. Try again with MISMATCH_DEBUG=1."
