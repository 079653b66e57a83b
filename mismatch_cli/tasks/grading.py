"""Rewards: the last boxed answer against the reference, by math-verify, in a worker that cannot hang the run."""

from __future__ import annotations

import json
import re
from types import TracebackType

from mismatch_cli.tasks._child import Child

_BOX = re.compile(r"\\(?:boxed|fbox)\{")
_END_OF_THOUGHT = "</think>"
_PLAIN_INTEGER = re.compile(r"-?[0-9]{1,15}")


class Grader:
    """Compares answers in a child process, which is killed and started anew when a comparison takes too long.

    A context manager: the child ends with it. Equal pairs are compared once. `timeouts` counts responses that scored
    0 because their comparison was given up.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        self._known: dict[tuple[str, str], float] = {}
        self.timeouts = 0
        self.child = Child(
            "mismatch_cli.tasks._grading_worker", seconds=seconds,
            cannot_start="The grading worker (math-verify) did not start. Try: python -c 'import math_verify'",
        )  # fmt: skip

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
        if pair in self._known:
            return self._known[pair]
        reply = self._compare(boxed, answer)
        if reply is None:
            self.timeouts += 1
            return 0.0
        return self._known.setdefault(pair, reply)

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.child.stop()

    def _compare(self, boxed: str, answer: str) -> float | None:
        """None where it was given up: it took too long, or two children died of it (the first may be the machine's)."""
        # Both as LaTeX boxes: the one form whose extent math-verify does not have to guess.
        question = json.dumps([_as_box(boxed), _as_box(answer)])
        reply = self.child.ask(question) or self.child.ask(question)  # what took too long is not tried again
        if not reply:
            self.child.give_up([question])
        return float(reply == "true") if reply else None


def _after_the_thought(response: str) -> str:
    """Empty where the thought does not end, or where a second one ends: which of the two was the answer?"""
    _, closed, rest = response.partition(_END_OF_THOUGHT)
    return rest if closed and _END_OF_THOUGHT not in rest else ""


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
