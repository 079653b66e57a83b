"""A child process that answers each line with a line and cannot hang its caller."""

import hashlib
import json
import os
import secrets
import selectors
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from mismatch_cli.base.child_python import command, users_environment
from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.processes.child_worker import READY

_SECONDS_TO_START = 60.0  # importing sympy on a slow disk
# Characters of a question that timed out; of a longer one only the hash is remembered
_LONGEST_KEPT = 2**16
_SECONDS_TO_END = 10.0  # for its keeper, which needs at most half of it
_LONGEST_ANSWER = 2**20  # bytes
_READ_BYTES = 2**16
_WROTE = "it wrote into a file descriptor that it had not opened"
_OUT_OF_TURN = json.dumps({"error": _WROTE})  # instead of an answer


def users_code(where: str, flag: str, kind: str, example: str) -> tuple[str, str]:
    """The file of FILE.py:NAME, and FILE.py:NAME with its full path; a `UsageError` where the
    file does not exist.
    """
    file, colon, name = where.rpartition(":")
    if not colon or not name.isidentifier() or not Path(file).is_file():
        raise UsageError(f"{flag} {where}: no such {kind}. Write it as path/to/file.py:{example}.")
    return file, f"{Path(file).resolve()}:{name}"


class Child:
    """Runs `python -m module arguments…`, which answers each line that it reads with one, the first
    with "ready".

    A question that takes too long is given up: the child is killed, the next question starts a new
    one, and the same question is not tried again. `cannot_start` is the error message if "ready"
    never comes; what the child printed after that word is in `said_at_start` once it has started.
    When the child ends, so does every process it started.

    A question begins with a secret that its answer repeats. So what foreign code writes into
    descriptors that it finds is never an answer: `ask` returns an object with an "error" instead,
    and ends the child. Code that searches the child's memory for the secret, or reads its questions
    before it does, can still forge one.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        cannot_start: str,
        seconds_to_start: float = _SECONDS_TO_START,
    ) -> None:
        self._command = command(module, *arguments)
        self._seconds_to_start, self._cannot_start = seconds_to_start, cannot_start
        self.said_at_start: str | None = None
        self._given_up: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._heard = bytearray()

    @property
    def given_up(self) -> list[str]:
        """The questions that took too long: with them, a resumed run equals an uninterrupted
        one.
        """
        return sorted(self._given_up)

    def give_up(self, questions: Iterable[str]) -> None:
        """Do not try these again."""
        self._given_up |= set(map(_remembered, questions))

    def ask(self, question: str, seconds: float) -> str | None:
        """The answer; None if the question was given up, empty if the child died of it (out of
        memory, a crash).
        """
        if _remembered(question) in self._given_up:
            return None
        unasked = None if self._process is None else self._hear(self._process, "", 0.0)
        if unasked == "":
            self.stop()  # it died between two questions (out of memory): not this one's fault
        answer = unasked or self._answer_to(question, self._process or self.start(), seconds)
        if answer is None:
            self.give_up([question])
        if answer in (None, "", _OUT_OF_TURN):
            self.stop()
        return answer

    def stop(self) -> None:
        """End the child and every process it started; unread output is lost."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()  # its keeper ends the rest
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process, as the first question does; a `MismatchError` if it does not get
        ready.
        """
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            env=users_environment(),
        )
        self._heard.clear()
        reply = self._answer_to("", self._process, self._seconds_to_start)
        ready, _, word = (reply or "").partition(" ")
        if ready != READY:
            self.stop()
            if reply == _OUT_OF_TURN:
                raise MismatchError(f"{self._command[-1]} failed: {_WROTE}. Run it by itself.")
            raise MismatchError(json.loads(reply) if reply else self._cannot_start)
        self.said_at_start = word
        return self._process

    def _answer_to(
        self, question: str, child: subprocess.Popen[bytes], seconds: float
    ) -> str | None:
        secret = secrets.token_hex(16)
        return self._hear(child, secret, seconds, f"{secret} {question}\n".encode())

    def _hear(
        self, child: subprocess.Popen[bytes], secret: str, seconds: float, unsent: bytes = b""
    ) -> str | None:
        """Send a question and wait for the answer with its secret: None after a timeout, empty if
        the pipe ends. Neither side blocks on a full pipe.
        """
        assert child.stdin is not None and child.stdout is not None
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as ready:
            ready.register(child.stdout, selectors.EVENT_READ)
            if unsent:
                os.set_blocking(child.stdin.fileno(), False)
                ready.register(child.stdin, selectors.EVENT_WRITE)
            try:
                # Children of foreign code keep the pipes that they inherit: a pipe may never end.
                # Waiting for its end could take forever: the line or the time decides.
                while (answer := self._answer(secret)) is None:
                    found = ready.select(max(0.0, until - time.monotonic()))
                    if not found:
                        return None
                    for key, _ in found:
                        if key.fileobj is child.stdin:
                            unsent = unsent[os.write(child.stdin.fileno(), unsent) :]
                            if not unsent:
                                ready.unregister(child.stdin)
                        elif not (received := os.read(child.stdout.fileno(), _READ_BYTES)):
                            return ""
                        else:
                            self._heard += received
            except OSError:
                return ""
            return answer

    def _answer(self, secret: str) -> str | None:
        """The line that has arrived, if it answers this question; empty if the child writes an
        endless one.
        """
        line, ended, rest = self._heard.partition(b"\n")
        if not ended:
            return "" if len(self._heard) > _LONGEST_ANSWER else None
        self._heard = rest
        repeated, _, text = line.decode(errors="replace").partition(" ")
        return text if secret and repeated == secret else _OUT_OF_TURN


def _remembered(question: str) -> str:
    return (
        question
        if len(question) <= _LONGEST_KEPT
        else hashlib.sha256(question.encode()).hexdigest()
    )
