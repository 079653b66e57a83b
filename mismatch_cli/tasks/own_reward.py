"""A reward of the user's own: a function in a file, in a worker that cannot hang the run."""

from __future__ import annotations

import json
from math import isfinite, nan
from pathlib import Path
from typing import Any

from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.tasks._child import Child

ARGUMENTS = ("response", "answer", "problem", "finish_reason")  # what the function may name; it gets those it names


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
            "mismatch_cli.tasks._own_reward_worker", f"{Path(file).resolve()}:{name}",
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
