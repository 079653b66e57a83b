"""A kill or a failure before every file operation of a command, for tests and for `kills.py
operations`.

The command runs in a fork of this process, whose imports are done. An audit hook, and wrappers of
what has no audit event, count its operations on paths inside one folder; before the chosen one the
process kills itself, or the operation fails as on a full disk, on a lost network file system or
without permission: once, or from then on.
"""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

KILL = "SIGKILL"
ERRORS = ("ESTALE", "ENOSPC", "EACCES")
# The audit events of operations, and where their paths and the descriptors of their folders are
# among the arguments.
_CHANGES = {
    "os.mkdir": ((0, 2),), "os.rmdir": ((0, 1),), "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((0, 2), (1, 3)), "os.symlink": ((1, 2),), "os.truncate": ((0, None),),
    "os.utime": ((0, 3),),
}  # fmt: skip
_READS = {"os.listdir": ((0, None),), "os.scandir": ((0, None),)}
_WITHOUT_EVENT = ("stat", "lstat", "fsync")  # only the last is a change
_NEVER = 10**9
_CRASHED = 70  # an exit code
_SAID = 4000  # characters


@dataclass(frozen=True)
class Fault:
    """What happens before the operation with this number."""

    at: int
    what: str  # KILL or the name of an error
    stays: bool = False  # an error comes at all later operations too

    def __str__(self) -> str:
        return f"{self.what} {'from' if self.stays else 'at'} operation {self.at}"


@dataclass(frozen=True)
class Outcome:
    """How a fork ended: its exit code (negative: the signal), its stderr, its file operations,
    what it imported.
    """

    code: int
    said: str
    operations: tuple[str, ...]
    modules: tuple[str, ...]

    def preload(self) -> None:
        """Import here what the action imported: later forks save the time, and nothing has been
        computed.
        """
        for name in self.modules:
            with suppress(Exception):
                importlib.import_module(name)


def attempt(action: Callable[[], int], inside: Path, fault: Fault | None = None) -> Outcome:
    """Run an action in a fork, with a fault among its operations in the folder `inside`."""
    reading, writing = os.pipe()
    # What is still buffered here would be printed a second time by the fork
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _in_the_fork(action, _Counter(str(inside.absolute()), fault), writing)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # A fork that was killed has told nothing
    if not answer:
        return Outcome(code, "", (), ())
    report = json.loads(answer)
    return Outcome(code, report["said"], tuple(report["operations"]), tuple(report["modules"]))


def _in_the_fork(action: Callable[[], int], counter: _Counter, pipe: int) -> None:
    said, code = io.StringIO(), _CRASHED
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            counter.start()
            try:
                code = action()
            finally:
                counter.on = False
    except BaseException as error:
        said.write(f"Traceback: {type(error).__name__}: {error}")
    finally:
        report = {
            "said": said.getvalue()[-_SAID:],
            "operations": counter.operations,
            "modules": list(sys.modules),
        }
        with open(pipe, "w", encoding="utf-8") as out:
            json.dump(report, out)
        os._exit(code)


class _Counter:
    """Counts the operations of this process in a folder, and brings the fault; a kill counts
    changes only.
    """

    def __init__(self, inside: str, fault: Fault | None) -> None:
        self._inside, self._fault = inside, fault
        self._reads = fault is not None and fault.what != KILL
        self.operations: list[str] = []
        self.on = False

    def start(self) -> None:
        for name in _WITHOUT_EVENT:
            setattr(os, name, self._counted(name, getattr(os, name)))
        sys.addaudithook(self._hear)
        self.on = True

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(path: Any, *more: Any, **named: Any) -> Any:
            if self.on and (self._reads or name == "fsync"):
                self._count(name, [_path(path, named.get("dir_fd"))])
            return real(path, *more, **named)

        return operation

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, _, flags = arguments
            if self._reads or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self._count("open", [_path(path, None)])
        elif event in _CHANGES or (self._reads and event in _READS):
            paths = []
            for path_at, folder_at in (_CHANGES | _READS)[event]:
                folder = None if folder_at is None else arguments[folder_at]
                paths.append(_path(arguments[path_at], folder))
            self._count(event, paths)

    def _count(self, name: str, paths: list[str]) -> None:
        if not any(path.startswith(self._inside) for path in paths):
            return
        shown = " → ".join(path.removeprefix(self._inside) for path in paths)
        self.operations.append(f"{name} {shown}")
        fault, number = self._fault, len(self.operations)
        if fault is None or number < fault.at or (number > fault.at and not fault.stays):
            return
        if fault.what == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        kind = getattr(errno, fault.what)
        raise OSError(kind, os.strerror(kind), paths[0])


def _path(path: Any, folder: Any) -> str:
    """An absolute path, from what an operation was given: a name, a descriptor, or a name in an
    open folder.
    """
    if isinstance(path, int):
        return _of_descriptor(path)
    try:
        text = os.fsdecode(path)
    except TypeError:
        return ""
    if os.path.isabs(text):
        return text
    around = _of_descriptor(folder) if isinstance(folder, int) and folder >= 0 else os.getcwd()
    return os.path.join(around, text)


def _of_descriptor(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def faults(
    action: Callable[[], int], prepare: Callable[[], Path], *, step: int = 1
) -> Iterator[Fault]:
    """A kill before each change that an action makes in a folder, and errors of all kinds before
    each operation.

    `prepare` makes the folder as it was. With a `step`, only every so many.
    """
    changes = len(attempt(action, prepare(), Fault(_NEVER, KILL)).operations)
    operations = len(attempt(action, prepare(), Fault(_NEVER, "ESTALE")).operations)
    assert changes, "the action changes nothing"
    for at in range(1, changes + 1, step):
        yield Fault(at, KILL)
    kinds = cycle(product((False, True), ERRORS))
    for at, (stays, what) in zip(range(1, operations + 1, step), kinds, strict=False):
        yield Fault(at, what, stays)
