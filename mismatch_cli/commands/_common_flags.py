"""Options that several commands share, so that they look and read the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_OUTPUT = "Output"
BUNDLED = "the bundled one, a short training run with an fp8 KV cache."

Json = Annotated[
    bool,
    typer.Option("--json", help="Print JSON on stdout instead of tables (schemas: docs/).", rich_help_panel=_OUTPUT),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No talk on stderr, only errors.", rich_help_panel=_OUTPUT)]
Force = Annotated[bool, typer.Option("--force", help="Replace a run that is already there.", rich_help_panel=_OUTPUT)]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=_OUTPUT)
]  # read by cli.run, which catches the error
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the code that a model brings; it is refused without."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --output where it was stopped.")]
FullPaths = Annotated[
    bool,
    typer.Option("--full-paths", help="Show absolute paths as they are, in place of …/NAME.", rich_help_panel=_OUTPUT),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Run folder for the trace, summary.json, report.html, plots and log.",
        rich_help_panel=_OUTPUT,
    ),
]
Worst = Annotated[
    int,
    typer.Option(
        "--worst", min=0, help="Show the N worst tokens and responses in their context.", rich_help_panel=_OUTPUT
    ),
]
Traces = Annotated[
    list[Path] | None,
    typer.Argument(help="Run folders or trace folders, pooled; without one, the bundled trace.", show_default=False),
]
ReportFolder = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Folder for summary.json, report.html and plots.",
        show_default="in the run, or here; named after the command",
        rich_help_panel=_OUTPUT,
    ),
]
