"""What a response earns and teaches: math-verify or a user's function, in a worker that cannot hang the run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.batch import Rollout
from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.tasks._child import Child
from mismatch_cli.tasks._worker import ARGUMENTS
from mismatch_cli.tasks.prompts import Problem

if TYPE_CHECKING:
    import numpy as np


def group_mean_advantages(reward_S: np.ndarray, prompt_id_S: np.ndarray) -> np.ndarray:
    """Reward minus the mean of its group (the samples of one prompt), without division by the standard deviation.

    A_i = R_i − mean_{j in group} R_j, float32, shape _S. A group of one, or with equal rewards, gets zeros: it teaches
    nothing. Source: Dr. GRPO; arXiv 2602.04879, section 4.1 and App. C.1.
    """
    import numpy as np

    _, group_S = np.unique(prompt_id_S, return_inverse=True)
    sums_G = np.bincount(group_S, weights=reward_S)
    return (reward_S - (sums_G / np.bincount(group_S))[group_S]).astype(np.float32)


_BOX = re.compile(r"\\(?:boxed|fbox)\{")
_END_OF_THOUGHT = "</think>"
_PLAIN_INTEGER = re.compile(r"-?[0-9]{1,15}")


class MathVerify:
    """Compares answers in a child process, which is killed and started anew when a comparison takes too long.

    A context manager: the child ends with it. Equal pairs are compared once. `timeouts` counts responses that scored
    0 because their comparison was given up.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        self._known: dict[tuple[str, str], float] = {}
        self.timeouts = 0
        self.child = Child(
            "mismatch_cli.tasks._worker", seconds=seconds,
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

    def __enter__(self) -> MathVerify:
        return self

    def __exit__(self, *_: object) -> None:
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


def check_reward(where: str) -> None:
    """Load a reward function once and let go of it, so that what is wrong with it is told first; nothing for none."""
    if where:
        reward = OwnReward(where)
        try:
            reward.child.start()
        finally:
            reward.child.stop()


class OwnReward:
    """Calls `FUNCTION` of `FILE.py`; what it takes too long over earns 0 and is counted in `timeouts`."""

    def __init__(self, where: str, seconds: float = 30.0) -> None:
        file, colon, name = where.rpartition(":")
        if not colon or not name.isidentifier() or not Path(file).is_file():
            raise UsageError(f"--reward {where}: there is no such function. Give it as path/to/file.py:function.")
        self._where = where
        self.timeouts = 0
        self.child = Child(
            "mismatch_cli.tasks._worker", f"{Path(file).resolve()}:{name}",
            seconds=seconds, cannot_start=f"{file} did not load within a minute.",
        )  # fmt: skip

    def grade(self, response: str, answer: str | None, finish_reason: str, problem: Any) -> float:
        """What the function says; a `MismatchError` where it fails or says something that is no finite number."""
        values = (response, answer, problem, finish_reason)
        reply = self.child.ask(json.dumps(dict(zip(ARGUMENTS, values, strict=True))))
        if reply is None:
            self.timeouts += 1
            return 0.0
        said: dict[str, Any] = json.loads(reply) if reply else {"error": "its process died"}
        reward = float(said.get("reward", nan))
        if not isfinite(reward):
            why = said.get("error", f"it answered {reward}")
            raise MismatchError(f"--reward {self._where} failed: {why}. Try it alone on response {response[:200]!r}.")
        return reward


def gradable(problems: Sequence[Problem], reward: str, location: str) -> list[Problem]:
    """Those that can be graded: with an answer, or all by a `reward` of the user's; a `MismatchError` if none can."""
    found = [problem for problem in problems if reward or problem.answer is not None]
    if not found:
        raise MismatchError(f"{location} has no problem with an answer. Name its field with --answer-field.")
    return found


class Grader:
    """Grades responses as text; a context manager, because a child process does the work.

    `reward` is FILE.py:FUNCTION, or empty for math-verify. With the template "r1-distill" only what follows the thought
    is the answer.
    """

    def __init__(self, decode: Callable[[list[int]], str], *, reward: str = "", template: str = "chat") -> None:
        self._decode, self._in_thought = decode, template == "r1-distill"
        self._by: MathVerify | OwnReward = OwnReward(reward) if reward else MathVerify()

    def can_grade(self, problem: Problem) -> bool:
        """Without an answer only a function of the user's has something to say."""
        return isinstance(self._by, OwnReward) or problem.answer is not None

    def reward(self, problem: Problem, rollout: Rollout) -> float:
        """What a response to a problem earns; 0 where grading takes too long."""
        stopped = rollout.finish_reason == "stop"
        said = rollout.response_ids[:-1] if stopped else rollout.response_ids  # the token that ends it is no text
        response = self._decode(said)
        if isinstance(self._by, OwnReward):
            return self._by.grade(response, problem.answer, rollout.finish_reason, problem.prompt)
        assert problem.answer is not None
        return self._by.grade(response, problem.answer, rollout.finish_reason, in_thought=self._in_thought)

    @property
    def timeouts(self) -> int:
        """Responses that earned 0 because grading them took too long."""
        return self._by.timeouts

    def start(self) -> None:
        """Start the child now: the user's own code says whether it can be loaded."""
        self._by.child.start()

    def state_dict(self) -> dict[str, Any]:
        """What took too long: a resumed run does not try it again, and scores what the unbroken one did."""
        return {"given_up": self._by.child.given_up, "timeouts": self._by.timeouts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._by.child.give_up(state["given_up"])
        self._by.timeouts = state["timeouts"]

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._by.child.stop()
