"""A view on a terminal, as text."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from rich.console import Console

from mismatch_cli.report.terminal import print_report


def printed(
    view: Any,
    width: int = 80,
    by: Callable[[Any, Console], None] = print_report,
    **terminal: Any,
) -> str:
    """What a function prints of a view on a terminal of this width."""
    console = Console(
        file=io.StringIO(), width=width, highlight=False, emoji=False, markup=False, **terminal
    )
    by(view, console)
    return console.file.getvalue()  # type: ignore[attr-defined]
