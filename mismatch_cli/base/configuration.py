"""Settings that are not typed: in a file, `--config FILE.toml`, or in the environment,
`MISMATCH_FLAG`.

Flags win over environment variables, these over the file, and the file over defaults. A file is
read only if you name it: a measurement must not depend on the contents of the working folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import MismatchError, UsageError, unreadable
from mismatch_cli.base.options import Setting, is_typed_only
from mismatch_cli.base.registry import did_you_mean, unknown_name
from mismatch_cli.base.text import parse_toml
from mismatch_cli.base.values import (
    PREFIX,
    TYPED,
    SourcedValue,
    Values,
    by_flag,
    convert_toml_value,
    toml,
    variable_of,
)

CONFIG = "config"  # the parameter that names the file
SETTING = "setting"  # the attribute of a parameter that is its declaration
_OURS = f"{PREFIX}CLI_"  # variables between our own processes
# Set for our own tests and lab: their command lines spell keys without a flag like flags
WRITTEN = f"{_OURS}WRITTEN"
# Elsewhere this variable says what to train or analyse, and not which two runs to compare
_OWN_ONLY = {("report", "ALGORITHM")}
_NO_FLAGS = (f"{PREFIX}RECORD",)  # read by the recorder inside a run


def setting_of(parameter: Any) -> Setting | None:
    """The setting behind a parameter of a command; None for `--help`."""
    return getattr(parameter, SETTING, None)


def key_of(parameter: Any) -> str:
    """The key of a parameter in a file: its flag without dashes, or the name of a positional
    argument.
    """
    if parameter.param_type_name == "argument":
        return str(parameter.name).replace("_", "-")
    return str(max(parameter.opts, key=len)).lstrip("-")


def has_flag(parameter: Any) -> bool:
    """Whether it can be typed; a key of a file alone is hidden from click's own help."""
    return not getattr(parameter, "hidden", False)


def variables(command: str, parameter: Any) -> list[str]:
    """The environment variables of a parameter: for this command only, and for all commands."""
    key = key_of(parameter).upper().replace("-", "_")
    own = f"{PREFIX}{command.upper().replace('-', '_')}_{key}"
    return [own] if (command, key) in _OWN_ONLY else [own, f"{PREFIX}{key}"]


def misspelt_variables(context: Any) -> list[str]:
    """A sentence for each variable that looks like ours but belongs to no command."""
    own = {
        name
        for known in context.command.params
        for name in variables(str(context.info_name), known)
    }
    odd = [name for name in os.environ if _is_variable(name) and name not in own]
    if not odd:
        return []
    known = {
        name
        for command, parameter in _parameters(context)
        for name in variables(command, parameter)
    }
    return [
        f"The variable {name} belongs to no command and is ignored. {did_you_mean(name, known)}".rstrip()
        for name in odd
        if name not in known
    ]


def _is_variable(name: str) -> bool:
    return name.startswith(PREFIX) and not name.startswith(_OURS) and name not in _NO_FLAGS


def describe_sources(context: Any) -> str:
    """The settings that were not typed, with their sources, in one line; empty if the rest are
    defaults.
    """
    by_place: dict[str, list[str]] = {}
    for known in context.command.params:
        if place := place_of(context, known):
            by_place.setdefault(place, []).append(key_of(known))
    return "; ".join(f"{place}: {', '.join(keys)}" for place, keys in by_place.items())


def place_of(context: Any, parameter: Any) -> str:
    """The variable or file from which a value was read; empty if it was typed or is the default."""
    source = context.get_parameter_source(parameter.name)
    if source is None or source.name not in ("ENVIRONMENT", "DEFAULT_MAP"):
        return ""
    if source.name == "DEFAULT_MAP":
        return str(context.meta[CONFIG])
    return next(name for name in parameter.envvar if os.environ.get(name))


def values_of(context: Any) -> Values:
    """What was typed, and what variables and the `--config` file set."""
    given: dict[str, SourcedValue] = {}
    for parameter in context.command.params:
        setting = setting_of(parameter)
        source = context.get_parameter_source(parameter.name)
        if setting is None or source is None or source.name == "DEFAULT":
            continue
        place = TYPED if source.name == "COMMANDLINE" else place_of(context, parameter)
        given[setting.key] = SourcedValue(context.params[parameter.name], place)
    return Values(given)


def check_typed(context: Any) -> None:
    """A `UsageError` for what only the command line may set, if a file or a variable sets it."""
    for parameter in context.command.params:
        setting, place = setting_of(parameter), place_of(context, parameter)
        if place and setting is not None:
            value = context.params[parameter.name]
            if is_typed_only(setting, value):
                raise UsageError(
                    f"{place}: {setting.key} can start code or send keys to a host, so neither a "
                    f"file nor a variable may set it. If you trust it, type {setting.flag} "
                    "yourself."
                )


def check_flags(context: Any, words: Sequence[str]) -> None:
    """A `UsageError` for a key that is typed like a flag: it shows the line to write."""
    if WRITTEN in os.environ:
        return
    settings = [setting_of(parameter) for parameter in context.command.params]
    keys = by_flag(each for each in settings if each is not None and not each.has_flag)
    for word, following in zip(words, [*words[1:], "VALUE"], strict=False):
        typed, _, value = word.partition("=")
        flag = typed.replace("_", "-")
        if flag in keys:
            is_off = flag == keys[flag].about.get("off")
            raise _without_flag(flag, keys[flag], "false" if is_off else value or following)


def _without_flag(typed: str, setting: Setting, value: str) -> UsageError:
    if setting.about.get("argument"):
        return UsageError(f"{typed} is not a flag: type {setting.flag} by itself.")
    if setting.type is bool:
        value = "false" if value == "false" else "true"
    elif setting.type not in (int, float):
        value = toml(value)
    return UsageError(
        f"{typed} is a key of --config, not a flag. Write this line into a file, and add "
        f"--config FILE.toml: {setting.key} = {value} (Or set {variable_of(setting)}.)"
    )


def read_into(context: Any, path: Path) -> None:
    """Let a file set what neither a flag nor a variable sets.

    Top-level keys apply to every command that has the flag, keys of a table to the command of that
    name. Raises a `UsageError` that suggests the nearest name for an unknown key or table, or names
    the type of a wrong value.
    """
    content, command = _content(path), str(context.info_name)
    own, commands = {key_of(known): known for known in context.command.params}, _commands(context)
    del own[CONFIG]
    tables = {name: table for name, table in content.items() if isinstance(table, dict)}
    for name in tables:
        if name not in commands:
            raise UsageError(f"{path}: [{name}]: {unknown_name('command', name, commands)}")
    everyones = {_key(name): value for name, value in content.items() if name not in tables}
    if others := [name for name in everyones if name not in own]:
        _check_somebodys(others, context, path)
    commands_own = {_key(name): value for name, value in tables.get(command, {}).items()}
    for name in commands_own:
        if name not in own:
            raise _stranger(name, own, f"{path}: [{command}]", command)
    settings = {known.name: getattr(known, SETTING) for known in own.values()}
    context.default_map = {
        own[name].name: convert_toml_value(settings[own[name].name], value, str(path))
        for name, value in (everyones | commands_own).items()
        if name in own
    }
    context.meta[CONFIG] = path


def _content(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MismatchError(f"--config {path} does not exist. Name a TOML file.") from error
    except (OSError, ValueError) as error:
        raise unreadable(
            f"--config {path}", error, "Correct it.", "cannot be read as TOML ({})"
        ) from error


def _key(name: str) -> str:
    return name.replace("_", "-")


def _commands(context: Any) -> list[str]:
    group = context.find_root().command
    return (
        list(group.list_commands(context))
        if hasattr(group, "list_commands")
        else [str(context.info_name)]
    )


def _parameters(context: Any) -> Iterator[tuple[str, Any]]:
    """Every parameter of every command; this builds all commands."""
    group = context.find_root().command
    for name in _commands(context):
        command = (
            group.get_command(context, name) if hasattr(group, "get_command") else context.command
        )
        yield from ((name, known) for known in command.params)


def _check_somebodys(names: list[str], context: Any, path: Path) -> None:
    known = {key_of(parameter) for _, parameter in _parameters(context)} - {CONFIG}
    for name in names:
        if name not in known:
            raise _stranger(name, known, str(path), "COMMAND")


def _stranger(name: str, known: Iterable[str], where: str, command: str) -> UsageError:
    return UsageError(
        f"{where}: Unknown setting '{name}'. {did_you_mean(name, known)}See: mismatch-cli {command} --help"
    )
