"""A field of a dataclass is a setting: its flag, help, default and limits, and whether a resumed
run may change it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from mismatch_cli.base import registry
from mismatch_cli.base.configuration import CONFIG, is_reserved, read_into
from mismatch_cli.base.errors import UsageError

_Settings = TypeVar("_Settings")
ABOVE_0: dict[str, Any] = {"valid": lambda value: value > 0, "wanted": "a number above 0"}
FROM_0: dict[str, Any] = {"valid": lambda value: value >= 0, "wanted": "0 or more"}
SHARE: dict[str, Any] = {"valid": lambda value: 0 < value < 1, "wanted": "a share between 0 and 1"}
UP_TO_1: dict[str, Any] = {
    "valid": lambda value: 0 < value <= 1,
    "wanted": "a number above 0, up to 1",
}
MODEL, DATA, ADAPTER = "model", "data", "adapter"  # kinds of `path`
BELOW_1: dict[str, Any] = {
    "valid": lambda value: 0 <= value < 1,
    "wanted": "a number from 0 to below 1",
}


def setting(default: Any, help: str, flag: str | bool | None = None, **about: Any) -> Any:
    """A field of a dataclass, or a parameter of a command, with a flag of its name, or with the
    given `flag`; without one if that is False: then only a file or a variable sets it.

    A default that is a function is called if nothing is given, and `--help` shows no default.
    `about` is any of
    `least` (and `why`), `valid` with `wanted`: what the value must be;
    `choices`: the word for what is chosen, and the names or a function that lists them;
    `completes`: names that a shell completes, or a function that lists them; other values are
    possible too;
    `changeable`: a resumed run may have a different value, since it only decides how the work is
    done;
    `path`: it may be a local path, which is recorded in one spelling: that of a MODEL, of DATA or
    of an ADAPTER;
    `typed`: only the command line may set it, or, if this is a function, the values for which it is
    true: what runs code, or names a host that gets the environment's keys. Never a file, a variable
    or somebody's manifest;
    `argument`: it is positional, without a flag;
    `short`: its one-letter flag; and what Typer takes: `min`, `max`, `metavar`, `show_default`, and
    `panel`, the title in `--help`.
    """
    factory = default if callable(default) else lambda: default
    about |= {"default": factory, "unset": callable(default), "help": help, "flag": flag}
    return field(default_factory=factory, metadata=about)


def default_of(setting: Field[Any]) -> Any:
    """The value if nothing is given."""
    return setting.metadata["default"]()


def flag_of(setting: Field[Any]) -> str:
    """The flag of a setting, or its key if it has none, as messages name it."""
    if setting.metadata.get("argument"):
        return setting.name.upper()
    return _said(setting.name, setting.metadata)


def names_cluster(place: str) -> bool:
    """Whether workers are on a Ray cluster of this address, whose answers are pickles."""
    return place.startswith("ray://")


def is_typed_only(setting: Field[Any], value: Any) -> bool:
    """Whether only the command line may give a setting this value."""
    return is_reserved(setting.metadata.get("typed", False), value)


def _said(name: str, about: Mapping[str, Any]) -> str:
    """The flag of a setting as it is typed, or the key in a file that it has instead."""
    if about["flag"] is False:
        return name.replace("_", "-")
    return str(about["flag"] or _flag(name))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check(settings: Any, *, typed: bool) -> None:
    """A `UsageError` for the first invalid value; it names the flag if `typed`, else the key of
    a file.
    """
    for known in fields(settings):
        value, limits = getattr(settings, known.name), known.metadata
        if value is None:
            continue
        name = flag_of(known) if typed else known.name
        said = f"{name} {value}" if typed else f"{name} = {value}"
        if "least" in limits and value < limits["least"]:
            raise UsageError(
                f"{said} is too small. Use at least {limits['least']}{limits.get('why', '')}."
            )
        if "valid" in limits and not limits["valid"](value):
            raise UsageError(f"{said} is out of range. Use {limits['wanted']}.")
        _check_choice(name, value, limits)


def _check_choice(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if "choices" in limits and value is not None:
        kind, names = limits["choices"]
        names = names() if callable(names) else names
        if value not in names:
            raise UsageError(f"{name}: {registry.unknown(kind, value, names)}")


def build(kind: type[_Settings], given: Mapping[str, Any]) -> _Settings:
    """Build settings of this kind from a mapping, perhaps read from JSON; missing and None
    values get defaults.
    """
    named = {known.name: given.get(known.name) for known in fields(kind)}  # type: ignore[arg-type]
    known = {
        name: tuple(value) if isinstance(value, list) else value for name, value in named.items()
    }
    return kind(**{name: value for name, value in known.items() if value is not None})


def resumed(
    kind: type, asked: Mapping[str, Any], typed: set[str], recorded: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a resumed run: the recorded ones, and those typed now that a resumed run may
    change.

    Raises a `UsageError` for any other typed setting that differs.
    """
    changeable = {known.name for known in fields(kind) if known.metadata.get("changeable")}
    for known in sorted(fields(kind), key=lambda known: known.name):
        name = known.name
        if name in typed - changeable and asked[name] != recorded.get(name):
            raise UsageError(
                f"{flag_of(known)} differs from the run to resume. Leave it out, or start in "
                "another --output."
            )
    return {**asked, **recorded, **{name: asked[name] for name in changeable & typed}}


class Saying(NamedTuple):
    """A setting by name, with changes for one command."""

    name: str
    changes: Mapping[str, Any]


def saying(name: str, **changes: Any) -> Saying:
    """In the `Annotated` of a command: include this setting, with `changes` to what `setting`
    was given.
    """
    return Saying(name, changes)


def flags(
    kind: type | None = None, without: Sequence[str] = (), defaults: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command whose parameters are settings.

    A `setting` as the default of a parameter makes it a flag. A dataclass of settings as its type
    makes it an object, built from a flag for each field, or for those that an `Annotated` names.
    `--config`, a file of settings, comes last and is read before the command starts.
    The fields of `kind` are flags too, before all others; they reach the command if it takes
    `**settings`. With `defaults`, what `--help` shows for each, they have no default: something
    else decides.
    """

    def with_flags(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        parameters: list[inspect.Parameter] = []
        built: dict[str, tuple[type, list[str]]] = {}
        own: dict[str, Field[Any]] = {}
        if kind is not None:
            names = [known.name for known in fields(kind) if known.name not in without]
            parameters += _parameters(kind, {name: _elsewhere(name, defaults) for name in names})
        for name, declared in signature.parameters.items():
            is_part = get_origin(declared.annotation) is Annotated
            group, *named = get_args(declared.annotation) if is_part else [declared.annotation]
            if is_dataclass(group):
                named = named or [known.name for known in fields(group)]
                parts: dict[str, dict[str, Any]] = {}
                for part in named:
                    part_name, changes = part if isinstance(part, Saying) else (part, {})
                    parts[part_name] = {**parts.get(part_name, {}), **changes}
                built[name] = group, list(parts)  # type: ignore[assignment]
                parameters += _parameters(group, parts)  # type: ignore[arg-type]
            elif isinstance(declared.default, Field):
                own[name] = declared.default
                parameters.append(_parameter(name, declared.annotation, declared.default.metadata))
            elif declared.kind is not declared.VAR_KEYWORD:
                parameters.append(declared.replace(kind=declared.KEYWORD_ONLY))
        parameters.append(_parameter(CONFIG, Path, _CONFIG.metadata))
        takes_all = any(
            declared.kind is declared.VAR_KEYWORD for declared in signature.parameters.values()
        )

        @wraps(function)
        def command(**given: Any) -> None:
            del given[CONFIG]
            for name, known in own.items():
                _check_choice(_said(name, known.metadata), given[name], known.metadata)
            objects: dict[str, Any] = {
                name: build(group, {part: given.pop(part) for part in names})
                for name, (group, names) in built.items()
            }
            function(
                **objects,
                **{
                    n: value for n, value in given.items() if takes_all or n in signature.parameters
                },
            )

        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        groups = [*filter(None, [kind]), *(group for group, _ in built.values())]
        about = {known.name: known.metadata for group in groups for known in fields(group)}
        about |= {name: known.metadata for name, known in own.items()}
        command.reserved = {  # type: ignore[attr-defined]
            name: limits["typed"] for name, limits in about.items() if "typed" in limits
        }
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return with_flags


def _read(context: Any, path: Path | None) -> Path | None:
    """Read the file; Typer calls this before any other parameter has its value."""
    if path is not None and not context.resilient_parsing:
        read_into(context, path)
    return path


_CONFIG: Field[Any] = setting(
    None,
    "Read settings that you do not type from this file.",
    metavar="FILE.toml",
    callback=_read,
    is_eager=True,
)


def _elsewhere(name: str, defaults: Mapping[str, str] | None) -> dict[str, Any]:
    """The changes to a setting whose default is decided elsewhere, as `--help` shows it."""
    return (
        {} if defaults is None else {"unset": True, "show_default": defaults.get(name, "") or False}
    )


def _parameters(kind: type, named: Mapping[str, Mapping[str, Any]]) -> list[inspect.Parameter]:
    hints, known = get_type_hints(kind), {field.name: field.metadata for field in fields(kind)}
    return [
        _parameter(name, hints[name], {**known[name], **changes}) for name, changes in named.items()
    ]


def _completing(about: Mapping[str, Any]) -> Callable[[str], list[str]] | None:
    """The function that completes a value for a shell; if nothing fits, the shell completes
    files.
    """
    names = about.get("completes") or about.get("choices", (None, None))[1]
    if names is None:
        return None

    def complete(incomplete: str) -> list[str]:
        return [
            name for name in (names() if callable(names) else names) if name.startswith(incomplete)
        ]

    return complete


_FOR_TYPER = ("min", "max", "metavar", "show_default", "callback", "is_eager")
_METAVARS = {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}
_MOST_NAMED = 60  # characters: longer lists of choices are not shown beside a flag


def _metavar(hint: Any, about: Mapping[str, Any]) -> str | None:
    """The placeholder of a value in `--help`: the choices if they are few, else a letter for its
    type.
    """
    if "choices" in about:
        _, names = about["choices"]
        choices = "|".join(names() if callable(names) else names)
        if len(choices) <= _MOST_NAMED:
            return choices
    kinds = {kind for part in get_args(hint) or (hint,) for kind in get_args(part) or (part,)} - {
        NoneType
    }
    return _METAVARS.get(kinds.pop()) if len(kinds) == 1 else None


def _parameter(name: str, hint: Any, about: Mapping[str, Any]) -> inspect.Parameter:
    import typer

    taken = {known: about[known] for known in _FOR_TYPER if known in about}
    taken["autocompletion"] = _completing(about)
    typed = {"help": about["help"], "rich_help_panel": about.get("panel"), **taken}
    if about.get("argument"):
        option = typer.Argument(**{"show_default": False, **typed})
    else:
        typed.setdefault("metavar", _metavar(hint, about))
        names = about["flag"] or _flag(name), *filter(None, [about.get("short")])
        option = typer.Option(*names, hidden=about["flag"] is False, **typed)
    unset = about["unset"]
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if unset else about["default"](),
        annotation=Annotated[hint | None if unset else hint, option],
    )
