"""The other end of `Child`: a process that answers lines until its parent is gone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from mismatch_cli.tasks._keeper import stand_guard

READY = "ready"


def answer_lines(prepare: Callable[[], Callable[[str], str]], *, memory: int | None) -> None:
    """Say "ready" when `prepare` is done (or the error, if it raises one), then answer each line with its callable.

    A line is a number and a question, its answer the same number and one line. What the callable prints, reads or forks
    touches neither: both ends are out of its reach, and a process that it forked does not answer.
    """
    stand_guard(memory)
    questions, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    worker = os.getpid()
    try:
        answer = prepare()
    except BaseException as error:
        if os.getpid() != worker:
            raise
        _say(answers, b"0", json.dumps(str(error) or type(error).__name__))
        os._exit(1)  # whatever was started by then may not want to end
    if os.getpid() == worker:
        _say(answers, b"0", READY)
    for line in questions:
        number, _, question = line.partition(b" ")
        reply = answer(question.decode())
        if os.getpid() != worker:
            os._exit(0)
        _say(answers, number, reply)
    os._exit(0)


def _say(answers: int, number: bytes, reply: str) -> None:
    left = memoryview(number + b" " + reply.encode(errors="backslashreplace") + b"\n")
    while left:
        left = left[os.write(answers, left) :]
