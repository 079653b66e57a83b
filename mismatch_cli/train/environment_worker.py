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
    for name in needed:
        if name not in ARGUMENTS:
            raise MismatchError(
                f"{code} has the parameter '{name}'. It can have: {', '.join(ARGUMENTS)}."
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
            # null tells the run that this process replaced the one that knew the episode.
            if name not in episodes:
                return None
            return _step(episodes[name], question["action"])
        environment = make(**{argument: question[argument] for argument in wanted})
        episodes[name] = environment
        return {"observation": _reset(environment, question["seed"])}

    return answer


def _reset(environment: Any, seed: int) -> Any:
    parameters = inspect.signature(environment.reset).parameters.values()
    seeded = any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in parameters)
    result = environment.reset(seed=seed) if seeded else environment.reset()
    # Gymnasium returns (observation, info).
    if isinstance(result, tuple) and result:
        result = result[0]
    return _observation(result, "reset")


def _step(environment: Any, action: str) -> dict[str, Any]:
    result = environment.step(action)
    size = len(result) if isinstance(result, tuple) else None
    if size not in (3, 5):
        returned = type(result).__name__
        if size is not None:
            returned += f" of {size}"
        raise TypeError(
            "step must return (observation, reward, done), or Gymnasium's (observation, reward, "
            f"terminated, truncated, info); it returned {returned}"
        )
    done = bool(result[2]) or (size == 5 and bool(result[3]))
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
    close = getattr(environment, "close", None)
    if callable(close):
        close()
