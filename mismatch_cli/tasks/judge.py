"""What a response earns: math-verify on the last box, or a function of the user's; the same for every command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from mismatch_cli.batch import Rollout
from mismatch_cli.errors import MismatchError
from mismatch_cli.tasks.grading import Grader
from mismatch_cli.tasks.own_reward import OwnReward
from mismatch_cli.tasks.prompts import Problem


def judgeable(problems: Sequence[Problem], reward: str, location: str) -> list[Problem]:
    """Those that can be judged: with an answer, or all by a `reward` of the user's; a `MismatchError` if none can."""
    found = [problem for problem in problems if reward or problem.answer is not None]
    if not found:
        raise MismatchError(f"{location} has no problem with an answer. Name its field with --answer-field.")
    return found


class Judge:
    """Judges responses as text; a context manager, because a child process does the work.

    `reward` is FILE.py:FUNCTION, or empty for math-verify. With the template "r1-distill" only what follows the thought
    is the answer.
    """

    def __init__(self, decode: Callable[[list[int]], str], *, reward: str = "", template: str = "chat") -> None:
        self._decode, self._in_thought = decode, template == "r1-distill"
        self._by: Grader | OwnReward = OwnReward(reward) if reward else Grader()

    def can_judge(self, problem: Problem) -> bool:
        """Without an answer only a function of the user's has something to say."""
        return isinstance(self._by, OwnReward) or problem.answer is not None

    def reward(self, problem: Problem, rollout: Rollout) -> float:
        """What a response to a problem earns; 0 where judging takes too long."""
        stopped = rollout.finish_reason == "stop"
        said = rollout.response_ids[:-1] if stopped else rollout.response_ids  # the token that ends it is no text
        response = self._decode(said)
        if isinstance(self._by, OwnReward):
            return self._by.grade(response, problem.answer, rollout.finish_reason, problem.prompt)
        assert problem.answer is not None
        return self._by.grade(response, problem.answer, rollout.finish_reason, in_thought=self._in_thought)

    @property
    def timeouts(self) -> int:
        """Responses that earned 0 because judging them took too long."""
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

    def __enter__(self) -> Judge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._by.child.stop()
