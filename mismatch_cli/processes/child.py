"""A child process that runs a function of ours and cannot hang, flood or outlive its caller."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from mismatch_cli.base.child_python import python_command
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.processes import keeper

_SECONDS_TO_START = 60.0  # importing sympy on a slow disk
# Characters of a question that took too long; of a longer one only the hash is remembered
_LONGEST_REMEMBERED = 2**16
_SECONDS_TO_END = 10.0  # for its keeper, which needs at most half of it
_LONGEST_ANSWER = 2**20  # bytes
_LONGEST_QUEUE = 2**26  # bytes that a child has not read; what is told beyond them is dropped
_READ_BYTES = 2**16
_MOST_DESCRIPTORS = 2**16


class Reply(NamedTuple):
    """A child's answer, or why there is none."""

    value: Any = None
    error: str = ""


# These three are compared with `is`: a function's own error may have the same words
LATE = Reply(error="it takes too long")
DIED = Reply(error="its process died")
OUT_OF_TURN = Reply(error="it wrote into a file descriptor that it had not opened")


class Child:
    """Runs `function` in a process of its own: it takes the arguments, and returns what is called
    with each question, JSON in and JSON out. `ask` waits for the answer; `tell` does not.

    A question that takes too long is given up: the child is killed, the next question starts a new
    one, and the same question is not tried again. `cannot_start` is the error message if it does
    not get ready. What it prints goes to `log`. It ends with us, at once or, if it was told things,
    within `grace` seconds, and so does every process it started. `forks`: the function is a closure
    over what this process has, and runs in a fork of it; else it is found by its name.

    A question begins with a secret that its answer repeats. So what foreign code writes into
    descriptors that it finds is never an answer: `ask` returns `OUT_OF_TURN` instead, and ends the
    child. Code that searches the child's memory for the secret, or reads its questions before it
    does, can still forge one.
    """

    def __init__(
        self,
        function: Callable[..., keeper.Answer],
        *arguments: str,
        cannot_start: str = "",
        seconds_to_start: float = _SECONDS_TO_START,
        longest_answer: int = _LONGEST_ANSWER,
        log: Path | None = None,
        grace: float = 0.0,
        forks: bool = False,
    ) -> None:
        self._function = function
        self._arguments = arguments
        self._cannot_start = cannot_start
        self.seconds_to_start = seconds_to_start
        self._longest_answer = longest_answer
        self._log = log
        self._grace = grace
        self._forks = forks
        self._given_up: set[str] = set()
        self._process: subprocess.Popen[bytes] | _Fork | None = None
        self.dropped = 0  # messages

    @property
    def given_up(self) -> list[str]:
        """The questions that took too long: with them, a resumed run equals an uninterrupted
        one.
        """
        return sorted(self._given_up)

    def give_up(self, questions: Iterable[str]) -> None:
        """Do not try these questions again."""
        self._given_up |= set(map(_remembered, questions))

    @property
    def runs(self) -> bool:
        """Whether it was started, and not stopped since."""
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """The process of its keeper, while it runs."""
        if self._process is None:
            return None
        return self._process.pid

    def start(self) -> None:
        """Start the process, as the first question does; a `MismatchError` if it does not get
        ready.
        """
        self._begin()
        reply = self.receive(self.seconds_to_start) or LATE
        if not reply.error:
            return
        self.stop()
        if reply is OUT_OF_TURN:
            raise MismatchError(f"{self._arguments[-1]} failed: {reply.error}. Run it by itself.")
        has_no_reason = reply is LATE or reply is DIED
        if has_no_reason and self._cannot_start:
            raise MismatchError(self._cannot_start)
        raise MismatchError(reply.error)

    def ask(self, question: Any, seconds: float) -> Reply:
        """The answer; `LATE` if the question was given up, `DIED` if the child died of it (out of
        memory, a crash).
        """
        text = json.dumps(question, default=str)  # dates and the like as text
        if _remembered(text) in self._given_up:
            return LATE
        # What arrives before the question is not its answer, and ends the child below.
        reply = self.receive(0.0) if self.runs else None
        # A child that died between two questions, out of memory, did not die of this one.
        if reply is DIED:
            self.stop()
            reply = None
        if not self.runs:
            self.start()
        if reply is None:
            self._lines.send(text)
            reply = self.receive(seconds) or LATE
        if reply is LATE:
            self.give_up([text])
        if reply is LATE or reply is DIED or reply is OUT_OF_TURN:
            self.stop()
        return reply

    def tell(self, message: Any) -> None:
        """Send a message without waiting, to a child that this may start; dropped, and counted, if
        it has yet to read 64 MiB.
        """
        if not self.runs:
            self._begin()
        if len(self._lines.unsent) > _LONGEST_QUEUE:
            self.dropped += 1
        else:
            self._lines.send(json.dumps(message))

    def receive(self, seconds: float) -> Reply | None:
        """The next answer, if it arrives within so long; the first one says that the child is
        ready.
        """
        return self._lines.receive(seconds)

    @property
    def silence(self) -> float:
        """Seconds for which an answer has been due."""
        return self._lines.silence

    def finish(self, seconds: float) -> Reply:
        """Let a child that was told things do them all and close, then end it; the first error, or
        `LATE`.
        """
        self._lines.end()
        until = time.monotonic() + seconds
        reply = Reply()
        while self._lines.expected and not reply.error:
            reply = self.receive(max(0.0, until - time.monotonic())) or LATE
        self.stop()
        return reply

    def stop(self) -> None:
        """End the child and every process it started; unread output is lost."""
        if self._process is None:
            return
        process = self._process
        self._process = None
        process.terminate()  # its keeper ends the rest
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            end_group(process)
        self._lines.close()

    def _begin(self) -> None:
        """Start the process, and send the empty question that it answers once it is ready."""
        input_end, to_child = os.pipe()
        from_child, output_end = os.pipe()
        self._lines = _Lines(to_child, from_child, self._longest_answer)
        try:
            if self._forks:
                self._process = self._start_fork(input_end, output_end)
            else:
                self._process = self._start_python(input_end, output_end)
        except OSError:
            self._lines.close()
            raise
        finally:
            os.close(input_end)
            os.close(output_end)
        self._lines.send("")

    def _start_python(self, input_end: int, output_end: int) -> subprocess.Popen[bytes]:
        name = f"{self._function.__module__}:{self._function.__qualname__}"
        program = python_command(keeper.__name__, str(self._grace), name, *self._arguments)
        if self._log is None:
            return in_own_group(program, stdin=input_end, stdout=output_end)
        with self._log.open("ab") as log:
            return in_own_group(program, stdin=input_end, stdout=output_end, stderr=log)

    def _start_fork(self, input_end: int, output_end: int) -> _Fork:
        pid = os.fork()
        if pid:
            return _Fork(pid)
        try:
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(input_end, 0)
            os.dup2(output_end, 1)
            os.dup2(nothing, 2)
            # A fork has all that we have open, and would keep our locks for as long as it lives.
            os.closerange(3, _MOST_DESCRIPTORS)
            keeper.serve(lambda: self._function(*self._arguments), self._grace)
        finally:
            os._exit(1)


class _Lines:
    """Questions to a process and its replies, one a line; neither side blocks on a full pipe."""

    def __init__(self, to_child: int, from_child: int, longest: int) -> None:
        os.set_blocking(to_child, False)
        self._to_child = to_child
        self._from_child = from_child
        self._longest = longest  # bytes of a line
        self.unsent = bytearray()
        self._unread = bytearray()
        self.expected: deque[str] = deque()  # secrets of questions without an answer
        self._first_secret = ""
        self._ends_when_sent = False
        self._last_heard = time.monotonic()

    def send(self, question: str) -> None:
        """Queue a question, and write what the pipe takes."""
        secret = secrets.token_hex(16)
        self._first_secret = self._first_secret or secret
        self._expect(secret)
        self.unsent += f"{secret} {question}\n".encode()
        self._write()

    def end(self) -> None:
        """Close the pipe once all is sent: the child closes too, and repeats the first secret."""
        self._ends_when_sent = True
        self._expect(self._first_secret)
        self._write()

    def _expect(self, secret: str) -> None:
        if not self.expected:
            self._last_heard = time.monotonic()
        self.expected.append(secret)

    @property
    def silence(self) -> float:
        """Seconds since a reply arrived, or became due; 0 while none is due."""
        if not self.expected:
            return 0.0
        return time.monotonic() - self._last_heard

    def receive(self, seconds: float) -> Reply | None:
        """The next reply, if it arrives within so long; `DIED` if the pipe ends."""
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as ready:
            ready.register(self._from_child, selectors.EVENT_READ)
            if self.unsent:
                ready.register(self._to_child, selectors.EVENT_WRITE)
            # Children of foreign code keep the pipes that they inherit: a pipe may never end.
            # Waiting for its end could take forever: the line or the time decides.
            while True:
                reply = self._next_reply()
                if reply is not None:
                    return reply
                events = ready.select(max(0.0, until - time.monotonic()))
                if not events:
                    return None
                for key, _ in events:
                    if key.fd == self._from_child:
                        received = os.read(self._from_child, _READ_BYTES)
                        if not received:
                            return DIED
                        self._unread += received
                    else:
                        self._write()
                        if not self.unsent:
                            ready.unregister(key.fd)

    def _write(self) -> None:
        try:
            while self.unsent:
                written = os.write(self._to_child, self.unsent)
                del self.unsent[:written]
        except BlockingIOError:
            return
        except OSError:
            # The child has ended and reads no more; what it answered before can still be read.
            self.unsent.clear()
        if self._ends_when_sent:
            self._ends_when_sent = False
            os.close(self._to_child)
            self._to_child = -1

    def _next_reply(self) -> Reply | None:
        """The reply in the next line; None until a whole line has arrived, `DIED` if the child
        writes an endless one, `OUT_OF_TURN` if the secret is not that of the oldest question.
        """
        end = self._unread.find(b"\n")
        if end < 0:
            is_endless = len(self._unread) > self._longest
            return DIED if is_endless else None
        secret, _, text = self._unread[:end].decode(errors="replace").partition(" ")
        del self._unread[: end + 1]
        self._last_heard = time.monotonic()
        if not self.expected or secret != self.expected.popleft():
            return OUT_OF_TURN
        try:
            return Reply(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            # Foreign code has changed the functions that answer: no later reply can be trusted.
            return DIED

    def close(self) -> None:
        """Close both pipes."""
        if self._to_child >= 0:
            os.close(self._to_child)
        os.close(self._from_child)


class _Fork:
    """A fork of this process: as much of `Popen` as an end needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, seconds: float = inf) -> None:
        """Reap it; a `TimeoutExpired` if it lives longer."""
        until = time.monotonic() + seconds
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("fork", seconds)
            time.sleep(0.002)


def in_own_group(program: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program in a process group of its own, which Ctrl-C does not reach; by default it
    reads and prints nothing. `options` are those of `Popen`.
    """
    nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    return subprocess.Popen(program, start_new_session=True, **{**nothing, **options})


def end_group(process: subprocess.Popen[bytes] | _Fork) -> None:
    """Kill a process that is the first of its group, with the group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _remembered(question: str) -> str:
    if len(question) <= _LONGEST_REMEMBERED:
        return question
    return hashlib.sha256(question.encode()).hexdigest()
