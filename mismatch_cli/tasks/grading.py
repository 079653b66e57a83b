"""Rewards: the last boxed answer against the reference, by math-verify, in a worker that cannot hang the run."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import TracebackType

from mismatch_cli.errors import MismatchError

_SECONDS_TO_START = 60.0  # importing sympy on a slow disk


class Grader:
    """Compares answers in a child process, which is killed and started anew when a comparison takes too long.

    A context manager: the child ends with it. Equal pairs are compared once. `timeouts` counts responses that scored
    0 because their comparison was given up.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._known: dict[tuple[str, str], float | None] = {}  # None = given up
        self.timeouts = 0
        self._process: mp.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def grade(self, response: str, answer: str, finish_reason: str) -> float:
        """1 if the last `\\boxed{}` of a response equals the answer, else 0; a truncated response scores 0."""
        boxed = None if finish_reason == "length" else last_boxed(response)
        if boxed is None:
            return 0.0
        pair = (boxed, answer)
        if pair not in self._known:
            self._known[pair] = self._compare(boxed, answer)
        reward = self._known[pair]
        self.timeouts += reward is None
        return reward or 0.0

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _compare(self, boxed: str, answer: str) -> float | None:
        connection = self._connection or self._start()
        try:
            connection.send((boxed, answer))
            if connection.poll(self._seconds):
                return float(connection.recv())
        except (EOFError, OSError):  # the child died of this pair: out of memory, a crash in a parser
            self._stop()
            return 0.0
        self._stop()
        return None

    def _start(self) -> Connection:
        context = mp.get_context("spawn")  # a fork would inherit the engine's threads and locks
        parent, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child,), daemon=True)
        self._process.start()
        child.close()
        if not parent.poll(_SECONDS_TO_START):
            self._stop()
            raise MismatchError("The grading worker (math-verify) did not start. Try: python -c 'import math_verify'")
        parent.recv()
        self._connection = parent
        return parent

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


def _serve(connection: Connection) -> None:
    """The child: one comparison per message until the parent is gone."""
    import logging
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    logging.disable()  # math-verify warns that its own timeouts are off; ours is the parent's clock
    from math_verify import parse, verify

    connection.send("ready")
    for boxed, answer in _messages(connection):
        # Both as LaTeX boxes: the one form whose extent math-verify does not have to guess.
        gold = parse(_as_box(answer), parsing_timeout=None)
        found = parse(_as_box(boxed), parsing_timeout=None)
        connection.send(bool(verify(gold, found, timeout_seconds=None)))


def _messages(connection: Connection) -> Iterator[tuple[str, str]]:
    while True:
        try:
            yield connection.recv()
        except EOFError:
            return


def _as_box(answer: str) -> str:
    inner = last_boxed(answer)
    return f"\\boxed{{{answer.strip().strip('$') if inner is None else inner}}}"


def last_boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{…}` (or `\\fbox{…}`) with balanced braces; None where there is none."""
    best, where = None, -1
    for command in ("\\boxed{", "\\fbox{"):
        start = text.rfind(command)
        while start > where:
            content = _balanced(text, start + len(command))
            if content is not None:
                best, where = content, start
                break
            start = text.rfind(command, 0, start)
    return best


def _balanced(text: str, start: int) -> str | None:
    depth = 1
    for index in range(start, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return text[start:index]
    return None
