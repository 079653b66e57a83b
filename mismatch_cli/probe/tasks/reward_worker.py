"""What grades in a child: math-verify, or a user's reward."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.processes.keeper import bound_memory, most_memory
from mismatch_cli.processes.users_code import SHOWN, load

# The parameters that a reward may have: for one response, for a batch (lists), or in TRL's form
# (lists, besides columns of the data set).
ARGUMENTS = ("response", "answer", "problem", "finish_reason")
BATCH_ARGUMENTS = ("responses", "answers", "problems", "finish_reasons")
KEYWORD_ARGUMENTS = ("completions", "prompts", "completion_ids")
BATCH, KEYWORDS = "batch", "keywords"  # the kinds of the last two

_MATH_VERIFY_MEMORY = 2**32  # bytes; a response can require any amount


def start_math_verify() -> None:
    """Import math-verify, which warns that its own timeouts are off: the parent keeps time."""
    bound_memory(_MATH_VERIFY_MEMORY)
    logging.disable()
    import math_verify  # noqa: F401


def math_verify() -> Callable[[list[str]], bool]:
    """Compares a stated answer and the right one, each in a box, with math-verify."""
    start_math_verify()
    from math_verify import parse, verify

    def compare(boxes: list[str]) -> bool:
        stated, gold = (parse(box, parsing_timeout=None) for box in boxes)
        return bool(verify(gold, stated, timeout_seconds=None))

    return compare


def own_reward(code: str) -> Callable[[dict[str, Any] | None], Any]:
    """Calls FILE.py:FUNCTION with the arguments that it names: a number, or one per response.

    Without arguments (None) it returns the function's kind.
    """
    bound_memory(most_memory())
    function, wanted = _load_reward(code)
    kind = _kind(wanted)

    def reward(arguments: dict[str, Any] | None) -> Any:
        if arguments is None:
            return kind
        if kind == KEYWORDS:
            return _numbers(_called(function, arguments), or_none=True)
        result = _called(function, {name: arguments[name] for name in wanted})
        return _numbers(result, or_none=False) if kind else number(result)

    return reward


def _kind(wanted: list[str]) -> str:
    """A function's kind by its parameters: as TRL calls it, for a batch, or (empty) for one
    response.
    """
    if not set(wanted).isdisjoint(KEYWORD_ARGUMENTS):
        return KEYWORDS
    is_for_batch = wanted and set(wanted).issubset(BATCH_ARGUMENTS)
    return BATCH if is_for_batch else ""


def _called(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call the function with the arguments that it names, or all of them; a coroutine is awaited,
    as in TRL.

    A column that the data set lacks is a missing argument, which raises a TypeError.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_all:
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    result = function(**arguments)
    if not inspect.iscoroutine(result):
        return result
    # This file is imported for its constants too, by commands that start fast.
    import asyncio

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


def _load_reward(code: str) -> tuple[Callable[..., Any], list[str]]:
    """The function, and the arguments that it takes: those of one response, or lists of them."""
    function, named, needed = load(code, "the reward as FILE.py:FUNCTION")
    if not set(named).isdisjoint(KEYWORD_ARGUMENTS):
        return function, named
    for parameter in needed:
        if parameter not in (*ARGUMENTS, *BATCH_ARGUMENTS):
            raise MismatchError(
                f"{code} has the parameter '{parameter}'. It can have: "
                f"{', '.join(ARGUMENTS)}; or, for lists of them, {', '.join(BATCH_ARGUMENTS)}."
            )
    single = [parameter for parameter in ARGUMENTS if parameter in named]
    lists = [parameter for parameter in BATCH_ARGUMENTS if parameter in named]
    if single and lists:
        raise MismatchError(
            f"{code} has the parameters '{single[0]}' and '{lists[0]}'. A reward grades "
            "either one response or a list of them."
        )
    return function, lists or single
