"""What `--reward` names: a reward of the package, or a user's function, which runs for one response
or a batch in a process that cannot hang the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite, nan
from typing import Any, NamedTuple

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.probe.tasks import named_rewards
from mismatch_cli.probe.tasks.reward_worker import ARGUMENTS, KEYWORDS, own_reward
from mismatch_cli.processes import users_code
from mismatch_cli.processes.child import LATE, Child, Reply

_FOR_ONE, _FOR_A_BATCH, _TO_LOAD = 30, 600, 60  # seconds


def is_own(rewards: str | Iterable[str]) -> bool:
    """Whether one of these is a user's FILE.py:FUNCTION, which runs code, and no name of the
    package's.
    """
    names = [rewards] if isinstance(rewards, str) else rewards
    return any(":" in name or name.endswith(".py") for name in names)


def needs_answer(reward: str | None) -> bool:
    """Whether a problem without an answer cannot be graded: by the default rule, or by a named
    reward that uses it.
    """
    if not reward:
        return True
    return not is_own(reward) and named_rewards.find(reward).NEEDS_ANSWER


def check_reward(where: str | None, seconds: int | None = None) -> None:
    """Load a reward function once, so that its errors show before the run starts; does nothing
    without one.

    Raises a `UsageError` for an unknown name.
    """
    if not where:
        return
    if not is_own(where):
        named_rewards.check(where)
        return
    reward = OwnReward(where, seconds or 0)
    try:
        reward.child.start()
    finally:
        reward.child.stop()


class AnsweredResponse(NamedTuple):
    """A response with everything that a reward function may take."""

    response: str
    answer: str | None
    problem: Any
    finish_reason: str
    columns: Mapping[str, Any] | None = None  # of its row
    response_ids: Sequence[int] = ()


class OwnReward:
    """Calls `FUNCTION` of `FILE.py`; responses that take too long earn 0 and count in `timeouts`.

    A function with the parameters `responses`, `answers`, `problems`, `finish_reasons` takes lists
    and returns one; its process persists, so that a model stays loaded. The same holds for
    functions in TRL's form, with the parameters `completions`, `prompts`, `completion_ids` and
    columns of the data set; `conversational`: prompts and completions are lists of messages.
    """

    def __init__(self, where: str, seconds: float = 0, *, conversational: bool = False) -> None:
        file, code = users_code.check(where, "--reward", "function", "function")
        self._where = where
        self._seconds = seconds
        self._conversational = conversational
        self.timeouts = 0
        self._known_kind: str | None = None
        to_load = max(seconds, _TO_LOAD)
        self.child = Child(
            own_reward,
            code,
            seconds_to_start=to_load,
            cannot_start=f"{file} did not load within {to_load:g} s. Allow more, with a line "
            "reward_seconds = N in the file of --config.",
        )

    def grade(self, response: str, answer: str | None, finish_reason: str, problem: Any) -> float:
        """The function's reward; a `MismatchError` if it fails or does not return a finite
        number.
        """
        return self.grade_all([AnsweredResponse(response, answer, problem, finish_reason)])[0]

    def grade_all(self, rows: Sequence[AnsweredResponse]) -> list[float]:
        """The rewards of responses; NaN where a function in TRL's form returns None."""
        if not rows:
            return []
        if not self._kind:
            return [self._grade_one(row) for row in rows]
        arguments = self._as_keywords(rows) if self._kind == KEYWORDS else _in_lists(rows)
        reply = self._reply(arguments, rows)
        if reply is LATE:
            return [0.0] * len(rows)
        if len(reply.value) != len(rows):
            raise self._failed(
                f"it returned {len(reply.value)} numbers for {len(rows)} responses",
                rows[0].response,
            )
        rewards: list[float] = []
        for reward, row in zip(reply.value, rows, strict=True):
            # TRL's functions return None for a response that is not theirs to grade.
            rewards.append(nan if reward is None else self._finite(reward, row.response))
        return rewards

    @property
    def _kind(self) -> str:
        """The function's kind, which its process is asked once; empty for one that grades single
        responses.
        """
        if self._known_kind is None:
            reply = self.child.ask(None, _FOR_ONE)
            if reply.error:
                raise self._failed(reply.error, "")
            self._known_kind = str(reply.value)
        return self._known_kind

    def _as_keywords(self, rows: Sequence[AnsweredResponse]) -> dict[str, Any]:
        """What GRPOTrainer passes to a reward function; None where a row lacks a column."""
        # `answer` is the name that most functions use; a column of that name replaces it.
        keywords: dict[str, Any] = {"answer": [row.answer for row in rows], **_columns_of(rows)}
        prompts = [row.problem for row in rows]
        completions: list[Any] = [row.response for row in rows]
        if self._conversational:
            prompts = [_messages("user", prompt) for prompt in prompts]
            completions = [_messages("assistant", response) for response in completions]
        keywords["prompts"] = prompts
        keywords["completions"] = completions
        keywords["completion_ids"] = [list(row.response_ids) for row in rows]
        return keywords

    def _grade_one(self, row: AnsweredResponse) -> float:
        arguments = dict(zip(ARGUMENTS, row[: len(ARGUMENTS)], strict=True))
        reply = self._reply(arguments, [row])
        if reply is LATE:
            return 0.0
        return self._finite(reply.value, row.response)

    def _reply(self, question: Mapping[str, Any], rows: Sequence[AnsweredResponse]) -> Reply:
        """The function's value, or `LATE` after its time limit, when the responses are counted."""
        usual_limit = _FOR_A_BATCH if self._kind else _FOR_ONE
        reply = self.child.ask(question, self._seconds or usual_limit)
        if reply is LATE:
            self.timeouts += len(rows)
        elif reply.error:
            raise self._failed(reply.error, rows[0].response)
        return reply

    def _finite(self, reward: float, response: str) -> float:
        if not isfinite(reward):
            raise self._failed(f"it returned {reward}", response)
        return reward

    def _failed(self, why: str, response: str) -> MismatchError:
        return MismatchError(
            f"--reward {self._where} failed: {why}. Call it yourself on the response "
            f"{response[:200]!r}."
        )


def _in_lists(rows: Sequence[AnsweredResponse]) -> dict[str, Any]:
    """What a function for a batch takes: a list of each argument."""
    return {
        "responses": [row.response for row in rows],
        "answers": [row.answer for row in rows],
        "problems": [row.problem for row in rows],
        "finish_reasons": [row.finish_reason for row in rows],
    }


def _columns_of(rows: Sequence[AnsweredResponse]) -> dict[str, list[Any]]:
    """The columns that any of these rows has; None where a row lacks one."""
    columns = [row.columns or {} for row in rows]
    by_name: dict[str, list[Any]] = {}
    for name in dict.fromkeys(chain.from_iterable(columns)):
        by_name[name] = [column.get(name) for column in columns]
    return by_name


def _messages(role: str, content: Any) -> list[dict[str, str]]:
    """A conversation; a text becomes its first message."""
    if isinstance(content, list):
        return content
    return [{"role": role, "content": content}]
