"""A field of a dataclass is a setting: its key, help, default and limits, whether it has a flag,
and whether a resumed run may change it.

A configuration is composed of such dataclasses: `config.engine.dtype` is the setting
`rollout_dtype`, which is declared once, whichever commands have it. Its key is what files,
manifests and, as `--rollout-dtype`, the command line call it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import cache, partial
from types import MappingProxyType, NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_Settings = TypeVar("_Settings")
ABOVE_0: dict[str, Any] = {"valid": lambda value: value > 0, "wanted": "a number above 0"}
FROM_0: dict[str, Any] = {"valid": lambda value: value >= 0, "wanted": "0 or more"}
SHARE: dict[str, Any] = {"valid": lambda value: 0 < value < 1, "wanted": "a share between 0 and 1"}
UP_TO_1: dict[str, Any] = {
    "valid": lambda value: 0 < value <= 1,
    "wanted": "a number above 0, up to 1",
}
BELOW_1: dict[str, Any] = {
    "valid": lambda value: 0 <= value < 1,
    "wanted": "a number from 0 to below 1",
}
MODEL, DATA, ADAPTER = "model", "data", "adapter"  # kinds of `path`
_SELECTION = "selection"
# Words for a value in `--help`, by the type of the setting
_METAVARS = {bool: "", int: "N", float: "X", str: "TEXT"}
_MOST_NAMED = 24  # characters: longer lists of choices are not shown beside a flag


def setting(default: Any, help: str, *, key: str = "", flag: bool = True, **about: Any) -> Any:
    """A field of a dataclass that is a setting.

    `key` is its name in files and manifests: that of the field unless given. Its flag is the key
    with dashes; without a `flag`, only a file or a variable sets it.
    A default that is a function is called where nothing is given, and `--help` shows none.
    `about` is any of
    `least` and `most` (and `why`), `valid` with `wanted`: what the value must be;
    `choices`: the word for what is chosen, and the names or a function that lists them;
    `unless`: a sentence for those who give another;
    `completes`: names that a shell completes, or a function that lists them; other values are
    possible too;
    `changeable`: a resumed run may have a different value, since it only decides how the work is
    done;
    `nothing`: how a file, which has no None, spells that the setting is unset: 0, or a word;
    an empty text is one way wherever the setting is a text;
    `path`: it may be a local path, which is recorded in one spelling: that of a MODEL, of DATA or
    of an ADAPTER;
    `typed`: only the command line may set it, or, if this is a function, the values for which it is
    true: what runs code, or names a host that gets the environment's keys. Never a file, a variable
    or somebody's manifest;
    `argument`: it is positional, without a flag;
    `off`: the flag that makes a switch false;
    `numeric`: a file may have a number for its text;
    `repeatable`: it is typed once for each of several values;
    `short`: its one-letter flag; `metavar`, `show_default`: words for its value and its default;
    `panel`: the title above it in `--help`.
    """
    factory = default if callable(default) else lambda: default
    about |= {"default": default, "help": help, "key": key, "flag": flag}
    return field(default_factory=factory, metadata=about)


RUNNING = "Running"  # the title above what decides only how the work is done
of_running = partial(setting, panel=RUNNING)


def override(default: Any = ..., **about: Any) -> dict[str, Any]:
    """What differs for one command in a setting that others have too: its default, a limit, a word
    of its help.
    """
    if default is ...:
        return about
    return {"default": default, **about}


def settings_group(
    kind: type, *names: str, without: Sequence[str] = (), panel: str = "", **changes: dict[str, Any]
) -> Any:
    """A field, or a command's parameter, that is a dataclass of settings; see `select_settings`."""
    chosen = select_settings(kind, names, without, panel, changes)
    return field(default_factory=lambda: build(chosen, {}), metadata={_SELECTION: chosen})


def select_settings(
    kind: type,
    names: Sequence[str] = (),
    without: Sequence[str] = (),
    panel: str = "",
    changes: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> SettingSelection:
    """All settings of a dataclass, or those of these `names` (of fields) and of `changes`, which
    say with `override` what differs here; `panel` is the title above all of them.
    """
    every = [declared.name for declared in fields(kind) if declared.name not in without]
    chosen = list(dict.fromkeys([*names, *changes])) if names else every
    misspelt = {*chosen, *changes} - set(every)
    if misspelt:
        raise ValueError(f"{kind.__name__} has no setting {', '.join(misspelt)}")
    titled = override(panel=panel) if panel else {}
    return SettingSelection(kind, {name: titled | changes.get(name, {}) for name in chosen})


@dataclass(frozen=True, eq=False)  # hashed by identity: what it contains cannot be
class SettingSelection:
    """The settings of a dataclass that a configuration or a command has, and what differs there."""

    kind: type
    names: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Setting:
    """A setting as one configuration or command has it."""

    name: str  # of the field
    hint: Any
    about: Mapping[str, Any]

    @property
    def key(self) -> str:
        """What files and manifests call it."""
        return str(self.about["key"] or self.name)

    @property
    def flag(self) -> str:
        """What messages call it: its flag, a positional argument in capitals, else its key."""
        if self.about.get("argument"):
            return (self.about.get("metavar") or self.name.upper()).strip("[].")
        return self.as_flag if self.has_flag else self.key

    @property
    def is_typed(self) -> bool:
        """Whether it is typed: as a flag or as an argument; else it is a key of files."""
        return self.has_flag or bool(self.about.get("argument"))

    @property
    def as_flag(self) -> str:
        """The flag that it has, or would have."""
        return f"--{self.key.replace('_', '-')}"

    @property
    def has_flag(self) -> bool:
        """Whether it has a flag."""
        return bool(self.about["flag"]) and not self.about.get("argument")

    @property
    def default(self) -> Any:
        """The value where nothing is given."""
        default = self.about["default"]
        return default() if callable(default) else default

    @property
    def type(self) -> Any:
        """The type of a value that is set."""
        union = get_args(self.hint)
        if NoneType not in union:
            return self.hint
        others = [member for member in union if member is not NoneType]
        return others[0] if len(others) == 1 else self.hint

    @property
    def item(self) -> Any:
        """The type of each of several values; None for a setting with one."""
        origin = get_origin(self.type)
        if self.about.get("repeatable") and origin is not list:
            return self.type
        if origin in (list, tuple):
            return get_args(self.type)[0]
        return None

    @property
    def nothing(self) -> Any:
        """How a file spells that it is unset; None if it is never unset, or has no such word."""
        if NoneType not in get_args(self.hint):
            return None
        return self.about.get("nothing", "" if self.type is str else None)

    def value_from(self, value: Any) -> Any:
        """The value that the setting gets from one that was typed or read: its default for None,
        None for how a file spells that it is unset.
        """
        if value is None:
            return self.default
        if get_origin(self.type) is tuple:
            return tuple(value)
        if self.nothing is None:
            return value
        # By type too, since False and 0.0 equal 0.
        is_unset = type(value) is type(self.nothing) and value in ("", self.nothing)
        return None if is_unset else value

    @property
    def choices(self) -> tuple[str, Collection[str]] | None:
        """What the allowed values are called, and their names; None if any value is allowed."""
        if "choices" not in self.about:
            return None
        kind, names = self.about["choices"]
        if callable(names):
            names = names()
        return kind, names

    @property
    def metavar(self) -> str:
        """The word for its value in `--help`: the choices if they are few, else a letter for its
        type.
        """
        if "metavar" in self.about:
            return str(self.about["metavar"])
        if self.choices is not None:
            kind, names = self.choices
            listed = "|".join(names)
            if len(listed) <= _MOST_NAMED:
                return listed
            return kind.rpartition(" ")[2].upper()
        return _METAVARS.get(self.type, "PATH")


def settings_of(kind: type | SettingSelection) -> Iterator[Setting]:
    """Every setting of a configuration and of its groups, in the order of declaration."""
    for each in _members(_selection(kind)).values():
        if isinstance(each, SettingSelection):
            yield from settings_of(each)
        else:
            yield each


def by_key(kind: type | SettingSelection) -> dict[str, Setting]:
    """The settings of a configuration by key."""
    return {each.key: each for each in settings_of(kind)}


# Selections are hashed by identity: one for each dataclass, so that `_members` remembers it.
@cache
def _selection(kind: type | SettingSelection) -> SettingSelection:
    if isinstance(kind, SettingSelection):
        return kind
    return SettingSelection(kind, {declared.name: {} for declared in fields(kind)})


@cache
def _members(chosen: SettingSelection) -> dict[str, Setting | SettingSelection]:
    """The settings and groups of settings of one dataclass, by the names of their fields."""
    hints = get_type_hints(chosen.kind)
    declared = {each.name: each for each in fields(chosen.kind)}
    members: dict[str, Setting | SettingSelection] = {}
    for name, changes in chosen.names.items():
        about = declared[name].metadata
        if _SELECTION in about:
            members[name] = about[_SELECTION]
        elif "help" in about:
            members[name] = Setting(name, hints[name], {**about, **changes})
    return members


def build(kind: type[_Settings] | SettingSelection, values: Mapping[str, Any]) -> _Settings:
    """A configuration from values by key, perhaps read from JSON; what is missing or None gets its
    default.
    """
    chosen = _selection(kind)  # type: ignore[arg-type]  # a class has a hash
    arguments: dict[str, Any] = {}
    for name, each in _members(chosen).items():
        if isinstance(each, SettingSelection):
            arguments[name] = build(each, values)
        else:
            arguments[name] = each.value_from(values.get(each.key))
    built: _Settings = chosen.kind(**arguments)
    return built


def values_by_key(configuration: Any) -> dict[str, Any]:
    """The values of a configuration by key."""
    kind: Any = type(configuration)
    return _values_by_key(_selection(kind), configuration)


def _values_by_key(chosen: SettingSelection, configuration: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, each in _members(chosen).items():
        value = getattr(configuration, name)
        if isinstance(each, SettingSelection):
            values |= _values_by_key(each, value)
        else:
            values[each.key] = value
    return values


def replace_settings(configuration: _Settings, **values: Any) -> _Settings:
    """The configuration with other values, by key."""
    return build(type(configuration), {**values_by_key(configuration), **values})


def selection_of(declared: Field[Any]) -> SettingSelection | None:
    """What a parameter or field that is a `settings_group` has."""
    return declared.metadata.get(_SELECTION)


def names_cluster(workers: str) -> bool:
    """Whether workers are on the Ray cluster of an address, whose answers are pickles."""
    return workers.startswith("ray://")


def is_typed_only(declared: Setting, value: Any) -> bool:
    """Whether only the command line may give a setting this value; an empty one starts nothing."""
    if not value:
        return False
    typed = declared.about.get("typed", False)
    if callable(typed):
        typed = typed(value)
    return bool(typed)
