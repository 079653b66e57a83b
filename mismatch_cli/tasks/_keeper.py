"""The process between us and foreign code: it ends with all that came of that code, however we ended ourselves.

What foreign code starts may leave its process group, outlive the process that started it, and hold any pipe that it
inherited. On Linux the keeper is made the parent of every such orphan, so that it finds and ends them all; elsewhere it
ends the process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # prctl(2)
_LOOKS_UP_AFTER = 0.5  # seconds after which it is noticed that whoever asked has died
_SECONDS_TO_END = 5.0  # a process that the system itself cannot end is left behind
_FIRST_TO_GO = b"1000"  # when the machine runs out of memory; see oom_score_adj in proc(5)


def stand_guard(memory: int | None) -> None:
    """Fork. The process that returns is to do the work, with at most `memory` bytes; the other one keeps watch.

    The keeper ends everything when the worker has ended, when it is told to (SIGTERM), or when its parent is gone.
    """
    parent = os.getppid()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _prctl(_SET_SUBREAPER, 1)
    worker = os.fork()
    if worker:
        try:
            for inherited in (0, 1, 2):
                os.close(inherited)
            while not told and os.getppid() == parent and not _has_ended(worker):
                if select.select([woken], [], [], _LOOKS_UP_AFTER)[0]:
                    os.read(woken, 512)
            _end_all(worker)
        finally:
            os._exit(0)
    os.setsid()
    die_with_parent()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.close(woken)
    os.close(wake)
    _bound_memory(memory)


def die_with_parent() -> None:
    """This process, just forked, is not to outlive the one that forked it; elsewhere than on Linux it may."""
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _bound_memory(memory: int | None) -> None:
    """More than `memory` is a MemoryError; where the whole machine has no more, this process goes before the run."""
    import resource

    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_FIRST_TO_GO)
    if memory is not None:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        bound = memory if most == resource.RLIM_INFINITY else min(memory, most)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, most))


def _has_ended(worker: int) -> bool:
    """Whether the worker is among the children that have ended; those are taken note of, orphans too."""
    try:
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            if pid == worker:
                return True
    except ChildProcessError:
        return True
    return False


def _end_all(worker: int) -> None:
    """The worker's group, and then child after child: what one of them leaves becomes a child of this process."""
    _kill(os.killpg, worker)
    until = time.monotonic() + _SECONDS_TO_END
    while time.monotonic() < until:
        for pid in _children():
            _kill(os.kill, pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _kill(how: Callable[[int, int], None], target: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(target, signal.SIGKILL)


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []
