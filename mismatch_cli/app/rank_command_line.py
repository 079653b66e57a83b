"""Spells a command line again as it was typed, to start ranks with it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import typer


def typed_arguments(context: typer.Context, without: Collection[str] = ()) -> list[str]:
    """The arguments that were typed, `without` those of some parameters."""
    typed: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in without:
            typed += _spell(parameter, context.params[name])
    return typed


def _spell(parameter: Any, value: Any) -> list[str]:
    """What to type for a parameter to have a value; nothing for a flag that cannot be turned off
    and is.
    """
    if parameter.param_type_name == "argument":
        values = value if parameter.nargs != 1 else [value]
        return list(map(str, values))
    if parameter.is_flag:
        spellings = parameter.opts if value else parameter.secondary_opts
        return [max(spellings, key=len)] if spellings else []
    is_repeated = parameter.multiple or isinstance(value, list)
    flag = max(parameter.opts, key=len)
    spelled: list[str] = []
    for item in value if is_repeated else [value]:
        # An option of two values, such as `--compare A B`, has a tuple.
        values = item if isinstance(item, tuple) else (item,)
        spelled += [flag, *map(str, values)]
    return spelled
