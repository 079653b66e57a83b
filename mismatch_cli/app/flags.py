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

    Each parameter whose default is a `settings_group` is built from its settings, all of which
    become flags or keys of `--config`. The function may also take `context`, and `values`: what was
    given for any setting, and where. The settings of `kind`, a configuration that the command
    builds itself from these values, come first; `changes` say what differs in them here, and
    `shown` which defaults `--help` shows for them.
    """
    own_settings: list[Setting] = []
    if kind is not None:
        own_settings = _with_shown_defaults(select_settings(kind, changes=changes), shown)
    return partial(_command, own_settings)


def _command(own_settings: Sequence[Setting], function: Callable[..., None]) -> Callable[..., None]:
    parameters = inspect.signature(function).parameters
    selections: dict[str, SettingSelection] = {}
    for name, parameter in parameters.items():
        is_field = isinstance(parameter.default, Field)
        selection = selection_of(parameter.default) if is_field else None
        if selection is not None:
            selections[name] = selection
    settings = [*own_settings, *chain(*map(settings_of, selections.values())), _CONFIG]

    @wraps(function)
    def command(**of_typer: Any) -> None:
        context = of_typer[_CONTEXT]
        values = values_of(context)
        arguments: dict[str, Any] = {}
        if _CONTEXT in parameters:
            arguments[_CONTEXT] = context
        if "values" in parameters:
            arguments["values"] = values
        for name, selection in selections.items():
            arguments[name] = values.build(selection)
        function(**arguments)

    _describe(command, {_name(each): each for each in settings})
    return command


def _describe(command: Any, settings: Mapping[str, Setting]) -> None:
    """Give a command the signature that Typer reads, and its settings by parameter."""
    context = inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *(_parameter(name, each) for name, each in settings.items())]
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.settings = settings


def _with_shown_defaults(
    selection: SettingSelection, shown: Mapping[str, str] | None
) -> list[Setting]:
    """The settings, with the defaults that `--help` shows for them: by default their own."""
    settings = list(settings_of(selection))
    if shown is None:
        return settings
    shown_settings = []
    for each in settings:
        about = {**each.about, "show_default": shown.get(each.key, "")}
        shown_settings.append(Setting(each.name, each.hint, about))
    return shown_settings


def _name(each: Setting) -> str:
    """The name of the parameter for a setting: its key, unless Python reserves that."""
    return f"{each.key}_" if keyword.iskeyword(each.key) else each.key


def _read_file(context: Any, path: Path | None) -> Path | None:
    """Read the file of --config; Typer calls this before any other parameter has its value."""
    if path is not None and not context.resilient_parsing:
        read_config_file(context, path)
    return path


_CONFIG = Setting(
    CONFIG,
    Path | None,
    setting(
        None,
        "File of settings; typed ones win.",
        metavar="FILE.toml",
        panel=RUNNING,
        callback=_read_file,
        is_eager=True,
    ).metadata,
)


def _completing(about: Mapping[str, Any]) -> Callable[[str], list[str]] | None:
    """The function that completes a value for a shell; if nothing fits, the shell completes
    files.
    """
    _, choices = about.get("choices", (None, None))
    names = about.get("completes") or choices
    if names is None:
        return None

    def complete(incomplete: str) -> list[str]:
        # Looking for names takes time (folders, packages), so it is done only on Tab.
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
    for key in ("callback", "is_eager"):
        if key in about:
            of_typer[key] = about[key]
    if about.get("argument"):
        option = typer.Argument(metavar=about.get("metavar"), show_default=False, **of_typer)
    else:
        names = [each.as_flag]
        if "off" in about:
            names = [f"{each.as_flag}/{about['off']}"]
        if about.get("short"):
            names.append(about["short"])
        option = typer.Option(*names, metavar=each.metavar, hidden=not each.has_flag, **of_typer)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[hint | None, option],
    )
