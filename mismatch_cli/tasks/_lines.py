"""The other end of `Child`: a process that answers lines until its parent is gone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

_LONGEST = 120  # seconds; the parent gives up long before


def answer_lines(prepare: Callable[[], Callable[[str], str]]) -> None:
    """Say "ready" when `prepare` is done (or the error, if it raises one), then answer each line with its callable."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a library that prints must not answer in our place
    try:
        answer = prepare()
    except Exception as error:
        print(str(error), file=answers, flush=True)
        return
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        signal.alarm(_LONGEST)  # the default action ends this process: a killed parent leaves no child that computes on
        print(answer(line), file=answers, flush=True)
        signal.alarm(0)  # waiting for the next line is no work
