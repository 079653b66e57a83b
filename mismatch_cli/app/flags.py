"""A command whose parameters are settings: their flags, for Typer, and the objects it gets from
them.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping
from dataclasses import Field
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from mismatch_cli.base.configuration import CONFIG, read_into, values_of
from mismatch_cli.base.options import (
    RUNNING,
    Chosen,
    Setting,
    choose,
    chosen_of,
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

    def with_flags(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)
        parts = {
            name: chosen
            for name, parameter in signature.parameters.items()
            if (chosen := _part(parameter.default)) is not None
        }
        settings = (
            []
            if kind is None
            else _with_defaults(choose(kind, without=(), panel="", **changes), shown)
        )
        for chosen in parts.values():
            settings += settings_of(chosen)
        settings.append(_CONFIG)
        by_parameter = {_name(known): known for known in settings}

        @wraps(function)
        def command(**given: Any) -> None:
            context = given[_CONTEXT]
            values = values_of(context)
            arguments: dict[str, Any] = {n: values.build(part) for n, part in parts.items()}
            if _CONTEXT in signature.parameters:
                arguments[_CONTEXT] = context
            if "values" in signature.parameters:
                arguments["values"] = values
            function(**arguments)

        parameters = [_parameter(name, known) for name, known in by_parameter.items()]
        of_typer: Any = inspect.Parameter
        context = of_typer(_CONTEXT, of_typer.KEYWORD_ONLY, annotation=typer.Context)
        command.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in (context, *parameters)}
        command.settings = by_parameter  # type: ignore[attr-defined]
        return command

    return with_flags


def _part(default: Any) -> Chosen | None:
    return chosen_of(default) if isinstance(default, Field) else None


def _with_defaults(chosen: Chosen, shown: Mapping[str, str] | None) -> list[Setting]:
    """The settings, with the defaults that `--help` shows for them."""
    if shown is None:
        return list(settings_of(chosen))
    return [
        Setting(known.name, known.hint, {**known.about, "show_default": shown.get(known.key, "")})
        for known in settings_of(chosen)
    ]


def _name(known: Setting) -> str:
    """The name of the parameter for a setting: its key, unless Python reserves that."""
    return f"{known.key}_" if keyword.iskeyword(known.key) else known.key


def _read(context: Any, path: Path | None) -> Path | None:
    """Read the file; Typer calls this before any other parameter has its value."""
    if path is not None and not context.resilient_parsing:
        read_into(context, path)
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


def _parameter(name: str, known: Setting) -> inspect.Parameter:
    """The parameter that Typer turns into an option or an argument; it has no default, so that what
    is given is known.
    """
    about = known.about
    hint = list[known.type] if about.get("repeatable") else known.hint  # type: ignore[name-defined]
    of_typer: dict[str, Any] = {"help": about["help"], "autocompletion": _completing(about)}
    of_typer |= {key: about[key] for key in ("callback", "is_eager") if key in about}
    if about.get("argument"):
        option = typer.Argument(metavar=about.get("metavar"), show_default=False, **of_typer)
    else:
        words = f"{known.words}/{about['off']}" if "off" in about else known.words
        names = [words, *filter(None, [about.get("short")])]
        option = typer.Option(*names, metavar=known.metavar, hidden=not known.has_flag, **of_typer)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[hint | None, option],
    )
