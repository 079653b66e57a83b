"""A user's environment as a child plays it: many concurrent episodes.

NAME of FILE.py makes one environment, with `reset` and `step` as in Gymnasium and GEM. Questions:

    {"episode": …, "seed": …, "problem": …, "answer": …}    make an environment, and reset it
    {"episode": …, "action": …}                             take its next step; null if it is unknown here
    {"forget": number}                                      close all environments
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.probe.tasks.prompts import is_message
from mismatch_cli.probe.tasks.reward_worker import number
from mismatch_cli.processes.keeper import bound_memory, most_memory
from mismatch_cli.processes.users_code import load

ARGUMENTS = ("problem", "answer")  # arguments that NAME may take


def play(code: str) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    """Plays the environments that FILE.py:NAME makes."""
    bound_memory(most_memory())
    make, named, needed = load(
        code, "the environment as FILE.py:NAME, a class or a function that makes one"
    )
    if unknown := [name for name in needed if name not in ARGUMENTS]:
        raise MismatchError(
            f"{code} has the parameter '{unknown[0]}'. It can have: {', '.join(ARGUMENTS)}."
        )
    wanted = [name for name in ARGUMENTS if name in named]
    episodes: dict[str, Any] = {}

    def answer(question: dict[str, Any]) -> dict[str, Any] | None:
        if "forget" in question:
            while episodes:
                _close(episodes.popitem()[1])
            return {}
        name = json.dumps(question["episode"])
        if "action" in question:
            return _step(episodes[name], question["action"]) if name in episodes else None
        episodes[name] = environment = make(**{argument: question[argument] for argument in wanted})
        return {"observation": _reset(environment, question["seed"])}

    return answer


def _reset(environment: Any, seed: int) -> Any:
    takes = inspect.signature(environment.reset).parameters.values()
    seeded = any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in takes)
    result = environment.reset(seed=seed) if seeded else environment.reset()
    return _observation(result[0] if isinstance(result, tuple) and result else result, "reset")


def _step(environment: Any, action: str) -> dict[str, Any]:
    result = environment.step(action)
    if not isinstance(result, tuple) or len(result) not in (3, 5):
        raise TypeError(
            "step must return (observation, reward, done), or Gymnasium's (observation, reward, "
            "terminated, truncated, info); it returned "
            f"{type(result).__name__}{f' of {len(result)}' if isinstance(result, tuple) else ''}"
        )
    done = bool(result[2]) or (len(result) == 5 and bool(result[3]))
    return {
        "observation": None if done else _observation(result[0], "step"),
        "reward": number(result[1]),
        "done": done,
    }


def _observation(observation: Any, where: str) -> Any:
    """The observation, which must be a text or chat messages."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, list) and observation and all(map(is_message, observation)):
        return [{"role": message["role"], "content": message["content"]} for message in observation]
    kind = type(observation).__name__
    raise TypeError(
        f"the observation of {where} is {kind}, neither text nor a list of chat messages"
    )


def _close(environment: Any) -> None:
    if callable(close := getattr(environment, "close", None)):
        close()
