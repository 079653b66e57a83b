"""Settings that nobody types: in a file, `--config FILE.toml`, and in the environment, `MISMATCH_FLAG`.

What is typed wins over variables, these over the file, and the file over defaults. A file is read where it is named:
a measurement does not depend on what lies in the working folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.registry import meant, unknown

CONFIG = "config"  # the parameter whose file it is
PREFIX = "MISMATCH_"
_OURS = f"{PREFIX}CLI_"  # what our processes tell each other
_NO_FLAGS = (f"{PREFIX}RECORD",)  # read by what records in a run


def key_of(parameter: Any) -> str:
    """What a parameter is called in a file: its flag without dashes, or the name of what stands by itself."""
    if parameter.param_type_name == "argument":
        return str(parameter.name).replace("_", "-")
    return str(max(parameter.opts, key=len)).lstrip("-")


def variables(command: str, parameter: Any) -> list[str]:
    """What a parameter is called in the environment: for this command alone, and for all."""
    key = key_of(parameter).upper().replace("-", "_")
    return [f"{PREFIX}{command.upper().replace('-', '_')}_{key}", f"{PREFIX}{key}"]


def without_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command that is told everything by its flags."""
    return {name: value for name, value in environment.items() if not _is_variable(name)}


def misspelt(context: Any) -> list[str]:
    """A sentence for each variable that looks like one of ours and is none of any command."""
    own = {name for known in context.command.params for name in variables(str(context.info_name), known)}
    odd = [name for name in os.environ if _is_variable(name) and name not in own]
    if not odd:
        return []
    known = {name for command, parameter in _parameters(context) for name in variables(command, parameter)}
    return [
        f"{name} is not a variable of any command, and is not read. {meant(name, known)}".rstrip()
        for name in odd
        if name not in known
    ]


def _is_variable(name: str) -> bool:
    return name.startswith(PREFIX) and not name.startswith(_OURS) and name not in _NO_FLAGS


def told(context: Any) -> str:
    """Which settings nobody typed, and where each comes from, as one line; empty where all others are defaults."""
    by_place: dict[str, list[str]] = {}
    for known in context.command.params:
        if place := place_of(context, known):
            by_place.setdefault(place, []).append(key_of(known))
    return "; ".join(f"{place}: {', '.join(keys)}" for place, keys in by_place.items())


def place_of(context: Any, parameter: Any) -> str:
    """Where a value was read that was not typed: the name of a variable, or of the file; else empty."""
    source = context.get_parameter_source(parameter.name)
    if source is None or source.name not in ("ENVIRONMENT", "DEFAULT_MAP"):
        return ""
    if source.name == "DEFAULT_MAP":
        return str(context.meta[CONFIG])
    return next(name for name in parameter.envvar if os.environ.get(name))


def read_into(context: Any, path: Path) -> None:
    """Let a file say what holds where neither a flag nor a variable does.

    Keys at its top are for every command that has that flag, those of a table for the command of its name. A
    `UsageError` names the nearest for a key, a table or a value that no command takes.
    """
    content, command = _content(path), str(context.info_name)
    own, commands = {key_of(known): known for known in context.command.params}, _commands(context)
    del own[CONFIG]
    tables = {name: table for name, table in content.items() if isinstance(table, dict)}
    for name in tables:
        if name not in commands:
            raise UsageError(f"{path}: [{name}]: {unknown('command', name, commands)}")
    everyones = {_key(name): value for name, value in content.items() if name not in tables}
    if others := [name for name in everyones if name not in own]:
        _check_somebodys(others, context, path)
    mine = {_key(name): value for name, value in tables.get(command, {}).items()}
    for name in mine:
        if name not in own:
            raise _stranger(name, own, f"{path}: [{command}]", command)
    found = {name: value for name, value in (everyones | mine).items() if name in own}
    context.default_map = {
        own[name].name: _fitted(own[name], value, f"{path}: {name}") for name, value in found.items()
    }
    context.meta[CONFIG] = path


def _content(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MismatchError(f"--config {path} does not exist. Name a TOML file.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise MismatchError(f"--config {path} cannot be read ({error}). Name a TOML file.") from error


def _key(name: str) -> str:
    return name.replace("_", "-")


def _commands(context: Any) -> list[str]:
    group = context.find_root().command
    return list(group.list_commands(context)) if hasattr(group, "list_commands") else [str(context.info_name)]


def _parameters(context: Any) -> Iterator[tuple[str, Any]]:
    """Every parameter of every command, which are built for it."""
    group = context.find_root().command
    for name in _commands(context):
        command = group.get_command(context, name) if hasattr(group, "get_command") else context.command
        yield from ((name, known) for known in command.params)


def _check_somebodys(names: list[str], context: Any, path: Path) -> None:
    known = {key_of(parameter) for _, parameter in _parameters(context)} - {CONFIG}
    for name in names:
        if name not in known:
            raise _stranger(name, known, str(path), "COMMAND")


def _stranger(name: str, known: Iterable[str], where: str, command: str) -> UsageError:
    return UsageError(f"{where}: Unknown setting '{name}'. {meant(name, known)}See: mismatch-cli {command} --help")


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _fitted(parameter: Any, value: Any, said: str) -> Any:
    """The value as if it had been typed; a `UsageError` where it is of another kind."""
    described = parameter.type_descriptor
    if described.is_list or described.is_tuple:
        values = value if isinstance(value, list) else [value]
        return [_single(str, item, said) for item in values]
    return _single(described.annotation, value, said)


def _single(kind: Any, value: Any, said: str) -> Any:
    kind = kind if kind in _KINDS else str  # paths and the like
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        bool: isinstance(value, bool),
        int: is_number and isinstance(value, int),
        float: is_number,
        str: is_number or isinstance(value, str),
    }[kind]
    if not fits:
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        raise UsageError(f"{said} = {shown} has to be {_KINDS[kind]}.")
    return value if kind is bool else str(value)
