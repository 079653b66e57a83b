"""The process that runs a user's environment: many concurrent episodes, one JSON object per line in
and out.

`python -m mismatch_cli.train.environment_worker FILE.py:NAME`. NAME makes one environment, with
`reset` and `step` as in Gymnasium and GEM. Requests:

    {"episode": …, "seed": …, "problem": …, "answer": …}    make an environment, and reset it
    {"episode": …, "action": …}                             take its next step; {"lost": true} if it is unknown here
    {"forget": number}                                      close all environments
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from mismatch_cli.probe.tasks.prompts import is_message
from mismatch_cli.probe.tasks.reward_worker import number
from mismatch_cli.processes.child_worker import answer_lines, in_words, load, most_memory

ARGUMENTS = ("problem", "answer")  # arguments that NAME may take


def _loaded() -> tuple[Callable[..., Any], list[str]]:
    file, name = sys.argv[1].rsplit(":", 1)
    make, named, needed = load(
        file, name, "the environment as FILE.py:NAME, a class or a function that makes one"
    )
    if unknown := [known for known in needed if known not in ARGUMENTS]:
        raise ValueError(
            f"{file}: {name} has the parameter '{unknown[0]}'. It can have: {', '.join(ARGUMENTS)}."
        )
    return make, [known for known in ARGUMENTS if known in named]


def _play() -> tuple[Callable[[str], str], str]:
    make, wanted = _loaded()
    episodes: dict[Any, Any] = {}
    worker = os.getpid()

    def answer(line: str) -> str:
        asked = json.loads(line)
        try:
            return json.dumps(_answer(asked, episodes, make, wanted))
        except (
            BaseException
        ) as error:  # SystemExit and KeyboardInterrupt are reported like any other error
            if os.getpid() != worker:
                raise
            return json.dumps({"error": in_words(error)})

    return answer, ""


def _answer(
    asked: dict[str, Any], episodes: dict[Any, Any], make: Callable[..., Any], wanted: list[str]
) -> dict[str, Any]:
    if "forget" in asked:
        while episodes:
            _close(episodes.popitem()[1])
        return {}
    name = json.dumps(asked["episode"])
    if "action" in asked:
        return _step(episodes[name], asked["action"]) if name in episodes else {"lost": True}
    episodes[name] = environment = make(**{argument: asked[argument] for argument in wanted})
    return {"observation": _reset(environment, asked["seed"])}


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


# A process of a pool that the environment started: it looks up names by their module
if __name__ == "__mp_main__":
    _loaded()
if __name__ == "__main__":
    answer_lines(_play, limit=most_memory())
