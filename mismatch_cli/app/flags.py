"""A command whose parameters are settings: their flags, for Typer, and the objects it gets from
them.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from mismatch_cli.base.configuration import CONFIG, read_config_file, values_of
from mismatch_cli.base.options import (
    RUNNING,
    Setting,
    SettingSelection,
    select_settings,
    selection_of,
    setting,
    settings_of,
)

_CONTEXT = "context"


def flags(
    kind: type | None = None,
    *,
    shown: Mapping[str, str] | None = None,
    **changes: dict[str, Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function.

    Each parameter that is a `part` is built from its settings, all of which become flags or keys of
    `--config`. The function may also take `context`, and `values`: what was given for any setting,
    and where. The settings of `kind`, a configuration that the command builds itself from these
    values, come first; `changes` say what differs in them here, and `shown` which defaults `--help`
    shows for them.
    """
    own_settings = (
        [] if kind is None else _with_defaults(select_settings(kind, changes=changes), shown)
    )
    return partial(_command, own_settings)


def _command(own_settings: Sequence[Setting], function: Callable[..., None]) -> Callable[..., None]:
    parameters = inspect.signature(function).parameters
    parts = {name: _part(parameter.default) for name, parameter in parameters.items()}
    built = {name: chosen for name, chosen in parts.items() if chosen is not None}
    settings = [*own_settings, *chain(*map(settings_of, built.values())), _CONFIG]

    @wraps(function)
    def command(**of_typer: Any) -> None:
        context = of_typer[_CONTEXT]
        values = values_of(context)
        others = {_CONTEXT: context, "values": values}
        taken = {name: value for name, value in others.items() if name in parameters}
        function(**taken, **{name: values.build(chosen) for name, chosen in built.items()})

    _describe(command, {_name(each): each for each in settings})
    return command


def _describe(command: Any, settings: Mapping[str, Setting]) -> None:
    """Give a command the signature that Typer reads, and its settings by parameter."""
    context = inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *(_parameter(name, each) for name, each in settings.items())]
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.settings = settings


def _part(default: Any) -> SettingSelection | None:
    return selection_of(default) if isinstance(default, Field) else None


def _with_defaults(chosen: SettingSelection, shown: Mapping[str, str] | None) -> list[Setting]:
    """The settings, with the defaults that `--help` shows for them."""
    if shown is None:
        return list(settings_of(chosen))
    return [
        Setting(each.name, each.hint, {**each.about, "show_default": shown.get(each.key, "")})
        for each in settings_of(chosen)
    ]


def _name(each: Setting) -> str:
    """The name of the parameter for a setting: its key, unless Python reserves that."""
    return f"{each.key}_" if keyword.iskeyword(each.key) else each.key


def _read(context: Any, path: Path | None) -> Path | None:
    """Read the file; Typer calls this before any other parameter has its value."""
    if path is not None and not context.resilient_parsing:
        read_config_file(context, path)
    return path


_CONFIG = Setting(
    CONFIG,
    Path | None,
    setting(
        None,
        "Read what you do not type from this file.",
        metavar="FILE.toml",
        panel=RUNNING,
        callback=_read,
        is_eager=True,
    ).metadata,
)


def _completing(about: Mapping[str, Any]) -> Callable[[str], list[str]] | None:
    """The function that completes a value for a shell; if nothing fits, the shell completes
    files.
    """
    names = about.get("completes") or about.get("choices", (None, None))[1]
    if names is None:
        return None

    def complete(incomplete: str) -> list[str]:
        every = names() if callable(names) else names
        return [name for name in every if name.startswith(incomplete)]

    return complete


def _parameter(name: str, each: Setting) -> inspect.Parameter:
    """The parameter that Typer turns into an option or an argument; without a default, so that one
    can tell what was given.
    """
    about = each.about
    hint = list[each.type] if about.get("repeatable") else each.hint  # type: ignore[name-defined]
    of_typer: dict[str, Any] = {"help": about["help"], "autocompletion": _completing(about)}
    of_typer |= {key: about[key] for key in ("callback", "is_eager") if key in about}
    if about.get("argument"):
        option = typer.Argument(metavar=about.get("metavar"), show_default=False, **of_typer)
    else:
        words = f"{each.words}/{about['off']}" if "off" in about else each.words
        names = [words, *filter(None, [about.get("short")])]
        option = typer.Option(*names, metavar=each.metavar, hidden=not each.has_flag, **of_typer)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[hint | None, option],
    )
