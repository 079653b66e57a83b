"""The other end of `Child`: a process that answers lines until its parent is gone.

A keeper process separates us from the code that it runs and ends everything that this code started,
however we end ourselves. Processes that foreign code starts may leave their process group, outlive
their parent, and hold any pipe that they inherited. On Linux the keeper becomes the parent of every
such orphan, so it finds and ends them all; elsewhere it ends the process group.
"""

import contextlib
import ctypes
import importlib.util
import inspect
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mismatch_cli.base import memory

_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # prctl(2)
_LOOKS_UP_AFTER = 0.5  # seconds between checks whether the parent has died
_SECONDS_TO_END = 5.0  # then a process that the system cannot kill is left behind
_FIRST_TO_GO = b"1000"  # when the machine runs out of memory; see oom_score_adj in proc(5)


def stand_guard(memory: int | None) -> None:
    """Fork: the process that returns does the work, with at most `memory` bytes, and the other one
    is its keeper.

    The keeper ends everything when the worker has ended, on SIGTERM, or when its parent is gone.
    """
    parent = os.getppid()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    terminated: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: terminated.append(1))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Processes of foreign code may leave their group and outlive their parent.
    # As the parent of every orphan, the keeper finds them all; else they would outlive the run.
    _prctl(_SET_SUBREAPER, 1)
    worker = os.fork()
    if worker:
        try:
            for inherited in (0, 1, 2):
                os.close(inherited)
            while not terminated and os.getppid() == parent and not _has_ended(worker):
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
    """End this newly forked process with its parent (on Linux only)."""
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _bound_memory(memory: int | None) -> None:
    """Raise MemoryError beyond `memory`; if the machine runs out, this process is killed before
    the run.
    """
    import resource

    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_FIRST_TO_GO)
    if memory is not None:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        bound = memory if most == resource.RLIM_INFINITY else min(memory, most)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, most))


def _has_ended(worker: int) -> bool:
    """Reap all children that have ended, orphans included; whether the worker is among them."""
    try:
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            if pid == worker:
                return True
    except ChildProcessError:
        return True
    return False


def _end_all(worker: int) -> None:
    """Kill the worker's group, then child after child: orphans of each become children of this
    process.
    """
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


def _kill(kill: Callable[[int, int], None], target: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(target, signal.SIGKILL)


def _children() -> list[int]:
    try:
        return [
            int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        ]
    except OSError:
        return []


READY = "ready"
_MODULE = "_own_reward"  # not the file's name, which a library may have too
SHOWN = 300  # characters of an error
_SHARE = 0.9  # of the memory that is free at the start


def answer_lines(
    prepare: Callable[[], tuple[Callable[[str], str], str]], *, limit: int | None
) -> None:
    """Answer "ready" when `prepare` is done (or the error that it raises), then each line with its
    callable.

    After "ready" comes the word that `prepare` returns with the callable.

    A line is a secret and a question, its answer the same secret and one line; "ready" answers the
    first. `limit` is in bytes. What the callable prints, reads or forks does not interfere: a
    process that it forks does not answer, and its stdin and stdout are neither pipe. It can find
    the pipes among its descriptors, but not what to write there.
    """
    stand_guard(limit)
    questions, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    worker, secret = os.getpid(), questions.readline().strip()
    try:
        answer, word = prepare()
    except BaseException as error:
        if os.getpid() != worker:
            raise
        _say(answers, secret, json.dumps(str(error) or type(error).__name__))
        os._exit(1)  # threads that it started may never end
    if os.getpid() == worker:
        _say(answers, secret, f"{READY} {word}".strip())
    for line in questions:
        secret, _, question = line.partition(b" ")
        reply = answer(question.decode())
        if os.getpid() != worker:
            os._exit(0)
        _say(answers, secret, reply)
    os._exit(0)


def _say(answers: int, secret: bytes, reply: str) -> None:
    left = memoryview(secret + b" " + reply.encode(errors="backslashreplace") + b"\n")
    while left:
        left = left[os.write(answers, left) :]


def most_memory() -> int | None:
    """The memory for a user's code, in bytes: most of what is free now."""
    free = memory.free()
    return None if free is None else int(_SHARE * free)


def in_words(error: BaseException) -> str:
    try:
        message = str(error)[:SHOWN]
    except BaseException:  # the user's own exception may raise another
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def load(file: str, name: str, given_as: str) -> tuple[Callable[..., Any], list[str], list[str]]:
    """A user's function (or class), the names of its parameters, and those without a default."""
    spec = importlib.util.spec_from_file_location(_MODULE, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses look up their annotations here
    sys.path.insert(0, str(Path(file).parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise ValueError(f"{file} cannot be loaded ({in_words(error)}).") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{file} has no function '{name}'. Give {given_as}.")
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return function, [p.name for p in named], [p.name for p in named if p.default is p.empty]
