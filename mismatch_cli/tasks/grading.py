"""Rewards: the last boxed answer against the reference, by math-verify, in a worker that cannot hang the run."""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
from collections.abc import Iterable
from types import TracebackType

from mismatch_cli.errors import MismatchError

_BOX = re.compile(r"\\(?:boxed|fbox)\{")
_END_OF_THOUGHT = "</think>"
_PLAIN_INTEGER = re.compile(r"-?[0-9]{1,15}")
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
        self._process: subprocess.Popen[str] | None = None

    def grade(self, response: str, answer: str, finish_reason: str, *, in_thought: bool = False) -> float:
        """1 if the last `\\boxed{}` of a response equals the answer, else 0; a truncated response scores 0.

        `in_thought`: the prompt has opened a thought, and only what follows its one closing tag is the answer.
        """
        if in_thought:
            response = _after_the_thought(response)
        boxed = None if finish_reason == "length" else last_boxed(response)
        if boxed is None:
            return 0.0
        if _PLAIN_INTEGER.fullmatch(boxed) and _PLAIN_INTEGER.fullmatch(answer):
            return float(int(boxed) == int(answer))  # what the library says too, a thousand times sooner
        pair = (boxed, answer)
        if pair not in self._known:
            self._known[pair] = self._compare(boxed, answer)
        reward = self._known[pair]
        self.timeouts += reward is None
        return reward or 0.0

    @property
    def given_up(self) -> list[tuple[str, str]]:
        """The comparisons that took too long: with them a resumed run scores what the unbroken one did."""
        return [pair for pair, reward in self._known.items() if reward is None]

    def give_up(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Do not try these again."""
        self._known |= dict.fromkeys(pairs)

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _compare(self, boxed: str, answer: str) -> float | None:
        # Both as LaTeX boxes: the one form whose extent math-verify does not have to guess.
        try:
            reply = self._ask(json.dumps([_as_box(boxed), _as_box(answer)]))
        except OSError:  # the child died of this pair: out of memory, a crash in a parser
            reply = ""
        if reply in ("true", "false"):
            return float(reply == "true")
        self._stop()
        return None if reply is None else 0.0

    def _ask(self, line: str) -> str | None:
        """The child's reply; None when it takes too long, empty when the child is gone."""
        child = self._process or self._start()
        print(line, file=child.stdin, flush=True)
        return _read_line(child, self._seconds)

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "mismatch_cli.tasks._grading_worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if _read_line(self._process, _SECONDS_TO_START) != "ready":
            self._stop()
            raise MismatchError("The grading worker (math-verify) did not start. Try: python -c 'import math_verify'")
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None


def _after_the_thought(response: str) -> str:
    """Empty where the thought does not end, or where a second one ends: which of the two was the answer?"""
    _, closed, rest = response.partition(_END_OF_THOUGHT)
    return rest if closed and _END_OF_THOUGHT not in rest else ""


def _read_line(child: subprocess.Popen[str], seconds: float) -> str | None:
    """One short line; the child writes it whole, so it is there whole once there is anything."""
    assert child.stdout is not None
    readable, _, _ = select.select([child.stdout], [], [], seconds)
    return child.stdout.readline().strip() if readable else None


def _as_box(answer: str) -> str:
    inner = last_boxed(answer)
    return f"\\boxed{{{answer.strip().strip('$') if inner is None else inner}}}"


def last_boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{…}` or `\\fbox{…}`, braces balanced; None where there is none.

    Of nested boxes the inner one, whose content both share. One pass: responses can be long and hostile.
    """
    found, best_start, open_braces = None, -1, []
    boxes = {match.end() for match in _BOX.finditer(text)}
    for index, character in enumerate(text, start=1):
        if character == "{":
            open_braces.append(index)
        elif character == "}" and open_braces:
            start = open_braces.pop()
            if start in boxes and start > best_start:
                found, best_start = text[start : index - 1], start
    return found
