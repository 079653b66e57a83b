"""The command line as words that can be typed again, to start ranks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import typer


def words(context: typer.Context, without: Collection[str] = ()) -> list[str]:
    """The arguments that were typed, `without` some."""
    typed: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in without:
            typed += _spelled(parameter, context.params[name])
    return typed


def _spelled(parameter: Any, value: Any) -> list[str]:
    if parameter.param_type_name == "argument":
        return list(map(str, value)) if parameter.nargs != 1 else [str(value)]
    flag = max(parameter.opts, key=len)
    if parameter.is_flag:
        return (
            [flag if value else max(parameter.secondary_opts, key=len)]
            if value or parameter.secondary_opts
            else []
        )
    several = value if parameter.multiple or isinstance(value, list) else [value]
    return [
        word
        for item in several
        for word in (flag, *map(str, item if isinstance(item, tuple) else (item,)))
    ]
