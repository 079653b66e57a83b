"""Rewards of the user's own: a function that judges one response or a batch, in a process that cannot hang the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

from mismatch_cli.errors import MismatchError
from mismatch_cli.tasks._child import Child, users_code
from mismatch_cli.tasks._worker import ARGUMENTS, BATCH, BATCH_ARGUMENTS

_FOR_ONE, _FOR_A_BATCH, _TO_LOAD = 30, 600, 60  # seconds


def check_reward(where: str, seconds: int = 0) -> None:
    """Load a reward function once and let go of it, so that what is wrong with it is told first; nothing for none."""
    if where:
        reward = OwnReward(where, seconds)
        try:
            reward.child.start()
        finally:
            reward.child.stop()


class OwnReward:
    """Calls `FUNCTION` of `FILE.py`; what it takes too long over earns 0 and is counted in `timeouts`.

    A function whose parameters are `responses`, `answers`, `problems`, `finish_reasons` is given lists and answers with
    one; its process lives on, so that a model which it has loaded stays loaded.
    """

    def __init__(self, where: str, seconds: float = 0) -> None:
        file, code = users_code(where, "--reward", "function", "function")
        self._where, self._seconds = where, seconds
        self.timeouts = 0
        to_load = max(seconds, _TO_LOAD)
        self.child = Child(
            "mismatch_cli.tasks._worker", code,
            seconds_to_start=to_load,
            cannot_start=f"{file} did not load within {to_load:g} s. Give it more with --reward-seconds.",
        )  # fmt: skip

    def grade(self, response: str, answer: str | None, finish_reason: str, problem: Any) -> float:
        """What the function says; a `MismatchError` where it fails or its answer is not a finite number."""
        return self.grade_all([(response, answer, problem, finish_reason)])[0]

    def grade_all(self, rows: Sequence[tuple[str, str | None, Any, str]]) -> list[float]:
        """The rewards of responses, each given as (response, answer, problem, finish_reason)."""
        if not rows:
            return []
        if not self._takes_batches:
            return [self._said(row) for row in rows]
        told = self._told(dict(zip(BATCH_ARGUMENTS, map(list, zip(*rows, strict=True)), strict=True)), len(rows))
        if told is None:
            return [0.0] * len(rows)
        rewards = told.get("rewards")
        if not isinstance(rewards, list):
            raise self._failed(told.get("error", "it answered no list"), rows[0][0])
        if len(rewards) != len(rows):
            raise self._failed(f"it answered {len(rewards)} numbers for {len(rows)} responses", rows[0][0])
        return [self._finite(reward, told, row[0]) for reward, row in zip(rewards, rows, strict=True)]

    @property
    def _takes_batches(self) -> bool:
        """What the function's parameters say, which its process tells once."""
        if self.child.said_at_start is None:
            self.child.start()
        return self.child.said_at_start == BATCH

    def _said(self, row: tuple[str, str | None, Any, str]) -> float:
        told = self._told(dict(zip(ARGUMENTS, row, strict=True)), 1)
        return 0.0 if told is None else self._finite(told.get("reward", nan), told, row[0])

    def _told(self, question: Mapping[str, Any], responses: int) -> dict[str, Any] | None:
        """The answer; None, and the responses counted, where it took too long."""
        limit = self._seconds or (_FOR_A_BATCH if self._takes_batches else _FOR_ONE)
        reply = self.child.ask(json.dumps(question), limit)
        if reply is None:
            self.timeouts += responses
            return None
        told: dict[str, Any] = json.loads(reply) if reply else {"error": "its process died"}
        return told

    def _finite(self, said: Any, told: Mapping[str, Any], response: str) -> float:
        reward = float(said)
        if not isfinite(reward):
            raise self._failed(told.get("error", f"it answered {reward}"), response)
        return reward

    def _failed(self, why: str, response: str) -> MismatchError:
        return MismatchError(f"--reward {self._where} failed: {why}. Try it alone on response {response[:200]!r}.")
