"""What each setting of a command is, and where it came from.

Presets, `--config` files, `MISMATCH_…` variables, `--like`, a manifest and the command line fill
the same object; what is checked here is named as it was given.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mismatch_cli.base import registry
from mismatch_cli.base.errors import UsageError, quoted
from mismatch_cli.base.options import (
    Setting,
    SettingSelection,
    build,
    by_key,
    is_typed_only,
    settings_of,
)

_Settings = TypeVar("_Settings")
TYPED = ""  # the source of what was typed
PREFIX = "MISMATCH_"  # of variables
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class SourcedValue(NamedTuple):
    """A value, and where it came from: TYPED, a variable, or the name of what was read."""

    value: Any
    source: str


class Values(Mapping[str, Any]):
    """Settings by key, each from some source; what is missing has its default."""

    def __init__(self, sourced: Mapping[str, SourcedValue]) -> None:
        self._sourced = dict(sourced)

    @classmethod
    def of(cls, values: Mapping[str, Any], source: str = TYPED) -> Values:
        """Values that all come from one source; None stands for a missing one."""
        if isinstance(values, Values):
            return values
        return cls({k: SourcedValue(v, source) for k, v in values.items() if v is not None})

    def __getitem__(self, key: str) -> Any:
        return self._sourced[key].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._sourced)

    def __len__(self) -> int:
        return len(self._sourced)

    def source(self, key: str) -> str | None:
        """Where a value came from; None for a default."""
        if key not in self._sourced:
            return None
        return self._sourced[key].source

    @property
    def typed(self) -> set[str]:
        """The keys of what was typed."""
        return {key for key, sourced in self._sourced.items() if sourced.source == TYPED}

    def over(self, below: Mapping[str, Any], source: str = TYPED) -> Values:
        """These values, and where one is missing, that from `below`."""
        return Values(Values.of(below, source)._sourced | self._sourced)

    def only(self, keys: Iterable[str]) -> Values:
        """The values of these keys."""
        chosen = set(keys)
        return Values({key: self._sourced[key] for key in self._sourced if key in chosen})

    def without(self, *keys: str) -> Values:
        """The values of all other keys."""
        return self.only(self._sourced.keys() - set(keys))

    def with_values(self, values: Mapping[str, Any]) -> Values:
        """All values, some of them replaced by these, which get the sources of what they
        replace.
        """
        changed = {key: SourcedValue(values[key], self._sourced[key].source) for key in values}
        return Values(self._sourced | changed)

    def build(self, kind: type[_Settings] | SettingSelection) -> _Settings:
        """The configuration; a `UsageError` that names the first invalid value as it was given."""
        for setting in settings_of(kind):
            if setting.key in self:
                self._check(setting)
        return build(kind, self)

    def _check(self, setting: Setting) -> None:
        value = setting.value_from(self[setting.key])
        if value is None:
            return
        source = self._sourced[setting.key].source
        _check_choice(setting, value, source)
        limits = setting.about
        said = _describe_value(setting, value, source)
        least = limits.get("least")
        if least is not None and value < least:
            raise UsageError(f"{said} is too small. Use at least {least}{limits.get('why', '')}.")
        most = limits.get("most")
        if most is not None and value > most:
            raise UsageError(f"{said} is too large. Use at most {most}.")
        if "valid" in limits and not limits["valid"](value):
            raise UsageError(f"{said} is out of range. Use {limits['wanted']}.")


def _check_choice(setting: Setting, value: Any, source: str) -> None:
    if setting.choices is None:
        return
    kind, names = setting.choices
    if value not in names:
        unknown = f"{registry.unknown_name(kind, value, names)} {setting.about.get('unless', '')}"
        raise UsageError(f"{_describe_setting(setting, source)}: {unknown.rstrip()}")


def _describe_value(setting: Setting, value: Any, source: str) -> str:
    """A setting and its value as they were given: typed, in a variable, or as a line of a file."""
    if source == TYPED and setting.is_typed:
        return f"{setting.flag} {value}"
    if source == TYPED or source.startswith(PREFIX):
        return f"{source or setting.key} = {value}"
    return f"{source}: {setting.key} = {value}"


def _describe_setting(setting: Setting, source: str) -> str:
    if source == TYPED:
        return setting.flag
    if source.startswith(PREFIX):
        return source
    return f"{source}: {setting.key}"


def read(kind: type | SettingSelection, content: Mapping[str, Any], source: str) -> Values:
    """The values that a TOML file gives to these settings.

    Raises a `UsageError` for an unknown name, and for a value of another type.
    """
    settings = by_key(kind)
    for name in content:
        if name not in settings:
            raise UsageError(f"{source}: {registry.unknown_name('setting', name, settings)}")
    converted = {}
    for name, value in content.items():
        converted[name] = convert_toml_value(settings[name], value, source)
    return Values.of(converted, source)


def resumed(kind: type | SettingSelection, values: Values, recorded: Mapping[str, Any]) -> Values:
    """The settings of a resumed run: the recorded ones, and those given now that a resumed run may
    change.

    Raises a `UsageError` for any other typed setting that differs. A file or a variable changes
    only what has no flag: it may be meant for another run.
    """
    changed = {}
    for key, setting in sorted(by_key(kind).items()):
        if not _is_by_user(setting, values):
            continue
        if setting.about.get("changeable"):
            changed[key] = values[key]
        elif key in values.typed and not _is_recorded(setting, values[key], recorded):
            raise UsageError(
                f"{setting.flag} differs from the run to resume. Leave it out, or start in another "
                "--output."
            )
    return Values.of(changed).over(recorded, "the run to resume")


def confirmed(
    kind: type | SettingSelection, values: Values, recorded: Mapping[str, Any]
) -> set[str]:
    """The keys of what the user gives as a run has recorded it: typed, or in a file or variable
    where there is no flag.
    """
    keys = set()
    for key, setting in by_key(kind).items():
        if _is_by_user(setting, values) and _is_recorded(setting, values[key], recorded):
            keys.add(key)
    return keys


def _is_by_user(setting: Setting, values: Values) -> bool:
    """Whether the user sets this for the run to resume: a file or a variable, which may be meant
    for another run, counts only for what has no flag.
    """
    if setting.is_typed:
        return setting.key in values.typed
    return setting.key in values


def _is_recorded(setting: Setting, value: Any, recorded: Mapping[str, Any]) -> bool:
    return bool(setting.value_from(value) == setting.value_from(recorded.get(setting.key)))


def convert_toml_value(setting: Setting, value: Any, source: str) -> Any:
    """A value of a TOML file in the type of its setting; a `UsageError` if it has another."""
    said = f"{source}: {setting.key}"
    if setting.item is None:
        return _single(setting.type, value, said, numeric=bool(setting.about.get("numeric")))
    values = value if isinstance(value, list) else [value]
    return [_single(setting.item, each, said, numeric=True) for each in values]


def _single(kind: Any, value: Any, said: str, *, numeric: bool) -> Any:
    """A value of one type; if it is `numeric`, a number stands for the text that it would be on the
    command line.
    """
    if kind not in _KINDS:
        kind = str  # paths and the like
    # In Python, a bool is a whole number too.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        bool: isinstance(value, bool),
        int: is_number and isinstance(value, int),
        float: is_number,
        str: isinstance(value, str) or (numeric and is_number),
    }
    if not fits[kind]:
        raise UsageError(f"{said} = {toml(value)} must be {_KINDS[kind]}.")
    return kind(value)


def check_typed(kind: type | SettingSelection, content: Values, chosen: Values) -> None:
    """A `UsageError` for what a file sets although only the command line may; `chosen` values hide
    it.
    """
    for setting in settings_of(kind):
        value = content.get(setting.key)
        if setting.key not in chosen and is_typed_only(setting, value):
            typed = quoted(setting.flag, str(value))
            raise UsageError(
                f"{content.source(setting.key)}: {setting.key} can start code or send keys to a "
                f"host, so a file may not set it. If you trust it, add: {typed}"
            )


def variable_of(setting: Setting) -> str:
    """The environment variable that gives a setting its value in every command."""
    return f"{PREFIX}{setting.key.upper()}"


def as_typed(kind: type, words: Sequence[str | Path]) -> tuple[list[str], list[str | Path]]:
    """Words of a command line that spell every setting as a flag, as a user can type them:
    variables to put before the command, for settings that have no flag, and the rest.
    """
    keys = by_flag(each for each in settings_of(kind) if not each.is_typed)
    variables: list[str] = []
    typed: list[str | Path] = []
    rest = iter(words)
    for word in rest:
        if not isinstance(word, str) or word not in keys:
            typed.append(word)
            continue
        setting = keys[word]
        if setting.type is bool:
            value = "false" if word == setting.about.get("off") else "true"
        else:
            value = quoted(next(rest))
        variables.append(f"{variable_of(setting)}={value}")
    return variables, typed


def by_flag(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Settings by the flags that they have or would have, those that switch one off included."""
    every = list(settings)
    offs = {each.about["off"]: each for each in every if "off" in each.about}
    return {each.as_flag: each for each in every} | offs


def toml(value: Any) -> str:
    """A value as a line of a TOML file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A text of JSON is one of TOML, which refuses one more character as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    return repr(value)


def toml_line(setting: Setting, value: Any) -> str:
    """The line of a TOML file that gives a setting this value; unset, where it is None."""
    if value is None:
        value = setting.nothing
    return f"{setting.key} = {toml(value)}"
