"""A field of a dataclass is a setting: its flag, help, default and limits, and whether a resumed run may change it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, field, fields
from typing import Annotated, Any, TypeVar, get_type_hints

from mismatch_cli import registry
from mismatch_cli.errors import UsageError

_Settings = TypeVar("_Settings")
ABOVE_0: dict[str, Any] = {"valid": lambda value: value > 0, "wanted": "a number above 0"}
FROM_0: dict[str, Any] = {"valid": lambda value: value >= 0, "wanted": "0 or more"}
SHARE: dict[str, Any] = {"valid": lambda value: 0 < value < 1, "wanted": "a share between 0 and 1"}
BELOW_1: dict[str, Any] = {"valid": lambda value: 0 <= value < 1, "wanted": "a number from 0 to below 1"}


def setting(default: Any, help: str, flag: str | None = None, **about: Any) -> Any:
    """A field with a flag of its name, or with this one, a switch with both of its words.

    A default that is a function is called where nothing is given, and `--help` shows none. `about` is any of
    `least` (and `why`), `valid` with `wanted`: what the value has to be;
    `choices`: the word for what is chosen, and the names there are or a function that lists them;
    `changeable`: a run that goes on may have another value, since it decides how the work is done, not what comes out;
    `path`: it may lie on this machine, and is recorded in one spelling;
    `argument`: it has no flag, it stands by itself;
    and what Typer takes: `min`, `max`, and the title in `--help`, `panel`.
    """
    factory = default if callable(default) else lambda: default
    about |= {"default": factory, "unset": callable(default), "help": help, "flag": flag}
    return field(default_factory=factory, metadata=about)


def default_of(setting: Field[Any]) -> Any:
    """What holds where nothing is given."""
    return setting.metadata["default"]()


def flag_of(setting: Field[Any]) -> str:
    """What is typed for it, as messages name it."""
    return setting.name.upper() if setting.metadata.get("argument") else f"--{setting.name.replace('_', '-')}"


def check(settings: Any, *, typed: bool) -> None:
    """A `UsageError` for the first value out of its limits; it names the flag if `typed`, else the key of a file."""
    for known in fields(settings):
        value, limits = getattr(settings, known.name), known.metadata
        if value is None:
            continue
        name = flag_of(known) if typed else known.name
        said = f"{name} {value}" if typed else f"{name} = {value}"
        if "least" in limits and value < limits["least"]:
            raise UsageError(f"{said} is too small. Use at least {limits['least']}{limits.get('why', '')}.")
        if "valid" in limits and not limits["valid"](value):
            raise UsageError(f"{said} makes no sense. Use {limits['wanted']}.")
        if "choices" in limits:
            kind, names = limits["choices"]
            names = names() if callable(names) else names
            if value not in names:
                raise UsageError(f"{name}: {registry.unknown(kind, value, names)}")


def build(kind: type[_Settings], given: Mapping[str, Any]) -> _Settings:
    """The settings of this kind among what is given, as it is or from JSON; what is None has its default."""
    named = {known.name: given.get(known.name) for known in fields(kind)}  # type: ignore[arg-type]
    known = {name: tuple(value) if isinstance(value, list) else value for name, value in named.items()}
    return kind(**{name: value for name, value in known.items() if value is not None})


def resumed(kind: type, asked: Mapping[str, Any], typed: set[str], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that goes on: its own, and of those that were typed now the ones that it may change.

    Raises a `UsageError` for one that was typed and differs, but may not.
    """
    changeable = {known.name for known in fields(kind) if known.metadata.get("changeable")}
    for known in sorted(fields(kind), key=lambda known: known.name):
        name = known.name
        if name in typed - changeable and asked[name] != recorded.get(name):
            raise UsageError(
                f"{flag_of(known)} differs from the run to go on with. Leave it out, or start in another --output."
            )
    return {**asked, **recorded, **{name: asked[name] for name in changeable & typed}}


def flags(kind: type, **shown: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose `**settings` are flags, one for each field of a dataclass, in their order.

    They stand before the other parameters. With `shown`, which Typer takes (and `without`, names that the command
    declares itself), they stand behind, and none has a default: something else says what holds.
    """

    def with_flags(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        made = _parameters(kind, **shown)
        parameters = own + made if shown else made + own
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in parameters}
        return function

    return with_flags


def _parameters(kind: type, without: Sequence[str] = (), **shown: Any) -> list[inspect.Parameter]:
    import typer

    hints, made = get_type_hints(kind), []
    for known in fields(kind):
        if known.name in without:
            continue
        about = known.metadata
        limits = {name: about[name] for name in ("min", "max") if name in about}
        typed = {"help": about["help"], "rich_help_panel": about.get("panel"), **limits, **shown}
        if about.get("argument"):
            option = typer.Argument(show_default=False, **typed)
        else:
            option = typer.Option(about["flag"] or flag_of(known), **typed)
        unset = bool(shown) or about["unset"]
        parameter = inspect.Parameter(known.name, inspect.Parameter.KEYWORD_ONLY)
        hint: Any = hints[known.name] | None if unset else hints[known.name]
        made.append(parameter.replace(default=None if unset else default_of(known), annotation=Annotated[hint, option]))
    return made
