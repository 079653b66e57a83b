"""A subcommand: its help, and where settings come from that nobody typed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
import typer.core

from mismatch_cli.commands._help import is_argument, panels, print_help, row_of
from mismatch_cli.configuration import misspelt, place_of, told, variables
from mismatch_cli.ranks.joined import launched


class Command(typer.core.TyperCommand):
    """One whose parameters are also variables of the environment, and keys of the file behind `--config`."""

    debugging = False  # whether the command that runs was asked for the traceback of an error

    def __init__(self, name: str | None, **attributes: Any) -> None:
        super().__init__(name, **attributes)
        for known in self.params:
            known.envvar = variables(str(name), known)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """What stands behind the name of the command in the line of its usage."""
        return ["[OPTIONS]", *(row_of(known).names for known in self.params if is_argument(known))]

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Print it, as Typer does: nothing is left for the formatter."""
        print_help(self, ctx, panels(self.get_params(ctx)))

    def parse_args(self, ctx: Any, args: Sequence[str]) -> list[str]:
        """As Typer does; what is wrong with a value that was not typed is said of the place where it stands."""
        try:
            return list(super().parse_args(ctx, list(args)))
        except typer.BadParameter as error:
            if error.param is not None and error.param_hint is None:
                typed = " / ".join(f"'{name}'" for name in error.param.opts)
                place = place_of(ctx, error.param)
                error.param_hint = f"{typed} in {place}" if place else typed
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run it, and say first which settings were not typed: numbers depend on them."""
        Command.debugging = bool(ctx.params.get("debug"))
        if not ctx.params.get("quiet") and not launched():
            if places := told(ctx):
                print(f"Settings from {places}", file=sys.stderr)
            for sentence in misspelt(ctx):
                print(f"mismatch-cli: {sentence}", file=sys.stderr)
        return super().invoke(ctx)
