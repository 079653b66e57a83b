"""A contract over many cases as one test: it runs them all, and names every one that fails.

pytest sets up, reports and distributes every case of `parametrize` by itself, which costs more than
a case that only computes. Where cases need no fixture of their own, `looped` takes the same
arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

_MOST_SHOWN = 20


def looped(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[..., Any]:
    """Like `pytest.mark.parametrize`, as a loop inside the test; fixtures are shared by the cases."""
    split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = list(cases)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            assert values, "no case"
            failures: list[tuple[dict[str, Any], BaseException]] = []
            for value in values:
                case = dict(zip(split, value if len(split) > 1 else (value,), strict=True))
                try:
                    test(**fixtures, **case)
                except (Exception, pytest.fail.Exception) as error:
                    failures.append((case, error))
            if failures:
                raise AssertionError(summary(failures, len(values))) from failures[0][1]

        # pytest must see the fixtures alone, not the arguments of the cases
        signature = inspect.signature(test)
        others = [p for p in signature.parameters.values() if p.name not in split]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


def summary(failures: Sequence[tuple[dict[str, Any], BaseException]], cases: int) -> str:
    lines = [f"{len(failures)} of {cases} cases fail:"]
    for case, error in failures[:_MOST_SHOWN]:
        named = ", ".join(f"{name}={value!r}" for name, value in case.items())
        lines.append(f"  {named}: {type(error).__name__}: {str(error).strip()[:300]}")
    if len(failures) > _MOST_SHOWN:
        lines.append(f"  and {len(failures) - _MOST_SHOWN} more")
    return "\n".join(lines)
