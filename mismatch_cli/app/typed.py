"""The command line as words that can be typed again, to start runs in processes of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import typer

from mismatch_cli.base.configuration import CONFIG
from mismatch_cli.base.errors import UsageError

_ANYWHERE = ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP")  # all but defaults


def words(
    context: typer.Context,
    without: Collection[str] = (),
    chosen: Mapping[str, str] | None = None,
    *,
    resolved: bool = False,
) -> list[str]:
    """The arguments of a command `without` some, and with `chosen` values for others.

    `resolved`: include environment variables and the --config file, for a process that must not
    read them again.
    """
    sources = _ANYWHERE if resolved else _ANYWHERE[:1]
    without = {*without, CONFIG} if resolved else without
    found: list[str] = []
    for known in context.command.params:
        name = str(known.name)
        source = context.get_parameter_source(name)
        typed = source is not None and source.name in sources and name not in without
        if chosen and name in chosen:
            found += _spelled(
                known, truth(chosen[name]) if getattr(known, "is_flag", False) else chosen[name]
            )
        elif typed:
            found += _spelled(known, context.params[name])
    return found


def _spelled(known: Any, value: Any) -> list[str]:
    if known.param_type_name == "argument":
        return list(map(str, value)) if known.nargs != 1 else [str(value)]
    flag = max(known.opts, key=len)
    if known.is_flag:
        return (
            [flag if value else max(known.secondary_opts, key=len)]
            if value or known.secondary_opts
            else []
        )
    several = value if known.multiple or isinstance(value, list) else [value]
    return [
        word
        for item in several
        for word in (flag, *map(str, item if isinstance(item, tuple) else (item,)))
    ]


def truth(text: str) -> bool:
    """The value of a switch; a `UsageError` unless it is true or false."""
    if text.lower() not in ("true", "false"):
        raise UsageError(f"{text} is neither true nor false.")
    return text.lower() == "true"
