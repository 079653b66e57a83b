"""A subcommand: its help, and where the settings come from that were not typed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
import typer.core

from mismatch_cli.app.help import help_line, is_argument, keys, panels, print_help
from mismatch_cli.base.configuration import (
    SETTING,
    check_flags,
    check_typed,
    describe_sources,
    has_flag,
    misspelt_variables,
    source_of,
    variables,
)
from mismatch_cli.base.memory import check_room
from mismatch_cli.processes.ranks.joined import launched

# click's own: newer versions of Typer vendor their click
_UsageError = typer.BadParameter.__mro__[1]


def _say_how_many(error: Any) -> None:
    """Say what a setting of several values needs: a file or a variable has too few or too many."""
    if error.param.nargs > 1:
        error.message = f"it needs {error.param.nargs} values, {error.param.metavar}."


class Command(typer.core.TyperCommand):
    """A command whose parameters are also environment variables and keys of the `--config` file.

    `running` and `debugging` are of the process, which runs one command: `cli.run` reads them.
    """

    running = False  # whether a command has begun: its flags are parsed
    debugging = False  # whether the running command was asked to show tracebacks

    def __init__(self, name: str | None, **attributes: Any) -> None:
        super().__init__(name, **attributes)
        settings = getattr(self.callback, "settings", {})
        for parameter in self.params:
            parameter.envvar = variables(str(name), parameter)
            setattr(parameter, SETTING, settings.get(parameter.name))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """What follows the name of the command in its usage line."""
        arguments = filter(is_argument, self.params)
        return ["[OPTIONS]", *(help_line(argument).names for argument in arguments)]

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Print it directly, as Typer does; the formatter gets nothing."""
        parameters = self.get_params(ctx)
        print_help(self, ctx, panels(parameters), keys(parameters))

    def parse_args(self, ctx: Any, args: Sequence[str]) -> list[str]:
        """Parse as Typer does; an error in a value that was not typed names the file or variable
        it came from.
        """
        # A shell that completes a half-typed line parses it leniently: nothing may be refused.
        is_completion = ctx.resilient_parsing
        if not is_completion:
            check_flags(ctx, args)
        try:
            remaining = list(super().parse_args(ctx, list(args)))
            if not is_completion:
                check_typed(ctx)
            return remaining
        except typer.BadParameter as error:
            if error.param is not None and error.param_hint is None:
                error.param_hint = " / ".join(f"'{name}'" for name in error.param.opts)
                place = source_of(ctx, error.param)
                if place:
                    error.param_hint += f" in {place}"
                    _say_how_many(error)
            raise
        except _UsageError as error:  # type: ignore[misc]
            # Typer suggests flags for one that it does not know, hidden ones included.
            # A setting without a flag is a hidden parameter, which nobody can type.
            near = getattr(error, "possibilities", None)
            if near:
                error.possibilities = [name for name in near if name in self._flags]
            raise

    @property
    def _flags(self) -> set[str]:
        """The flags that can be typed."""
        flags: set[str] = set()
        for parameter in self.params:
            if has_flag(parameter):
                flags.update(parameter.opts)
        return flags

    def invoke(self, ctx: Any) -> Any:
        """Run it, but first name the settings that were not typed: numbers depend on them."""
        Command.running = True
        Command.debugging = bool(ctx.params.get("debug"))
        if not ctx.params.get("quiet") and not launched():
            places = describe_sources(ctx)
            if places:
                print(f"Settings from {places}", file=sys.stderr)
            for sentence in misspelt_variables(ctx):
                print(f"mismatch-cli: {sentence}", file=sys.stderr)
        check_room()
        return super().invoke(ctx)
