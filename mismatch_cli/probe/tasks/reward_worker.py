"""The process that grades: `python -m mismatch_cli.probe.tasks.reward_worker` compares answers with
math-verify, one JSON pair per line in, true or false out.

With FILE.py:FUNCTION it runs a user's reward: one JSON object per line in, its reward (or rewards)
or error out.
"""

import inspect
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from mismatch_cli.processes.child_worker import SHOWN, answer_lines, in_words, load, most_memory

ARGUMENTS = ("response", "answer", "problem", "finish_reason")  # parameters that a reward may have
# Of a reward for a batch: lists
BATCH_ARGUMENTS = ("responses", "answers", "problems", "finish_reasons")
BATCH = "batch"  # follows "ready" for such a reward
# Of a TRL reward function: lists, besides columns
TRL_ARGUMENTS = ("completions", "prompts", "completion_ids")
KEYWORDS = "keywords"  # follows "ready" for such a reward

MATH_VERIFY_MEMORY = 2**32  # bytes; a response can require any amount


def quiet_math_verify() -> None:
    """Import math-verify, which warns that its own timeouts are off: the parent keeps time."""
    logging.disable()
    import math_verify  # noqa: F401


def _math_verify() -> tuple[Callable[[str], str], str]:
    quiet_math_verify()
    from math_verify import parse, verify

    def compare(line: str) -> str:
        found, gold = (parse(box, parsing_timeout=None) for box in json.loads(line))
        return json.dumps(bool(verify(gold, found, timeout_seconds=None)))

    return compare, ""


def _own_reward() -> tuple[Callable[[str], str], str]:
    function, wanted = _load_reward(*sys.argv[1].rsplit(":", 1))
    worker, kind = os.getpid(), _kind(wanted)

    def reward(line: str) -> str:
        arguments = json.loads(line)
        try:
            result = _called(
                function,
                arguments if kind == KEYWORDS else {name: arguments[name] for name in wanted},
            )
            return json.dumps(
                {"rewards": _numbers(result, kind == KEYWORDS)}
                if kind
                else {"reward": number(result)}
            )
        except (
            BaseException
        ) as error:  # SystemExit and KeyboardInterrupt are reported like any other error
            if os.getpid() != worker:
                raise
            return json.dumps({"error": in_words(error)})

    return reward, kind


def _kind(wanted: list[str]) -> str:
    """A function's kind by its parameters: as TRL calls it, for a batch, or (empty) for one
    response.
    """
    if set(wanted) & set(TRL_ARGUMENTS):
        return KEYWORDS
    return BATCH if wanted and set(wanted) <= set(BATCH_ARGUMENTS) else ""


def _called(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call the function with the arguments that it names, or all of them; a coroutine is awaited,
    as in TRL.

    A column that the data set lacks is a missing argument, which raises a TypeError.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    result = function(
        **{name: value for name, value in arguments.items() if takes_all or name in parameters}
    )
    if not inspect.iscoroutine(result):
        return result
    import asyncio  # which `--help` need not pay for

    return asyncio.run(result)


def _numbers(result: Any, or_none: bool) -> list[float | None]:
    """The numbers of a list, tuple, array or tensor, but not of other iterables, whose order is
    arbitrary.
    """
    if isinstance(result, dict | set | frozenset | str | bytes) or not hasattr(result, "__len__"):
        raise TypeError(f"it returned a {type(result).__name__}, not a list of numbers")
    return [None if or_none and value is None else number(value) for value in result]


def number(value: Any) -> float:
    """A number of any library as a float; text that looks like a number is refused, since it
    hides a mistake.
    """
    if isinstance(value, str | bytes):
        raise TypeError(f"it returned the text {value[:SHOWN]!r}, not a number")
    return float(value)


def _load_reward(file: str, name: str) -> tuple[Callable[..., Any], list[str]]:
    """The function, and the arguments that it takes: those of one response, or lists of them."""
    function, named, needed = load(file, name, "the reward as FILE.py:FUNCTION")
    if set(named) & set(TRL_ARGUMENTS):
        return function, named
    single, lists = (
        [known for known in arguments if known in named]
        for arguments in (ARGUMENTS, BATCH_ARGUMENTS)
    )
    if unknown := [known for known in needed if known not in (*ARGUMENTS, *BATCH_ARGUMENTS)]:
        raise ValueError(
            f"{file}: {name} has the parameter '{unknown[0]}'. It can have: "
            f"{', '.join(ARGUMENTS)}; or, for lists of them, {', '.join(BATCH_ARGUMENTS)}."
        )
    if single and lists:
        raise ValueError(
            f"{file}: {name} has the parameters '{single[0]}' and '{lists[0]}'. A reward grades "
            "either one response or a list of them."
        )
    return function, lists or single


# A process of a pool that the function started: it looks up the function by its module
if __name__ == "__mp_main__":
    _load_reward(*sys.argv[1].rsplit(":", 1))
if __name__ == "__main__":
    if len(sys.argv) > 1:
        answer_lines(_own_reward, limit=most_memory())
    answer_lines(_math_verify, limit=MATH_VERIFY_MEMORY)
