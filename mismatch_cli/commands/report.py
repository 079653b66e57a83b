"""`mismatch-cli report`: everything that `probe` printed and drew, again, from traces alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatch_cli.commands._options import Debug, Force, Json, Output, Quiet, Worst


def command(
    traces: Annotated[
        list[Path] | None, typer.Argument(help="Run folders or trace folders; several are pooled.", show_default=False)
    ] = None,
    worst: Worst = 10,
    export: Annotated[
        str | None, typer.Option("--export", help="Write one row per token to tokens.csv or tokens.parquet: csv or parquet.")
    ] = None,
    output: Output = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Print and draw the report of a trace again, without a model.

    Examples:

      mismatch-cli report probe-model

      mismatch-cli report probe-model --worst 20 --export parquet
    """
