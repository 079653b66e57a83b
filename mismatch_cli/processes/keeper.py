"""The other end of `Child`: a keeper, and the worker that it keeps.

`python -m mismatch_cli.processes.keeper SECONDS MODULE:FUNCTION ARGUMENTS…` is both. The worker
calls FUNCTION with the arguments, and then what it returns with each question. The keeper separates
us from what runs there, and ends everything that it started, however we end ourselves. Processes
that foreign code starts may leave their process group, outlive their parent, and hold any pipe that
they inherited. On Linux the keeper becomes the parent of every such orphan, so it finds and ends
them all; elsewhere it ends the process group.
"""

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from mismatch_cli.base import memory
from mismatch_cli.processes.users_code import describe_error, load_in_pool

Answer = Callable[[Any], Any]  # JSON in, JSON out
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG in prctl(2)
_SET_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_LOOKS_UP_AFTER = 0.5  # seconds between checks whether the parent has died
_SECONDS_TO_END = 5.0  # afterwards a process that the system cannot kill is left behind
_FIRST_TO_GO = b"1000"  # when the machine runs out of memory; see oom_score_adj in proc(5)
_SHARE = 0.9  # of the memory that is free at the start


def stand_guard(grace: float = 0.0) -> None:
    """Fork: the process that returns does the work, and the other one is its keeper.

    The keeper ends everything when the worker has ended, on SIGTERM, or when its parent is gone, in
    that case after `grace` seconds.
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
    # A parent's thread that ends sends it too, so it only wakes the keeper
    _prctl(_SET_DEATH_SIGNAL, signal.SIGCHLD)
    worker = os.fork()
    if worker:
        try:
            for inherited in (0, 1, 2):
                os.close(inherited)
            _wait_for_end(worker, parent, grace, terminated, woken)
            _end_all(worker)
        finally:
            os._exit(0)
    os.setsid()
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.close(woken)
    os.close(wake)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_FIRST_TO_GO)


def _wait_for_end(
    worker: int, parent: int, grace: float, terminated: list[int], woken: int
) -> None:
    """Wait until the worker has ended, SIGTERM is in `terminated`, or the parent has been gone for
    `grace` seconds.
    """
    until = inf
    while not terminated and not _has_ended(worker):
        if os.getppid() != parent:
            until = min(until, time.monotonic() + grace)
            if time.monotonic() >= until:
                return
        signalled, _, _ = select.select([woken], [], [], _LOOKS_UP_AFTER)
        if signalled:
            os.read(woken, 512)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _has_ended(worker: int) -> bool:
    """Reap all children that have ended, orphans included; whether the worker is among them."""
    try:
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return False
            if pid == worker:
                return True
    except ChildProcessError:
        return True


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
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    try:
        return list(map(int, children.read_text().split()))
    except OSError:
        return []


def bound_memory(most: int | None) -> None:
    """Let this process raise MemoryError beyond so many bytes; None changes nothing."""
    if most is None:
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def most_memory() -> int | None:
    """The memory for a user's code, in bytes: most of what is free now; None if unknown."""
    free = memory.free()
    if free is None:
        return None
    return int(_SHARE * free)


def serve(prepare: Callable[[], Answer], grace: float = 0.0) -> NoReturn:
    """Answer lines of stdin until it ends: the first when `prepare` is done, each other one by what
    it returned.

    A line is a secret and a question in JSON, its answer the same secret and `{"value": …}`, or
    `{"error": …}` for an exception. At the end `close` of the answering object is called, if it has
    one, and the first line is answered once more. What the code prints goes to stderr; what it
    reads or forks does not interfere: a process that it forks does not answer, and its stdin and
    stdout are neither pipe. It can find the pipes among its descriptors, but not what to write
    there.
    """
    stand_guard(grace)
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.dup(1)
    # Foreign code reads and prints as it likes: its stdin is empty, its stdout our stderr.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    first_secret = questions.readline().strip()
    # Preparing is answered like a question: what it raises is a reply too.
    prepared: list[Answer] = []
    reply = _reply_of(lambda _: prepared.append(prepare()), None)
    _send(answers, first_secret, reply)
    # Threads that foreign code started may never end, so nothing here waits for them.
    if not prepared:
        os._exit(1)
    answer = prepared[0]
    for line in questions:
        secret, _, question = line.partition(b" ")
        _send(answers, secret, _reply_of(answer, json.loads(question)))
    close = getattr(answer, "close", lambda: None)
    _send(answers, first_secret, _reply_of(lambda _: close(), None))
    os._exit(0)


def _reply_of(answer: Answer, question: Any) -> str:
    """What a function answers, or the error that it raises, as JSON; never returns in a process
    that it has forked.
    """
    worker = os.getpid()
    try:
        reply = json.dumps({"value": answer(question)})
    except BaseException as error:  # SystemExit and KeyboardInterrupt like any other
        if os.getpid() != worker:
            raise
        reply = json.dumps({"error": describe_error(error)})
    if os.getpid() != worker:
        os._exit(0)
    return reply


def _send(answers: int, secret: bytes, reply: str) -> None:
    unsent = memoryview(secret + b" " + reply.encode() + b"\n")
    with contextlib.suppress(BrokenPipeError):  # the parent is gone: the questions will end too
        while unsent:
            written = os.write(answers, unsent)
            unsent = unsent[written:]


def _main(grace: str, function: str, *arguments: str) -> NoReturn:
    module, _, name = function.partition(":")

    def prepare() -> Answer:
        answer: Answer = getattr(importlib.import_module(module), name)(*arguments)
        return answer

    serve(prepare, float(grace))


# A process of a pool that a user's code started: it looks up names by their module
if __name__ == "__mp_main__":
    load_in_pool(sys.argv[-1])
if __name__ == "__main__":
    _main(*sys.argv[1:])
