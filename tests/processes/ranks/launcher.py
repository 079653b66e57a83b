"""`mismatch-cli … --nproc N` from a warm Python: its ranks are forks, made before it does anything.

All else is the launcher's own: torch's agent begins, watches, signals and restarts what are its
children. What stands in for a fork here, `python -m mismatch_cli` as a new process, is what
`test_ctrl_c_ends_ranks_that_have_just_begun` and the `--nproc` line of docs/training-runs.md do.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import psutil

from tests.warm import Forked, become

_NAME = 15  # PR_SET_NAME
_waiting: list[_Rank] = []


def launched(*arguments: str, ranks: int) -> Forked:
    """The command, with enough forks for this many ranks in total, restarted ones included."""
    return Forked("tests.processes.ranks.launcher", str(ranks), *arguments)


def ranks_of(launcher: int) -> dict[int, int]:
    """The process of each rank that has started, a fork or a new Python."""
    ranks = {}
    for child in psutil.Process(launcher).children():
        # It has just ended
        with suppress(psutil.Error):
            kind, _, number = child.name().partition(" ")
            rank = number if kind == "rank" else child.environ().get("RANK")
            if rank:
                ranks[int(rank)] = child.pid
    return ranks


class _Rank:
    """A child that waits for its rank's environment; torch's agent sees a `subprocess.Popen`."""

    def __init__(self) -> None:
        orders, self._orders = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            # Which the launcher passes on to all of its children
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for other in (*_waiting, self):
                os.close(other._orders)
            _serve(orders)
        os.close(orders)

    def begin(self, order: dict[str, Any]) -> None:
        with os.fdopen(self._orders, "w") as orders:
            json.dump(order, orders)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        code = self.poll()
        while code is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.02)
            code = self.poll()
        return code


def _serve(orders: int) -> None:
    with os.fdopen(orders) as file:
        order = file.read()
    if not order:
        # It is not needed
        os._exit(0)
    request = json.loads(order)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_NAME, f"rank {request['env']['RANK']}".encode(), 0, 0, 0)
    become(request)


def _begin(handler: Any, command: tuple[str, ...], env: dict[str, str]) -> _Rank:
    """Replaces `SubprocessHandler._popen`."""
    assert command[:4] == (sys.executable, "-P", "-m", "mismatch_cli"), command
    order = {"module": "mismatch_cli", "arguments": command[4:], "env": env}
    order |= {"folder": os.getcwd(), "stdout": "/dev/stdout", "stderr": "/dev/stderr"}
    for name, file in (("stdout", handler._stdout), ("stderr", handler._stderr)):
        if file:
            order[name] = file.name
    rank = _waiting.pop()
    rank.begin(order)
    return rank


def main(ranks: str, *arguments: str) -> None:
    for _ in range(int(ranks)):
        _waiting.append(_Rank())
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = _begin
    sys.argv = ["mismatch_cli", *arguments]
    runpy.run_module("mismatch_cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
