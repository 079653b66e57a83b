"""Settings that are not typed: in a file, `--config FILE.toml`, or in the environment,
`MISMATCH_FLAG`.

Flags win over environment variables, these over the file, and the file over defaults. A file is
read only if you name it: a measurement must not depend on the contents of the working folder.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
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
    """Whether a parameter can be typed; a key of a file alone is hidden from click's own help."""
    return not getattr(parameter, "hidden", False)


def variables(command: str, parameter: Any) -> list[str]:
    """The environment variables of a parameter: for this command only, and for all commands."""
    key = key_of(parameter).upper().replace("-", "_")
    own = f"{PREFIX}{command.upper().replace('-', '_')}_{key}"
    if (command, key) in _OWN_ONLY:
        return [own]
    return [own, f"{PREFIX}{key}"]


def misspelt_variables(context: Any) -> list[str]:
    """A sentence for each variable that looks like ours but belongs to no command."""
    own: set[str] = set()
    for parameter in context.command.params:
        own.update(variables(str(context.info_name), parameter))
    others = [name for name in os.environ if _is_variable(name) and name not in own]
    # The variables of other commands are known once all are imported, which takes its time.
    if not others:
        return []
    every: set[str] = set()
    for command, parameter in _parameters(context):
        every.update(variables(command, parameter))
    sentences = []
    for name in others:
        if name not in every:
            sentence = f"The variable {name} belongs to no command and is ignored. "
            sentences.append((sentence + did_you_mean(name, every)).rstrip())
    return sentences


def _is_variable(name: str) -> bool:
    return name.startswith(PREFIX) and not name.startswith(_OURS) and name not in _NO_FLAGS


def describe_sources(context: Any) -> str:
    """In one line, the file and the variables that set something, each with its keys; empty if all
    was typed or is the default.
    """
    keys_by_source: dict[str, list[str]] = {}
    for parameter in context.command.params:
        source = source_of(context, parameter)
        if source:
            keys_by_source.setdefault(source, []).append(key_of(parameter))
    return "; ".join(f"{source}: {', '.join(keys)}" for source, keys in keys_by_source.items())


def source_of(context: Any, parameter: Any) -> str:
    """The variable or file from which a value was read; empty if it was typed or is the default."""
    kind = context.get_parameter_source(parameter.name)
    if kind is None or kind.name not in ("ENVIRONMENT", "DEFAULT_MAP"):
        return ""
    if kind.name == "DEFAULT_MAP":
        return str(context.meta[CONFIG])
    return str(next(filter(os.environ.get, parameter.envvar)))


def values_of(context: Any) -> Values:
    """What was typed, and what variables and the `--config` file set."""
    values: dict[str, SourcedValue] = {}
    for parameter in context.command.params:
        setting = setting_of(parameter)
        kind = context.get_parameter_source(parameter.name)
        if setting is None or kind is None or kind.name == "DEFAULT":
            continue
        source = TYPED if kind.name == "COMMANDLINE" else source_of(context, parameter)
        values[setting.key] = SourcedValue(context.params[parameter.name], source)
    return Values(values)


def check_typed(context: Any) -> None:
    """A `UsageError` for what only the command line may set, if a file or a variable sets it."""
    for parameter in context.command.params:
        setting = setting_of(parameter)
        source = source_of(context, parameter)
        if setting is None or not source:
            continue
        if is_typed_only(setting, context.params[parameter.name]):
            raise UsageError(
                f"{source}: {setting.key} can start code or send keys to a host, so neither a file "
                f"nor a variable may set it. If you trust it, type {setting.flag} yourself."
            )


def check_flags(context: Any, words: Sequence[str]) -> None:
    """A `UsageError` for a key that is typed like a flag: it shows the line to write."""
    if WRITTEN in os.environ:
        return
    settings = filter(None, map(setting_of, context.command.params))
    keys = by_flag(setting for setting in settings if not setting.has_flag)
    for word, following in pairwise([*words, "VALUE"]):
        typed, _, value = word.partition("=")
        flag = typed.replace("_", "-")
        if flag not in keys:
            continue
        setting = keys[flag]
        if flag == setting.about.get("off"):
            value = "false"
        raise _key_as_flag(flag, setting, value or following)


def _key_as_flag(typed: str, setting: Setting, value: str) -> UsageError:
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


def read_config_file(context: Any, path: Path) -> None:
    """Let a file set what neither a flag nor a variable sets.

    Top-level keys apply to every command that has the flag, keys of a table to the command of that
    name. Raises a `UsageError` that suggests the nearest name for an unknown key or table, or names
    the type of a wrong value.
    """
    own = {key_of(parameter): parameter for parameter in context.command.params}
    del own[CONFIG]
    defaults: dict[str, Any] = {}
    for key, value in _values_in_file(context, path, own).items():
        parameter = own[key]
        setting = getattr(parameter, SETTING)
        defaults[parameter.name] = convert_toml_value(setting, value, str(path))
    context.default_map = defaults
    context.meta[CONFIG] = path


def _values_in_file(context: Any, path: Path, own: Collection[str]) -> dict[str, Any]:
    """What a file sets for this command, whose keys are `own`."""
    command = str(context.info_name)
    commands = _commands(context)
    for_all: dict[str, Any] = {}
    for_this: dict[str, Any] = {}
    for name, value in _content(path).items():
        if not isinstance(value, dict):
            for_all[_key(name)] = value
        elif name not in commands:
            raise UsageError(f"{path}: [{name}]: {unknown_name('command', name, commands)}")
        elif name == command:
            for_this = {_key(key): item for key, item in value.items()}
    _check_other_keys([key for key in for_all if key not in own], context, path)
    for key in for_this:
        if key not in own:
            raise _unknown_key(key, own, f"{path}: [{command}]", command)
    return {key: value for key, value in (for_all | for_this).items() if key in own}


def _content(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MismatchError(f"--config {path} does not exist. Name a TOML file.") from error
    except (OSError, ValueError) as error:
        raise unreadable(
            f"--config {path}", error, "Fix the file.", "cannot be read as TOML ({})"
        ) from error


def _key(name: str) -> str:
    return name.replace("_", "-")


def _commands(context: Any) -> list[str]:
    group = context.find_root().command
    if not hasattr(group, "list_commands"):
        return [str(context.info_name)]
    return list(group.list_commands(context))


def _parameters(context: Any) -> Iterator[tuple[str, Any]]:
    """Every parameter of every command; this builds all commands."""
    group = context.find_root().command
    is_group = hasattr(group, "get_command")
    for name in _commands(context):
        command = group.get_command(context, name) if is_group else context.command
        for parameter in command.params:
            yield name, parameter


def _check_other_keys(others: list[str], context: Any, path: Path) -> None:
    """A `UsageError` for a key, which this command lacks, that all other commands lack too."""
    # A file for several commands has such keys. Only then are those commands imported.
    if not others:
        return
    every = {key_of(parameter) for _, parameter in _parameters(context)} - {CONFIG}
    for key in others:
        if key not in every:
            raise _unknown_key(key, every, str(path), "COMMAND")


def _unknown_key(key: str, available: Iterable[str], where: str, command: str) -> UsageError:
    return UsageError(
        f"{where}: Unknown setting '{key}'. {did_you_mean(key, available)}"
        f"See: mismatch-cli {command} --help"
    )
